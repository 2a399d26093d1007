"""Activations written in arithmetic: rows of bounds, SiLU, GELU, hard swish; the last as products and Clips."""

import math

import numpy as np
import onnx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from onnx import helper

from kenosis_ort import rewrite
from tests.graph.build import run
from tests.models import Net, normal
from tests.rewrite.forms import check, ops, parse, refused

BOUND = st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0, 6.0])
STEP = st.one_of(
    st.tuples(st.sampled_from(["Min", "Max"]), BOUND, st.booleans()),
    st.tuples(st.just("Relu")),
    st.tuples(st.just("Clip"), st.none() | BOUND, st.none() | BOUND),
)


def bound(g, y, *steps):
    for kind, *numbers in steps:
        if kind in ("Min", "Max"):
            y = g.both(kind, y, *numbers)
        else:
            y = g.op(kind, [y, *("" if number is None else number for number in numbers)])
    return y


@given(steps=st.lists(STEP, min_size=1, max_size=4), seed=st.integers(0, 2**16))
@example(steps=[("Max", 0.0, False)], seed=0)
@example(steps=[("Clip", -1.0, None), ("Relu",)], seed=0)
def test_every_row_computes_the_same_to_the_bit(steps, seed):
    g = Net.over([3, 40])
    proto = g.of(bound(g, "x", *steps))
    result = check(rewrite.collapse_clip, proto, normal((3, 40), seed, 4), rtol=0).proto
    if not any(kind == "Clip" and None not in numbers and numbers[0] > numbers[1] for kind, *numbers in steps):
        ends = run(proto, {"x": np.repeat(np.float32([[-9], [0], [9]]), 40, 1)})[0][:, 0].tolist()
        assert ops(result) == ["Relu" if ends == [0, 0, 9] and ops(proto) != ["Clip"] else "Clip"]


QUICK = "com.microsoft.QuickGelu"


def silu(g, x, *, alpha=None, divided=False, swap=False, gate_first=False, shape=()):
    argument = x
    if alpha is not None and divided:
        argument = g.op("Div", [x, np.full(shape, 1.0 / alpha)])
    elif alpha is not None:
        argument = g.both("Mul", x, np.full(shape, alpha), swap)
    return g.both("Mul", x, g.op("Sigmoid", [argument]), gate_first)


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    alpha=st.none() | st.sampled_from([1.702, 1.0, -0.5, 3.0]) | st.floats(0.01, 10), divided=st.booleans(),
    swap=st.booleans(), gate_first=st.booleans(), factor_rank=st.integers(0, 1),
    magnitude=st.sampled_from([1e-3, 1.0, 30.0, 1e4, 1e30]), opset=st.sampled_from([13, 17, 18, 21]),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_every_silu_computes_the_same(shape, alpha, divided, swap, gate_first, factor_rank, magnitude, opset, seed):
    g = Net.over(shape, opset=opset)
    y = silu(g, "x", alpha=alpha, divided=divided, swap=swap, gate_first=gate_first, shape=(1,) * factor_rank)
    result = check(rewrite.collapse_silu, g.of(y), normal(shape, seed, magnitude), [QUICK], rtol=2e-6)
    (node,) = result.proto.graph.node
    assert onnx.helper.get_node_attr_value(node, "alpha") == pytest.approx(1.0 if alpha is None else alpha, rel=1e-6)


GELU, FAST = "com.microsoft.Gelu", "com.microsoft.FastGelu"
SLOPE = math.sqrt(2 / math.pi)


class Writer(Net):
    """Writes arithmetic with operands in the orders that ``swaps`` says, constants of the given rank."""

    def __init__(self, *, swaps=(), constant_rank=0, **options):
        super().__init__(**options)
        self.swaps, self.constant_rank = iter(swaps), constant_rank

    def number(self, content):
        return self.const(np.full((1,) * self.constant_rank, content))

    def times(self, left, right, op_type="Mul"):
        right = right if isinstance(right, str) else self.number(right)
        return self.both(op_type, left, right, not next(self.swaps, False))

    def plus(self, left, right):
        return self.times(left, right, "Add")


def erf_of(g, x, form):
    if form == "div":
        return g.op("Erf", [g.op("Div", [x, g.number(math.sqrt(2))])])
    return g.op("Erf", [g.times(x, math.sqrt(0.5))])


