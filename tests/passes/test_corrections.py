"""Biases corrected layer by layer, and weights rounded on their grid so that outputs are closest."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kenosis_ort.accuracy.channel_statistics import certain_mean
from kenosis_ort.graph.live import LiveGraph
from kenosis_ort.graph.view import GraphView
from kenosis_ort.passes import correct_biases, round_weights as rounding
from kenosis_ort.passes.channel_means import FloatMeans
from kenosis_ort.passes.contract import materialize
from kenosis_ort.passes.correct_biases import bias_shifts, chosen_feeds, with_biases, with_shifts
from kenosis_ort.passes.input_moments import Grid, InputMoments, descend, pass_on
from kenosis_ort.passes.layers import bias_of, layers
from kenosis_ort.runtime.counting import counted
from tests import models, planning
from tests.flow.support import changed
from tests.passes.support import array, first, noise

LAYERS = ("c0", "c1", "c2")
ACTIVATIONS = {
    "relu": lambda net, y: net.op("Relu", [y]), "silu": lambda net, y: net.op("Mul", [y, net.op("Sigmoid", [y])]),
    "none": lambda net, y: y, "one batch": lambda net, y: net.op("Relu", [y]),
}  # fmt: skip


def net_of(text, weights=None):
    return planning.prepared(planning.parse(text, weights))


def means(model, feeds):
    outputs = np.concatenate(first(model, feeds))
    return outputs.mean(axis=tuple(i for i in range(outputs.ndim) if i != 1))


def damaged(model, *layers):
    """Weights rounded down a little: a quantizer whose error has a mean, as clipped ranges and coarse scales have."""
    return changed(model, **{f"{name}_w": lambda w: w - 0.02 * np.abs(w).max() for name in layers})


def chain(act):
    net = models.Net(seed=1)
    y = net.op("Abs", [net.input("x", [1 if act == "one batch" else "n", 4, 8, 8])])
    for at, name in enumerate(LAYERS):
        y = ACTIVATIONS[act](net, net.conv(y, 8 if at else 4, 8, name=name))
    if act == "one batch":  # whose exporter writes all sizes as constants
        y = net.op("Gather", [net.op("Reshape", [y, net.const([-1])]), net.const(np.arange(512).reshape(1, 8, 8, 8))])
        y = net.op("Reshape", [y, net.const([1, 8, 8, 8])])
    return planning.prepared(net.of(net.conv(y, 8, 4, k=1, name="last")))


def corrected(model, shifts):
    return materialize(model, with_shifts(GraphView(model), shifts))


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_each_layer_is_corrected_with_those_before_it_corrected(act, monkeypatch):
    """The damaged model stands for a quantized one; one run of all samples finds what a run of each finds."""
    model = chain(act)
    bad, feeds, held_out = damaged(model, *LAYERS), models.feeds(model, 16, seed=2), models.feeds(model, 16, seed=3)
    with counted() as counts:
        shifts = bias_shifts(GraphView(model), bad, feeds)
    # the float model on each sample, and on two stacked; the quantized one on all
    assert (counts.total.sessions, counts.total.runs, list(shifts)) == (2, len(feeds) + 1 + 1, [*LAYERS, "last"])
    good = corrected(bad, shifts)
    assert noise(model, good, held_out) < noise(model, bad, held_out) / 4
    assert np.abs(means(good, held_out) - means(model, held_out)).max() < 0.05 * np.abs(means(model, held_out)).max()
    monkeypatch.setattr(correct_biases, "shifts_in_one_run", lambda *_, **__: None)
    one_by_one = bias_shifts(GraphView(model), bad, feeds)
    assert shifts.keys() == one_by_one.keys()
    for layer, shift in one_by_one.items():
        np.testing.assert_allclose(shifts[layer], shift, rtol=1e-3, atol=2e-5 * np.abs(shift).max())


def test_means_of_the_float_model_are_computed_once_for_the_same_samples():
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


def test_samples_whose_rows_are_mixed_are_run_one_by_one():
    text = """(float[1,4,8,8] x) => (y) <float[8,4,3,3] a_w, float[8] a_b, float[4,8,1,1] b_w, float[4] b_b> {
        p = Abs (x) [a] c = Conv <pads = [1,1,1,1]> (p, a_w, a_b) top = ReduceMax <axes = [0,2,3], keepdims = 1> (c)
        d = Sub (c, top) [b] y = Conv (d, b_w, b_b) }"""
    model, known = net_of(text), FloatMeans()
    bad, feeds = damaged(model, "b"), models.feeds(model, 6)
    with counted() as counts:
        shifts = bias_shifts(GraphView(model), bad, feeds, nodes={"b"}, float_means=known)
    assert counts.total.runs > 2 * len(feeds)
    with counted() as counts:
        np.testing.assert_equal(bias_shifts(GraphView(model), bad, feeds, nodes={"b"}, float_means=known), shifts)
    assert (counts.total.sessions, counts.total.runs) == (1, len(feeds)), "of the quantized model alone"
    off = means(model, feeds) - means(bad, feeds)
    np.testing.assert_allclose(shifts["b"], off, atol=0.2 * np.abs(off).max())


def test_matmul_is_corrected_in_its_add_and_only_named_nodes_are():
    text = """(float[n,6] x) => (y) <float[6,8] m_w, float[8] m_b, float[8,4] g_w, float[4] g_b>
        { [m] m = MatMul (x, m_w) a = Add (m, m_b) r = Relu (a) [g] y = Gemm (r, g_w, g_b) }"""
    model = net_of(text)
    bad, feeds = damaged(model, "m"), [{"x": np.abs(f["x"])} for f in models.feeds(model, 8, dims={"n": 4})]
    shifts = bias_shifts(GraphView(model), bad, feeds, nodes={"m"})
    assert (set(shifts), set(bias_shifts(GraphView(model), bad, feeds))) == ({"m"}, {"m", "g"})
    assert noise(model, corrected(bad, shifts), feeds) < noise(model, bad, feeds) / 4


def test_every_layer_gets_a_bias_of_its_own():
    text = """(float[n,4,6,6] x) => (y) <float[4,4,1,1] u, float[4,4,1,1] v, float[4,4,1,1] w, float[4] shared>
        { [a] p = Conv (x, u, shared) [b] q = Conv (p, v, shared) [c] y = Conv (q, w) }"""
    model = net_of(text)
    result = with_biases(model)
    assert len({node.input[2] for node in result.graph.node}) == 3
    assert noise(model, result, models.feeds(model, 2)) == 0.0
    assert with_biases(result) is result
    assert [len(node.input) for node in with_biases(model, nodes={"a"}).graph.node] == [3, 3, 2]


def test_one_number_for_all_channels_becomes_one_a_channel():
    model = net_of("(float[n,4] x) => (float[n,3] y) <float[4,3] w, float[1] b> { y = Gemm (x, w, b) }")
    result = with_biases(model)
    assert array(result.graph.initializer, result.graph.node[0].input[2]).shape == (3,)
    assert noise(model, result, models.feeds(model, 2)) == 0.0


def test_a_number_for_each_row_is_no_bias_of_channels():
    text = """(float[4,6] x) => (y) <float[6,4] w, float[4,1] rows, float[4,4] v, float[4,4] u, float[4,1] more>
        { [a] p = Gemm (x, w, rows) q = Relu (p) [b] r = Gemm (q, v, rows) [m] m = MatMul (r, u) y = Add (m, more) }"""
    model = net_of(text)
    assert with_biases(model) is model
    assert [bias_of(layer, LiveGraph(model)) for layer in layers(LiveGraph(model))] == [None] * 3


def test_gemm_with_beta_moves_by_the_shift():
    text = "(float[n,4] x) => (y) <float[4,3] w, float[3] b> { [g] y = Gemm <beta = 0.5> (x, w, b) }"
    model = planning.prepared(planning.parse(text))
    feeds, moved = models.feeds(model, 2), corrected(model, {"g": np.array([1.0, 2.0, 3.0])})
    np.testing.assert_allclose(means(moved, feeds) - means(model, feeds), [1, 2, 3], rtol=1e-5)


def test_chance_is_not_corrected():
    noisy = certain_mean(np.random.default_rng(0).normal(0, 1, (16, 200)))
    assert np.mean(noisy == 0.0) > 0.5
    np.testing.assert_allclose(certain_mean(np.full((16, 3), 2.0)), 2.0)
    np.testing.assert_array_equal(certain_mean(np.array([[1.0, -1.0]])), [1.0, -1.0])


@pytest.mark.parametrize(("count", "rows", "chosen"), [(200, 1, 128), (10, 50, 2), (0, 1, 0)])
def test_feeds_are_chosen_by_their_cost(count, rows, chosen):
    model = chain("relu")
    assert len(chosen_feeds(model, models.feeds(model, count, dims={"n": rows}), ["c0_out"])) == chosen


@pytest.mark.parametrize(("side", "chosen"), [(64, 20), (512, 10), (8192, 2)])
def test_fewer_feeds_are_chosen_where_memory_is_short(side, chosen):
    model = planning.prepared(
        planning.parse(f"""(float[1,1,{side},{side}] x) => (y) <float[8,1,3,3] w>
        {{ y = Conv <pads = [1,1,1,1]> (x, w) }}""")
    )
    feed = {"x": np.broadcast_to(np.float32(0), (1, 1, side, side))}
    assert len(chosen_feeds(model, [feed] * 20, ["y"])) == chosen


def test_memory_is_reckoned_behind_a_reshape_that_hides_the_batch():
    text = """(float[n,1048576] x) => (float[m,8,1024,1024] y) <float[8,1,3,3] w, int64[4] shape = {-1, 1, 1024, 1024}>
        { image = Reshape (x, shape)  y = Conv <pads = [1,1,1,1]> (image, w) }"""
    feed = {"x": np.broadcast_to(np.float32(0), (1, 1048576))}
    assert len(chosen_feeds(planning.prepared(planning.parse(text)), [feed] * 20, ["y"])) == 2


# ---- weights rounded on their grid ----------------------------------------------------------------------------------


def smooth_feeds(model, count, seed=0):
    """Inputs whose neighbouring pixels and channels go together: only then do errors of weights add up."""
    mix = np.random.default_rng(7).normal(size=(24, 24)) * 0.5 ** np.arange(24)[:, None]
    out = []
    for x in (feed["x"] for feed in models.feeds(model, count, seed=seed)):
        if x.ndim == 4:
            for axis in (2, 3):
                x = np.cumsum(x, axis) / np.sqrt(x.shape[axis])
        mixed = x + 0.5 * x.mean(axis=1, keepdims=True) if x.ndim == 4 else x @ mix
        out.append({"x": mixed.astype(np.float32)})
    return out


def one_layer(kind, *, groups=1, stride=1, pads=1, dilation=1, seed=0):
    net = models.Net(seed=seed)
    if kind == "gemm":
        y = net.gemm(net.input("x", ["n", 24]), 24, 8, name="a")
    elif kind == "matmul":
        y = net.linear(net.input("x", ["n", 5, 24]), 24, 8, name="a")
    else:
        inputs = [net.input("x", ["n", 8, 9, 11]), net.weight((8, 8 // groups, 3, 3), name="a_w"), np.zeros(8)]
        how = {"group": groups, "strides": [stride] * 2, "dilations": [dilation] * 2, "pads": [pads] * 4}
        y = net.op("ConvTranspose" if kind == "transposed" else "Conv", inputs, name="a", **how)
    return planning.prepared(net.of(y))


def dequantized(model, outcome):
    """The float model with the quantized model's weights."""
    stored = outcome.quantized.graph.initializer
    axis = next(d.axis for d in outcome.plan.decisions if d.edge.value == "a_w")
    integers, scale = array(stored, "a_w_quantized"), array(stored, "a_w_scale")
    shape = [-1 if at == axis else 1 for at in range(integers.ndim)]
    return changed(planning.prepared(model), a_w=lambda _: integers * scale.reshape(shape))


