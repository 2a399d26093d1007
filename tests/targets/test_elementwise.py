"""Operators between layers: sums, products, functions, Concat, pools and norms; integer kernels and float islands."""

from functools import partial

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto

from kenosis_ort.targets.ort_cpu.rules import CHANNELS_LAST

from . import qdq
from .qdq import BYTES, IMAGE, ISLAND, STEP, Case, QdqGraph, alone, build, step

OUT = 6 / 255  # a step other than the operands'
STEP16 = 8 / 65535
POOL = {"kernel_shape": [2, 2], "strides": [2, 2]}


def unary(op_type, *q, **attributes):
    """A function of one quantized value, with Q behind it."""
    return alone(step(op_type, **attributes), *q)


def bare(op_type, **attributes):
    return alone(step(op_type, **attributes), q_behind=False)


def binary(op_type, other=QdqGraph.act_input, *q):
    return alone(lambda g, x: g.op(op_type, x, other(g)), *q)


CONSTANT = {
    "dq": lambda g: g.dq_constant(np.abs(g.random(16, 1, 1)) + 0.5), "dq scalar": lambda g: g.dq_constant(1.5),
    "dq int8": lambda g: g.dq_constant(np.abs(g.random(16, 1, 1)) + 0.5, dtype=np.int8),
    "float": lambda g: g.const(np.abs(g.random(16, 1, 1)) + 0.5), "float scalar": lambda g: g.const(1.5),
    "value": QdqGraph.act_input, "float value": QdqGraph.input,
}  # fmt: skip


def where(kind):
    return alone(lambda g, x: g.op("Where", g.input(IMAGE, TensorProto.BOOL), x, CONSTANT[kind](g)), OUT, 100)


def block(g, *, q_on_conv=True, q_on_add=True):
    """A residual block of two Convs."""
    x = g.act_input()
    y = g.conv(g.relu_q(g.op("Relu", g.conv(x))))
    total = g.op("Relu", g.op("Add", g.q(y) if q_on_conv else y, x))
    return g.relu_q(total) if q_on_add else total


def joined(*steps, axis=1, out=(STEP, 128)):
    """A Concat of Convs, each with a Q of these parameters or none."""

    def made(g):
        convs = [g.conv(g.act_input()) for _ in steps]
        parts = [c if step is None else g.q(c, *step) for c, step in zip(convs, steps, strict=True)]
        return g.q(g.op("Concat", *parts, axis=axis), *out)

    return made


def joined_with(other):
    return alone(lambda g, x: g.op("Concat", x, other(g), axis=1))


ONE = {size: np.ones(size, np.float32) for size in (12, 16)}
NORMS = {
    "LayerNormalization": step("LayerNormalization", ONE[12], ONE[12]),
    "InstanceNormalization": step("InstanceNormalization", ONE[16], ONE[16]),
    "BatchNormalization": step("BatchNormalization", *[ONE[16]] * 4),
    "LRN": step("LRN", size=5),
    "LpNormalization": step("LpNormalization", axis=1, p=2),
}
OTHERS = {
    "TopK": lambda g, x: g.ops("TopK", x, g.ints(3), count=2, axis=1)[0],
    "CumSum": step("CumSum", 1),
    "GridSample": step("GridSample", np.zeros((1, 4, 4, 2), np.float32)),
}
FLOAT_BINARY = ("Sub", "Div", "Pow", "Min", "Max", "Sum", "Mean", "PRelu")
FLOAT_UNARY = (
    *("Tanh", "Softplus", "HardSigmoid", "Elu", "Gelu", "Erf", "LogSoftmax", "Hardmax"),
    *("Exp", "Sqrt", "Abs", "Neg", "Log", "Reciprocal", "Floor", "Ceil", "Round", "Sign", "Sin", "Cos"),
)


def normed(g, x):
    return g.relu_q(g.op("Relu", NORMS["BatchNormalization"](g, x)))


def recurrent(op_type, gates, weight):
    def made(g, x):
        arrays = [g.random(1, gates * 4, 8), g.random(1, gates * 4, 4)]
        weights = [g.dq_weight(a, axis=None) if weight == "dq" else g.const(a) for a in arrays]
        return g.op(op_type, x, *weights, hidden_size=4)

    return alone(made, shape=(5, 1, 8))


