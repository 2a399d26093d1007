"""Conv, Gemm and MatMul: integer kernels with quantized and with float output, which operands they take, and traps.

ONNX Runtime's QLinearConv multiplies directly where all weights have zero point 0 and by im2col and the 8-bit matrix
product where they have another one. Weights stored one lower with zero point -1 are the same weights: which kernel runs
is a matter of speed alone.
"""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, strategies as st
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from kenosis_ort.targets.ort_cpu.work import has_direct_kernel
from tests import models
from tests.planning import parse
from tests.processor import LARGEST_WEIGHT

from . import qdq
from .qdq import ANY, LINES, RELU_STEP, STEP, VERSION, Case, alone, build, compute_ops, kernels, since, snr_db, step

BATCH, HEADS = (2, 4, 32), (2, 3, 4, 32)
RANKS = [LINES, BATCH, HEADS]


def conv(shape=(1, 16, 12, 12), *, q=True, **how):
    return alone(lambda g, x: g.conv(x, **how), shape=shape, q_behind=q)


def gemm(*, q=True, **how):
    return alone(lambda g, x: g.gemm(x, **how), shape=LINES, q_behind=q)


def matmul(shape=LINES, behind="", **how):
    """A MatMul and steps behind it: operators, Q, or a Reshape."""

    def made(g, x):
        y = g.matmul(x, **how)
        for name in behind.split():
            further = [g.ints(-1, 2, 8)] if name == "Reshape" else []
            y = g.relu_q(y) if name == "Q" else g.op(name, y, *further)
        return y

    return alone(made, shape=shape, q_behind=False)


def conv_of_rank(rank):
    weight = (16, 16, *[3] * (rank - 2))
    shape = (1, 16, *[6] * (rank - 2))
    return alone(lambda g, x: g.op("Conv", x, g.dq_weight(g.random(*weight, spread=0.1))), shape=shape)


def shared(g, *, bias):
    """Two Convs of one weight, and perhaps one bias, which fits the first alone."""
    x, y = g.act_input(), g.act_input(scale=STEP / 2)
    weight = g.dq_weight(g.random(16, 16, 3, 3, spread=0.1))
    more = [g.dq_bias(g.random(16), x, weight)] if bias else []
    return [g.q(g.op("Conv", value, weight, *more)) for value in (x, y)]


def one_bias_scale(g):
    weight, zero = g.dq_weight(g.random(16, 16, 3, 3, spread=0.1)), g.const(np.array(0, np.int32))
    bias = g.op("DequantizeLinear", g.const(np.zeros(16, np.int32)), g.const(1e-4), zero)
    return g.q(g.op("Conv", g.act_input(), weight, bias))


def hidden(g, layer, act, behind):
    """A layer, Relu or Clip, and behind it one or two float nodes, a Q before one, or the graph's output."""
    x = g.act_input(LINES)
    y = g.gemm(x) if layer == "QGemm" else g.matmul(x)
    y = g.op("Relu", y) if act == "Relu" else g.clip(y, 0.0, 6.0)
    read = g.relu_q(y) if behind == "q" else y
    ops = {"output": [], "two": ["Tanh", "Neg"]}.get(behind, ["Tanh"])
    return [g.op(op_type, read) for op_type in ops] or y


def residual(shape, *, q):
    def made(g, x):
        y = g.matmul(x)
        return g.op("Add", g.q(y) if q else y, g.act_input((*shape[:-1], 16)))

    return alone(made, shape=shape)


def shaped_bias(shape, lead, kind):
    def made(g, x):
        values = g.random(*lead, 16, spread=50)
        scale, zero = g.const(np.float32(1e-3)), g.const(np.array(0, np.int32))
        integers = g.op("DequantizeLinear", g.const(np.rint(values).astype(np.int32)), scale, zero)
        return g.op("Add", g.matmul(x, axis=None), integers if kind == "int32" else g.const(values))

    return alone(made, shape=shape)


def transposed_weight(axis):
    weight = step("Transpose")
    return alone(lambda g, x: g.op("MatMul", x, weight(g, g.dq_weight(g.random(16, 32), axis=axis))), shape=LINES)


def of_activations(g, *, turned=False):
    left = g.act_input(BATCH)
    right = g.op("Transpose", g.act_input(BATCH), perm=[0, 2, 1]) if turned else g.act_input((2, 32, 4))
    return g.op("MatMul", left, right)


