"""Activations written in arithmetic: rows of bounds, SiLU, GELU, hard swish; the last as products and Clips."""

import math
import re
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from onnx import helper

from kenosis_ort import rewrite
from tests.graph.build import run
from tests.models import Net, normal
from tests.rewrite.forms import check, ops, parse, refused, spelled

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


SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


SILU = {
    "plain": "s = Sigmoid(x) y = Mul(x, s)", "times": "a = Mul(x, alpha) s = Sigmoid(a) y = Mul(x, s)",
    "divided": "a = Div(x, inverse) s = Sigmoid(a) y = Mul(x, s)",
}  # fmt: skip


@given(
    form=st.sampled_from([*SILU]), shape=SHAPES, rank=st.integers(0, 1), seed=st.integers(0, 2**16),
    alpha=st.sampled_from([1.702, 1.0, -0.5, 3.0]) | st.floats(0.01, 10),
    magnitude=st.sampled_from([1e-3, 1.0, 30.0, 1e4, 1e30]), opset=st.sampled_from([13, 17, 18, 21]),
)  # fmt: skip
def test_every_silu_computes_the_same(form, shape, rank, seed, alpha, magnitude, opset):
    numbers = {"alpha": np.full((1,) * rank, alpha), "inverse": np.full((1,) * rank, 1 / alpha)}
    proto = spelled(SILU[form], shape, seed=seed, opset=opset, **numbers)
    x = normal(shape, seed, magnitude)
    (node,) = check(rewrite.collapse_silu, proto, x, "com.microsoft.QuickGelu", rtol=2e-6).proto.graph.node
    assert helper.get_node_attr_value(node, "alpha") == pytest.approx(1.0 if form == "plain" else alpha, rel=1e-6)


GELU, FAST = "com.microsoft.Gelu", "com.microsoft.FastGelu"
BENDS = {
    "erf div": "a = Div(x, root2) b = Erf(a)",
    "erf mul": "a = Mul(x, root_half) b = Erf(a)",
    "tanh pow": "c = Pow(x, three) d = Mul(c, k) e = Add(x, d) a = Mul(e, slope) b = Tanh(a)",
    "tanh mul": "q = Mul(x, x) c = Mul(x, q) d = Mul(c, k) e = Add(x, d) a = Mul(e, slope) b = Tanh(a)",
    "tanh fast": "d = Mul(x, k) q = Mul(d, x) e = Add(q, one) c = Mul(x, slope) a = Mul(c, e) b = Tanh(a)",
    "tanh spread": "q = Mul(x, x) c = Mul(x, q) d = Mul(x, slope) e = Mul(c, both) a = Add(d, e) b = Tanh(a)",
}
"""``b``, by which GELU bends: Erf, or its approximation by Tanh, as exporters spell them."""
AROUND = {
    "half last": "s = Add(b, one) p = Mul(x, s) y = Mul(p, half)",
    "half first": "s = Add(b, one) p = Mul(x, half) y = Mul(p, s)",
    "halved gate": "s = Add(b, one) p = Mul(s, half) y = Mul(x, p)",
    "divided": "s = Add(b, one) p = Mul(x, s) y = Div(p, two)",
    "spread": "s = Mul(b, half) p = Add(s, half) y = Mul(p, x)",
    "product first": "p = Mul(x, b) s = Add(x, p) y = Mul(s, half)",
}
SLOPE = math.sqrt(2 / math.pi)
NUMBERS = {
    "root2": math.sqrt(2), "root_half": math.sqrt(0.5), "k": 0.044715, "slope": SLOPE, "both": SLOPE * 0.044715,
    "half": 0.5, "one": 1.0, "two": 2.0, "three": 3.0,
}  # fmt: skip