pooled = partial(unary, "MaxPool", **POOL)


def wide(g, *shape):
    return g.q(g.input(shape or IMAGE), STEP16)


BOTH = "Add", "Mul"
WIDE = {
    "Conv": lambda g: g.conv(wide(g)),
    **{op: lambda g, o=op: g.op(o, wide(g), wide(g)) for op in BOTH},
    "Concat": lambda g: g.op("Concat", wide(g), wide(g), axis=1),
    **{op: lambda g, o=op: g.op(o, wide(g)) for op in ("Sigmoid", "Softmax")},
    "MaxPool": lambda g: g.op("MaxPool", wide(g), kernel_shape=[2, 2]),
    f"Reshape {BYTES}": lambda g: g.op("Reshape", wide(g), g.ints(-1)),
    f"Transpose {BYTES}": lambda g: g.op("Transpose", wide(g)),
    f"Slice {BYTES}": lambda g: g.op("Slice", wide(g), g.ints(0), g.ints(2), g.ints(1)),
    f"Gather {BYTES}": lambda g: g.op("Gather", wide(g), g.ints(0, 1), axis=1),
}


def looked_up(g, table):
    """An embedding."""
    rows, ids = g.random(50, 8), g.input((1, 5), TensorProto.INT64)
    value = g.op("Gather", g.const(rows) if table == "float" else g.dq_constant(rows), ids)
    return g.q(value) if table == "quantized" else value