def learned(outcome, feeds, **options):
    return rounding.learn_rounding(outcome.model, outcome.quantized, feeds, **options)


@pytest.mark.parametrize(("kind", "options"), [
    ("conv", {}), ("conv", {"groups": 2}), ("conv", {"groups": 8}), ("gemm", {}), ("matmul", {}),
])  # fmt: skip
def test_outputs_get_closer_and_the_grid_is_kept(kind, options):
    model = one_layer(kind, **options)
    (layer,), stored = layers(LiveGraph(model)), array(model.graph.initializer, "a_w")
    np.testing.assert_array_equal(layer.stored(layer.canonical(stored)), stored)
    fit, held_out = smooth_feeds(model, 100 if kind == "gemm" else 24), smooth_feeds(model, 20, seed=1)
    before = planning.quantize(model, feeds=fit)
    rounded = learned(before, fit)
    fine = materialize(before.model, rounded)
    after = planning.quantize(fine, feeds=fit)
    assert [*rounded] == ["a"]
    np.testing.assert_allclose(*(array(o.quantized.graph.initializer, "a_w_scale") for o in (after, before)), rtol=2e-7)
    # The float weights lie on the grid: quantizing them loses nothing more.
    assert noise(fine, dequantized(fine, after), held_out) < 1e-9
    plain, closer = (noise(model, dequantized(o.model, o), held_out) for o in (before, after))
    assert closer < plain


