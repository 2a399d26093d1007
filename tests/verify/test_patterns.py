"""Every clause of oneDNN's quantized Convolution patterns, kept and broken."""

from collections.abc import Callable, Sequence
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


# ---- the pattern ------------------------------------------------------------------------------------------------


def bias_add(net: Quantized, y: str, shape: tuple[int, ...] = (1, 4, 1, 1), cast: int | None = None) -> str:
    bias = net.const(np.zeros(shape, np.float32))
    return net.op("Add", [bias if cast is None else net.op("Cast", [bias], to=cast), y])


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
        for shape in ((1, 1, 1, 1), (1, 1, 6, 6), (4,), (1, 4, 6, 6), (1, 1, 4, 1, 1))
    },
    # Where it ends, in floating point or at a Quantize.
    "a second reader": (conv(read_twice), ("ReLU",), "f32", "2 readers"),
    "an output of the graph": (conv(handed_out), (), "f32", "output of the graph"),
    "another operator": (conv(lambda net, y: net.op("Selu", [y])), (), "f32", "Selu"),
    "a Max of three": (conv(lambda net, y: net.op("Max", [y, "x", "x"])), (), "f32", "Max"),
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


def float16_weight(net: Quantized) -> str:
    parameters = [net.const(np.full((), 0.05), dtype=np.float16), net.const(np.zeros(()), dtype=np.int8)]
    quantized = net.op("QuantizeLinear", [net.const(np.ones((4, 4, 3, 3)), dtype=np.float16), *parameters])
    return net.dq(quantized, np.int8)


def in_type(to: int, epilogue: Callable[[Quantized, str], str] = lambda net, y: y) -> onnx.ModelProto:
    """A Conv that computes in a type, with a TypeCast to float32 before its Quantize."""
    return conv(
        epilogue, src=lambda net, x: cast(net, net.pair(x), to), bias=None,
        weight=lambda net: cast(net, net.dq(net.int8_weight(), np.int8), to),
        dst=lambda net, y: net.pair(cast(net, y, TensorProto.FLOAT)),
    )  # fmt: skip


def of_other_form(*, op_type: str = "Conv", inputs: int = 3) -> onnx.ModelProto:
    model = conv()
    node = next(n for n in model.graph.node if n.op_type == "Conv")
    node.op_type = op_type
    del node.input[inputs:]
    return model


BROKEN: list[tuple[onnx.ModelProto, Clause | list[Clause]]] = [
    (conv(src=lambda net, x: x), Clause.SRC_CONVERSION),
    (conv(src=lambda net, x: net.op("Relu", [net.pair(x)])), Clause.SRC_CONVERSION),
    (conv(src=lambda net, x: net.pair(x, np.uint16)), Clause.SRC_TYPE),
    (conv(weight=lambda net: net.weight((4, 4, 3, 3))), Clause.WEIGHTS_CONVERSION),
    (conv(weight=lambda net: net.dq(net.op("Clip", [net.int8_weight()]), np.int8)), Clause.WEIGHTS_CONVERSION),
    (conv(weight=lambda net: net.dq(net.int8_weight(np.uint8))), Clause.WEIGHTS_TYPE),
    (conv(weight=lambda net: net.dq(net.int8_weight(np.int16), np.int16)), Clause.WEIGHTS_TYPE),
    (conv(weight=lambda net: net.pair(net.weight((4, 4, 3, 3)), np.uint8)), Clause.WEIGHTS_TYPE),
    (conv(weight=float16_weight), Clause.WEIGHTS_TYPE),
    (conv(bias=int32_bias), Clause.BIAS_CONVERSION),
    (conv(bias=lambda net: net.const(np.zeros(4), dtype=np.float64)), Clause.BIAS_TYPE),
    (conv(lambda net, y: bias_add(net, FOUR(net, y)), bias=None), Clause.EPILOGUE),
    (conv(dst=lambda net, y: net.pair(y, np.uint16)), Clause.DST_TYPE),
    (conv(dst=lambda net, y: cast(net, y, TensorProto.DOUBLE)), Clause.DST_TYPE),
    (conv(lambda net, y: FOUR(net, FOUR(net, y)), src=lambda net, x: net.pair(x, np.int16), bias=int32_bias,
          weight=lambda net: net.weight((4, 4, 3, 3)), dst=lambda net, y: net.pair(y, np.int16)),
     [Clause.SRC_TYPE, Clause.WEIGHTS_CONVERSION, Clause.BIAS_CONVERSION, Clause.EPILOGUE, Clause.DST_TYPE]),
    (in_type(TensorProto.FLOAT16), Clause.DST_CONVERSION),
    (of_other_form(op_type="QLinearConv"), Clause.CONVOLUTION),
    (of_other_form(inputs=1), Clause.CONVOLUTION),
]  # fmt: skip


@pytest.mark.parametrize(("model", "clause"), BROKEN)
def test_broken_clauses(model: onnx.ModelProto, clause: Clause | list[Clause]):
    found = read(model)
    assert [b.clause for b in found.broken] == (clause if isinstance(clause, list) else [clause])
    assert not found.matches


def test_types_that_the_text_has():
    assert read(conv(src=lambda net, x: net.pair(x, np.int8))).src == "s8"
    quantized = read(conv(weight=lambda net: net.pair(net.weight((4, 4, 3, 3)), np.int8)))
    assert (quantized.matches, quantized.weights) == (True, "f32")
    other = read(in_type(TensorProto.BFLOAT16, lambda net, y: bias_add(net, y, cast=TensorProto.BFLOAT16)))
    assert (other.matches, other.dst, other.epilogue) == (True, "u8", ("BiasAdd",))
    casts = read(conv(
        src=lambda net, x: cast(net, net.pair(x)), weight=lambda net: cast(net, net.dq(net.int8_weight(), np.int8)),
        bias=lambda net: cast(net, float_bias(net)), dst=lambda net, y: y,
    ))  # fmt: skip
    assert casts.matches
    assert (casts.src, casts.weights, casts.bias, casts.dst) == ("u8", "s8", "f32", "bf16")


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
    assert (read(conv()).node, read(conv()).pattern) == ("conv", "u8 * s8 + f32 -> u8")
    worse = verify_patterns(conv(src=lambda net, x: x))
    assert not worse.conforms
    assert "src-conversion 1x" in worse.verdict()
    assert worse.to_dict()["convs"][0]["broken"][0]["clause"] == "src-conversion"


def test_convs_of_bodies_are_read_too():
    net = Net.over(SHAPE, opset=20)
    bodies = {f"{name}_branch": conv().graph for name in ("then", "else")}
    for body in bodies.values():
        del body.input[:]
    net.op("If", [net.input("flag", [], TensorProto.BOOL)], name="if", out="y", **bodies)
    model = helper.make_model(net.graph(), opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    assert {c.graph for c in verify_patterns(model).convs} == {"if.then_branch", "if.else_branch"}


def test_what_is_refused():
    with pytest.raises(OptionError, match="onednn"):
        verify_patterns(conv(), target="onedn")
    with pytest.raises(ModelLoadError):
        verify_patterns(b"no model")