OPSETS = ((13, ()), (17, ()), (21, ()), (23, since("1.24")))
EXAMPLES = {
    "conv-integer": [
        *(Case("QLinearConv", conv(axis=axis, bias=bias), STEP, marks=marks, options={"opset": opset})
          for opset, marks in OPSETS
          for axis, bias in ((0, "int32"), (None, "int32"), (0, "none"), (0, "float"))),
        *(Case("QLinearConv", conv_of_rank(rank)) for rank in (3, 5)),
        *(Case("QLinearConv", conv(("N", 16, *size))) for size in ((12, 12), ("H", "W"))),
        *(Case("QLinearConv", conv(group=group), STEP) for group in (4, 16)),
        Case("QLinearConv QLinearConv", partial(shared, bias=False)),
        Case("QLinearConv", conv(), options={"weight": np.uint8}),
        *(Case("QLinearConv", conv(zero_point=zero), STEP) for zero in (5, -1)),
        Case("QLinearConv", conv(zero_point=-1, axis=None), STEP),
        # An int32 bias has to have the product of the scales, or nearly so: then it counts as if it had.
        *(Case("QLinearConv", conv(bias_factor=factor)) for factor in (1.005, 1.015)),
        # integer and wrong before
        *(Case("Conv", conv(bias_factor=factor), STEP, marks=since("1.27")) for factor in (0.5, 1.03, 1.05, 2.0, 4.0)),
        Case("Conv", one_bias_scale, marks=since("1.27")),
        Case("Conv QLinearConv", partial(shared, bias=True), marks=since("1.27")),
    ],
    "conv-needs-output-q": [
        Case("Conv", conv(q=False)), Case("Conv", lambda g: [g.q(y := conv(q=False)(g)), y]),
        *(Case(f"Conv {op}", alone(lambda g, x, o=op: g.op(o, g.conv(x), g.const(g.random(16, 1, 1)))))
          for op in ("Mul", "Add")),
    ],
    "gemm-integer": [
        *(Case("QGemm", gemm(transposed=transposed, axis=axis, bias=bias), STEP)
          for transposed, axis in ((True, 0), (False, 1), (True, None))
          for bias in ("int32", "float", "none")),
        Case("QGemm", gemm(), options={"weight": np.uint8}),
        # alpha or beta other than 1 makes a Gemm with a bias float; without a bias both are fine.
        *(Case(kernel, gemm(q=q, bias=bias, **{name: value}), marks=since("1.28") if name == "alpha" else ())
          for kernel, bias in (("Gemm", "int32"), ("QGemm", "none"))
          for name in ("alpha", "beta")
          for value in (0.5, 2.0)
          for q in (True, False)),
    ],
    "gemm-float-output": [
        *(Case("QGemm", gemm(q=False, bias=bias), exact=True) for bias in ("int32", "none")),
        Case("QGemm Relu", alone(lambda g, x: g.op("Relu", g.gemm(x)), shape=LINES, q_behind=False)),
    ],
    "gemm-float-bias-needs-output-q": [
        Case("Gemm", gemm(q=False, bias="float"), exact=True), Case("QGemm", gemm(bias="float"))],
    "matmul-integer": [
        *(Case("QLinearMatMul", alone(lambda g, x, a=axis: g.matmul(x, axis=a), shape=shape), STEP)
          for shape in RANKS
          for axis in (1, None)),
        *(Case("MatMulIntegerToFloat", matmul(shape), exact=True) for shape in RANKS),
        # Behind DQ and Transpose: before 1.31 the form by channel aborted the process that loaded it.
        Case("FusedMatMul", transposed_weight(0), marks=since("1.31")), Case("QLinearMatMul", transposed_weight(None)),
        # A float activation and an int8 weight, which a Gemm has to have untransposed.
        *(Case("MatMulNBits", lambda g, a=a: g.matmul(g.input(LINES), axis=a), marks=since("1.25")) for a in (1, None)),
        *(Case("MatMul", lambda g, a=a: g.q(g.matmul(g.input(LINES), axis=a)), marks=since("1.25")) for a in (1, None)),
        Case("MatMulNBits", lambda g: g.gemm(g.input(LINES), transposed=False, axis=1), marks=since("1.25")),
        Case("Gemm", lambda g: g.gemm(g.input(LINES)), marks=since("1.25")),
    ],
    "matmul-activations": [
        Case("QLinearMatMul", lambda g: g.q(of_activations(g)), STEP),
        Case("MatMulIntegerToFloat", of_activations, exact=True),
        Case("MatMulIntegerToFloat", partial(of_activations, turned=True)),
    ],
    "matmul-add-float-bias-trap": [
        Case("Gemm", matmul(bias="float")),
        *(Case("Gemm Reshape Reshape", matmul(shape, bias="float")) for shape in RANKS[1:]),
    ],
    "matmul-residual-float-gemm": [
        Case("Gemm", residual(LINES, q=False)), Case("QLinearAdd QLinearMatMul", residual(LINES, q=True)),
        Case("Add MatMulIntegerToFloat", residual(BATCH, q=False)),
    ],
    # With three axes and a symbolic one, or a bias of further axes, MatMul and Add are not merged.
    "matmul-add-int32-bias": [
        *(Case("Add MatMulIntegerToFloat", alone(lambda g, x, b=bias: g.matmul(x, bias=b), shape=("N", 4, 32)))
          for bias in ("int32", "float")),
        Case("QGemm", shaped_bias(LINES, (1,), "int32")), Case("Gemm", shaped_bias(LINES, (1,), "float")),
        *(Case("Add MatMulIntegerToFloat", shaped_bias(BATCH, lead, kind))
          for lead in ((1,), (1, 1))
          for kind in ("int32", "float")),
    ],
}  # fmt: skip


