from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from kenosis_ort.accuracy.channel_statistics import channel_statistics
from kenosis_ort.graph.view import GraphView
from kenosis_ort.passes.equalize_layers import equalize, values_for_equalization
from tests import models, planning
from tests.flow.support import run
from tests.models import Net
from tests.passes.support import array, change, noise


def distance(model, other, feeds):
    """Largest difference over the largest value of each output."""
    pairs = [p for a, b in zip(run(model, feeds), run(other, feeds), strict=True) for p in zip(a, b, strict=True)]
    return max(float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-6)) for a, b in pairs)


def peaks_of(model, feeds):
    return channel_statistics(model, feeds, values_for_equalization(model), threads=1)


def spread(net, weight, *, axis, seed=0, back=False):
    """Makes the channels of a stored weight differ by up to a hundred times; ``back`` undoes it."""
    shape = [-1 if at == axis else 1 for at in range(array(net.initializers, weight).ndim)]
    factors = 10 ** (np.random.default_rng(seed).uniform(-2, 0, array(net.initializers, weight).shape[axis]))
    change(net.initializers, weight, lambda w: w * (1 / factors if back else factors).reshape(shape))


def pair_net(first, act, second, *, groups=1, channels=8, seed=0, bias=True):
    """conv or transposed conv or gemm, activation, another layer; channels between them of unlike range."""
    net = Net(seed=seed)
    if first == "gemm":
        x = net.input("x", ["n", 6])
        y = net.gemm(x, 6, channels, name="a")
        spread(net, "a_w", axis=0, seed=seed)
    elif first == "matmul":
        x = net.input("x", ["n", 6])
        y = net.linear(x, 6, channels, name="a", bias=bias)
        spread(net, "a_w", axis=1, seed=seed)
    else:
        x = net.input("x", ["n", 4, 6, 6])
        if first == "conv":
            y = net.conv(x, 4, channels, groups=1, name="a", bias=bias)
            spread(net, "a_w", axis=0, seed=seed)
        else:
            y = net.op("ConvTranspose", [x, net.weight((4, channels // 2, 3, 3), name="a_w")], name="a", group=2)
            spread(net, "a_w", axis=1, seed=seed)
    y = activate(net, y, act, channels, flat=first in ("gemm", "matmul"))
    if second == "flat":
        y = net.op("Flatten", [y])
        y = net.gemm(y, channels * 36, 5, name="b")
    elif second == "conv":
        y = net.conv(y, channels, 8, groups=groups, name="b")
    elif second == "transposed":
        y = net.op("ConvTranspose", [y, net.weight((channels, 3, 3, 3), name="b_w")], name="b", group=groups)
    elif second == "gemm":
        y = net.gemm(y, channels, 5, name="b")
    else:
        y = net.linear(y, channels, 5, name="b")
    net.output(y)
    return planning.prepared(net.model())


def activate(net, y, act, channels, *, flat):
    if act == "clip":
        return net.op("Clip", [y, net.const(np.float32(0)), net.const(np.float32(3))])
    if act == "prelu":
        shape = (channels,) if flat else (channels, 1, 1)
        return net.op("PRelu", [y, net.const(np.linspace(-0.5, 0.5, channels).reshape(shape))])
    if act == "leaky":
        return net.op("LeakyRelu", [y], alpha=0.1)
    if act == "relu-pool":
        return net.op("AveragePool", [net.op("Relu", [y])], kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    return net.op("Relu", [y]) if act == "relu" else y


@settings(deadline=None)
@given(
    first=st.sampled_from(["conv", "transposed"]),
    act=st.sampled_from(["relu", "leaky", "prelu", "none", "relu-pool"]),
    second=st.sampled_from(["conv", "transposed"]),
    groups=st.sampled_from([1, 2, 8]),
    seed=st.integers(0, 2**16),
)
def test_convolutions_compute_the_same_for_every_input(first, act, second, groups, seed):
    model = pair_net(first, act, second, groups=groups, seed=seed)
    result = equalize(model, peaks=peaks_of(model, models.feeds(model, 2, seed=seed)))
    others = [{"x": 50 * f["x"]} for f in models.feeds(model, 2, seed=seed + 1)]  # far beyond what was observed
    assert distance(model, result.model, others) < 1e-5


@pytest.mark.parametrize("first", ["gemm", "matmul"])
@pytest.mark.parametrize("second", ["gemm", "matmul"])
@pytest.mark.parametrize("act", ["relu", "leaky", "prelu", "none"])
def test_linear_layers_compute_the_same(first, act, second):
    model = pair_net(first, act, second)
    result = equalize(model, peaks=peaks_of(model, models.feeds(model, 4)))
    assert result.pairs
    assert distance(model, result.model, models.feeds(model, 3, seed=9)) < 1e-5


@pytest.mark.parametrize("pool", ["MaxPool", "AveragePool"])
def test_a_pool_mixes_the_channels_of_linear_layers(pool):
    net = Net()
    x = net.input("x", ["n", 2, 5, 6])
    y = net.op(pool, [net.linear(x, 6, 8, name="a")], kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    spread(net, "a_w", axis=1)
    net.output(net.linear(y, 8, 5, name="b"))
    assert equalize(planning.prepared(net.model())).pairs == ()


def test_features_behind_a_flatten_follow_their_channel():
    model = pair_net("conv", "relu", "flat")
    result = equalize(model, peaks=peaks_of(model, models.feeds(model, 4)))
    assert [(p.first, p.second) for p in result.pairs] == [("a", "b")]
    assert distance(model, result.model, models.feeds(model, 3, seed=9)) < 1e-5


@settings(max_examples=20, deadline=None)
@given(groups=st.sampled_from([1, 8]), seed=st.integers(0, 2**16))
def test_a_clip_is_kept_on_the_observed_range(groups, seed):
    model = pair_net("conv", "clip", "conv", groups=groups, seed=seed)
    feeds = models.feeds(model, 4, seed=seed)
    peaks = peaks_of(model, feeds)
    result = equalize(model, peaks=peaks)
    assert distance(model, result.model, feeds) < 1e-5
    for pair in result.pairs:
        at_bound = next(iter(peaks.values())).high >= 3.0
        assert np.all(pair.scales[at_bound] == 1.0)


def test_a_clip_without_statistics_is_left_alone():
    model = pair_net("conv", "clip", "conv", groups=8)
    assert equalize(model).pairs == ()
    assert equalize(model).model is model


def test_without_statistics_the_weights_stand_in():
    model = pair_net("conv", "relu", "conv", groups=8)
    result = equalize(model)
    assert result.pairs
    assert distance(model, result.model, models.feeds(model, 3)) < 1e-5


def depthwise_net():
    """A net whose channels were like and then scaled apart without changing what it computes."""
    net = Net(seed=3)
    y = net.op("Relu", [net.conv(net.input("x", ["n", 4, 8, 8]), 4, 8, k=1, name="a")])
    y = net.op("Relu", [net.conv(y, 8, 8, groups=8, name="b")])
    net.output(net.conv(y, 8, 4, k=1, name="c"))
    for seed, (first, second, axis) in enumerate((("a", "b", 0), ("b", "c", 1))):
        for name in (f"{first}_w", f"{first}_b"):
            spread(net, name, axis=0, seed=seed)
        spread(net, f"{second}_w", axis=axis, seed=seed, back=True)
    return net


def test_depthwise_triple_keeps_its_function_and_quantizes_better():
    model = planning.prepared(depthwise_net().model())
    feeds = models.feeds(model, 6)
    result = equalize(model, peaks=peaks_of(model, feeds[:4]))
    assert [(p.first, p.second) for p in result.pairs] == [("a", "b"), ("b", "c")]
    assert distance(model, result.model, feeds) < 1e-5
    before, after = (
        noise(model, planning.quantize(m, feeds=feeds[:4]).quantized, feeds[4:]) for m in (model, result.model)
    )
    assert after < before / 10  # 10 dB


def test_high_biases_move_on_to_a_layer_that_does_not_pad():
    def net(kernel):
        made = Net(seed=4)
        y = made.op("Relu", [made.conv(made.input("x", ["n", 4, 6, 6]), 4, 8, k=1, name="a")])
        made.output(made.conv(y, 8, 4, k=kernel, name="b"))
        change(made.initializers, "a_b", lambda bias: np.full_like(bias, 40.0))
        return planning.prepared(made.model())

    model, padded = net(1), net(3)
    feeds = models.feeds(model, 16)
    result = equalize(model, peaks=peaks_of(model, feeds))
    assert np.all(result.pairs[0].absorbed > 10)
    assert distance(model, result.model, feeds) < 1e-5
    assert not any(p.absorbed.any() for p in equalize(padded, peaks=peaks_of(padded, feeds)).pairs)
    # Factors are those of the net whose biases had moved before.
    absorbed = result.pairs[0].absorbed
    weight = numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == "b_w"))[:, :, 0, 0]
    for tensor in model.graph.initializer:
        by = {"a_b": -absorbed, "b_b": weight @ absorbed}.get(tensor.name)
        if by is not None:
            moved = (numpy_helper.to_array(tensor) + by).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(moved, tensor.name))
    (again,) = equalize(model, peaks=peaks_of(model, feeds)).pairs
    np.testing.assert_allclose(again.scales, result.pairs[0].scales, rtol=1e-3)


@pytest.mark.parametrize("case", ["two consumers", "output", "shared weight", "sigmoid", "excluded"])
def test_what_others_need_is_not_touched(case):
    net = Net(seed=5)
    y = net.op("Sigmoid" if case == "sigmoid" else "Relu", [net.conv(net.input("x", ["n", 4, 6, 6]), 4, 8, name="a")])
    if case == "two consumers":
        net.output(net.op("Exp", [y]))
    if case == "output":
        net.output(y)
    z = net.conv(y, 8, 8, name="b")
    if case == "shared weight":
        z = net.op("Conv", [net.op("Relu", [z]), "b_w"], name="c", pads=[1, 1, 1, 1])
    net.output(z)
    spread(net, "a_w", axis=0)
    model = planning.prepared(net.model())
    assert equalize(model, nodes={"b"} if case == "excluded" else None).pairs == ()


def test_the_model_given_stays_as_it_is():
    model = planning.prepared(depthwise_net().model())
    before = model.SerializeToString(deterministic=True)
    assert equalize(model).pairs
    assert model.SerializeToString(deterministic=True) == before
    GraphView(equalize(model).model)
