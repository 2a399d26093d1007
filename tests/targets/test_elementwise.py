"""Operators between layers: sums, products, functions, Concat, pools and norms; integer kernels and float islands."""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidGraph

from kenosis_ort.targets.ort_cpu.barriers import CHANNELS_LAST
from kenosis_ort.targets.ort_cpu.rules import is_arm

from . import qdq
from .qdq import BYTES, IMAGE, ISLAND, LINES, RELU_STEP, STEP, Case, QdqGraph, build, compute_ops, op_types, since

OUT = 6 / 255  # a step other than the operands'
STEP16 = 8 / 65535
POOL: dict[str, Any] = {"kernel_shape": [2, 2], "strides": [2, 2]}


def unary(g: QdqGraph, op_type: str, *q: float, **attributes: Any) -> str:
    """A function of one quantized value, with Q behind it."""
    return g.q(g.op(op_type, g.act_input(), **attributes), *q)


def bare(g: QdqGraph, op_type: str, **attributes: Any) -> str:
    return g.op(op_type, g.act_input(), **attributes)


def binary(g: QdqGraph, op_type: str, other: str, *q: float) -> str:
    return g.q(g.op(op_type, g.act_input(), other), *q)


def constant(g: QdqGraph, kind: str) -> str:
    values = np.abs(g.random(16, 1, 1)) + 0.5
    kinds: dict[str, Callable[[], str]] = {
        "dq": lambda: g.dq_constant(values),
        "dq scalar": lambda: g.dq_constant(1.5),
        "dq int8": lambda: g.dq_constant(values, dtype=np.int8),
        "float": lambda: g.const(values),
        "float scalar": lambda: g.const(1.5),
        "value": g.act_input,
        "float value": g.input,
    }
    return kinds[kind]()


def where(g: QdqGraph, branch: str) -> str:
    other = {"value": g.act_input, "dq": lambda: g.dq_constant(1.0), "float": lambda: g.const(1.0)}[branch]
    return g.q(g.op("Where", g.input(IMAGE, TensorProto.BOOL), g.act_input(), other()), OUT, 100)


def block(g: QdqGraph, *, q_on_conv: bool = True, q_on_add: bool = True) -> str:
    """A residual block of two Convs."""
    x = g.act_input()
    y = g.conv(g.relu_q(g.op("Relu", g.conv(x))))
    total = g.op("Relu", g.op("Add", g.q(y) if q_on_conv else y, x))
    return g.relu_q(total) if q_on_add else total


def joined(g: QdqGraph, *steps: tuple[float, int] | None, axis: int = 1, out: tuple[float, int] = (STEP, 128)) -> str:
    """A Concat of Convs, each with a Q of these parameters or none."""
    convs = [g.conv(g.act_input()) for _ in steps]
    parts = [c if step is None else g.q(c, *step) for c, step in zip(convs, steps, strict=True)]
    return g.q(g.op("Concat", *parts, axis=axis), *out)


def joined_with(g: QdqGraph, kind: str) -> str:
    other = {"dq": g.dq_constant, "float": g.const}[kind](g.random(*IMAGE)) if kind != "input" else g.input()
    return g.q(g.op("Concat", g.act_input(), other, axis=1))


def ones(g: QdqGraph, count: int, size: int) -> list[str]:
    return [g.const(np.ones(size, np.float32)) for _ in range(count)]


NORMS: dict[str, Callable[[QdqGraph, str], str]] = {
    "LayerNormalization": lambda g, x: g.op("LayerNormalization", x, *ones(g, 2, 12)),
    "InstanceNormalization": lambda g, x: g.op("InstanceNormalization", x, *ones(g, 2, 16)),
    "BatchNormalization": lambda g, x: g.op("BatchNormalization", x, *ones(g, 4, 16)),
    "LRN": lambda g, x: g.op("LRN", x, size=5),
    "LpNormalization": lambda g, x: g.op("LpNormalization", x, axis=1, p=2),
}
OTHERS: dict[str, Callable[[QdqGraph, str], str]] = {
    "TopK": lambda g, x: g.ops("TopK", x, g.ints(3), count=2, axis=1)[0],
    "CumSum": lambda g, x: g.op("CumSum", x, g.const(np.array(1, np.int64))),
    "GridSample": lambda g, x: g.op("GridSample", x, g.const(np.zeros((1, 4, 4, 2), np.float32))),
}
FLOAT_BINARY = ("Sub", "Div", "Pow", "Min", "Max", "Sum", "Mean", "PRelu")
FLOAT_UNARY = (
    *("Tanh", "Softplus", "HardSigmoid", "Elu", "Gelu", "Erf", "LogSoftmax", "Hardmax"),
    *("Exp", "Sqrt", "Abs", "Neg", "Log", "Reciprocal", "Floor", "Ceil", "Round", "Sign", "Sin", "Cos"),
)