pool = step("MaxPool", **POOL)
SOFTMAXES = (((4, 10), -1), ((4, 10), 0), (IMAGE, 1))
TWO = "QLinearConcat QLinearConv QLinearConv"
EXAMPLES = {
    "mul-integer": [
        *(Case("QLinearMul", binary("Mul", partial(QdqGraph.act_input, shape=shape), OUT, 100), OUT)
          for shape in (IMAGE, (1, 16, 1, 1), (12,))),
        # A constant operand stands behind DequantizeLinear, of the type of the activations; no operand is float.
        *(Case(kernel.format(op_type), binary(op_type, CONSTANT[kind], OUT, 100))
          for op_type in BOTH
          for kernel, kinds in (
              ("QLinear{}", ("dq", "dq scalar")), ("{}", ("dq int8", "float", "float scalar", "float value")),
          )
          for kind in kinds),
        *(Case(o, lambda g, o=o: g.op(o, g.act_input(), g.act_input())) for o in BOTH),
    ],
    "sub-div-float": [Case(o, binary(o, CONSTANT["value"], *q)) for o in FLOAT_BINARY for q in ((), (OUT, 100))],
    "unary-float": [Case(o, unary(o, *q), options={"opset": 20}) for o in FLOAT_UNARY for q in ((), (OUT, 100))],
    "sigmoid-lut": [
        Case("QLinearSigmoid", unary("Sigmoid", 1 / 256, 0), 1 / 256), Case("Sigmoid", bare("Sigmoid"))],
    "leakyrelu-lut": [
        Case("QLinearLeakyRelu", unary("LeakyRelu", OUT, 100, alpha=0.1), OUT), Case("LeakyRelu", bare("LeakyRelu"))],
    "softmax-lut": [
        *(Case("QLinearSoftmax", alone(step("Softmax", axis=a), 1 / 256, 0, shape=s), 1 / 256) for s, a in SOFTMAXES),
        *(Case("Softmax", alone(step("Softmax", axis=a), shape=s, q_behind=False)) for s, a in SOFTMAXES),
    ],
    "where-integer": [
        *(Case("QLinearWhere", where(kind), OUT) for kind in ("value", "dq scalar")),
        Case("QLinearWhere", where("float scalar"), OUT, marks=qdq.since("1.24")),  # the runtime quantizes it
    ],
    "relu-clip-alone": [
        Case("", lambda g: g.relu_q(g.op("Relu", g.act_input()))),
        Case("", lambda g: g.q(g.clip(g.act_input(), -4.1, 4.1))), Case("Relu", unary("Relu")),
        Case("Clip", lambda g: g.q(g.clip(g.act_input(), -1.0, 1.0))),
    ],
    "residual-add": [Case("QLinearAdd QLinearConv QLinearConv", block, qdq.RELU_STEP)],
    "residual-needs-q-on-conv": [
        Case("FusedConv QLinearConv", partial(block, q_on_conv=False)),  # which swallows the Add
        Case("Add QLinearConv QLinearConv Relu", partial(block, q_on_add=False)),
    ],
    "concat-shared": [
        *(Case(TWO, joined((STEP, 128), (STEP, 128), axis=a), STEP) for a in (0, 1, 2, -1)),
        Case(TWO, joined((5 / 255, 128), (3 / 255, 7), out=(OUT, 100)), OUT),
        Case("QLinearConcat", joined_with(lambda g: g.dq_constant(g.random(*IMAGE)))),
        Case("Concat", joined_with(lambda g: g.const(g.random(*IMAGE)))), Case("Concat", joined_with(QdqGraph.input)),
        Case("Concat Conv QLinearConv", joined(None, (STEP, 128))), Case("Concat Conv Conv", joined(None, None)),
        Case("Concat", lambda g: g.op("Concat", g.act_input(), g.act_input(), axis=1)),
    ],
    "norms-float": [Case(f"{name} {ISLAND}", alone(norm)) for name, norm in NORMS.items()],
    "bn-unfolded-float": [
        Case("BatchNormalization Conv", lambda g: normed(g, g.conv(g.act_input()))),
        Case("BatchNormalization QLinearConv", lambda g: normed(g, g.q(g.conv(g.act_input())))),
    ],
    "lstm-float": [
        *(Case(op_type, recurrent(op_type, gates, weight), weights=count)
          for op_type, gates in (("LSTM", 4), ("GRU", 3))
          for weight, count in (("dq", 2), ("float", 0))),
        Case("Einsum", lambda g: g.q(g.op("Einsum", g.act_input((4, 8)), g.act_input((8, 4)), equation="ij,jk->ik"))),
        *(Case(f"{name} {ISLAND}", alone(other)) for name, other in OTHERS.items()),
    ],
    "maxpool-opset12": [
        Case(f"MaxPool {BYTES}", pooled(), 0.0, options={"opset": 13}),
        Case(f"MaxPool {BYTES}", pooled(), 0.0, options={"opset": 22}, marks=qdq.since("1.28")),
        Case(f"MaxPool {ISLAND}", pooled(OUT, 100), options={"opset": 13}),  # other parameters behind it
        Case(f"MaxPool {ISLAND}", pooled(), options={"opset": 11}),  # it takes no bytes there
        Case(f"MaxPool {ISLAND}", lambda g: g.q(g.ops("MaxPool", g.act_input(), count=2, **POOL)[0])),  # and indices
    ],
    "average-pool": [
        *(Case("QLinearAveragePool", unary("AveragePool", scale, 100, kernel_shape=[3, 3], **how), scale)
          for scale in (STEP, OUT)
          for how in ({}, {"pads": [1] * 4}, {"pads": [1] * 4, "count_include_pad": 1})),
        Case("AveragePool", bare("AveragePool", **POOL)),
        Case("AveragePool", bare("AveragePool", dilations=[2, 2], **POOL), options={"opset": 19}),
    ],
    "global-average-pool": [
        Case("QLinearGlobalAveragePool", unary("GlobalAveragePool", scale), scale) for scale in (STEP, qdq.RELU_STEP)],
    "reduce-mean-float": [
        *(Case(o, unary(o, axes=[2, 3]), options={"opset": 13}) for o in ("ReduceMean", "ReduceL2")),
        *(Case(o, alone(step(o, (2, 3))), options={"opset": 18}) for o in ("ReduceMean", "ReduceL2", "ReduceSum")),
        Case("ReduceSum", alone(step("ReduceSum", (2, 3))), options={"opset": 13}),
        Case("GlobalMaxPool", unary("GlobalMaxPool")), Case("LpPool", unary("LpPool", kernel_shape=[2, 2])),
    ],
    "sixteen-bit-float": [
        *(Case(kernel, lambda g, m=make: g.q(m(g), STEP16), options={"opset": 21, "act": act})
          for act in (np.uint16, np.int16)
          for kernel, make in WIDE.items()),
        # One side of 16 bits is enough.
        Case("Conv", lambda g: g.q(g.conv(wide(g)), act=np.uint8), options={"opset": 21, "act": np.uint16}),
        Case("Conv", lambda g: g.q(g.conv(g.act_input()), STEP16, act=np.uint16), options={"opset": 21}),
    ],
    "argmax reads bytes and argmin does not": [
        Case(f"Q > {front}{op} > Cast", lambda g, o=op: g.op("Cast", g.op(o, g.act_input(), axis=1), to=1))
        for op, front in (("ArgMax", ""), ("ArgMin", "DQ > "))
    ],
    # Without a Q of the same parameters behind it the whole table is dequantized on every run.
    "an embedding": [
        Case(kernels, partial(looked_up, table=table))
        for table, kernels in (("quantized", "Gather > DQ"), ("dequantized", "DQ > Gather"), ("float", "Gather"))
    ],
    # Q behind a float MaxPool is hoisted above it, unless a Max of one input or a second reader prevents it.
    "hoist-q-over-maxpool": [
        Case("Q > MaxPool > DQ", lambda g: g.q(pool(g, g.input()))),
        Case("Conv > Q > MaxPool > DQ", lambda g: g.q(pool(g, g.conv(g.input(), weight="float")))),
        Case("MaxPool > Max > Q > DQ", lambda g: g.q(g.op("Max", pool(g, g.input())))),
        Case("MaxPool > Q > DQ > Max", lambda g: g.op("Max", g.q(m := pool(g, g.input())), m)),
        # DQ in front is pushed below it.
        Case("Q > MaxPool > DQ > Exp", lambda g: g.op("Exp", pool(g, g.act_input()))),
        Case("Q > DQ > Max > MaxPool > Exp", lambda g: g.op("Exp", pool(g, g.op("Max", g.act_input())))),
    ],
}  # fmt: skip


