"""Every clause of oneDNN's quantized Convolution patterns, kept and broken."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

import kenosis_ort
from kenosis_ort.errors import ModelLoadError, OptionError
from kenosis_ort.verify import Clause, ConvPattern, verify_patterns
from tests.downloaded import QUANTIZED
from tests.models import Net
from tests.targets.onednn_nets import BINARY, SHAPE, UNARY, Quantized, chain, conv, silu


def read(model: onnx.ModelProto) -> ConvPattern:
    """Returns the only Conv's entry."""
    (found,) = verify_patterns(model, target="onednn").convs
    return found


def broken(model: onnx.ModelProto) -> list[Clause]:
    """Returns the clauses that the only Conv breaks."""
    return [b.clause for b in read(model).broken]


# ---- the pattern ------------------------------------------------------------------------------------------------


def bias_add(net: Quantized, y: str, shape: tuple[int, ...] = (1, 4, 1, 1)) -> str:
    return net.op("Add", [net.const(np.zeros(shape, np.float32)), y])


def mish(net: Quantized, y: str) -> str:
    return net.op("Mul", [net.op("Tanh", [net.op("Softplus", [y])]), y])


def residual(net: Quantized, y: str) -> str:
    return net.op("Relu", [net.op("Add", [net.pair("x"), y])])


def read_twice(net: Quantized, y: str) -> str:
    y = net.op("Relu", [y])
    net.output(net.op("Tanh", [y]))
    return y


def handed_out(net: Quantized, y: str) -> str:
    net.output(y)
    return net.op("Relu", [y])


def as_bound(net: Quantized, y: str) -> str:
    return net.op("Clip", [net.pair("x"), net.op("ReduceMin", [y], keepdims=0)])


def cast(net: Quantized, value: str, to: int = TensorProto.BFLOAT16) -> str:
    return net.op("Cast", [value], to=to)


def float_bias(net: Quantized) -> str:
    return net.const(np.zeros(4, np.float32))


