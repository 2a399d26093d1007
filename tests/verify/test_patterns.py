"""Every clause of oneDNN's quantized Convolution patterns, kept and broken."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

import kenosis_ort
from kenosis_ort.errors import ModelLoadError, OptionError
from kenosis_ort.verify import Clause, ConvPattern, verify_patterns
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


def test_the_plain_pattern():
    found = read(conv())
    assert found.matches
    assert found.pattern == "u8 * s8 + f32 -> u8"
    assert (found.node, found.epilogue, found.ends) == ("conv", (), "")


@pytest.mark.parametrize("op", UNARY)
def test_every_unary_operation_of_the_text(op: str):
    found = read(conv(chain(op)))
    assert (found.matches, len(found.epilogue), found.dst) == (True, 1, "u8")


@pytest.mark.parametrize("op", BINARY)
def test_every_binary_operation_of_the_text(op: str):
    found = read(conv(chain(op)))
    assert (found.matches, len(found.epilogue), found.dst) == (True, 1, "u8")


def test_silu_is_two_operations():
    found = read(conv(silu))
    assert found.matches
    assert (found.epilogue, found.dst) == (("Sigmoid", "Multiply"), "u8")


def test_mish_spelled_out_is_three_operations():
    def mish(net: Quantized, y: str) -> str:
        return net.op("Mul", [net.op("Tanh", [net.op("Softplus", [y])]), y])

    assert read(conv(mish)).epilogue == ("SoftPlus", "Tanh", "Multiply")


def test_a_residual_add_is_a_binary_operation():
    def add(net: Quantized, y: str) -> str:
        return net.op("Relu", [net.op("Add", [net.pair("x"), y])])

    found = read(conv(add))
    assert (found.matches, found.epilogue, found.dst) == (True, ("Add", "ReLU"), "u8")


@given(st.lists(st.sampled_from(UNARY + BINARY), max_size=7))
def test_nought_to_four_operations(ops: Sequence[str]):
    found = read(conv(chain(*ops)))
    assert len(found.epilogue) == len(ops)
    assert [b.clause for b in found.broken] == ([Clause.EPILOGUE] if len(ops) > 4 else [])


# ---- BiasAdd ----------------------------------------------------------------------------------------------------


def bias_add(net: Quantized, y: str) -> str:
    return net.op("Add", [net.const(np.zeros((1, 4, 1, 1), np.float32)), y])


def test_a_bias_add_comes_first_and_does_not_count():
    found = read(conv(lambda net, y: chain("Relu", "Mul", "Tanh", "Abs")(net, bias_add(net, y)), bias=None))
    assert found.matches
    assert found.epilogue == ("BiasAdd", "ReLU", "Multiply", "Tanh", "Abs")


def test_behind_another_operation_it_is_a_binary_add_and_counts():
    def late(net: Quantized, y: str) -> str:
        return bias_add(net, chain("Relu", "Mul", "Tanh", "Abs")(net, y))

    found = read(conv(late, bias=None))
    assert "BiasAdd" not in found.epilogue
    assert [b.clause for b in found.broken] == [Clause.EPILOGUE]


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_bias_is_added_once(has_bias: bool):
    def twice(net: Quantized, y: str) -> str:
        return bias_add(net, bias_add(net, y))

    bias = (lambda net: net.const(np.zeros(4, np.float32))) if has_bias else None
    assert read(conv(twice, bias=bias)).epilogue == (("Add", "Add") if has_bias else ("BiasAdd", "Add"))


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 1, 6, 6), (4,), (1, 4, 6, 6)])
def test_an_add_of_another_shape_is_no_bias(shape: tuple[int, ...]):
    def add(net: Quantized, y: str) -> str:
        return net.op("Add", [y, net.const(np.zeros(shape, np.float32))])

    assert read(conv(add, bias=None)).epilogue == ("Add",)


# ---- where the epilogue ends ------------------------------------------------------------------------------------


def test_a_second_reader_ends_it_in_floating_point():
    def two(net: Quantized, y: str) -> str:
        y = net.op("Relu", [y])
        net.output(net.op("Tanh", [y]))
        return y

    found = read(conv(two))
    assert (found.matches, found.epilogue, found.dst) == (True, ("ReLU",), "f32")
    assert "2 readers" in found.ends


def test_an_output_of_the_graph_ends_it():
    def seen(net: Quantized, y: str) -> str:
        net.output(y)
        return net.op("Relu", [y])

    found = read(conv(seen))
    assert (found.epilogue, found.dst) == ((), "f32")
    assert "output of the graph" in found.ends


def test_another_operator_ends_it():
    found = read(conv(lambda net, y: net.op("Selu", [y])))
    assert (found.matches, found.epilogue, found.dst) == (True, (), "f32")
    assert "Selu" in found.ends


def test_an_operand_that_is_no_data_ends_it():
    def as_bound(net: Quantized, y: str) -> str:
        return net.op("Clip", [net.pair("x"), net.op("ReduceMin", [y], keepdims=0)])

    assert read(conv(as_bound)).ends.startswith("ReduceMin")


def test_a_quantize_between_conv_and_activation_ends_it_there():
    found = read(conv(lambda net, y: net.op("Relu", [net.pair(y)])))
    assert (found.matches, found.epilogue, found.dst) == (True, (), "u8")


def test_a_circle_of_nodes_is_left():
    model = conv(lambda net, y: net.op("Add", [y, "back"]))
    last = next(n for n in model.graph.node if n.op_type == "Add")
    relu = helper.make_node("Relu", [last.output[0]], ["back"])
    del model.graph.node[list(model.graph.node).index(last) + 1 :]
    model.graph.node.append(relu)
    assert read(model).epilogue == ("Add", "ReLU")


# ---- the clauses, broken ----------------------------------------------------------------------------------------


def test_the_source_has_to_be_dequantized():
    assert broken(conv(src=lambda net, x: x)) == [Clause.SRC_CONVERSION]
    assert broken(conv(src=lambda net, x: net.op("Relu", [net.pair(x)]))) == [Clause.SRC_CONVERSION]


def test_types_of_the_source():
    assert read(conv(src=lambda net, x: net.pair(x, np.int8))).src == "s8"
    assert broken(conv(src=lambda net, x: net.pair(x, np.uint16))) == [Clause.SRC_TYPE]


def test_the_weights_have_to_be_dequantized():
    assert broken(conv(weight=lambda net: net.weight((4, 4, 3, 3)))) == [Clause.WEIGHTS_CONVERSION]


def test_types_of_the_weights():
    assert broken(conv(weight=lambda net: net.dq(net.int8_weight(np.uint8)))) == [Clause.WEIGHTS_TYPE]


def test_float_weights_behind_a_quantize():
    found = read(conv(weight=lambda net: net.pair(net.weight((4, 4, 3, 3)), np.int8)))
    assert (found.matches, found.weights) == (True, "f32")
    assert broken(conv(weight=lambda net: net.pair(net.weight((4, 4, 3, 3)), np.uint8))) == [Clause.WEIGHTS_TYPE]


def test_a_clip_inside_the_weights_conversion():
    def clipped(net: Quantized) -> str:
        return net.dq(net.op("Clip", [net.int8_weight()]), np.int8)

    assert broken(conv(weight=clipped)) == [Clause.WEIGHTS_CONVERSION]


def test_type_casts_behind_a_dequantize():
    def cast(net: Quantized, value: str) -> str:
        return net.op("Cast", [value], to=TensorProto.BFLOAT16)

    model = conv(
        src=lambda net, x: cast(net, net.pair(x)),
        weight=lambda net: cast(net, net.dq(net.int8_weight(), np.int8)),
        bias=lambda net: cast(net, net.const(np.zeros(4, np.float32))),
        dst=lambda net, y: y,
    )
    found = read(model)
    assert found.matches
    assert (found.src, found.weights, found.bias, found.dst) == ("u8", "s8", "f32", "bf16")


def test_the_bias_is_floating_point():
    def int32(net: Quantized) -> str:
        return net.dq(net.const(np.zeros(4, np.int32), dtype=np.int32), np.int32)

    assert broken(conv(bias=int32)) == [Clause.BIAS_CONVERSION]
    assert broken(conv(bias=lambda net: net.const(np.zeros(4), dtype=np.float64))) == [Clause.BIAS_TYPE]
    assert read(conv(bias=None)).matches


def test_the_destination():
    assert read(conv(dst=lambda net, y: y)).dst == "f32"
    assert read(conv(dst=lambda net, y: net.pair(y, np.int8))).dst == "s8"
    assert broken(conv(dst=lambda net, y: net.pair(y, np.uint16))) == [Clause.DST_TYPE]
    assert read(conv(dst=lambda net, y: net.op("Cast", [y], to=TensorProto.FLOAT16))).dst == "f16"


def test_a_type_cast_before_the_quantize_is_bf16_to_f32_only():
    def cast_then_quantize(net: Quantized, y: str) -> str:
        return net.pair(net.op("Cast", [y], to=TensorProto.FLOAT))

    def in_type(to: int) -> onnx.ModelProto:
        return conv(
            src=lambda net, x: net.op("Cast", [net.pair(x)], to=to),
            weight=lambda net: net.op("Cast", [net.dq(net.int8_weight(), np.int8)], to=to),
            bias=None,
            dst=cast_then_quantize,
        )

    found = read(in_type(TensorProto.BFLOAT16))
    assert (found.matches, found.dst) == (True, "u8")
    assert broken(in_type(TensorProto.FLOAT16)) == [Clause.DST_CONVERSION]


def test_other_forms_of_a_quantized_conv():
    model = conv()
    node = next(n for n in model.graph.node if n.op_type == "Conv")
    node.op_type = "QLinearConv"
    assert broken(model) == [Clause.CONVOLUTION]
    node.op_type = "Conv"
    del node.input[1:]
    assert broken(model) == [Clause.CONVOLUTION]


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
