"""Hard swish and hard sigmoid: collapsed from arithmetic, and as integer products and Clips."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from kenosis_ort.rewrite import collapse_hard_swish, hard_sigmoid_to_clip, hard_swish_to_product
from tests import planning
from tests.rewrite.forms import Graph, assert_formed, assert_refused, check, refused, rewritten, untouched


def clip_gate(g, x, *, slope=1.0, shift=3.0, high=6.0, order=(), divide=True, times_x=None):
    """Clip(slope * x + shift, 0, high) / high; ``times_x`` multiplies by x before ("first") or behind ("last") it."""
    flips = iter(order)

    def both(op_type, left, right):
        return g.op(op_type, *((left, right) if next(flips, True) else (right, left)))

    line = x if slope == 1.0 else both("Mul", x, slope)
    y = g.op("Clip", both("Add", line, shift), 0.0, high)
    y = both("Mul", y, x) if times_x == "first" else y
    if high != 1.0:
        y = g.op("Div", y, high) if divide else both("Mul", y, 1.0 / high)
    return both("Mul", y, x) if times_x == "last" else y


def inputs(shape, magnitude, seed=0):
    return (np.random.default_rng(seed).normal(size=shape) * magnitude).astype(np.float32)


SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4)
ORDER = st.lists(st.booleans(), max_size=6)
MAGNITUDE = st.sampled_from([1e-3, 1.0, 5.0, 1e4, 1e30])


@settings(deadline=None)
@given(
    shape=SHAPES,
    high=st.sampled_from([1.0, 6.0, 2.5]),
    slope=st.sampled_from([1.0, 0.2, 3.0]),
    shift=st.sampled_from([3.0, 0.5]),
    order=ORDER,
    divide=st.booleans(),
    times_x=st.sampled_from([None, "first", "last"]),
    magnitude=MAGNITUDE,
    opset=st.sampled_from([13, 14, 17, 22]),
    seed=st.integers(0, 2**16),
)
def test_every_clip_computes_the_same(shape, high, slope, shift, order, divide, times_x, magnitude, opset, seed):
    g = Graph(shape, opset=opset)
    y = clip_gate(g, "x", slope=slope, shift=shift, high=high, order=order, divide=divide, times_x=times_x)
    swish = opset >= 14 and (slope / high, shift / high) == (1 / 6, 0.5)
    expected = ["HardSigmoid"] if times_x is None else ["HardSwish"] if swish else ["HardSigmoid", "Mul"]
    result = assert_formed(g.model(y), collapse_hard_swish, expected, inputs(shape, magnitude, seed))
    gate, last = result.proto.graph.node[0], result.proto.graph.node[-1]
    assert last.name == y
    assert set(result.nodes) == {n.name for n in g.nodes} - {n.name for n in result.proto.graph.node}
    if gate.op_type == "HardSigmoid":
        assert helper.get_node_attr_value(gate, "alpha") == pytest.approx(slope / high, rel=1e-6)
        assert helper.get_node_attr_value(gate, "beta") == pytest.approx(shift / high, rel=1e-6)
    assert not result.proto.graph.initializer


@settings(deadline=None)
@given(shape=SHAPES, gate_first=st.booleans(), magnitude=MAGNITUDE, opset=st.sampled_from([14, 17, 22]))
def test_every_product_with_a_hard_sigmoid_computes_the_same(shape, gate_first, magnitude, opset):
    g = Graph(shape, opset=opset)
    gate = g.op("HardSigmoid", "x", alpha=1 / 6, beta=0.5)
    y = g.op("Mul", *((gate, "x") if gate_first else ("x", gate)))
    result = assert_formed(g.model(y), collapse_hard_swish, ["HardSwish"], inputs(shape, magnitude))
    assert result.nodes == {gate: (y,)}


def test_a_product_stays_where_the_operator_set_has_no_hard_swish():
    g = Graph([2, 3], opset=13)
    proto = g.model(g.op("Mul", "x", g.op("HardSigmoid", "x", alpha=1 / 6, beta=0.5)))
    assert_refused(proto, collapse_hard_swish, None)


def test_x_may_be_scaled_arithmetic_itself():
    g = Graph([2, 3])
    x = g.op("Mul", "x", 2.0)
    y = clip_gate(g, x, times_x="last")
    assert_formed(g.model(y), collapse_hard_swish, ["Mul", "HardSwish"], inputs([2, 3], 3.0))
    g = Graph([2, 3])
    y = clip_gate(g, g.op("Mul", "x", 2.0))
    assert_formed(g.model(y), collapse_hard_swish, ["HardSigmoid"], inputs([2, 3], 3.0))


def test_a_gate_of_another_value_becomes_a_hard_sigmoid():
    g = Graph([2, 3])
    proto = g.model(g.op("Mul", g.op("Relu", "x"), clip_gate(g, "x")))
    result = assert_formed(proto, collapse_hard_swish, ["Relu", "HardSigmoid", "Mul"], inputs([2, 3], 3.0))
    assert set(result.nodes) == {"add1", "clip2"}


def test_a_gate_that_is_needed_elsewhere_too_becomes_a_hard_sigmoid():
    g = Graph([2, 3])
    gate = clip_gate(g, "x")
    proto = g.model(g.op("Mul", "x", gate), gate)
    assert_formed(proto, collapse_hard_swish, ["HardSigmoid", "Mul"], inputs([2, 3], 3.0))


def test_an_output_gate_stays_in_a_product():
    g = Graph([2, 3])
    gate = g.op("HardSigmoid", "x", alpha=1 / 6, beta=0.5)
    proto = g.model(g.op("Mul", "x", gate), gate)
    assert_refused(proto, collapse_hard_swish, f"'{gate}' is needed elsewhere")


def test_other_slopes_stay_hard_sigmoid_and_mul():
    g = Graph([2, 3])
    y = g.op("Mul", "x", g.op("HardSigmoid", "x"))
    assert_refused(g.model(y), collapse_hard_swish, "alpha 0.2 and beta 0.5 are not those of HardSwish")


CONV = "kernel_shape = [3,3], pads = [1,1,1,1]"
CHAIN = f"c = Conv <{CONV}> (x, w)\n h = HardSwish (c)\n y = Conv (h, u)"


def parse(text: str, **options: Any) -> onnx.ModelProto:
    """Returns the model of a text, its nodes named as preparation would."""
    proto = planning.parse(text, **options)
    for node in proto.graph.node:
        node.name = f"{node.op_type}_{node.output[0]}"
    return proto


def net(body: str, outputs: str = "y") -> str:
    return f"""net (float[2,3,8,8] x) => ({outputs})
    <float[16,3,3,3] w, float[16,16,1,1] u, float[16] b, float[16,1,3,3] d, float[16,10] m> {{ {body} }}"""


def feed(seed: int = 0, spread: float = 4.0) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).normal(0, spread, (2, 3, 8, 8)).astype(np.float32)}


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16), spread=st.floats(0.01, 30.0))
def test_the_product_computes_the_same(seed: int, spread: float) -> None:
    expected = ["Conv", "Add", "Clip", "Mul", "Conv"]
    check(hard_swish_to_product, parse(net(CHAIN), seed=seed), feed(seed, spread), expected)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16), alpha=st.floats(0.05, 2.0), beta=st.floats(-0.5, 1.5), first=st.booleans())
def test_a_product_with_its_own_gate(seed: int, alpha: float, beta: float, first: bool) -> None:
    product = "h = Mul (c, g)" if first else "h = Mul (g, c)"
    gate = f"g = HardSigmoid <alpha = {alpha:f}, beta = {beta:f}> (c)"
    text = net(f"c = Conv <{CONV}> (x, w)\n {gate}\n {product}\n y = Conv (h, u)")
    check(hard_swish_to_product, parse(text, seed=seed), feed(seed), ["Conv", "Add", "Clip", "Mul", "Conv"])


def test_the_gate_of_another_value_stays() -> None:
    text = net(f"c = Conv <{CONV}> (x, w)\n g = HardSigmoid (c)\n a = Abs (c)\n h = Mul (a, g)\n y = Conv (h, u)")
    untouched(hard_swish_to_product, parse(text))


@pytest.mark.parametrize(
    ("behind", "expected"),
    [
        (f"y = Conv <{CONV}, group = 16> (h, d, b)", ["Conv"]),
        ("p = GlobalAveragePool (h)\n f = Flatten (p)\n y = MatMul (f, m)", ["GlobalAveragePool", "Flatten", "MatMul"]),
        ("p = GlobalAveragePool (h)\n f = Flatten (p)\n y = Gemm (f, m)", ["GlobalAveragePool", "Flatten", "Gemm"]),
        (
            "p = GlobalAveragePool (h)\n e = Conv (p, u, b)\n g = Sigmoid (e)\n s = Mul (h, g)\n y = Conv (s, u)",
            ["GlobalAveragePool", "Conv", "Sigmoid", "Mul", "Conv"],
        ),
        ("z = Conv (h, u)\n y = Conv (h, u, b)", ["Conv", "Conv"]),
    ],
    ids=["depthwise", "matmul", "gemm", "squeeze-excite", "two layers, shared weights"],
)
def test_what_may_be_behind_it(behind: str, expected: list[str]) -> None:
    outputs = "y, z" if "z =" in behind else "y"
    text = net(f"c = Conv <{CONV}> (x, w)\n h = HardSwish (c)\n {behind}", outputs)
    check(hard_swish_to_product, parse(text), feed(), ["Conv", "Add", "Clip", "Mul", *expected])


@pytest.mark.parametrize(
    ("behind", "reason"),
    [
        ("s = Add (h, c)\n y = Conv (s, u)", "does not keep a factor"),
        ("s = Mul (h, h)\n y = Conv (s, u)", "does not keep a factor"),
        ("p = GlobalAveragePool (h)\n s = Mul (h, p)\n y = Conv (s, u)", "multiplies it with what comes from it"),
        ("s = Sigmoid (h)\n y = Conv (s, u)", "does not keep a factor"),
        ("t = Conv (h, u)\n y = Mul (h, t)", "is needed as it is"),
        ("k = Abs (u)\n y = Conv (h, k)", "are not constant"),
    ],
    ids=["sum", "square", "its own pool", "sigmoid", "output", "computed weights"],
)
def test_what_may_not(behind: str, reason: str) -> None:
    text = net(f"c = Conv <{CONV}> (x, w)\n h = HardSwish (c)\n {behind}")
    refused(hard_swish_to_product, parse(text), reason)


def test_layers_that_are_not_named_keep_their_weights() -> None:
    prepared = rewritten(hard_swish_to_product, parse(net(CHAIN)), "HardSwish_h")
    assert any("'Conv_y' is not to change" in note for note in prepared.notes)


def gated(body: str, outputs: str = "y") -> str:
    return f"""net (float[2,8,6,6] x) => ({outputs})
    <float[8,8,1,1] w, float[8,8,1,1] u, float[8] b, float[8,5] m, float[5,8] n, float[5] e> {{ {body} }}"""


def picture(seed: int = 0) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).normal(0, 3, (2, 8, 6, 6)).astype(np.float32)}


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**16),
    alpha=st.floats(0.1, 3.0),  # of a gate that is all but closed next to nothing is left to compare
    beta=st.floats(-0.5, 1.5),
    bias=st.booleans(),
)
def test_the_clip_computes_the_same(seed: int, alpha: float, beta: float, bias: bool) -> None:
    operands = "x, w, b" if bias else "x, w"
    text = gated(f"c = Conv ({operands})\n g = HardSigmoid <alpha = {alpha:f}, beta = {beta:f}> (c)\n y = Mul (x, g)")
    check(hard_sigmoid_to_clip, parse(text, seed=seed), picture(seed), ["Conv", "Clip", "Mul"])


@pytest.mark.parametrize("layer", ["Gemm (f, m, e)", "Gemm (f, m)", "Gemm <transB = 1> (f, n, e)"])
def test_behind_gemm(layer: str) -> None:
    text = gated(f"p = GlobalAveragePool (x)\n f = Flatten (p)\n c = {layer}\n y = HardSigmoid (c)")
    check(hard_sigmoid_to_clip, parse(text), picture(), ["GlobalAveragePool", "Flatten", "Gemm", "Clip"])


def test_a_gemm_with_factors_keeps_its_gate() -> None:
    body = "p = GlobalAveragePool (x)\n f = Flatten (p)\n c = Gemm <alpha = 2.0> (f, m)\n y = HardSigmoid (c)"
    refused(hard_sigmoid_to_clip, parse(gated(body)), "factors of its own")
