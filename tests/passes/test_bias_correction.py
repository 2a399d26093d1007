"""Biases corrected layer by layer, in one run where samples can be stacked."""

from typing import Any

import numpy as np
import onnx
import pytest

from kenosis_ort.accuracy.channel_statistics import certain_mean
from kenosis_ort.graph.live import LiveGraph
from kenosis_ort.graph.view import GraphView
from kenosis_ort.passes import correct_biases
from kenosis_ort.passes.contract import materialize
from kenosis_ort.passes.correct_biases import bias_shifts, chosen_feeds, with_biases, with_shifts
from kenosis_ort.passes.layers import bias_of, layers
from kenosis_ort.passes.self_correction import FloatMeans
from kenosis_ort.runtime.counting import counted
from tests import models, planning
from tests.flow.support import changed
from tests.models import Feed, Net
from tests.passes.support import first, noise

LAYERS = ("c0", "c1", "c2")
ACTIVATIONS: dict[str, Any] = {
    "relu": lambda net, y: net.op("Relu", [y]),
    "silu": lambda net, y: net.op("Mul", [y, net.op("Sigmoid", [y])]),
    "none": lambda net, y: y,
}


def means(model: onnx.ModelProto, feeds: list[Feed]) -> np.ndarray:
    outputs = np.concatenate(first(model, feeds))
    return outputs.mean(axis=tuple(i for i in range(outputs.ndim) if i != 1))


def damaged(model: onnx.ModelProto, *layers: str) -> onnx.ModelProto:
    """Weights rounded down a little: a quantizer whose error has a mean, as clipped ranges and coarse scales have."""
    return changed(model, **{f"{name}_w": lambda w: w - 0.02 * np.abs(w).max() for name in layers})


def chain(act: str) -> onnx.ModelProto:
    net = Net(seed=1)
    y = net.op("Abs", [net.input("x", ["n", 4, 8, 8])])
    for at, name in enumerate(LAYERS):
        y = ACTIVATIONS[act](net, net.conv(y, 8 if at else 4, 8, name=name))
    return planning.prepared(net.of(net.conv(y, 8, 4, k=1, name="last")))


