from __future__ import annotations

import numpy as np

from kenosis_ort.accuracy.channel_statistics import batch_norm_statistics, channel_statistics
from kenosis_ort.passes.equalize_layers import equalize
from tests import models, planning
from tests.models import Net


def trained_net(act="Relu"):
    """A net whose BatchNormalization holds the true mean and variance of what it normalizes."""
    net = Net(seed=2)
    x = net.input("x", ["n", 6, 12, 12])
    y = net.conv(x, 6, 8, k=1, name="a", bias=False)
    weight = models.numpy_helper.to_array(next(t for t in net.initializers if t.name == "a_w"))[:, :, 0, 0]
    gamma, beta = net.rng.uniform(0.2, 2.0, 8), net.rng.normal(0, 1, 8)
    params = [net.const(v) for v in (gamma, beta, np.zeros(8), (weight.astype(np.float64) ** 2).sum(1))]
    y = net.op("BatchNormalization", [y, *params], name="bn", out="normed")
    inputs = [y, net.const(np.float32(0)), net.const(np.float32(1.5))] if act == "Clip" else [y]
    y = net.op(act, inputs, out="active")
    net.output(net.conv(y, 8, 5, k=1, name="b"))
    return net.model()


def test_batch_norm_knows_its_output():
    source = trained_net()
    known = batch_norm_statistics(source)["normed"]
    model = planning.prepared(source)
    measured = channel_statistics(model, models.feeds(model, 32), ["normed"], threads=1)["normed"]
    np.testing.assert_allclose(known.mean, measured.mean, atol=0.1)
    np.testing.assert_allclose(known.second_moment, measured.second_moment, rtol=0.15, atol=0.05)
    assert np.all(known.high > known.mean)


def test_equalization_through_a_clip_by_what_batch_norm_says():
    source = trained_net("Clip")
    model = planning.prepared(source)
    known = batch_norm_statistics(source)
    result = equalize(model, peaks=known)
    for pair in result.pairs:
        assert np.all(pair.scales[known["normed"].high >= 1.5] == 1.0)