# ---- float weights: how the runtime quantizes them behind the model's back, and what keeps a node float for real -----
#
# The runtime's optimizer gives a Conv, ConvTranspose or Gemm with a float weight an int8 per-tensor asymmetric one if
# its input comes from DQ and its output goes to Q: directly, through Relu or Clip, or through what Q is hoisted over.


NODES = {
    "Conv": ("QLinearConv", lambda g: g.conv(g.act_input(), weight="float")),
    "ConvTranspose": ("ConvTranspose", lambda g: g.conv(g.act_input(), weight="float", transpose=True)),
    "Gemm": ("QGemm", lambda g: g.gemm(g.act_input((4, 32)), weight="float")),
    "MatMul+Add": ("QGemm", lambda g: g.matmul(g.act_input((4, 32)), weight="float", bias="float")),
}
"""With what the runtime makes of them."""
BETWEEN = {
    "": lambda g, v: v, "Relu": step("Relu"), "Clip": lambda g, v: g.clip(v, 0.0, 6.0),
    "Clip, not absorbed": lambda g, v: g.clip(v, -1.0, 1.0), "Slice": step("Slice", [0], [12], [1]),
}  # fmt: skip
BARRIERS = [step("Max"), step("Sum"), step("LeakyRelu", alpha=1.0)]
NO_BARRIERS = [
    step("Identity"), step("Dropout"), step("Cast", to=1), step("Mul", np.float32(1)), step("Add", np.float32(0)),
    step("Reshape", [0, 0, 0, 0]), step("Clip", np.float32(-3.4e38)),
]  # fmt: skip


def float_conv(g):
    return NODES["Conv"][1](g)


def before_q(node, between="", barrier=BETWEEN[""]):
    return lambda g: g.q(barrier(g, BETWEEN[between](g, NODES[node][1](g))), 6 / 255, 0)


def normed(g):
    return g.relu_q(g.op("Relu", g.op("BatchNormalization", float_conv(g), *[g.const(g.random(16) ** 2 + 1)] * 4)))