def corrected(model: onnx.ModelProto, shifts: Any) -> onnx.ModelProto:
    return materialize(model, with_shifts(GraphView(model), shifts))


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_each_layer_is_corrected_with_those_before_it_corrected(act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The damaged model stands for a quantized one; one run of all samples finds what a run of each finds."""
    model = chain(act)
    bad, feeds, held_out = damaged(model, *LAYERS), models.feeds(model, 16, seed=2), models.feeds(model, 16, seed=3)
    with counted() as counts:
        shifts = bias_shifts(GraphView(model), bad, feeds)
    # the float model on each sample, and on two stacked; the quantized one on all
    assert (counts.total.sessions, counts.total.runs) == (2, len(feeds) + 1 + 1)
    assert list(shifts) == [*LAYERS, "last"]
    good = corrected(bad, shifts)
    assert noise(model, good, held_out) < noise(model, bad, held_out) / 4
    assert np.abs(means(good, held_out) - means(model, held_out)).max() < 0.05 * np.abs(means(model, held_out)).max()
    monkeypatch.setattr(correct_biases, "shifts_in_one_run", lambda *_, **__: None)
    one_by_one = bias_shifts(GraphView(model), bad, feeds)
    assert shifts.keys() == one_by_one.keys()
    for layer, shift in one_by_one.items():
        np.testing.assert_allclose(shifts[layer], shift, rtol=1e-3, atol=2e-5 * np.abs(shift).max())


def test_means_of_the_float_model_are_computed_once_for_the_same_samples() -> None:
    model = chain("relu")
    bad, feeds, known = damaged(model, "c1"), models.feeds(model, 8, seed=2), FloatMeans()
    once = bias_shifts(GraphView(model), bad, feeds, nodes={"c0", "c1"}, float_means=known)
    with counted() as counts:
        again = bias_shifts(GraphView(model), bad, feeds, nodes={"c0", "c1"}, float_means=known)
    assert (counts.total.sessions, counts.total.runs) == (1, 1)
    more = bias_shifts(GraphView(model), bad, feeds, float_means=known)  # of more layers, some of them known
    others = bias_shifts(GraphView(model), bad, feeds[::2], float_means=known)
    np.testing.assert_equal(again, once)
    np.testing.assert_equal(more, bias_shifts(GraphView(model), bad, feeds))
    np.testing.assert_equal(others, bias_shifts(GraphView(model), bad, feeds[::2]))


def test_samples_whose_rows_are_mixed_are_run_one_by_one() -> None:
    text = """(float[1,4,8,8] x) => (y) <float[8,4,3,3] a_w, float[8] a_b, float[4,8,1,1] b_w, float[4] b_b> {
        p = Abs (x) [a] c = Conv <pads = [1,1,1,1]> (p, a_w, a_b) top = ReduceMax <axes = [0,2,3], keepdims = 1> (c)
        d = Sub (c, top) [b] y = Conv (d, b_w, b_b) }"""
    model = planning.prepared(planning.parse(text))
    bad, feeds = damaged(model, "b"), models.feeds(model, 6)
    known = FloatMeans()
    with counted() as counts:
        shifts = bias_shifts(GraphView(model), bad, feeds, nodes={"b"}, float_means=known)
    assert counts.total.runs > 2 * len(feeds)
    with counted() as counts:
        np.testing.assert_equal(bias_shifts(GraphView(model), bad, feeds, nodes={"b"}, float_means=known), shifts)
    assert (counts.total.sessions, counts.total.runs) == (1, len(feeds)), "of the quantized model alone"
    off = means(model, feeds) - means(bad, feeds)
    np.testing.assert_allclose(shifts["b"], off, atol=0.2 * np.abs(off).max())


def test_matmul_is_corrected_in_its_add_and_only_named_nodes_are() -> None:
    text = """(float[n,6] x) => (y) <float[6,8] m_w, float[8] m_b, float[8,4] g_w, float[4] g_b>
        { [m] m = MatMul (x, m_w) a = Add (m, m_b) r = Relu (a) [g] y = Gemm (r, g_w, g_b) }"""
    model = planning.prepared(planning.parse(text))
    bad = damaged(model, "m")
    feeds = [{"x": np.abs(f["x"])} for f in models.feeds(model, 8, dims={"n": 4})]
    assert set(bias_shifts(GraphView(model), bad, feeds)) == {"m", "g"}
    shifts = bias_shifts(GraphView(model), bad, feeds, nodes={"m"})
    assert set(shifts) == {"m"}
    assert noise(model, corrected(bad, shifts), feeds) < noise(model, bad, feeds) / 4


def test_every_layer_gets_a_bias_of_its_own() -> None:
    text = """(float[n,4,6,6] x) => (y) <float[4,4,1,1] u, float[4,4,1,1] v, float[4,4,1,1] w, float[4] shared>
        { [a] p = Conv (x, u, shared) [b] q = Conv (p, v, shared) [c] y = Conv (q, w) }"""
    model = planning.prepared(planning.parse(text))
    result = with_biases(model)
    assert len({node.input[2] for node in result.graph.node}) == 3
    assert noise(model, result, models.feeds(model, 2)) == 0.0
    assert with_biases(result) is result
    assert [len(node.input) for node in with_biases(model, nodes={"a"}).graph.node] == [3, 3, 2]


def test_one_number_for_all_channels_becomes_one_a_channel() -> None:
    model = planning.prepared(
        planning.parse("(float[n,4] x) => (float[n,3] y) <float[4,3] w, float[1] b> { y = Gemm (x, w, b) }")
    )
    result = with_biases(model)
    (bias,) = (t for t in result.graph.initializer if t.name == result.graph.node[0].input[2])
    assert list(bias.dims) == [3]
    assert noise(model, result, models.feeds(model, 2)) == 0.0


def test_a_number_for_each_row_is_no_bias_of_channels() -> None:
    text = """(float[4,6] x) => (y) <float[6,4] w, float[4,1] rows, float[4,4] v, float[4,4] u, float[4,1] more>
        { [a] p = Gemm (x, w, rows) q = Relu (p) [b] r = Gemm (q, v, rows) [m] m = MatMul (r, u) y = Add (m, more) }"""
    model = planning.prepared(planning.parse(text))
    assert with_biases(model) is model
    assert [bias_of(layer, LiveGraph(model)) for layer in layers(LiveGraph(model))] == [None] * 3


def test_gemm_with_beta_moves_by_the_shift() -> None:
    text = "(float[n,4] x) => (y) <float[4,3] w, float[3] b> { [g] y = Gemm <beta = 0.5> (x, w, b) }"
    model = planning.prepared(planning.parse(text))
    feeds, moved = models.feeds(model, 2), corrected(model, {"g": np.array([1.0, 2.0, 3.0])})
    np.testing.assert_allclose(means(moved, feeds) - means(model, feeds), [1, 2, 3], rtol=1e-5)


def test_chance_is_not_corrected() -> None:
    noisy = certain_mean(np.random.default_rng(0).normal(0, 1, (16, 200)))
    assert np.mean(noisy == 0.0) > 0.5
    np.testing.assert_allclose(certain_mean(np.full((16, 3), 2.0)), 2.0)
    np.testing.assert_array_equal(certain_mean(np.array([[1.0, -1.0]])), [1.0, -1.0])


@pytest.mark.parametrize(("count", "rows", "chosen"), [(200, 1, 128), (10, 50, 2), (0, 1, 0)])
def test_feeds_are_chosen_by_their_cost(count: int, rows: int, chosen: int) -> None:
    model = chain("relu")
    assert len(chosen_feeds(model, models.feeds(model, count, dims={"n": rows}), ["c0_out"])) == chosen