def tanh_of(g, x, form):
    if form == "fast":  # x * b * (1 + k * x * x)
        inner = g.plus(g.times(g.times(x, 0.044715), x), 1.0)
        return g.op("Tanh", [g.times(g.times(x, SLOPE), inner)])
    cube = g.op("Pow", [x, g.number(3.0)]) if form == "pow" else g.times(x, g.times(x, x))
    if form == "spread":  # b * x + (b * k) * x^3
        return g.op("Tanh", [g.plus(g.times(x, SLOPE), g.times(cube, SLOPE * 0.044715))])
    return g.op("Tanh", [g.times(g.plus(x, g.times(cube, 0.044715)), SLOPE)])


AROUND = {
    "half last": lambda g, x, bend: g.times(g.times(x, g.plus(bend, 1.0)), 0.5),
    "half first": lambda g, x, bend: g.times(g.times(x, 0.5), g.plus(bend, 1.0)),
    "halved gate": lambda g, x, bend: g.times(x, g.times(g.plus(bend, 1.0), 0.5)),
    "divided": lambda g, x, bend: g.op("Div", [g.times(x, g.plus(bend, 1.0)), g.number(2.0)]),
    "spread": lambda g, x, bend: g.times(g.plus(g.times(bend, 0.5), 0.5), x),
    "product first": lambda g, x, bend: g.times(g.plus(x, g.times(x, bend)), 0.5),
}


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    kind=st.sampled_from([(erf_of, "div"), (erf_of, "mul"), *((tanh_of, f) for f in ("pow", "mul", "fast", "spread"))]),
    form=st.sampled_from([*AROUND]), swaps=st.lists(st.booleans(), max_size=9), constant_rank=st.integers(0, 1),
    scaled=st.booleans(), magnitude=st.sampled_from([1e-3, 0.5, 3.0, 30.0, 1e4, 1e20]),
    opset=st.sampled_from([13, 17, 20]), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_every_gelu_computes_the_same(shape, kind, form, swaps, constant_rank, scaled, magnitude, opset, seed):
    g = Writer.over(shape, swaps=swaps, constant_rank=constant_rank, opset=opset)
    given_x = g.op("Mul", ["x", 1.5]) if scaled else "x"  # x may be arithmetic itself
    y = AROUND[form](g, given_x, kind[0](g, given_x, kind[1]))
    x = normal(shape, seed, magnitude)
    x.reshape(-1)[0] = magnitude  # sets the size of the outputs: for negative x the arithmetic cancels
    expected = "Gelu" if opset >= 20 else GELU if kind[0] is erf_of else FAST
    check(rewrite.collapse_gelu, g.of(y), x, ["Mul"] * scaled + [expected])


# ---- hard swish and hard sigmoid: collapsed from arithmetic, and as integer products and Clips -----------------------


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
    shape=SHAPES, high=st.sampled_from([1.0, 6.0, 2.5]), slope=st.sampled_from([1.0, 0.2, 3.0]),
    shift=st.sampled_from([3.0, 0.5]), order=ORDER, divide=st.booleans(),
    times_x=st.sampled_from([None, "first", "last"]), magnitude=MAGNITUDE, opset=st.sampled_from([13, 14, 17, 22]),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_every_clip_computes_the_same(shape, high, slope, shift, order, divide, times_x, magnitude, opset, seed):
    g = Net.over(shape, opset=opset)
    y = clip_gate(g, "x", slope=slope, shift=shift, high=high, order=order, divide=divide, times_x=times_x)
    swish = opset >= 14 and (slope / high, shift / high) == (1 / 6, 0.5)
    expected = "HardSigmoid" if times_x is None else "HardSwish" if swish else "HardSigmoid Mul"
    result = check(rewrite.collapse_hard_swish, g.of(y), normal(shape, seed, magnitude), expected)
    gate = result.proto.graph.node[0]
    if gate.op_type == "HardSigmoid":
        assert helper.get_node_attr_value(gate, "alpha") == pytest.approx(slope / high, rel=1e-6)
        assert helper.get_node_attr_value(gate, "beta") == pytest.approx(shift / high, rel=1e-6)