def normed(g: QdqGraph, x: str) -> str:
    return g.relu_q(g.op("Relu", NORMS["BatchNormalization"](g, x)))


def recurrent(g: QdqGraph, op_type: str, gates: int, weight: str) -> str:
    arrays = [g.random(1, gates * 4, 8), g.random(1, gates * 4, 4)]
    weights = [g.dq_weight(a, axis=None) if weight == "dq" else g.const(a) for a in arrays]
    return g.q(g.op(op_type, g.act_input((5, 1, 8)), *weights, hidden_size=4))


def reduced(g: QdqGraph, op_type: str, *, as_input: bool) -> str:
    x = g.act_input()
    return g.q(g.op(op_type, x, g.ints(2, 3)) if as_input else g.op(op_type, x, axes=[2, 3]))


def pooled(g: QdqGraph, *q: float, **attributes: Any) -> str:
    return g.q(g.op("MaxPool", g.act_input(), **POOL, **attributes), *q)


def softmax(g: QdqGraph, shape: tuple[int, ...], axis: int, *, q: bool) -> str:
    y = g.op("Softmax", g.act_input(shape), axis=axis)
    return g.q(y, 1 / 256, 0) if q else y


def wide(g: QdqGraph, *shape: int) -> str:
    return g.q(g.input(shape or IMAGE), STEP16)


WIDE: dict[str, Callable[[QdqGraph], str]] = {
    "Conv": lambda g: g.conv(wide(g)),
    "Gemm": lambda g: g.gemm(wide(g, *LINES)),
    "MatMulNBits" if qdq.VERSION >= (1, 32) else "MatMul": lambda g: g.matmul(wide(g, *LINES)),
    "Add": lambda g: g.op("Add", wide(g), wide(g)),
    "Mul": lambda g: g.op("Mul", wide(g), wide(g)),
    "Concat": lambda g: g.op("Concat", wide(g), wide(g), axis=1),
    "Sigmoid": lambda g: g.op("Sigmoid", wide(g)),
    "Softmax": lambda g: g.op("Softmax", wide(g)),
    "MaxPool": lambda g: g.op("MaxPool", wide(g), kernel_shape=[2, 2]),
    f"Reshape {BYTES}": lambda g: g.op("Reshape", wide(g), g.ints(-1)),
    f"Transpose {BYTES}": lambda g: g.op("Transpose", wide(g)),
    f"Slice {BYTES}": lambda g: g.op("Slice", wide(g), g.ints(0), g.ints(2), g.ints(1)),
    f"Gather {BYTES}": lambda g: g.op("Gather", wide(g), g.ints(0, 1), axis=1),
}


def looked_up(g: QdqGraph, table: str) -> str:
    """An embedding."""
    rows, ids = g.random(50, 8), g.input((1, 5), TensorProto.INT64)
    value = g.op("Gather", g.const(rows) if table == "float" else g.dq_constant(rows), ids)
    return g.q(value) if table == "quantized" else value


def pool(g: QdqGraph, x: str) -> str:
    return g.op("MaxPool", x, **POOL)