@qdq.each_case(EXAMPLES)
def test_rule(case):
    case.check()


def test_two_pairs_in_a_row_collapse():
    """The second step alone does not requantize."""
    model = build(lambda g: g.q(g.q(g.input()), OUT, 100))
    assert qdq.op_types(model) == ["QuantizeLinear", "DequantizeLinear"]
    assert qdq.largest_difference(model) > OUT / 10


def test_a_residual_block_has_one_dequantization():
    assert qdq.op_types(build(block)).count("DequantizeLinear") == 1


# ---- pools ------------------------------------------------------------------------------------------------------


def between_convs(make, opset=17):
    """The optimized graph of an integer Conv and Relu, what ``make`` adds, a Q, and a Conv."""

    def graph(g):
        x = g.relu_q(g.op("Relu", g.conv(g.act_input())))
        return g.q(g.conv(g.relu_q(make(g, x)), kernel=1))

    return qdq.op_types(build(graph, opset=opset))


def test_behind_a_conv_pools_run_in_its_layout():
    """Two Transposes in all."""
    ops = between_convs(pool)
    assert [o for o in ops if o.startswith(("QLinear", "Nhwc"))] == ["QLinearConv", "NhwcMaxPool", "QLinearConv"]
    for found in (ops, between_convs(step("GlobalAveragePool"))):
        assert found.count("Transpose") == 2


IN_LAYOUT = {
    **{op: lambda g, x, o=op: g.op(o, x, x) for op in (*BOTH, "Sub", "Div", "Sum", "Max", "Min")},
    "Concat": lambda g, x: g.op("Concat", x, x, axis=1), "Clip": step("Clip", np.float32(0), np.float32(2)),
    "Pow": step("Pow", np.float32(1.5)), "PRelu": step("PRelu", np.full((16, 1, 1), 0.3, np.float32)),
    "Slice": step("Slice", [0], [8], [1]), "Split": lambda g, x: g.ops("Split", x, count=2, axis=1, num_outputs=2)[0],
    "Resize": step("Resize", "", np.float32([1, 1, 2, 2]), mode="nearest"),
    "Pad": step("Pad", [0, 0, 1, 1, 0, 0, 1, 1]), "InstanceNormalization": NORMS["InstanceNormalization"],
    "MaxPool": pool, "QuickGelu": step("QuickGelu", domain=qdq.MS), "LRN": NORMS["LRN"],
    "AveragePool": lambda g, x: g.op("Max", g.op("AveragePool", x, kernel_shape=[3, 3], pads=[1] * 4)),
}  # fmt: skip
"""Operators over a picture that ask for more than ``Operator (x)``."""


