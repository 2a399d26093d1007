from __future__ import annotations

import numpy as np
import pytest

from kenosis_ort.accuracy.channel_statistics import channel_statistics
from kenosis_ort.calibration.part_session import ObservedModel, SessionSettings
from kenosis_ort.errors import CalibrationError
from tests import models, planning
from tests.models import Net


def net_of(opset):
    net = Net(opset=opset)
    y = net.conv(net.input("x", ["n", 3, 9, 7]), 3, 5, name="a")
    z = net.op("GlobalAveragePool", [net.op("Relu", [y], out="r")])
    net.output(net.gemm(net.op("Flatten", [z]), 5, 4, name="g"))
    return planning.prepared(net.model(), min_opset=opset)


@pytest.mark.parametrize("opset", [13, 17, 18])
def test_equal_to_numpy(opset):
    model = net_of(opset)
    feeds = models.feeds(model, 3, dims={"n": 2})
    found = channel_statistics(model, feeds, {"a_out": 1, "r": 1, "g_out": -1}, threads=1)
    with ObservedModel(model, SessionSettings(threads=1)) as observed:
        session = observed.session(["a_out", "r", "g_out"])
    for at, name in enumerate(("a_out", "r", "g_out")):
        array = np.concatenate([session.run(None, f)[at] for f in feeds]).astype(np.float64)
        over = (0, 2, 3) if array.ndim == 4 else (0,)
        s = found[name]
        np.testing.assert_array_equal(s.low, array.min(axis=over))
        np.testing.assert_array_equal(s.high, array.max(axis=over))
        scale = np.abs(array).mean()
        np.testing.assert_allclose(s.mean, array.mean(axis=over), atol=2e-6 * scale)
        np.testing.assert_allclose(s.second_moment, (array**2).mean(axis=over), rtol=1e-5)
        assert s.sample_means.shape == (6, array.shape[1])
        np.testing.assert_array_equal(s.peak, np.maximum(abs(s.low), abs(s.high)))


def test_channels_of_a_linear_layer_are_the_last_axis():
    net = Net()
    net.output(net.linear(net.input("x", ["n", 7, 6]), 6, 4, name="m"))
    model = planning.prepared(net.model())
    found = channel_statistics(model, models.feeds(model, 2), {"m_out": -1}, threads=1)
    assert found["m_out"].channels == 4


def test_large_means_are_accurate():
    """A mean of 1000 with a deviation of 1: what float32 loses is far below what a quantization step is."""
    net = Net()
    net.output(net.op("Add", [net.input("x", ["n", 2, 256, 256]), net.const(np.float32(1000))], name="a"))
    model = planning.prepared(net.model())
    feeds = models.feeds(model, 2)
    mean = channel_statistics(model, feeds, ["a_out"], threads=1)["a_out"].mean
    exact = np.mean(
        [np.float32(f["x"] + np.float32(1000)).astype(np.float64).mean(axis=(0, 2, 3)) for f in feeds], axis=0
    )
    np.testing.assert_allclose(mean, exact, rtol=2e-6)


def test_what_is_wrong_is_said():
    model = net_of(17)
    with pytest.raises(CalibrationError, match="computed by no node"):
        channel_statistics(model, models.feeds(model, 1), ["nothing"])
    with pytest.raises(CalibrationError, match="no sample"):
        channel_statistics(model, [], ["r"])
    broken = models.feeds(model, 2)
    broken[1]["x"][0, 0, 0, 0] = np.nan
    with pytest.raises(CalibrationError, match="sample 1"):
        channel_statistics(model, broken, ["a_out"], threads=1)
    assert channel_statistics(model, [], []) == {}
