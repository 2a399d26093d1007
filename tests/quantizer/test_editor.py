"""What edits a quantized model: lists of numbers, the order of nodes, what is taken out."""

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import helper, numpy_helper, parser
from onnxruntime.quantization.onnx_model import ONNXModel

from kenosis_ort.graph.constants import replace_nodes
from kenosis_ort.graph.outside import copy_model
from kenosis_ort.options import Stages
from kenosis_ort.quantizer.fusion_aware import FusionAwareQDQQuantizer, ModelWithBodies, sort_nodes_as_stock
from kenosis_ort.quantizer.pairs import QdqEditor
from kenosis_ort.quantizer.stock import QuantType
from tests import models
from tests.planning import prepared

KINDS = (np.float32, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.float16, np.int64)
LISTS = st.sampled_from(KINDS).flatmap(lambda kind: hnp.arrays(kind, hnp.array_shapes(min_dims=0, max_dims=2)))
MODEL = models.residual_block()


def editor_of(model: onnx.ModelProto, **weights: onnx.TensorProto) -> QdqEditor:
    types = (QuantType.QInt8, QuantType.QUInt8)
    quantizer = FusionAwareQDQQuantizer(
        copy_model(model), False, False, *types, None, [], [], [], {}, stages=Stages.none(), weights=weights
    )
    return QdqEditor(quantizer)


@given(LISTS)
def test_lists_are_stored_as_onnx_stores_them(array: npt.NDArray[Any]) -> None:
    editor = editor_of(MODEL)
    editor.add_list("numbers", array)
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    expected = helper.make_tensor("numbers", kind, array.shape, array.ravel().tolist())
    assert editor.constant("numbers").SerializeToString() == expected.SerializeToString()
    assert editor.graph.initializer[-1].name == "numbers"


def test_what_was_removed_or_is_read_no_more_goes_and_hollow_weights_are_filled() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (float[2] x, bool c) => (float[2] y) <float[2] w, float[2] body, float[2] idle> {
            [dropped] a = Relu (x)
            [kept] b = Add (a, w)
            [if] y = If (c) <then_branch = t () => (float[2] u) { u = Add (b, body) },
                             else_branch = e () => (float[2] v) { v = Relu (b) }>
        }"""
    editor = editor_of(parser.parse_model(text))
    for name in ("w", "body", "idle"):
        editor.add_constant(numpy_helper.from_array(np.zeros(2, np.float32), name))
    editor.quantizer.weights["w"] = numpy_helper.from_array(np.float32([1, 2]), "w")
    editor.read("kept", 0, "x")
    editor.rename_output("b", "b_float")
    editor.remove(editor.nodes["dropped"])
    editor.finish()
    kept = editor.graph.node[0]
    assert (kept.name, list(kept.input), list(kept.output)) == ("kept", ["x", "w"], ["b_float"])
    assert editor.makers["b_float"].name == "kept"
    held = {t.name: numpy_helper.to_array(t).tolist() for t in editor.graph.initializer}
    assert held == {"w": [1, 2], "body": [0, 0]}


@st.composite
def graphs(draw: st.DrawFn) -> onnx.ModelProto:
    """Draws a graph in any order of definition, with repeated and left-out inputs."""
    values, nodes = ["x", "z", "w0", "w1"], []
    for i in range(draw(st.integers(1, 8))):
        inputs = draw(st.lists(st.sampled_from(["", *values]), max_size=3))
        outputs = [f"v{i}", *([f"u{i}"] if draw(st.booleans()) else [])]
        nodes.append(helper.make_node("Op", inputs, outputs, name=f"n{i}", domain="test"))
        values += outputs
    inputs = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in ("z", "x", "w1")]
    constants = [numpy_helper.from_array(np.float32([0]), name) for name in ("w1", "w0")]
    return helper.make_model(helper.make_graph(draw(st.permutations(nodes)), "g", inputs, inputs[:1], constants))


@given(graphs())
def test_nodes_are_sorted_as_stock_sorts_them(model: onnx.ModelProto) -> None:
    stock = ONNXModel(copy_model(model))
    stock.topological_sort()
    sort_nodes_as_stock(model.graph)
    assert [n.SerializeToString() for n in model.graph.node] == [n.SerializeToString() for n in stock.nodes()]


def test_a_body_s_reads_count_as_the_owner_s_in_sorting_too() -> None:
    model = prepared(models.net_with_if())
    assert sorted(n.name for n in ModelWithBodies(model).input_name_to_nodes()["conv0_out"]) == ["if", "relu0"]
    replace_nodes(model.graph, list(model.graph.node)[::-1])
    sort_nodes_as_stock(model.graph)
    onnx.checker.check_model(model)


def test_a_cycle_is_an_error_that_names_a_node() -> None:
    graph = parser.parse_graph("g (float[1] x) => (float[1] b) { [first] a = Add (x, b) [second] b = Neg (a) }")
    with pytest.raises(ValueError, match="'first'"):
        sort_nodes_as_stock(graph)