def test_too_few_samples_shared_weights_and_nodes_not_named_change_nothing():
    net = models.Net()
    y = net.op("Relu", [net.conv(net.input("x", ["n", 8, 6, 6]), 8, 8, name="a")])
    shared = planning.prepared(net.of(net.op("Conv", [y, "a_w"], name="b", pads=[1, 1, 1, 1])))
    for model, count, options in ((one_layer("gemm"), 8, {}), (one_layer("conv"), 4, {"nodes": ()}), (shared, 4, {})):
        feeds = smooth_feeds(model, count)
        assert learned(planning.quantize(model, feeds=feeds), feeds, **options) == {}


@given(
    kind=st.sampled_from(["conv", "transposed"]), groups=st.sampled_from([1, 2, 8]), stride=st.integers(1, 2),
    pads=st.integers(0, 2), dilation=st.integers(1, 2), seed=st.integers(0, 999),
)  # fmt: skip
def test_rows_times_weights_are_the_layers_outputs(kind, groups, stride, pads, dilation, seed):
    """The energy of a layer's outputs is that of its moments under its weights, summed over output channels."""
    if kind == "transposed":
        stride, pads, dilation = 3, 0, 1  # taps do not overlap, so the energies of taps add up
    model = one_layer(kind, groups=groups, stride=stride, pads=pads, dilation=dilation, seed=seed)
    layer, feeds = next(layers(LiveGraph(model))), models.feeds(model, 1, seed=seed)
    moments = InputMoments(layer, 1)
    moments.add(feeds[0]["x"])
    weight = layer.canonical(array(model.graph.initializer, "a_w"))
    np.testing.assert_array_equal(layer.stored(weight), array(model.graph.initializer, "a_w"))
    energy, moments_of = 0.0, moments._products / moments.rows
    for at in range(8):
        rows = weight[at].T if kind == "transposed" else weight[at].reshape(1, -1)
        energy += float(np.einsum("rc,cd,rd->", rows, moments_of[at // (8 // groups)], rows)) * moments.rows
    (output,) = first(model, feeds)
    assert energy == pytest.approx(float((output**2).sum()), rel=1e-4)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(2, 12), st.booleans(), st.integers(0, 10**6))
def test_groups_are_rounded_together_as_each_alone(groups, rows, columns, paired, seed):
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(groups, 3 * columns, columns)) * rng.uniform(0.1, 3, (groups, 1, columns))
    moments = inputs.transpose(0, 2, 1) @ inputs + 0.01 * np.eye(columns)
    targets = rng.normal(0, 60, (groups, rows, columns))
    nearest = np.clip(np.rint(targets), -127, 127)
    neighbour = None
    if paired:  # the last of an odd number has none
        nearest = np.clip(nearest, -64, 64)
        order = rng.permutation(columns)
        neighbour = np.full(columns, -1)
        for a, b in zip(order[::2], order[1::2], strict=False):
            neighbour[[a, b]] = b, a
    limits = Grid(-127.0, 127.0, neighbour=neighbour)
    found = rounding._round(targets, nearest, moments, limits)
    for at in range(groups):
        alone = rounding._round(targets[at : at + 1], nearest[at : at + 1], moments[at : at + 1], limits)
        assert np.array_equal(found[at], alone[0])
    if neighbour is not None:
        other = np.where(neighbour >= 0, found[:, :, neighbour], 0)
        assert np.abs(np.where(np.sign(found) == np.sign(other), found + other, 0)).max() <= 128
        decides = np.abs(nearest) == np.abs(nearest).max(axis=2, keepdims=True)
        assert np.array_equal(found[decides], nearest[decides])
    errors = [np.einsum("grc,gcd,grd->", each, moments, each) for each in (found - targets, nearest - targets)]
    assert errors[0] <= errors[1] * (1 + 1e-9)


@pytest.mark.parametrize("way", [pass_on, partial(descend, sweeps=4)])
def test_a_grid_that_is_moved_and_stretched_takes_its_weights_along(way):
    inputs, targets = models.normal((2, 24, 8)), models.normal((2, 8, 5), 1, 40).astype(np.float64)
    hessian, nearest = inputs.transpose(0, 2, 1) @ inputs.astype(np.float64), np.clip(np.rint(targets), -127, 127)
    fixed, zero, scale = np.zeros(targets.shape, bool), np.full((2, 8, 5), 9.0), np.full((2, 8, 5), 0.5)
    plain = way(targets, nearest, fixed, hessian, Grid(-127, 127))
    moved = way(0.5 * targets, nearest + 9, fixed, hessian, Grid(-118, 136, scale, zero))
    np.testing.assert_array_equal(moved, plain + 9)


def test_a_conv_of_no_groups_is_no_layer():
    """No kernel runs it, but the runtime loads it, and a net may hold it where nothing runs."""
    text = "(float[1,2,4,4] x) => (float[1,2,4,4] y) <float[2,2,1,1] w> { y = Conv<group = 0>(x, w) }"
    assert not list(layers(GraphView(planning.parse(text, checked=False))))