SOFTMAXES = (((4, 10), -1), ((4, 10), 0), (IMAGE, 1))
TWO = "QLinearConcat QLinearConv QLinearConv"
EXAMPLES: dict[str, list[Case]] = {
    "mul-integer": [
        *(
            Case("QLinearMul", lambda g, s=shape: binary(g, "Mul", g.act_input(s), OUT, 100), OUT)
            for shape in (IMAGE, (1, 16, 1, 1), (12,))
        ),
        # A constant operand stands behind DequantizeLinear, of the type of the activations; no operand is float.
        *(
            Case(kernel.format(op_type), lambda g, o=op_type, k=kind: binary(g, o, constant(g, k), OUT, 100))
            for op_type in ("Add", "Mul")
            for kernel, kinds in (
                ("QLinear{}", ("dq", "dq scalar")),
                ("{}", ("dq int8", "float", "float scalar", "float value")),
            )
            for kind in kinds
        ),
        *(Case(o, lambda g, o=o: g.op(o, g.act_input(), g.act_input())) for o in ("Add", "Mul")),
    ],
    "sub-div-float": [
        Case(op_type, lambda g, o=op_type, q=q: binary(g, o, g.act_input(), *q))
        for op_type in FLOAT_BINARY
        for q in ((), (OUT, 100))
    ],
    "unary-float": [
        Case(op_type, lambda g, o=op_type, q=q: unary(g, o, *q), options={"opset": 20})
        for op_type in FLOAT_UNARY
        for q in ((), (OUT, 100))
    ],
    "sigmoid-lut": [
        Case("QLinearSigmoid", lambda g: unary(g, "Sigmoid", 1 / 256, 0), 1 / 256),
        Case("Sigmoid", partial(bare, op_type="Sigmoid")),
    ],
    "leakyrelu-lut": [
        Case("QLinearLeakyRelu", lambda g: unary(g, "LeakyRelu", OUT, 100, alpha=0.1), OUT),
        Case("LeakyRelu", partial(bare, op_type="LeakyRelu")),
    ],
    "softmax-lut": [
        *(Case("QLinearSoftmax", partial(softmax, shape=s, axis=a, q=True), 1 / 256) for s, a in SOFTMAXES),
        *(Case("Softmax", partial(softmax, shape=s, axis=a, q=False)) for s, a in SOFTMAXES),
    ],
    "where-integer": [
        *(Case("QLinearWhere", partial(where, branch=branch), OUT) for branch in ("value", "dq")),
        Case("QLinearWhere", partial(where, branch="float"), OUT, marks=since("1.24")),  # the runtime quantizes it
    ],
    "relu-clip-alone": [
        Case("", lambda g: g.relu_q(bare(g, "Relu"))),
        Case("", lambda g: g.q(g.clip(g.act_input(), -4.1, 4.1))),
        Case("Relu", lambda g: unary(g, "Relu")),
        Case("Clip", lambda g: g.q(g.clip(g.act_input(), -1.0, 1.0))),
    ],
    "residual-add": [Case("QLinearAdd QLinearConv QLinearConv", block, RELU_STEP)],
    "residual-needs-q-on-conv": [
        Case("FusedConv QLinearConv", partial(block, q_on_conv=False)),  # which swallows the Add
        Case("Add QLinearConv QLinearConv Relu", partial(block, q_on_add=False)),
    ],
    "concat-shared": [
        *(Case(TWO, lambda g, a=a: joined(g, (STEP, 128), (STEP, 128), axis=a), STEP) for a in (0, 1, 2, -1)),
        Case(TWO, lambda g: joined(g, (5 / 255, 128), (3 / 255, 7), out=(OUT, 100)), OUT),
        Case("QLinearConcat", partial(joined_with, kind="dq")),
        *(Case("Concat", partial(joined_with, kind=kind)) for kind in ("float", "input")),
        Case("Concat Conv QLinearConv", lambda g: joined(g, None, (STEP, 128))),
        Case("Concat Conv Conv", lambda g: joined(g, None, None)),
        Case("Concat", lambda g: g.op("Concat", g.act_input(), g.act_input(), axis=1)),
    ],
    "norms-float": [
        Case(f"{name} {ISLAND}", lambda g, m=make: g.q(m(g, g.act_input()))) for name, make in NORMS.items()
    ],
    "bn-unfolded-float": [
        Case("BatchNormalization Conv", lambda g: normed(g, g.conv(g.act_input()))),
        Case("BatchNormalization QLinearConv", lambda g: normed(g, g.q(g.conv(g.act_input())))),
    ],
    "lstm-float": [
        *(
            Case(op_type, partial(recurrent, op_type=op_type, gates=gates, weight=weight), weights=count)
            for op_type, gates in (("LSTM", 4), ("GRU", 3))
            for weight, count in (("dq", 2), ("float", 0))
        ),
        Case("Einsum", lambda g: g.q(g.op("Einsum", g.act_input((4, 8)), g.act_input((8, 4)), equation="ij,jk->ik"))),
        *(Case(f"{name} {ISLAND}", lambda g, m=make: g.q(m(g, g.act_input()))) for name, make in OTHERS.items()),
    ],
    "maxpool-opset12": [
        Case(f"MaxPool {BYTES}", pooled, 0.0, options={"opset": 13}),
        Case(f"MaxPool {BYTES}", pooled, 0.0, options={"opset": 22}, marks=since("1.28")),
        Case(f"MaxPool {ISLAND}", lambda g: pooled(g, OUT, 100), options={"opset": 13}),  # other parameters behind it
        Case(f"MaxPool {ISLAND}", pooled, options={"opset": 11}),  # it takes no bytes there
        Case(f"MaxPool {ISLAND}", lambda g: g.q(g.ops("MaxPool", g.act_input(), count=2, **POOL)[0])),  # and indices
    ],
    "average-pool": [
        *(
            Case(
                "QLinearAveragePool",
                lambda g, s=scale, h=how: unary(g, "AveragePool", s, 100, kernel_shape=[3, 3], **h),
                scale,
            )
            for scale in (STEP, OUT)
            for how in ({}, {"pads": [1] * 4}, {"pads": [1] * 4, "count_include_pad": 1})
        ),
        Case("AveragePool", partial(bare, op_type="AveragePool", **POOL)),
        Case("AveragePool", partial(bare, op_type="AveragePool", dilations=[2, 2], **POOL), options={"opset": 19}),
    ],
    "global-average-pool": [
        Case("QLinearGlobalAveragePool", lambda g, s=scale: unary(g, "GlobalAveragePool", s), scale)
        for scale in (STEP, RELU_STEP)
    ],
    "reduce-mean-float": [
        *(
            Case(o, partial(reduced, op_type=o, as_input=opset >= 18 or o == "ReduceSum"), options={"opset": opset})
            for o in ("ReduceMean", "ReduceSum", "ReduceL2")
            for opset in (13, 18)
        ),
        Case("GlobalMaxPool", lambda g: unary(g, "GlobalMaxPool")),
        Case("LpPool", lambda g: unary(g, "LpPool", kernel_shape=[2, 2])),
    ],
    "sixteen-bit-float": [
        *(
            Case(kernel, lambda g, m=make: g.q(m(g), STEP16), options={"opset": 21, "act": act})
            for act in (np.uint16, np.int16)
            for kernel, make in WIDE.items()
        ),
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
        Case("MaxPool > Neg > Q > DQ", lambda g: [g.q(m := pool(g, g.input())), g.op("Neg", m)]),
        # DQ in front is pushed below it.
        Case("Q > MaxPool > DQ > Exp", lambda g: g.op("Exp", pool(g, g.act_input()))),
        Case("Q > DQ > Max > MaxPool > Exp", lambda g: g.op("Exp", pool(g, g.op("Max", g.act_input())))),
    ],
}


