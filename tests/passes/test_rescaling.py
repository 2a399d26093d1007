"""Channels and rows brought to one range: exact in float, better in integers."""

import re
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st

from kenosis_ort.accuracy.channel_statistics import channel_statistics
from kenosis_ort.graph.live import LiveGraph
from kenosis_ort.graph.view import GraphView, PreparedModel
from kenosis_ort.passes.contract import Candidate, State
from kenosis_ort.passes.equalize_layers import equalize, values_for_equalization
from kenosis_ort.passes.evaluator import Score
from kenosis_ort.passes.layers import LinkNoise, find_links
from kenosis_ort.passes.scale_rows import _MASSIVE, RowScales, row_noise, with_row_scales
from kenosis_ort.passes.smooth import smooth, values_for_smoothing
from kenosis_ort.runtime.machine import runtime_limits
from tests import models, planning
from tests.flow.support import changed, run
from tests.graph.build import ops
from tests.passes.support import array, first
from tests.planning import parse, prepared


def distance(model, other, feeds):
    """Largest difference over the largest value of each output."""
    pairs = [p for a, b in zip(run(model, feeds), run(other, feeds), strict=True) for p in zip(a, b, strict=True)]
    return max(float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-6)) for a, b in pairs)


def equalized(model, feeds=None, nodes=None):
    feeds, values = feeds or models.feeds(model, 4), values_for_equalization(LiveGraph(model))
    return equalize(model, peaks=channel_statistics(model, feeds, values), nodes=nodes)


def of_first(pair):
    """What became of the output of the pair's first layer."""
    return next(iter(pair.values()))


def spread(model, *, axis, seed=0):
    """The model with channels of the first layer's weight that differ by up to a hundred times."""
    held = array(model.graph.initializer, "a_w")
    factors = 10 ** (np.random.default_rng(seed).uniform(-2, 0, held.shape[axis]))
    return changed(model, a_w=factors.reshape([-1 if at == axis else 1 for at in range(held.ndim)]))


ACTIVATIONS = {
    "relu": lambda net, y, flat: net.op("Relu", [y]),
    "leaky": lambda net, y, flat: net.op("LeakyRelu", [y], alpha=0.1),
    "prelu": lambda net, y, flat: net.op("PRelu", [y, np.linspace(-0.5, 0.5, 8).reshape((8,) if flat else (8, 1, 1))]),
    "none": lambda net, y, flat: y,
    "clip": lambda net, y, flat: net.op("Clip", [y, np.float32(0), np.float32(3)]),
    "pool": lambda net, y, flat: net.op("AveragePool", [net.op("Relu", [y])], kernel_shape=[3, 3], pads=[1] * 4),
}
LINEAR = {"gemm": models.Net.gemm, "matmul": models.Net.linear}


def pair_net(first, act, second, *, groups=1, seed=0):
    """Two layers with eight channels of unlike range between them."""
    net, flat = models.Net(seed=seed), first in LINEAR
    x = net.input("x", ["n", 6] if flat else ["n", 4, 6, 6])
    if flat:
        y = LINEAR[first](net, x, 6, 8, name="a")
    elif first == "conv":
        y = net.conv(x, 4, 8, name="a")
    else:
        y = net.op("ConvTranspose", [x, net.weight((4, 4, 3, 3), name="a_w")], name="a", group=2)
    y = ACTIVATIONS[act](net, y, flat)
    if second in LINEAR:
        y = LINEAR[second](net, y, 8, 5, name="b")
    elif second == "flat":
        y = net.gemm(net.op("Flatten", [y]), 8 * 36, 5, name="b")
    elif second == "conv":
        y = net.conv(y, 8, 8, groups=groups, name="b")
    else:
        y = net.op("ConvTranspose", [y, net.weight((8, 3, 3, 3), name="b_w")], name="b", group=groups)
    return planning.prepared(spread(net.of(y), axis=0 if first in ("gemm", "conv") else 1, seed=seed))