@pytest.mark.parametrize(("build", "expected"), [
    (lambda g: [clip_gate(g, g.op("Mul", ["x", 2.0]), times_x="last")], "Mul HardSwish"),
    (lambda g: [clip_gate(g, g.op("Mul", ["x", 2.0]))], "HardSigmoid"),
    (lambda g: [g.op("Mul", [g.op("Relu", ["x"]), clip_gate(g, "x")])], "Relu HardSigmoid Mul"),
    (lambda g: [gate := clip_gate(g, "x"), g.op("Mul", ["x", gate])], "HardSigmoid Mul"),
    (lambda g: [g.op("Mul", [g.op("HardSigmoid", ["x"], alpha=1 / 6), "x"])], "HardSwish"),
    (lambda g: [g.op("Neg", [g.op("Neg", [g.op("Neg", [clip_gate(g, "x")])])])], "HardSigmoid Neg"),
], ids=["x is scaled", "a scale within", "gate of another", "gate needed elsewhere", "node", "behind"])  # fmt: skip
def test_what_a_gate_becomes(build, expected):
    g = Net.over([2, 3])
    check(rewrite.collapse_hard_swish, g.of(*build(g)), normal([2, 3], 0, 3.0), expected)
    if expected == "HardSwish":
        old = Net.over([2, 3], opset=13)
        refused(rewrite.collapse_hard_swish, old.of(*build(old)), None)


CONV = "c = Conv <kernel_shape = [3,3], pads = [1,1,1,1]> (x, w)"
CHAIN = f"{CONV} h = HardSwish (c) y = Conv (h, u)"


def net(body: str, outputs: str = "y", seed: int = 0):
    declared = "<float[16,3,3,3] w, float[16,16,1,1] u, float[16] b, float[16,1,3,3] d, float[16,10] m>"
    return parse(f"(float[2,3,8,8] x) => ({outputs}) {declared} {{ {body} }}", seed=seed)


GATE = st.tuples(st.floats(0.05, 2.0), st.floats(-0.5, 1.5), st.sampled_from(["c, g", "g, c"]))


@given(seed=st.integers(0, 2**16), spread=st.floats(0.01, 30.0), own=st.none() | GATE)
def test_the_product_computes_the_same(seed, spread, own) -> None:
    """Of HardSwish, and of a product with a gate of its own."""
    gate = "g = HardSigmoid <alpha = {:f}, beta = {:f}> (c) h = Mul ({})"
    proto = net(CHAIN if own is None else f"{CONV} {gate.format(*own)} y = Conv (h, u)", seed=seed)
    x = normal((2, 3, 8, 8), seed, spread if own is None else 4.0)
    check(rewrite.hard_swish_to_product, proto, x, "Conv Add Clip Mul Conv")


@pytest.mark.parametrize("behind", [
    "y = Conv <kernel_shape = [3,3], pads = [1,1,1,1], group = 16> (h, d, b)",
    "p = GlobalAveragePool (h) f = Flatten (p) y = MatMul (f, m)",
    "p = GlobalAveragePool (h) f = Flatten (p) y = Gemm (f, m)",
    "p = GlobalAveragePool (h) e = Conv (p, u, b) g = Sigmoid (e) s = Mul (h, g) y = Conv (s, u)",
    "z = Conv (h, u) y = Conv (h, u, b)",
], ids=["depthwise", "matmul", "gemm", "squeeze-excite", "two layers, shared weights"])  # fmt: skip
def test_what_may_be_behind_it(behind: str) -> None:
    proto = net(f"{CONV} h = HardSwish (c) {behind}", "y, z" if "z =" in behind else "y")
    x = normal((2, 3, 8, 8), 0, 4.0)
    check(rewrite.hard_swish_to_product, proto, x, ["Conv", "Add", "Clip", "Mul", *ops(proto)[2:]])


def test_layers_that_are_not_named_keep_their_weights() -> None:
    refused(rewrite.hard_swish_to_product, net(CHAIN), "'y' is not to change", "h")


@given(  # of a gate that is all but closed next to nothing is left to compare
    layer=st.sampled_from(["Conv (x, w, b)", "Conv (x, w)", "Gemm (x, m, b)", "Gemm (x, m)", "Gemm <transB=1> (x, m)"]),
    alpha=st.floats(0.1, 3.0), beta=st.floats(-0.5, 1.5), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_the_clip_computes_the_same(layer: str, alpha: float, beta: float, seed: int) -> None:
    shape = (2, 8, 6, 6) if "Conv" in layer else (2, 8)
    text = f"""(float{list(shape)} x) => (y) <float[8,8,1,1] w, float[8] b, float[8,8] m> {{
        c = {layer} g = HardSigmoid <alpha = {alpha:f}, beta = {beta:f}> (c) y = Mul (x, g) }}"""
    proto = parse(text, seed=seed)
    check(rewrite.hard_sigmoid_to_clip, proto, normal(shape, seed, 3), f"{layer.split()[0]} Clip Mul")
