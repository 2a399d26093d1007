"""Statistics by channel: equal to numpy, known from BatchNormalization alone, and means behind an activation."""

import numpy as np
import pytest

from kenosis_ort.accuracy import channel_statistics as found_by
from kenosis_ort.calibration.part_session import ObservedModel, SessionSettings
from kenosis_ort.errors import CalibrationError
from kenosis_ort.graph import live, view
from kenosis_ort.passes import equalize_layers, layers
from tests import models, planning


def net_of(opset):
    text = """(float[n,3,9,7] x) => (g) <float[5,3,3,3] v, float[5] b, float[63,6] w, float[4,30] u, float[4] d> {
        a = Conv <pads = [1, 1, 1, 1]> (x, v, b) r = Relu (a) z = Reshape (r, shape) m = MatMul (z, w)
        f = Flatten (m) g = Gemm <transB = 1> (f, u, d) }"""
    return planning.prepared(planning.parse(text, {"shape": np.array([0, 5, 63])}, opset=opset), min_opset=opset)


@pytest.mark.parametrize("opset", [13, 17, 18])
def test_equal_to_numpy(opset):
    model = net_of(opset)
    feeds = models.feeds(model, 3, dims={"n": 2})
    axes = {"a": 1, "r": 1, "m": -1, "g": -1}
    found = found_by.channel_statistics(model, feeds, axes)
    with ObservedModel(model, SessionSettings(threads=1)) as observed:
        session = observed.session([*axes])
    for at, name in enumerate(axes):
        array = np.concatenate([session.run(None, f)[at] for f in feeds]).astype(np.float64)
        over = (0, 2, 3) if array.ndim == 4 else tuple(range(array.ndim - 1))
        s = found[name]
        np.testing.assert_array_equal(s.low, array.min(axis=over))
        np.testing.assert_array_equal(s.high, array.max(axis=over))
        scale = np.abs(array).mean()
        np.testing.assert_allclose(s.mean, array.mean(axis=over), atol=2e-6 * scale)
        np.testing.assert_allclose(s.second_moment, (array**2).mean(axis=over), rtol=1e-5)
        assert s.sample_means.shape == (6, array.shape[axes[name]])
        np.testing.assert_array_equal(s.peak, np.maximum(abs(s.low), abs(s.high)))


def test_large_means_are_accurate():
    """A mean of 1000 with a deviation of 1: what float32 loses is far below what a quantization step is."""
    model = planning.parse("(float[2,2,256,256] x) => (y) { y = Add (x, k) }", {"k": np.float32(1000)})
    (feed,) = feeds = models.feeds(model, 1)
    mean = found_by.channel_statistics(model, feeds, ["y"])["y"].mean
    exact = (feed["x"] + np.float32(1000)).astype(np.float64).mean(axis=(0, 2, 3))
    np.testing.assert_allclose(mean, exact, rtol=2e-6)


def test_what_is_wrong_is_said():
    model = net_of(17)
    broken = models.feeds(model, 2)
    broken[1]["x"][0, 0, 0, 0] = np.nan
    for feeds, name, said in ((broken, "no", "by no node"), ([], "r", "no sample"), (broken, "r", "sample 1")):
        with pytest.raises(CalibrationError, match=said):
            found_by.channel_statistics(model, feeds, [name])
    assert found_by.channel_statistics(model, [], []) == {}


def trained_net(act="Relu (normed)"):
    """A net whose BatchNormalization holds the true mean and variance of what it normalizes."""
    weight = np.random.default_rng(2).normal(0, 0.5, (8, 6, 1, 1)).astype(np.float32)
    known = {"v": weight, "variance": (weight.astype(np.float64) ** 2).sum((1, 2, 3)), "mean": np.zeros(8)}
    known |= {name: np.geomspace(1e-3, 2.0, 8) for name in ("gamma", "beta")} | {"zero": 0, "most": 1.5}
    text = f"""(float[n,6,12,12] x) => (y) <float[8,6,1,1] v, float[8] gamma, float[8] beta, float[8] mean,
        float[8] variance, float zero, float most, float[5,8,1,1] w> {{
        a = Conv (x, v) normed = BatchNormalization (a, gamma, beta, mean, variance) b = {act} y = Conv (b, w) }}"""
    return planning.parse(text, known)


def test_batch_norm_knows_its_output():
    source = trained_net()
    known = found_by.batch_norm_statistics(source)["normed"]
    model = planning.prepared(source)
    measured = found_by.channel_statistics(model, models.feeds(model, 32), ["normed"])["normed"]
    np.testing.assert_allclose(known.mean, measured.mean, atol=0.1)
    np.testing.assert_allclose(known.second_moment, measured.second_moment, rtol=0.15, atol=0.05)
    assert np.all(known.high > known.mean)


def test_equalization_through_a_clip_by_what_batch_norm_says():
    source = trained_net("Clip (normed, zero, most)")
    model, known = planning.prepared(source), found_by.batch_norm_statistics(source)
    (pair,) = equalize_layers.equalize(model, peaks=known).pairs
    scales = next(iter(pair.values())).factors
    clips = known["normed"].high >= 1.5
    assert (clips.sum(), set(scales[clips]), scales[~clips].max() > 2) == (2, {1.0}, True)
    (link,) = layers.find_links(live.LiveGraph(model))
    least, most = equalize_layers._limits(link, known["normed"])
    assert {*least[clips], *most[clips]} == {1.0}, "what is clipped stays as it is"
    assert np.all((most * known["normed"].high)[~clips] <= 1.5), "what is not stays so"


ACTIVATIONS = {
    "none": ("z = Mul (v, two)", (-np.inf, np.inf)), "relu": ("z = Relu (v)", (0.0, np.inf)),
    "clip": ("z = Clip (v, low, high)", (-0.5, 1.5)), "low only": ("z = Clip (v, low)", (-0.5, np.inf)),
    "high only": ("z = Clip (v, , high)", (-np.inf, 1.5)), "other": ("z = Sigmoid (v)", None),
}  # fmt: skip


def net(line):
    text = f"(float[N,3,4,5] x) => (float[N,3,4,5] y) {{ v = Identity (x)  {line}  y = Identity (z) }}"
    model = planning.parse(text, {"low": np.float32(-0.5), "high": np.float32(1.5), "two": np.float32(2)})
    return live.LiveGraph(model)


def behind_v(graph):
    """The activation behind what the first node writes."""
    return found_by.activation_behind(graph, graph.nodes[0].outputs[0])


def test_bounds():
    for line, bounds in ACTIVATIONS.values():
        graph = net(line)
        assert found_by.clip_bounds(graph, behind_v(graph).nodes) == bounds, line
    old = view.ir.node("Clip", [view.ir.Value(name="v")], attributes={"min": -1.0, "max": 6.0})
    assert found_by.clip_bounds(net("z = Relu (v)"), [old]) == (-1.0, 6.0)


def test_a_shift_moves_the_mean_behind_to_where_it_should_be():
    arrays = [models.normal((1, 3, 4, 5), seed) for seed in range(64)]
    graph, true = net("z = Relu (v)"), np.array([0.3, 0.0, -0.2])
    found = found_by.Response(graph, behind_v(graph), 4, 1)
    expected = np.concatenate([found.means(a, true) for a in arrays])
    assert np.allclose(found.shift_for(arrays, expected), true, atol=0.05)