@given(
    first=st.sampled_from(["conv", "transposed"]), act=st.sampled_from(["relu", "leaky", "prelu", "none", "pool"]),
    second=st.sampled_from(["conv", "transposed"]), groups=st.sampled_from([1, 2, 8]), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_convolutions_compute_the_same_for_every_input(first, act, second, groups, seed):
    model = pair_net(first, act, second, groups=groups, seed=seed)
    result = equalized(model, models.feeds(model, 2, seed=seed))
    others = [{"x": 50 * f["x"]} for f in models.feeds(model, 2, seed=seed + 1)]  # far beyond what was observed
    assert distance(model, result.model, others) < 1e-5


CASES = [(a, act, b) for a in LINEAR for b in LINEAR for act in ("relu", "leaky", "prelu", "none")]


@pytest.mark.parametrize(("first", "act", "second"), [*CASES, ("conv", "relu", "flat")])
def test_linear_layers_compute_the_same_and_features_behind_a_flatten_follow_their_channel(first, act, second):
    model = pair_net(first, act, second)
    result = equalized(model, models.feeds(model, 4))
    assert len(result.pairs) == 1
    assert distance(model, result.model, models.feeds(model, 3, seed=9)) < 1e-5


def test_the_noise_is_as_predicted():
    model = changed(pair_net("gemm", "none", "gemm"), b_w=10.0 ** np.linspace(-2, 1, 5)[:, None])
    (link,), feeds = find_links(LiveGraph(model)), models.feeds(model, 4, dims={"n": 500})
    (seen,) = channel_statistics(model, feeds, values_for_equalization(LiveGraph(model))).values()
    a, bias, b = (array(model.graph.initializer, name).astype(np.float64) for name in ("a_w", "a_b", "b_w"))
    x = np.concatenate([feed["x"] for feed in feeds]) @ a.T + bias
    step, steps = (x.max() - x.min()) / 255, np.abs(b).max(axis=1, keepdims=True) / 127
    off = (np.rint(x / step) * step) @ (np.rint(b / steps) * steps).T - x @ b.T
    noise = ((off**2).mean(axis=0) / ((x**2).mean(axis=0) @ (b**2).T)).sum()
    assert LinkNoise(link, seen, link.second.canonical(b), per_channel=True).of(np.ones(8)) == pytest.approx(noise, 0.1)


@pytest.mark.parametrize("pool", ["MaxPool", "AveragePool"])
def test_a_pool_mixes_the_channels_of_linear_layers(pool):
    text = f"""(float[n,2,5,6] x) => (y) <float[6,8] a_w, float[8,5] b_w>
        {{ a = MatMul (x, a_w) p = {pool} <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (a) y = MatMul (p, b_w) }}"""
    assert equalized(planning.prepared(spread(planning.parse(text), axis=1))).pairs == ()


@given(groups=st.sampled_from([1, 8]), seed=st.integers(0, 2**16))
def test_a_clip_is_kept_on_the_observed_range(groups, seed):
    model = pair_net("conv", "clip", "conv", groups=groups, seed=seed)
    feeds = models.feeds(model, 4, seed=seed)
    result = equalized(model, feeds)
    assert distance(model, result.model, feeds) < 1e-5
    peaks = channel_statistics(model, feeds, values_for_equalization(LiveGraph(model)))
    for pair in result.pairs:
        assert np.all(of_first(pair).factors[next(iter(peaks.values())).high >= 3.0] == 1.0)


def test_without_statistics_channels_stay():
    model = pair_net("gemm", "relu", "gemm")
    assert equalized(model).pairs
    assert (equalize(model, peaks={}).pairs, equalize(model, peaks={}).model is model) == ((), True)


def test_high_biases_move_on_to_a_layer_that_does_not_pad():
    text = """(float[n,4,6,6] x) => (y) <float[8,4,1,1] a_w, float[8] a_b, float[4,8,{0},{0}] b_w, float[4] b_b>
        {{ a = Conv (x, a_w, a_b) r = Relu (a) y = Conv <pads = [{1}, {1}, {1}, {1}]> (r, b_w, b_b) }}"""
    high = {"a_b": np.full(8, 40.0)}
    model, padded = (planning.prepared(planning.parse(text.format(*how), high)) for how in ((1, 0), (3, 1)))
    feeds = models.feeds(model, 16)
    result = equalized(model, feeds)
    absorbed = of_first(result.pairs[0]).shift
    assert np.all(absorbed > 10)
    assert distance(model, result.model, feeds) < 1e-5
    assert not any(of_first(p).shift.any() for p in equalized(padded, feeds).pairs)
    # Factors are those of the net whose biases had moved before.
    weight = array(model.graph.initializer, "b_w")[:, :, 0, 0]
    moved = changed(model, a_b=lambda bias: bias - absorbed, b_b=lambda bias: bias + weight @ absorbed)
    (again,) = equalized(moved, feeds).pairs
    np.testing.assert_allclose(of_first(again).factors, of_first(result.pairs[0]).factors, rtol=1e-3)


@pytest.mark.parametrize(("shape", "pairs"), [("4", 1), ("1,4", 1), ("1", 0), ("4,1", 0)])
def test_a_gemms_bias_has_a_number_for_each_channel_or_its_channels_stay(shape, pairs):
    text = f"""(float[4,6] x) => (y) <float[6,4] a_w, float[{shape}] a_b, float[4,5] b_w, float[5] b_b>
        {{ [a] p = Gemm (x, a_w, a_b) q = Relu (p) [b] y = Gemm (q, b_w, b_b) }}"""
    model = planning.prepared(planning.parse(text, {"a_w": models.normal((6, 4)) * [0.01, 0.1, 1.0, 1.0]}))
    result = equalized(model, models.feeds(model, 16))
    assert len(result.pairs) == pairs
    assert distance(model, result.model, models.feeds(model, 3, seed=9)) < 1e-5


@pytest.mark.parametrize("case", ["two consumers", "output", "shared weight", "sigmoid", "excluded"])
def test_what_others_need_is_not_touched(case):
    net = models.Net(seed=5)
    y = net.op("Sigmoid" if case == "sigmoid" else "Relu", [net.conv(net.input("x", ["n", 4, 6, 6]), 4, 8, name="a")])
    if case in ("two consumers", "output"):
        net.output(y if case == "output" else net.op("Exp", [y]))
    z = net.conv(y, 8, 8, name="b")
    if case == "shared weight":
        z = net.op("Conv", [net.op("Relu", [z]), "b_w"], name="c", pads=[1, 1, 1, 1])
    model = planning.prepared(spread(net.of(z), axis=0))
    assert equalized(model, nodes={"b"} if case == "excluded" else None).pairs == ()


# ---- SmoothQuant: folded where it can be, and better where channels differ ------------------------------------------


D = 32
NORMS = {
    "layer norm": "n = LayerNormalization <axis = -1> (x, gamma, beta)",
    "rms norm": "n = RMSNormalization <axis = -1> (x, gamma)",
    "rms norm in pieces": """q = Mul (x, x)\n m = ReduceMean <axes = [-1]> (q)\n e = Add (m, eps)\n r = Sqrt (e)
        d = Div (x, r)\n n = Mul (gamma, d)""",
    "affine": "d = Mul (x, gamma)\n n = Add (d, beta)",
}
ALPHAS = ("auto", 0.0, 0.3, 0.5, 0.85, 1.0)
INSTALLED = sorted(NORMS if runtime_limits().max_opset >= 23 else NORMS.keys() - {"rms norm"})  # its operator set
READERS = {
    "two linears": "a = MatMul (n, w1)\n b = MatMul (n, w2)\n c = Add (b, b2)\n y = Mul (a, c)",
    "gemm behind a reshape": "f = Reshape (n, flat)\n g = Gemm <transB = 1> (f, w1, b2)\n y = Reshape (g, back)",
    "transposed": "t = Transpose <perm = [1, 0, 2]> (n)\n g = MatMul (t, w1)\n y = Transpose <perm = [1, 0, 2]> (g)",
}


def with_outliers(gain=30.0, seed=0):
    """Weights of which the norm's gains have a few channels far above the rest."""
    rng = np.random.default_rng(seed)
    gamma = rng.uniform(0.5, 1.5, D)
    gamma[rng.choice(D, 3, replace=False)] *= gain
    dense = {f"w{i}": rng.standard_normal((D, D)) / D**0.5 for i in range(1, 5)}
    arrays = {"gamma": gamma, "beta": rng.standard_normal(D) * 0.1, "b2": rng.standard_normal(D), **dense}
    shapes = {"flat": np.array([-1, D], np.int64), "back": np.array([1, 10, D], np.int64)}
    return {**{k: v.astype(np.float32) for k, v in arrays.items()}, "eps": np.float32(1e-5), **shapes}


def behind_norm(body, given_weights=None, outputs="float[1,10,32] y"):
    used = {k: v for k, v in (given_weights or with_outliers()).items() if re.search(rf"\b{k}\b", body)}
    opset = 23 if "RMSNormalization" in body else 17
    return prepared(parse(f"net (float[1,10,{D}] x) => ({outputs}) {{ {body} }}", used, opset=opset))


def token_feeds(count=4, seed=1):
    rng = np.random.default_rng(seed)
    return [{"x": rng.standard_normal((1, 10, D)).astype(np.float32)} for _ in range(count)]


def smoothed(model, **options):
    insert = options.get("insert")
    wanted = values_for_smoothing(LiveGraph(model), nodes=options.get("nodes"), insert=insert)
    return smooth(model, peaks=channel_statistics(model, token_feeds(), wanted), **options)


def check_exact(model, result):
    before, after = (np.stack(first(m, token_feeds(seed=5))) for m in (model, result.model))
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5 * np.abs(before).max())