@pytest.mark.since("1.31")
@pytest.mark.parametrize(("op_type", "fast"), [
    *((o, True) for o in sorted(CHANNELS_LAST)), *((o, False) for o in ("LRN", "InstanceNormalization", "AveragePool")),
])  # fmt: skip
def test_rule_maxpool_channels_first_slow(op_type, fast):
    """Some hand the layout of a QLinearConv on to a MaxPool, which then has its fast kernel."""
    ops = between_convs(lambda g, x: pool(g, g.relu_q(IN_LAYOUT.get(op_type, step(op_type))(g, x))), opset=20)
    assert ("NhwcMaxPool" in ops, "MaxPool" in ops) == (fast or op_type == "MaxPool", not fast)


@pytest.mark.parametrize("dilations", [[1, 1], [2, 2]])
def test_an_average_pool_with_the_attribute_dilations_is_refused_between_dq_and_q(dilations):
    """Even with its default value; it must not be quantized, or the attribute be dropped."""
    model = build(unary("AveragePool", **POOL, dilations=dilations), opset=19)
    with pytest.raises(Exception, match="QLinearAveragePool") as caught:
        qdq.optimized(model)
    assert type(caught.value).__module__.startswith(ort.__name__)


# ---- int8 activations on x86-64 -----------------------------------------------------------------------------------

ON_INT8 = {**qdq.PRODUCERS, "QLinearSoftmax": (qdq.LINES, step("Softmax"))}


@pytest.mark.x86_only
@pytest.mark.parametrize("kernel", ON_INT8)
def test_rule_int8_activation_branch_float(kernel):
    """They become uint8 where the quantized value has one reader; with a second one the operator is float."""
    shape, make = ON_INT8[kernel]

    def branch(g):
        x = g.act_input(shape)
        return [g.q(make(g, x)), g.q(g.op("Neg", x))]

    Case(kernel, alone(make, shape=shape), STEP, options={"act": np.int8}).check()
    assert [kernel in qdq.compute_ops(build(branch, act=act)) for act in (np.int8, np.uint8)] == [False, True]


def forked(g, *, tapped):
    x = g.q(g.conv(g.act_input()))
    return [g.q(g.conv(x)), x if tapped else g.q(g.conv(x))]


INT8 = {"act": np.int8}
INT8_READERS = {
    # The Convs that make and read the branching value go float; a graph output is a reader.
    "readers": [
        Case(" ".join([kernel] * count), partial(forked, tapped=tapped), options=options)
        for tapped, count in ((False, 3), (True, 2))
        for kernel, options in (("Conv", INT8), ("QLinearConv", {}))
    ],
    "block": [Case("Add Conv QLinearConv", block, options=INT8)],
    "uint8 weights": [Case("QLinearConv", lambda g: g.q(g.conv(g.act_input())), options={**INT8, "weight": np.uint8})],
    # A constant operand is not rewritten; int8 and uint8 values go together.
    "constant": [Case("Add", binary("Add", CONSTANT["dq"]), options=INT8)],
    "mixed": [Case("QLinearAdd", lambda g: g.q(g.op("Add", g.q(g.input(), act=np.int8), g.act_input())))],
}


@pytest.mark.x86_only
@qdq.each_case(INT8_READERS)
def test_int8_values_with_one_reader_and_more(case):
    case.check()


@pytest.mark.x86_only
def test_rule_int8_branches_behind_barrier():
    """Equal pairs are merged again, and without the barrier the Conv before them is float; the axis says nothing."""

    def fork(g, *, told_apart, barrier):
        x = g.q(g.conv(g.act_input()))
        x = g.op("Max", x) if barrier else x
        grid = [g.const(np.float32(0.03)), g.const(np.int8(0))]
        outputs = []
        for said in ({"axis": axis} if told_apart else {} for axis in range(3)):
            pair = g.op("DequantizeLinear", g.op("QuantizeLinear", x, *grid, **said), *grid, **said)
            outputs.append(g.q(g.op("Add", pair, g.act_input())))
        return outputs

    for apart, barrier in ((True, True), (True, False), (False, True), (False, False)):
        found = qdq.compute_ops(build(partial(fork, told_apart=apart, barrier=barrier), act=np.int8))
        if apart and barrier:
            assert found == ["Max", *["QLinearAdd"] * 3, "QLinearConv"]
        else:
            assert {"Conv", "Add"} & set(found)