EXAMPLES |= {
    "float-weight-silently-quantized": [
        *(Case(f"{kernel} {'' if between in ('Relu', 'Clip') else between}", before_q(node, between), weights=1)
          for node, (kernel, _) in NODES.items()
          for between in ("", "Relu", "Clip", "Slice")),
        *(Case(ANY, before_q(node, "Clip, not absorbed"), weights=1) for node in NODES),
    ],
    # That the float value is a graph output too does not help: int8 weights, and a float Conv on top.
    "float-weight-silently-quantized-beside-graph-output": [
        Case("Conv", lambda g: [g.q(c := float_conv(g)), c], weights=1)],
    # The runtime folds a BatchNormalization into the float Conv first, then quantizes it.
    "float-weight-silently-quantized-behind-batch-norm": [Case("QLinearConv", normed, weights=1)],
    "float-weight-no-output-q-stays-float": [
        *(Case(ANY, make, exact=True, weights=0) for _, make in NODES.values()),
        # No DQ on the input, a second reader of the output, or another activation in front of Q.
        Case(ANY, lambda g: g.q(g.conv(g.input(), weight="float")), weights=0),
        Case(ANY, lambda g: [g.q(c := float_conv(g)), g.op("Neg", c)], weights=0),
        Case(ANY, lambda g: g.q(g.op("Sigmoid", float_conv(g))), weights=0),
        Case(ANY, lambda g: g.q(g.op("Flatten", float_conv(g))), weights=0),
        Case(ANY, lambda g: g.q(g.op("Add", float_conv(g), g.act_input())), weights=0),
    ],
    # Unless an Add of a float bias makes a Gemm of it.
    "float-matmul-weight-untouched": [
        Case("MatMul", lambda g: g.q(g.matmul(g.act_input((4, 32)), weight="float")), weights=0)],
    # An operator that changes nothing, directly in front of Q: the weight stays float, the numbers the file's.
    "barrier-keeps-float": [
        *(Case(ANY, before_q(node, between, barrier), exact=True, weights=0)
          for node in NODES
          for between in BETWEEN
          for barrier in BARRIERS),
        *(Case(ANY, before_q("Conv", "", BARRIERS[0]), weights=0, options={"opset": opset}, marks=marks)
          for opset, marks in ((13, ()), (19, ()), (21, ()), (23, since("1.24")), (24, since("1.24")))),
    ],
    # What the optimizer removes or sees through is no barrier.
    "barrier-must-survive": [Case(ANY, before_q("Conv", "", step), weights=1) for step in NO_BARRIERS],
    # No integer kernel: a DQ weight is dequantized on every run.
    "conv-transpose-float": [
        Case("ConvTranspose", lambda g: g.q(g.conv(g.act_input(), transpose=True, axis=1)), weights=1),
        Case("ConvTranspose", lambda g: g.conv(g.act_input(), transpose=True, axis=1), weights=1),
    ],
}  # fmt: skip


@qdq.each_case(EXAMPLES)
def test_rule(case):
    case.check()


def test_a_conv_is_an_operator_of_the_runtimes_own_and_dequantizes_on_every_run_without_q():
    assert [k.domain for k in kernels(build(conv())) if k.op_type == "QLinearConv"] == ["com.microsoft"]
    without = kernels(build(conv(q=False)))
    assert [k.op_type for k in without].count("DequantizeLinear") == 3  # activation, weight, bias


@pytest.mark.parametrize("layer", ["QGemm", "MatMulIntegerToFloat"])
@pytest.mark.parametrize("act", ["Relu", "Clip"])
def test_rule_activation_hides_float_output(layer, act):
    """Behind a Relu or Clip that one float node reads there has to be a Q; two readers or a graph output are fine."""
    integer = {"QGemm", "QLinearMatMul", "MatMulIntegerToFloat"}
    for behind in ("one", "q", "two", "output"):
        ops = compute_ops(build(partial(hidden, layer=layer, act=act, behind=behind)))
        assert bool(integer & set(ops)) is (behind != "one"), behind


@pytest.mark.parametrize("q", [True, False])
def test_the_scale_of_a_gemms_int32_bias_is_not_checked(q):
    """The result is silently wrong."""
    wrong, right = (build(gemm(q=q, bias_factor=factor)) for factor in (4.0, 1.0))
    assert compute_ops(wrong) == ["QGemm"]
    assert snr_db(wrong) < 20 < 40 < snr_db(right)


@pytest.mark.parametrize("shape", [*RANKS, ("N", 32)])
@pytest.mark.parametrize("behind", ["", "Relu", "Sigmoid", "Q", "Relu Q", "Sigmoid Q", "Reshape"])
def test_rule_matmul_add_int32_bias(shape, behind):
    """MatMul + Add of an int32 DQ bias becomes a QGemm, whatever stands behind it and with or without Q."""
    model = build(matmul(shape, behind, bias="int32"))
    assert set(compute_ops(model)) - {"Reshape", "Relu", "Sigmoid"} == {"QGemm"}
    assert qdq.largest_difference(model) <= RELU_STEP * 1.01


@pytest.mark.parametrize(("behind", "integer"), [("Q", [LINES, BATCH]), ("Relu Q", [LINES]), ("Sigmoid Q", [])])
def test_a_float_bias_behind_a_matmul_is_a_trap_but_with_q(behind, integer):
    for shape in (LINES, BATCH):
        assert ("QGemm" in compute_ops(build(matmul(shape, behind, bias="float")))) is (shape in integer)


@pytest.mark.parametrize("between", ["", "Identity", "Relu"])
def test_rule_clip_of_input_barrier(between):
    """Where Q alone would clip, runtimes before 1.24 want to drop the Clip, and cannot. Others keep it."""

    def make(g, barrier):
        clip = g.clip(g.op(between, g.input()) if between else g.input(), 0.0, 6.0)
        return g.q(g.op("Max", clip) if barrier else clip, 6 / 255, 0)

    assert compute_ops(build(lambda g: make(g, True))) == ["Clip", "Max"]
    bare = build(lambda g: make(g, False))
    if VERSION < (1, 24):
        with pytest.raises(ort_errors.RuntimeException, match="RemoveNode"):
            compute_ops(bare)
    else:
        assert compute_ops(bare) == ["Clip"]