@pytest.mark.parametrize("norm", INSTALLED)
@pytest.mark.parametrize("reader", READERS)
def test_folded_into_what_is_before(norm, reader):
    model = behind_norm(f"{NORMS[norm]}\n{READERS[reader]}")
    result = smoothed(model)
    (done,) = result.layers
    assert (done.value, len(done.layers)) == ("n", 2 if reader == "two linears" else 1)
    assert done.gain_db > 5
    assert (ops(result.model), len(result.notes)) == (ops(model), 1)
    check_exact(model, result)


@given(st.sampled_from(INSTALLED), st.floats(1, 300), st.sampled_from(ALPHAS), st.integers(0, 99))
def test_exact_in_float(norm, gain, alpha, seed):
    model = behind_norm(f"{NORMS[norm]}\n{READERS['two linears']}", with_outliers(gain, seed))
    check_exact(model, smoothed(model, alpha=alpha))


@pytest.mark.parametrize(("body", "values"), [
    ("h = MatMul (x, w1)\n r = Relu (h)\n y = MatMul (r, w2)", ["r"]),
    ("h = MatMul (x, w1)\n a = Add (h, b2)\n r = LeakyRelu (a)\n y = MatMul (r, w2)", ["r"]),
    ("g = MatMul (x, w1)\n s = Sigmoid (g)\n u = MatMul (x, w2)\n h = Mul (s, u)\n y = MatMul (h, w3)", ["h"]),
    ("h = MatMul (x, w1)\n r = Tanh (h)\n y = MatMul (r, w2)", []),
    ("h = MatMul (x, w1)\n s = Softmax (h)\n p = Add (h, s)\n y = MatMul (p, w2)", []),
])  # fmt: skip
def test_folded_into_the_linear_layer_before(body, values):
    arrays = with_outliers()
    arrays["w1"][:, :2] *= 40.0  # outlier channels of the first layer's output
    arrays["w2"][:, 5] *= 40.0
    model = behind_norm(body, arrays)
    result = smoothed(model)
    assert [done.value for done in result.layers] == values
    check_exact(model, result)


