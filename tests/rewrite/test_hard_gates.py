"""Hard swish and hard sigmoid: collapsed from arithmetic, and as integer products and Clips."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from kenosis_ort.rewrite import collapse_hard_swish, hard_sigmoid_to_clip, hard_swish_to_product
from tests.models import Net, normal
from tests.rewrite.forms import check, parse, refused, rewritten


def clip_gate(g, x, *, slope=1.0, shift=3.0, high=6.0, order=(), divide=True, times_x=None):
    """Clip(slope * x + shift, 0, high) / high; ``times_x`` multiplies by x before ("first") or behind ("last") it."""
    flips = iter(order)

    def both(op_type, left, right):
        return g.both(op_type, left, right, not next(flips, True))

    line = x if slope == 1.0 else both("Mul", x, slope)
    y = g.op("Clip", [both("Add", line, shift), 0.0, high])
    y = both("Mul", y, x) if times_x == "first" else y
    if high != 1.0:
        y = g.op("Div", [y, high]) if divide else both("Mul", y, 1.0 / high)
    return both("Mul", y, x) if times_x == "last" else y


SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4)
ORDER = st.lists(st.booleans(), max_size=6)
MAGNITUDE = st.sampled_from([1e-3, 1.0, 5.0, 1e4, 1e30])


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
    g = Net.over(shape, opset=opset)
    y = clip_gate(g, "x", slope=slope, shift=shift, high=high, order=order, divide=divide, times_x=times_x)
    swish = opset >= 14 and (slope / high, shift / high) == (1 / 6, 0.5)
    expected = "HardSigmoid" if times_x is None else "HardSwish" if swish else "HardSigmoid Mul"
    result = check(collapse_hard_swish, g.of(y), normal(shape, seed, magnitude), expected)
    gate = result.proto.graph.node[0]
    if gate.op_type == "HardSigmoid":
        assert helper.get_node_attr_value(gate, "alpha") == pytest.approx(slope / high, rel=1e-6)
        assert helper.get_node_attr_value(gate, "beta") == pytest.approx(shift / high, rel=1e-6)


def product(shape, gate_first=False, **options):
    g = Net.over(shape, **options)
    gate = g.op("HardSigmoid", ["x"], alpha=1 / 6, beta=0.5)
    y = g.both("Mul", "x", gate, gate_first)
    return g.of(y)


@given(shape=SHAPES, gate_first=st.booleans(), magnitude=MAGNITUDE, opset=st.sampled_from([14, 17, 22]))
def test_every_product_with_a_hard_sigmoid_computes_the_same(shape, gate_first, magnitude, opset):
    check(collapse_hard_swish, product(shape, gate_first, opset=opset), normal(shape, 0, magnitude), "HardSwish")


def test_a_product_stays_where_the_operator_set_has_no_hard_swish():
    refused(collapse_hard_swish, product([2, 3], opset=13), None)


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda g: [clip_gate(g, g.op("Mul", ["x", 2.0]), times_x="last")], "Mul HardSwish"),
        (lambda g: [clip_gate(g, g.op("Mul", ["x", 2.0]))], "HardSigmoid"),
        (lambda g: [g.op("Mul", [g.op("Relu", ["x"]), clip_gate(g, "x")])], "Relu HardSigmoid Mul"),
        (lambda g: [gate := clip_gate(g, "x"), g.op("Mul", ["x", gate])], "HardSigmoid Mul"),
    ],
    ids=["x is scaled itself", "a scale within", "gate of another value", "gate needed elsewhere"],
)
def test_what_it_becomes(build, expected):
    g = Net.over([2, 3])
    check(collapse_hard_swish, g.of(*build(g)), normal([2, 3], 0, 3.0), expected)


CONV = "c = Conv <kernel_shape = [3,3], pads = [1,1,1,1]> (x, w)"
CHAIN = f"{CONV} h = HardSwish (c) y = Conv (h, u)"


def net(body: str, outputs: str = "y", seed: int = 0):
    declared = "<float[16,3,3,3] w, float[16,16,1,1] u, float[16] b, float[16,1,3,3] d, float[16,10] m>"
    return parse(f"(float[2,3,8,8] x) => ({outputs}) {declared} {{ {body} }}", seed=seed)


def feed(seed: int = 0, spread: float = 4.0):
    return normal((2, 3, 8, 8), seed, spread)


@given(seed=st.integers(0, 2**16), spread=st.floats(0.01, 30.0))
def test_the_product_computes_the_same(seed: int, spread: float) -> None:
    check(hard_swish_to_product, net(CHAIN, seed=seed), feed(seed, spread), "Conv Add Clip Mul Conv")


@given(seed=st.integers(0, 2**16), alpha=st.floats(0.05, 2.0), beta=st.floats(-0.5, 1.5), first=st.booleans())
def test_a_product_with_its_own_gate(seed: int, alpha: float, beta: float, first: bool) -> None:
    gate = f"g = HardSigmoid <alpha = {alpha:f}, beta = {beta:f}> (c) h = Mul ({'c, g' if first else 'g, c'})"
    proto = net(f"{CONV} {gate} y = Conv (h, u)", seed=seed)
    check(hard_swish_to_product, proto, feed(seed), "Conv Add Clip Mul Conv")


@pytest.mark.parametrize(
    ("behind", "expected"),
    [
        ("y = Conv <kernel_shape = [3,3], pads = [1,1,1,1], group = 16> (h, d, b)", "Conv"),
        ("p = GlobalAveragePool (h) f = Flatten (p) y = MatMul (f, m)", "GlobalAveragePool Flatten MatMul"),
        ("p = GlobalAveragePool (h) f = Flatten (p) y = Gemm (f, m)", "GlobalAveragePool Flatten Gemm"),
        (
            "p = GlobalAveragePool (h) e = Conv (p, u, b) g = Sigmoid (e) s = Mul (h, g) y = Conv (s, u)",
            "GlobalAveragePool Conv Sigmoid Mul Conv",
        ),
        ("z = Conv (h, u) y = Conv (h, u, b)", "Conv Conv"),
    ],
    ids=["depthwise", "matmul", "gemm", "squeeze-excite", "two layers, shared weights"],
)
def test_what_may_be_behind_it(behind: str, expected: str) -> None:
    proto = net(f"{CONV} h = HardSwish (c) {behind}", "y, z" if "z =" in behind else "y")
    check(hard_swish_to_product, proto, feed(), f"Conv Add Clip Mul {expected}")


def test_layers_that_are_not_named_keep_their_weights() -> None:
    assert any("'y' is not to change" in note for note in rewritten(hard_swish_to_product, net(CHAIN), "h").notes)


def gated(body: str, seed: int = 0):
    declared = "<float[8,8,1,1] w, float[8] b, float[8,5] m, float[5,8] n, float[5] e>"
    return parse(f"(float[2,8,6,6] x) => (y) {declared} {{ {body} }}", seed=seed)


@given(
    seed=st.integers(0, 2**16),
    alpha=st.floats(0.1, 3.0),  # of a gate that is all but closed next to nothing is left to compare
    beta=st.floats(-0.5, 1.5),
    bias=st.booleans(),
)
def test_the_clip_computes_the_same(seed: int, alpha: float, beta: float, bias: bool) -> None:
    gate = f"g = HardSigmoid <alpha = {alpha:f}, beta = {beta:f}> (c) y = Mul (x, g)"
    proto = gated(f"c = Conv (x, w{', b' if bias else ''}) {gate}", seed=seed)
    check(hard_sigmoid_to_clip, proto, normal((2, 8, 6, 6), seed, 3), "Conv Clip Mul")


@pytest.mark.parametrize("layer", ["Gemm (f, m, e)", "Gemm (f, m)", "Gemm <transB = 1> (f, n, e)"])
def test_behind_gemm(layer: str) -> None:
    proto = gated(f"p = GlobalAveragePool (x) f = Flatten (p) c = {layer} y = HardSigmoid (c)")
    check(hard_sigmoid_to_clip, proto, normal((2, 8, 6, 6), 0, 3), "GlobalAveragePool Flatten Gemm Clip")