@qdq.each_case(EXAMPLES)
def test_rule(case: Case) -> None:
    case.check()


def test_two_pairs_in_a_row_collapse() -> None:
    """The second step alone does not requantize."""
    model = build(lambda g: g.q(g.q(g.input()), OUT, 100))
    assert op_types(model) == ["QuantizeLinear", "DequantizeLinear"]
    assert qdq.largest_difference(model) > OUT / 10


def test_a_residual_block_has_one_dequantization() -> None:
    assert op_types(build(block)).count("DequantizeLinear") == 1


# ---- pools ------------------------------------------------------------------------------------------------------


def between_convs(make: Callable[[QdqGraph, str], str], opset: int = 17) -> list[str]:
    """The optimized graph of an integer Conv and Relu, what ``make`` adds, a Q, and a Conv."""

    def graph(g: QdqGraph) -> str:
        x = g.relu_q(g.op("Relu", g.conv(g.act_input())))
        return g.q(g.conv(g.relu_q(make(g, x)), kernel=1))

    return op_types(build(graph, opset=opset))


def test_behind_a_conv_pools_run_in_its_layout() -> None:
    """Two Transposes in all."""
    ops = between_convs(pool)
    assert [o for o in ops if o.startswith(("QLinear", "Nhwc"))] == ["QLinearConv", "NhwcMaxPool", "QLinearConv"]
    for found in (ops, between_convs(lambda g, x: g.op("GlobalAveragePool", x))):
        assert found.count("Transpose") == 2