NORMED = f"{NORMS['layer norm']}\n a = MatMul (n, w1)\n "


@pytest.mark.parametrize(("body", "options"), [
    (f"{NORMED} y = Add (a, n)", {"insert": False}),  # a residual reads it
    (f"{NORMED} y = Add (a, b2)", {"nodes": ["other"]}), ("y = MatMul (x, w1)", {}),
    (f"{NORMS['layer norm']}\n t = Transpose <perm = [0, 2, 1]> (n)\n y = MatMul (t, w)", {}),
])  # fmt: skip
def test_left_alone(body, options):
    arrays = {**with_outliers(), "w": np.zeros((10, 32), np.float32)}
    model = behind_norm(body, arrays, "float[1,32,32] y" if "Transpose" in body else "float[1,10,32] y")
    result = smoothed(model, **options)
    assert (result.layers, result.notes, result.model) == ((), (), model)


def rounding_noise(model):
    """Power of what 8 bits change of the products behind a norm, as a share of theirs."""
    x = np.concatenate([feed["x"] for feed in token_feeds(seed=7)]).astype(np.float64)
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    n, share = x * array(model.graph.initializer, "gamma") + array(model.graph.initializer, "beta"), 0.0
    step = (n.max() - n.min()) / 255
    for name in ("w1", "w2"):
        w = array(model.graph.initializer, name).astype(np.float64)
        steps = np.abs(w).max(axis=0) / 127
        off = (np.round(n / step) * step) @ (np.round(w / steps) * steps) - n @ w
        share += float((off**2).mean() / ((n @ w) ** 2).mean())
    return share