# ---- the two kernels of a Conv ------------------------------------------------------------------------------------

PLAIN = [(4, 16), (16, 20), (64, 64), (12, 72), (3, 16), (7, 5), (1, 1), (8, 130)]
"""Channels read and written: by fours and more than fifteen, which the direct kernel asks for, and others."""
SIZES = {"window": (1, 5), "dilations": (1, 2), "strides": (1, 3), "front": (0, 3), "back": (0, 3), "beyond": (0, 12)}
GROUPED = [(16, 1, 1), (48, 1, 1), (10, 1, 1), (4, 1, 2), (2, 8, 16)]


CONVS = st.integers(1, 2).flatmap(
    lambda axes: st.fixed_dictionaries({
        **{name: st.tuples(*[st.integers(low, high)] * axes) for name, (low, high) in SIZES.items()},
        **{name: st.booleans() for name in ("signed", "per_channel", "bias")},
        "channels": st.sampled_from([*((1, *plain) for plain in PLAIN), *GROUPED]), "batch": st.integers(1, 2),
        "seed": st.integers(0, 2**16), "zero": st.sampled_from([0, 1, 110, 128, 254, 255]),
        "out_zero": st.sampled_from([0, 77, 128, 255]),
    })
)  # fmt: skip
"""Convs of one or two axes, in one of the kernels' classes: plain, depthwise, grouped, of odd channels."""


def output(c, zero_point):
    """Runs the Conv with weights that are stored with a zero point."""
    rng = np.random.default_rng(c["seed"])
    kind, shift = (np.int8, 128) if c["signed"] else (np.uint8, 0)
    groups, read, written = c["channels"]
    outputs, inputs = written * groups, read * groups
    sides = zip(*(c[name] for name in ("window", "dilations", "front", "back", "beyond")), strict=True)
    size = [max((window - 1) * step + 1 - front - back, 1) + more for window, step, front, back, more in sides]
    weights = rng.integers(-LARGEST_WEIGHT, LARGEST_WEIGHT + 1, (outputs, read, *c["window"])) + zero_point
    scales = rng.uniform(1e-4, 1e-2, outputs if c["per_channel"] else 1).astype(np.float32)
    steps = np.sqrt(read * np.prod(c["window"])) * float(scales.mean()) * 30
    held = {
        "xs": np.float32(0.04), "xz": kind(c["zero"] - shift), "w": weights.astype(np.int8),
        "ws": scales if c["per_channel"] else scales[0],
        "wz": np.full(scales.shape if c["per_channel"] else (), zero_point, np.int8), "ys": np.float32(0.04 * steps),
        "yz": kind(c["out_zero"] - shift),
        **({"b": rng.integers(-5000, 5000, outputs).astype(np.int32)} if c["bias"] else {}),
    }  # fmt: skip
    how = f"strides = {[*c['strides']]}, pads = {[*c['front'], *c['back']]}, dilations = {[*c['dilations']]}"
    data = (rng.integers(0, 256, (c["batch"], inputs, *size)) - shift).astype(kind)
    shapes = f"({data.dtype}{[*data.shape]} x) => ({data.dtype}[{','.join('abcd'[: data.ndim])}] y)"
    node = f"y = QLinearConv <group = {groups}, {how}> ({', '.join(['x', *held])})"
    return models.session(parse(f"{shapes} {{ {node} }}", held)).run(None, {"x": data})[0]


@given(CONVS)
def test_rule_conv_matrix_product(c):
    """Both kernels compute the same bits."""
    direct, product = output(c, 0), output(c, -1)
    assert direct.dtype == product.dtype
    assert np.array_equal(direct, product)


@pytest.mark.parametrize(("inputs", "outputs", "groups", "direct"), [
    (4, 16, 1, True), (64, 64, 1, True), (64, 20, 1, True), (3, 16, 1, False), (64, 12, 1, False), (64, 18, 1, False),
    (6, 32, 1, False), (16, 16, 16, True), (48, 48, 48, True), (24, 24, 24, False), (64, 64, 2, False),
    (16, 32, 16, False),
])  # fmt: skip
def test_which_convs_have_the_direct_kernel(inputs, outputs, groups, direct):
    assert has_direct_kernel(inputs, outputs, groups) is direct