def in_layout(g: QdqGraph, op_type: str, x: str) -> str:
    """An operator over a picture."""
    further: dict[str, Callable[[], list[str]]] = {
        **dict.fromkeys(("Add", "Mul", "Concat", "Sub", "Div", "Sum", "Max", "Min"), lambda: [x]),
        "Clip": lambda: [g.const(0.0), g.const(2.0)],
        "Pow": lambda: [g.const(1.5)],
        "PRelu": lambda: [g.const(np.full((16, 1, 1), 0.3, np.float32))],
        "Slice": lambda: [g.ints(0), g.ints(8), g.ints(1)],
        "Resize": lambda: ["", g.floats(1, 1, 2, 2)],
        "Pad": lambda: [g.ints(0, 0, 1, 1, 0, 0, 1, 1)],
        "InstanceNormalization": lambda: ones(g, 2, 16),
    }
    attributes: dict[str, dict[str, Any]] = {
        "Concat": {"axis": 1}, "MaxPool": POOL, "Resize": {"mode": "nearest"}, "QuickGelu": {"domain": qdq.MS},
        "LRN": {"size": 3}, "AveragePool": {"kernel_shape": [3, 3], "pads": [1] * 4},
    }  # fmt: skip
    if op_type == "Split":
        return g.ops("Split", x, count=2, axis=1, num_outputs=2)[0]
    y = g.op(op_type, x, *further.get(op_type, list)(), **attributes.get(op_type, {}))
    return g.op("Max", y) if op_type == "AveragePool" else y


@pytest.mark.since("1.31")
@pytest.mark.parametrize(
    ("op_type", "fast"),
    [
        *((o, True) for o in sorted(CHANNELS_LAST)),
        *((o, False) for o in ("LRN", "InstanceNormalization", "AveragePool")),
    ],
)
def test_rule_maxpool_channels_first_slow(op_type: str, fast: bool) -> None:
    """Some hand the layout of a QLinearConv on to a MaxPool, which then has its fast kernel."""
    ops = between_convs(lambda g, x: g.op("MaxPool", g.relu_q(in_layout(g, op_type, x)), **POOL), opset=20)
    assert ("NhwcMaxPool" in ops, "MaxPool" in ops) == (fast or op_type == "MaxPool", not fast)


@pytest.mark.parametrize("dilations", [[1, 1], [2, 2]])
def test_an_average_pool_with_the_attribute_dilations_is_refused_between_dq_and_q(dilations: list[int]) -> None:
    """Even with its default value; it must not be quantized, or the attribute be dropped."""
    model = build(lambda g: unary(g, "AveragePool", **POOL, dilations=dilations), opset=19)
    with pytest.raises(Exception, match="QLinearAveragePool") as caught:
        qdq.optimized(model)
    assert type(caught.value).__module__.startswith(ort.__name__)


# ---- int8 activations on x86-64 -----------------------------------------------------------------------------------

ON_INT8 = {**qdq.PRODUCERS, "QLinearSoftmax": (LINES, lambda g, x: g.op("Softmax", x))}


@pytest.mark.x86_only
@pytest.mark.parametrize("kernel", ON_INT8)
def test_rule_int8_activation_branch_float(kernel: str) -> None:
    """They become uint8 where the quantized value has one reader; with a second one the operator is float."""
    shape, make = ON_INT8[kernel]

    def branch(g: QdqGraph) -> list[str]:
        x = g.act_input(shape)
        return [g.q(make(g, x)), g.q(g.op("Neg", x))]

    alone = build(lambda g: g.q(make(g, g.act_input(shape))), act=np.int8)
    assert compute_ops(alone) == [kernel]
    assert qdq.largest_difference(alone) <= STEP * 1.01
    assert kernel not in compute_ops(build(branch, act=np.int8))
    assert kernel in compute_ops(build(branch, act=np.uint8))