@pytest.mark.parametrize("gain", [3.0, 30.0, 100.0])
def test_the_gain_is_as_predicted(gain):
    model = behind_norm(f"{NORMS['layer norm']}\n{READERS['two linears']}", with_outliers(gain))
    result = smoothed(model)
    gained = 10 * np.log10(rounding_noise(model) / rounding_noise(result.model))
    assert gained == pytest.approx(result.layers[0].gain_db, abs=1.0)


def test_weights_shared_with_others_are_not_changed():
    more = "m = LayerNormalization <axis = -1> (a, gamma, beta)\n s = Sigmoid (m)\n b = MatMul (s, w1)\n y = Add (b, m)"
    model = behind_norm(NORMED + more)
    result = smoothed(model)
    assert [done.value for done in result.layers] == ["n"]
    for name in ("w1", "gamma"):
        np.testing.assert_array_equal(array(result.model.graph.initializer, name), with_outliers()[name])
    check_exact(model, result)


def test_dead_channels():
    arrays = with_outliers()
    arrays["gamma"][4] = arrays["beta"][4] = 0.0
    arrays["w1"][7] = 0.0
    model = behind_norm(f"{NORMED} y = Add (a, b2)", arrays)
    result = smoothed(model)
    assert [*result.rescaled["n"].factors[[4, 7]]] == [1.0, 1.0]
    check_exact(model, result)


# ---- rows of one size: one range fit for all rows, and integer kernels behind ---------------------------------------


BODIES = {
    "matmul": "y = MatMul (x, w)", "matmul and bias": "m = MatMul (x, w)\n y = Add (m, b)",
    "two layers of one value": "a = MatMul (x, w)\n c = MatMul (x, v)\n y = Mul (a, c)",
    "gemm": "f = Reshape (x, flat)\n g = Gemm <transB = 1, beta = 0.5> (f, w, b)\n y = Reshape (g, back)",
    "its output is needed twice": "m = MatMul (x, w)\n r = Relu (m)\n y = Add (m, r)",
}  # fmt: skip
SHAPES = {"flat": np.array([-1, 32], np.int64), "back": np.array([2, -1, 32], np.int64)}


def of_rows(body, *, opset=17):
    rng = np.random.default_rng(0)
    arrays = {k: (rng.standard_normal((32, 32)) / 6).astype(np.float32) for k in ("w", "v")}
    arrays |= {"b": rng.standard_normal(32).astype(np.float32), **SHAPES}
    used = {k: v for k, v in arrays.items() if re.search(rf"\b{k}\b", body)}
    text = f"net (float[2,len,32] i) => (float[2,len,32] y) {{ x = Mul (i, i)\n {body} }}"
    return prepared(parse(text, used, opset=opset))


def linear_layers(model):
    return {node.name for node in model.graph.node if node.op_type in ("MatMul", "Gemm")}