@given(
    bend=st.sampled_from([*BENDS]), form=st.sampled_from([*AROUND]), shape=SHAPES, rank=st.integers(0, 1),
    scaled=st.booleans(), magnitude=st.sampled_from([1e-3, 0.5, 3.0, 30.0, 1e4, 1e20]),
    opset=st.sampled_from([13, 17, 20]), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_every_gelu_computes_the_same(bend, form, shape, rank, scaled, magnitude, opset, seed):
    body, numbers = f"{BENDS[bend]} {AROUND[form]}", {name: np.full((1,) * rank, n) for name, n in NUMBERS.items()}
    if scaled:  # x may be arithmetic itself
        body = "v = Mul(x, factor) " + re.sub(r"\bx\b", "v", body)
    proto = spelled(body, shape, seed=seed, opset=opset, factor=1.5, **numbers)
    x = normal(shape, seed, magnitude)
    x.reshape(-1)[0] = magnitude  # sets the size of the outputs: for negative x the arithmetic cancels
    expected = "Gelu" if opset >= 20 else GELU if bend.startswith("erf") else FAST
    check(rewrite.collapse_gelu, proto, x, ["Mul"] * scaled + [expected])


# ---- hard swish and hard sigmoid: collapsed from arithmetic, and as integer products and Clips -----------------------


@given(
    shape=SHAPES, high=st.sampled_from([1.0, 6.0, 2.5]), slope=st.sampled_from([1.0, 0.2, 3.0]),
    shift=st.sampled_from([3.0, 0.5]), divide=st.booleans(), times_x=st.sampled_from([None, "first", "last"]),
    magnitude=st.sampled_from([1e-3, 1.0, 5.0, 1e4, 1e30]), opset=st.sampled_from([13, 14, 17, 22]),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_every_clip_computes_the_same(shape, high, slope, shift, divide, times_x, magnitude, opset, seed):
    """Clip(slope * x + shift, 0, high) / high, times x before the division or behind it."""
    product = "p = Mul({}, x)"
    steps = ["l = Mul({}, slope)"] * (slope != 1) + ["a = Add({}, shift)", "c = Clip({}, zero, high)"]
    steps += [product] * (times_x == "first")
    steps += ["d = Div({}, high)" if divide else "d = Mul({}, inverse)"] * (high != 1)
    steps += [product] * (times_x == "last")
    names = ["x", *(step.split()[0] for step in steps)]
    body = " ".join(step.format(name) for step, name in zip(steps, names, strict=False))
    numbers = {"slope": slope, "shift": shift, "zero": 0.0, "high": high, "inverse": 1 / high}
    proto = spelled(body, shape, seed=seed, opset=opset, **numbers)
    swish = opset >= 14 and (slope / high, shift / high) == (1 / 6, 0.5)
    expected = "HardSigmoid" if times_x is None else "HardSwish" if swish else "HardSigmoid Mul"
    result = check(rewrite.collapse_hard_swish, proto, normal(shape, seed, magnitude), expected)
    gate = result.proto.graph.node[0]
    if gate.op_type == "HardSigmoid":
        found = [helper.get_node_attr_value(gate, name) for name in ("alpha", "beta")]
        assert found == pytest.approx([slope / high, shift / high], rel=1e-6)


CLIP_GATE = "a = Add({0}, three) c = Clip(a, zero, six) g = Div(c, six)"


@pytest.mark.parametrize(("body", "outputs", "expected"), [
    (f"d = Mul(x, two) {CLIP_GATE.format('d')} y = Mul(g, d)", "y", "Mul HardSwish"),
    (f"d = Mul(x, two) {CLIP_GATE.format('d')}", "g", "HardSigmoid"),
    (f"r = Relu(x) {CLIP_GATE.format('x')} y = Mul(r, g)", "y", "Relu HardSigmoid Mul"),
    (f"{CLIP_GATE.format('x')} y = Mul(x, g)", "g, float[2,3] y", "HardSigmoid Mul"),
    ("g = HardSigmoid<alpha = 0.16666667>(x) y = Mul(g, x)", "y", "HardSwish"),
    (f"{CLIP_GATE.format('x')} l = Neg(g) m = Neg(l) y = Neg(m)", "y", "HardSigmoid Neg"),
], ids=["x is scaled", "a scale within", "gate of another", "gate needed elsewhere", "node", "behind"])  # fmt: skip
def test_what_a_gate_becomes(body, outputs, expected):
    numbers = {"zero": 0.0, "two": 2.0, "three": 3.0, "six": 6.0}
    known = {name: np.float32(number) for name, number in numbers.items() if f" {name}" in body}
    make = partial(parse, f"(float[2,3] x) => (float[2,3] {outputs}) {{ {body} }}", known)
    check(rewrite.collapse_hard_swish, make(), normal([2, 3], 0, 3.0), expected)
    if expected == "HardSwish":
        refused(rewrite.collapse_hard_swish, make(opset=13), None)


CONV = "c = Conv <kernel_shape = [3,3], pads = [1,1,1,1]> (x, w)"
CHAIN = f"{CONV} h = HardSwish (c) y = Conv (h, u)"


def net(body, outputs="y", seed=0):
    declared = "<float[16,3,3,3] w, float[16,16,1,1] u, float[16] b, float[16,1,3,3] d, float[16,10] m>"
    return parse(f"(float[2,3,8,8] x) => ({outputs}) {declared} {{ {body} }}", seed=seed)


GATE = st.tuples(st.floats(0.05, 2.0), st.floats(-0.5, 1.5), st.sampled_from(["c, g", "g, c"]))


@given(seed=st.integers(0, 2**16), spread=st.floats(0.01, 30.0), own=st.none() | GATE)
def test_the_product_computes_the_same(seed, spread, own):
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
def test_what_may_be_behind_it(behind):
    proto = net(f"{CONV} h = HardSwish (c) {behind}", "y, z" if "z =" in behind else "y")
    x = normal((2, 3, 8, 8), 0, 4.0)
    check(rewrite.hard_swish_to_product, proto, x, ["Conv", "Add", "Clip", "Mul", *ops(proto)[2:]])


def test_layers_that_are_not_named_keep_their_weights():
    refused(rewrite.hard_swish_to_product, net(CHAIN), "'y' is not to change", "h")


@given(  # of a gate that is all but closed next to nothing is left to compare
    layer=st.sampled_from(["Conv (x, w, b)", "Conv (x, w)", "Gemm (x, m, b)", "Gemm (x, m)", "Gemm <transB=1> (x, m)"]),
    alpha=st.floats(0.1, 3.0), beta=st.floats(-0.5, 1.5), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_the_clip_computes_the_same(layer, alpha, beta, seed):
    shape = (2, 8, 6, 6) if "Conv" in layer else (2, 8)
    text = f"""(float{list(shape)} x) => (y) <float[8,8,1,1] w, float[8] b, float[8,8] m> {{
        c = {layer} g = HardSigmoid <alpha = {alpha:f}, beta = {beta:f}> (c) y = Mul (x, g) }}"""
    proto = parse(text, seed=seed)
    check(rewrite.hard_sigmoid_to_clip, proto, normal(shape, seed, 3), f"{layer.split()[0]} Clip Mul")