def forked(g: QdqGraph, *, tapped: bool) -> list[str]:
    x = g.q(g.conv(g.act_input()))
    return [g.q(g.conv(x)), x if tapped else g.q(g.conv(x))]


INT8 = {"act": np.int8}
INT8_READERS: dict[str, list[Case]] = {
    # The Convs that make and read the branching value go float; a graph output is a reader.
    "readers": [
        Case(" ".join([kernel] * count), partial(forked, tapped=tapped), options=options)
        for tapped, count in ((False, 3), (True, 2))
        for kernel, options in (("Conv", INT8), ("QLinearConv", {}))
    ],
    "block": [Case("Add Conv QLinearConv", block, options=INT8)],
    "uint8 weights": [Case("QLinearConv", lambda g: g.q(g.conv(g.act_input())), options={**INT8, "weight": np.uint8})],
    # A constant operand is not rewritten; int8 and uint8 values go together.
    "constant": [Case("Add", lambda g: binary(g, "Add", g.dq_constant(g.random(16, 1, 1))), options=INT8)],
    "mixed": [Case("QLinearAdd", lambda g: g.q(g.op("Add", g.q(g.input(), act=np.int8), g.act_input())))],
}


@pytest.mark.x86_only
@qdq.each_case(INT8_READERS)
def test_int8_values_with_one_reader_and_more(case: Case) -> None:
    case.check()


@pytest.mark.x86_only
def test_rule_int8_branches_behind_barrier() -> None:
    """Equal pairs are merged again, and without the barrier the Conv before them is float; the axis says nothing."""

    def fork(g: QdqGraph, *, told_apart: bool, barrier: bool) -> list[str]:
        x = g.q(g.conv(g.act_input()))
        x = g.op("Max", x) if barrier else x
        grid = [g.const(np.float32(0.03)), g.const(np.int8(0))]
        outputs = []
        for said in ({"axis": axis} if told_apart else {} for axis in range(3)):
            pair = g.op("DequantizeLinear", g.op("QuantizeLinear", x, *grid, **said), *grid, **said)
            outputs.append(g.q(g.op("Add", pair, g.act_input())))
        return outputs

    assert compute_ops(build(partial(fork, told_apart=True, barrier=True), act=np.int8)) == [
        "Max", *["QLinearAdd"] * 3, "QLinearConv"
    ]  # fmt: skip
    for apart, barrier in ((True, False), (False, True), (False, False)):
        assert {"Conv", "Add"} & set(compute_ops(build(partial(fork, told_apart=apart, barrier=barrier), act=np.int8)))


@pytest.mark.parametrize("op_type", ["Conv", pytest.param("MatMul", marks=pytest.mark.since("1.30"))])
def test_scales_of_float16_make_no_integer_kernel(op_type: str) -> None:
    """A Cast to float32 in front of Q does. Runtime 1.29 refuses the MatMul; that on Arm refuses both."""
    shape = IMAGE if op_type == "Conv" else LINES

    def cast(g: QdqGraph) -> str:
        x = g.q(g.op("Cast", g.input(shape, TensorProto.FLOAT16), to=TensorProto.FLOAT))
        return g.q(g.conv(x) if op_type == "Conv" else g.matmul(x))

    def half(g: QdqGraph) -> str:
        scale, zero, low = g.const(np.float16(0.02)), g.const(np.array(128, np.uint8)), g.const(np.array(0, np.int8))

        def pair(x: str) -> str:
            return g.op("DequantizeLinear", g.op("QuantizeLinear", x, scale, zero), scale, zero)

        weight = g.const(np.ones((16, 16, 3, 3) if op_type == "Conv" else (32, 16), np.int8))
        y = g.op(op_type, pair(g.input(shape, TensorProto.FLOAT16)), g.op("DequantizeLinear", weight, scale, low))
        return g.op("Cast", pair(y), to=TensorProto.FLOAT)

    if is_arm(platform.machine()):
        with pytest.raises(InvalidGraph, match="INVALID_GRAPH"):  # rule arm-float16-refused
            compute_ops(build(half, opset=19))
    else:
        assert op_type in compute_ops(build(half, opset=19))
    assert f"QLinear{op_type}" in compute_ops(build(cast, opset=19))