@given(st.sampled_from(sorted(BODIES)), st.sampled_from([13, 17, 18, 21]), st.integers(1, 5), st.floats(0, 4))
def test_it_computes_the_same(body, opset, length, power):
    model = of_rows(BODIES[body], opset=opset)
    read = dict.fromkeys(node.input[0] for node in model.graph.node if node.name in linear_layers(model))
    found, values = with_row_scales(model, [*read], nodes=linear_layers(model))
    onnx.checker.check_model(found)
    (value,) = values
    assert value in {value.name for value in found.graph.value_info}
    assert len({node.name for node in found.graph.node}) == len(found.graph.node)
    rng = np.random.default_rng(length)
    rows = 10.0 ** rng.uniform(-power, power, (2, length, 1))
    x = (rng.standard_normal((2, length, 32)) * rows).astype(np.float32)
    x[0, 0] = 0.0
    (want,), (got,) = (run(m, [{"i": x}])[0] for m in (model, found))
    size = np.abs(want).max(axis=-1, keepdims=True)
    assert (np.abs(want - got) <= 1e-5 * size + 1e-12).all()


def outlying():
    """Rows of which the first of each sample is thirty times the others."""
    x = np.random.default_rng(3).standard_normal((2, 16, 32)).astype(np.float32)
    x[:, 0] *= 30.0
    return x


@pytest.mark.parametrize(("errors", "tried", "scaled"), [
    ({0: 1.0, 4: 0.9}, [0, 4], 0), ({0: 1.0, 4: 0.5, 2: 0.6, 1: 1.5}, [0, 4, 2, 1], 2),
    ({0: 1.0, 4: 0.5, 2: 0.4, 1: 0.7}, [0, 4, 2, 1], 1),
], ids=["no gain", "half of them", "one of them"])  # fmt: skip
def test_fewer_values_are_tried_as_long_as_they_serve(errors, tried, scaled):
    body = "".join(f"x{at} = Mul (x, x)\n m{at} = MatMul (x{at}, w)\n " for at in range(4))
    model = of_rows(f"{body} s = Sum (m0, m1, m2, m3)\n y = Relu (s)")
    seen = []

    def score(state):
        seen.append(sum(node.op_type == "Reciprocal" for node in state.prepared.proto.graph.node))
        return Score(errors[seen[-1]], (errors[seen[-1]],) * 8)

    context = SimpleNamespace(
        mixes=True, fit=[{"i": outlying()}], nodes=linear_layers(model), custom_op_libraries=(), active={}, score=score
    )
    found = RowScales().apply(State(PreparedModel(model)), {}, context)
    assert (seen, found.what.split()[0] if isinstance(found, Candidate) else "0") == (tried, str(scaled))


def test_what_one_range_costs():
    """A row a thousand times the others hides them in one range and costs none of them in its own."""
    model = of_rows(BODIES["matmul"])
    (noise,) = row_noise(GraphView(model), [{"i": (x := outlying())}], nodes=linear_layers(model))
    assert (noise.value, noise.by_row < 1e-4 < 0.5 < noise.static) == ("x", True)
    (even,) = row_noise(GraphView(model), [{"i": np.sign(x)}], nodes=linear_layers(model))
    assert even.static == pytest.approx(even.by_row)
    usual = [{"i": np.abs(x[:, 1:]) ** 1.3}]  # rows that differ, which is not worth a trial: no score is asked for
    (noise,) = row_noise(GraphView(model), usual, nodes=linear_layers(model))
    assert (noise.static > 1e-4, 2 < noise.static / noise.by_row < _MASSIVE) == (True, True)
    context = SimpleNamespace(mixes=True, fit=usual, nodes=linear_layers(model), custom_op_libraries=())
    assert RowScales().apply(State(PreparedModel(model)), {}, context).why == "one range serves all rows"


@pytest.mark.parametrize("nodes", [set(), {"another"}])
def test_only_named_layers(nodes):
    model = of_rows(BODIES["matmul"])
    assert not row_noise(GraphView(model), [{"i": np.ones((2, 3, 32), np.float32)}], nodes=nodes)


def test_a_single_row_has_none_to_differ_from():
    model = prepared(parse("g (float[1,32] x) => (float[1,32] y) <float[32,32] w> { a = Abs (x) y = MatMul (a, w) }"))
    assert not row_noise(GraphView(model), [{"x": outlying()[0, :1]}], nodes=linear_layers(model))