FOUR = chain("Relu", "Mul", "Tanh", "Abs")
WHOLE: dict[str, tuple[onnx.ModelProto, tuple[str, ...], str, str]] = {
    "nothing": (conv(), (), "u8", ""),
    **{op: (conv(chain(op)), (None,), "u8", "") for op in (*UNARY, *BINARY)},  # type: ignore[dict-item]
    "SiLU is two": (conv(silu), ("Sigmoid", "Multiply"), "u8", ""),
    "Mish spelled out is three": (conv(mish), ("SoftPlus", "Tanh", "Multiply"), "u8", ""),
    "a residual Add is binary": (conv(residual), ("Add", "ReLU"), "u8", ""),
    # A BiasAdd comes first, once, does not count, and holds one number a channel.
    "BiasAdd": (conv(lambda net, y: FOUR(net, bias_add(net, y)), bias=None),
                ("BiasAdd", "ReLU", "Multiply", "Tanh", "Abs"), "u8", ""),
    "with a bias": (conv(lambda net, y: bias_add(net, bias_add(net, y))), ("Add", "Add"), "u8", ""),
    "without": (conv(lambda net, y: bias_add(net, bias_add(net, y)), bias=None), ("BiasAdd", "Add"), "u8", ""),
    **{
        f"an Add of {shape}": (conv(lambda net, y, s=shape: bias_add(net, y, s), bias=None), ("Add",), "u8", "")
        for shape in ((1, 1, 1, 1), (1, 1, 6, 6), (4,), (1, 4, 6, 6))
    },
    # Where it ends, in floating point or at a Quantize.
    "a second reader": (conv(read_twice), ("ReLU",), "f32", "2 readers"),
    "an output of the graph": (conv(handed_out), (), "f32", "output of the graph"),
    "another operator": (conv(lambda net, y: net.op("Selu", [y])), (), "f32", "Selu"),
    "an operand that is no data": (conv(as_bound), (), "f32", "ReduceMin"),
    "a Quantize in between": (conv(lambda net, y: net.op("Relu", [net.pair(y)])), (), "u8", ""),
    "float": (conv(dst=lambda net, y: y), (), "f32", ""),
    "int8": (conv(dst=lambda net, y: net.pair(y, np.int8)), (), "s8", ""),
    "a TypeCast": (conv(dst=lambda net, y: cast(net, y, TensorProto.FLOAT16)), (), "f16", ""),
    "no bias": (conv(bias=None), (), "u8", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_instances_of_the_pattern(name: str):
    model, epilogue, dst, ends = WHOLE[name]
    found = read(model)
    assert found.matches, str(found)
    assert len(found.epilogue) == len(epilogue)
    assert epilogue == (None,) or found.epilogue == epilogue
    assert found.dst == dst
    assert ends in found.ends
    assert bool(ends) == bool(found.ends)


def test_the_plain_pattern_in_words():
    found = read(conv())
    assert (found.node, found.pattern) == ("conv", "u8 * s8 + f32 -> u8")


@given(st.lists(st.sampled_from(UNARY + BINARY), max_size=7))
def test_nought_to_four_operations(ops: Sequence[str]):
    found = read(conv(chain(*ops)))
    assert len(found.epilogue) == len(ops)
    assert [b.clause for b in found.broken] == ([Clause.EPILOGUE] if len(ops) > 4 else [])


def test_a_circle_of_nodes_is_left():
    model = conv(lambda net, y: net.op("Add", [y, "back"]))
    last = next(n for n in model.graph.node if n.op_type == "Add")
    relu = helper.make_node("Relu", [last.output[0]], ["back"])
    del model.graph.node[list(model.graph.node).index(last) + 1 :]
    model.graph.node.append(relu)
    assert read(model).epilogue == ("Add", "ReLU")


# ---- the clauses, broken ----------------------------------------------------------------------------------------


def int32_bias(net: Quantized) -> str:
    return net.dq(net.const(np.zeros(4, np.int32), dtype=np.int32), np.int32)


def in_type(to: int) -> onnx.ModelProto:
    """A Conv that computes in a type, with a TypeCast to float32 before its Quantize."""
    return conv(
        src=lambda net, x: cast(net, net.pair(x), to),
        weight=lambda net: cast(net, net.dq(net.int8_weight(), np.int8), to),
        bias=None,
        dst=lambda net, y: net.pair(cast(net, y, TensorProto.FLOAT)),
    )


def of_other_form(*, op_type: str = "Conv", inputs: int = 3) -> onnx.ModelProto:
    model = conv()
    node = next(n for n in model.graph.node if n.op_type == "Conv")
    node.op_type = op_type
    del node.input[inputs:]
    return model


BROKEN: list[tuple[onnx.ModelProto, Clause]] = [
    (conv(src=lambda net, x: x), Clause.SRC_CONVERSION),
    (conv(src=lambda net, x: net.op("Relu", [net.pair(x)])), Clause.SRC_CONVERSION),
    (conv(src=lambda net, x: net.pair(x, np.uint16)), Clause.SRC_TYPE),
    (conv(weight=lambda net: net.weight((4, 4, 3, 3))), Clause.WEIGHTS_CONVERSION),
    (conv(weight=lambda net: net.dq(net.op("Clip", [net.int8_weight()]), np.int8)), Clause.WEIGHTS_CONVERSION),
    (conv(weight=lambda net: net.dq(net.int8_weight(np.uint8))), Clause.WEIGHTS_TYPE),
    (conv(weight=lambda net: net.pair(net.weight((4, 4, 3, 3)), np.uint8)), Clause.WEIGHTS_TYPE),
    (conv(bias=int32_bias), Clause.BIAS_CONVERSION),
    (conv(bias=lambda net: net.const(np.zeros(4), dtype=np.float64)), Clause.BIAS_TYPE),
    (conv(lambda net, y: bias_add(net, FOUR(net, y)), bias=None), Clause.EPILOGUE),
    (conv(dst=lambda net, y: net.pair(y, np.uint16)), Clause.DST_TYPE),
    (in_type(TensorProto.FLOAT16), Clause.DST_CONVERSION),
    (of_other_form(op_type="QLinearConv"), Clause.CONVOLUTION),
    (of_other_form(inputs=1), Clause.CONVOLUTION),
]


@pytest.mark.parametrize(("model", "clause"), BROKEN)
def test_broken_clauses(model: onnx.ModelProto, clause: Clause):
    assert broken(model) == [clause]


def test_types_that_the_text_has():
    assert read(conv(src=lambda net, x: net.pair(x, np.int8))).src == "s8"
    quantized = read(conv(weight=lambda net: net.pair(net.weight((4, 4, 3, 3)), np.int8)))
    assert (quantized.matches, quantized.weights) == (True, "f32")
    assert (read(in_type(TensorProto.BFLOAT16)).matches, read(in_type(TensorProto.BFLOAT16)).dst) == (True, "u8")
    casts = read(
        conv(
            src=lambda net, x: cast(net, net.pair(x)),
            weight=lambda net: cast(net, net.dq(net.int8_weight(), np.int8)),
            bias=lambda net: cast(net, float_bias(net)),
            dst=lambda net, y: y,
        )
    )
    assert casts.matches
    assert (casts.src, casts.weights, casts.bias, casts.dst) == ("u8", "s8", "f32", "bf16")


# ---- the text as a whole ---------------------------------------------------------------------------------------

_ONNX = {
    "u8": np.uint8, "s8": np.int8, "u16": np.uint16, "s16": np.int16, "s32": np.int32,
    "f32": TensorProto.FLOAT, "bf16": TensorProto.BFLOAT16, "f16": TensorProto.FLOAT16, "f64": TensorProto.DOUBLE,
}  # fmt: skip


def to(net: Quantized, value: str, kind: str) -> str:
    """Casts a float32 value to another floating-point type."""
    return value if kind == "f32" else net.op("Cast", [value], to=_ONNX[kind])


@given(
    src=st.sampled_from(("u8", "s8", "u16", "s16", "f32")),
    weights=st.sampled_from(("s8", "u8", "s16", "f32", "f32->s8", "f32->u8", "f16->s8", "f16->u8")),
    inner=st.sampled_from(("f32", "bf16", "f16")),
    bias=st.sampled_from(("", "f32", "f64", "s32", "add", "late")),
    operations=st.lists(st.sampled_from(UNARY + BINARY), max_size=6),
    dst=st.sampled_from(("u8", "s8", "u16", "s16", "bf16", "f16", "f32", "f64", "f32->u8", "f32->s8")),
)
def test_every_combination_breaks_what_the_text_says(
    src: str, weights: str, inner: str, bias: str, operations: list[str], dst: str
):
    """The clauses are told anew here, from the words of the text; ``inner`` is the type in which the Conv computes."""

    def source(net: Quantized, x: str) -> str:
        return to(net, x if src == "f32" else net.pair(x, _ONNX[src]), inner)

    def weight(net: Quantized) -> str:
        kind, _, quantized = weights.partition("->")
        if kind in ("s8", "u8", "s16"):
            return to(net, net.dq(net.int8_weight(_ONNX[kind]), _ONNX[kind]), inner)
        value = net.weight((4, 4, 3, 3))
        if not quantized:
            return to(net, value, inner)
        if kind == "f32":
            return to(net, net.pair(value, _ONNX[quantized]), inner)
        scale = net.const(np.full((), 0.05, np.float16), dtype=np.float16)
        zero = net.const(np.zeros((), _ONNX[quantized]), dtype=_ONNX[quantized])
        made = net.op("QuantizeLinear", [net.const(np.ones((4, 4, 3, 3)), dtype=np.float16), scale, zero])
        return to(net, net.dq(made, _ONNX[quantized]), inner)

    def biased(net: Quantized) -> str:
        if bias == "s32":
            return to(net, net.dq(net.const(np.zeros(4, np.int32), dtype=np.int32), np.int32), inner)
        if bias == "f64":
            value = net.const(np.zeros(4), dtype=np.float64)
            return net.op("Cast", [value], to=_ONNX[inner])
        return to(net, net.const(np.zeros(4, np.float32)), inner)

    def epilogue(net: Quantized, y: str) -> str:
        def bias_add(y: str) -> str:
            return net.op("Add", [y, to(net, net.const(np.zeros((1, 4, 1, 1), np.float32)), inner)])

        y = bias_add(y) if bias == "add" else y
        for op in operations:
            half = [to(net, net.const(np.full((1, 1, 1, 1), 0.5, np.float32)), inner)]
            y = net.op(op, [y, *(half if op in BINARY else [])])
        return bias_add(y) if bias == "late" else y

    def destination(net: Quantized, y: str) -> str:
        kind, _, quantized = dst.partition("->")
        if quantized or kind in ("u8", "s8", "u16", "s16"):
            y = to(net, y, inner) if inner == "f32" else net.op("Cast", [y], to=TensorProto.FLOAT)
            return net.pair(y, _ONNX[quantized or kind])
        return y if kind == inner else net.op("Cast", [y], to=_ONNX[kind])

    has_bias = bias not in ("", "add", "late")
    model = conv(epilogue, src=source, weight=weight, bias=biased if has_bias else None, dst=destination)
    quantizes = dst not in ("bf16", "f16", "f32", "f64")
    first = bias == "late" and not operations
    expected = {
        Clause.SRC_CONVERSION: src == "f32",
        Clause.SRC_TYPE: src in ("u16", "s16"),
        Clause.WEIGHTS_CONVERSION: weights == "f32",
        Clause.WEIGHTS_TYPE: weights in ("u8", "s16", "f32->u8", "f16->s8", "f16->u8"),
        Clause.BIAS_CONVERSION: bias == "s32",
        Clause.BIAS_TYPE: bias == "f64",
        Clause.EPILOGUE: len(operations) + (bias == "late" and not first) > 4,
        Clause.DST_CONVERSION: quantizes and inner == "f16",
        Clause.DST_TYPE: dst in ("u16", "s16", "f64"),
    }
    found = read(model)
    assert {b.clause for b in found.broken} == {clause for clause, is_broken in expected.items() if is_broken}
    assert found.matches is not any(expected.values())
    assert (found.epilogue[:1] == ("BiasAdd",)) is (bias == "add" or first)
    assert "BiasAdd" not in found.epilogue[1:]


@pytest.mark.parametrize("path", sorted(QUANTIZED.glob("*.onnx")), ids=lambda path: path.stem)
def test_files_of_other_tools_match_or_break_a_named_clause(path: Path):
    report = verify_patterns(path)
    assert len(report.convs) == sum(n.op_type in ("Conv", "QLinearConv") for n in onnx.load(path).graph.node)
    assert all(c.matches or all(b.why for b in c.broken) for c in report.convs)


# ---- the report -------------------------------------------------------------------------------------------------


def test_what_the_report_says():
    report = kenosis_ort.verify_patterns(conv(silu).SerializeToString())
    assert report.conforms
    assert "1 of 1 Convs match" in report.verdict()
    assert "u8 * s8 + f32 -> Sigmoid, Multiply -> u8" in str(report)
    worse = verify_patterns(conv(src=lambda net, x: x))
    assert not worse.conforms
    assert "src-conversion 1x" in worse.verdict()
    assert worse.to_dict()["convs"][0]["broken"][0]["clause"] == "src-conversion"


def test_convs_of_bodies_are_read_too():
    body = conv().graph
    del body.input[:]
    net = Net()
    net.input("x", SHAPE)
    net.input("flag", [], TensorProto.BOOL)
    node = helper.make_node("If", ["flag"], ["y"], name="if", then_branch=body, else_branch=conv().graph)
    del node.attribute[1].g.input[:]
    net.nodes.append(node)
    net.output("y", [1, 4, 6, 6])
    graph = helper.make_graph(net.nodes, "net", net.inputs, net.outputs)
    report = verify_patterns(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10))
    assert {c.graph for c in report.convs} == {"if.then_branch", "if.else_branch"}


def test_what_is_refused():
    with pytest.raises(OptionError, match="onednn"):
        verify_patterns(conv(), target="onedn")
    with pytest.raises(ModelLoadError):
        verify_patterns(b"no model")
