"""The live graph: edits keep the rest of a model, names stay unique, and the protobuf is what the edits say."""

import gc

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st
from onnx import TensorProto

from kenosis_ort.graph.live import LiveGraph
from kenosis_ort.graph.outside import copy_model
from kenosis_ort.graph.view import GraphView, further_outputs, optional
from kenosis_ort.rewrite import FLOAT_FORMS, INTEGER_FORMS, PREPARATION
from tests import models
from tests.graph.build import assert_same, net, ops, ready

X = {"x": np.array([[-2.0, 0.5, 3.0]], np.float32)}


def live(body="a = Relu(x) b = Mul(a, w) y = Neg(b)", outputs="y"):
    """A net over ``x`` [1, 3] and the constant ``w`` [3]; nodes are called after operator and output."""
    declared = ", ".join(f"float[1,3] {name}" for name in outputs.split())
    text = f"(float[1,3] x) => ({declared}) {{ {body} }}"
    return LiveGraph(ready(net(text, {"w": np.array([1, 2, 3], np.float32)})).proto)


def node(graph, operator):
    return next(each for each in graph.graph if each.op_type == operator)


def put_behind(graph, node, operator):
    """Gives the output of a node to a new node that reads it."""
    value = node.outputs[0]
    graph.append_behind(node, operator, [value], output=graph.hand_over(value), nearest=True)


def written(graph):
    return [f"{n.output[0]} = {n.op_type} {' '.join(n.input)}" for n in graph.write().graph.node]


@pytest.mark.parametrize("name", models.ALL)
def test_what_nothing_changes_is_written_as_it_was_read(name):
    proto = ready(models.ALL[name]()).proto
    before = proto.SerializeToString(deterministic=True)
    graph = LiveGraph(proto)
    graph.remove(graph.append_behind(graph.nodes[-1], "Neg", [graph.nodes[-1].outputs[0]]).producer())
    assert graph.write() is proto
    assert proto.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("name", models.ALL)
def test_behind_a_row_of_rules_the_graph_is_what_a_new_reader_sees(name):
    prepared = ready(models.ALL[name](), rewrites=(*PREPARATION, *FLOAT_FORMS, *INTEGER_FORMS), keep_values=["x"])
    mine, fresh = prepared.graph, GraphView(prepared.proto)
    assert isinstance(mine, LiveGraph)
    assert not mine.has_edits
    assert all(mine.node(node.name or "") is node for node in mine.nodes)

    def seen(view, value):
        if value is None:
            return None
        readers = {(c.node.name, c.index) for c in view.consumers(value)}
        return value.name, value.type, value.shape, view.constant(value), view.is_pinned(value), readers

    for one, other in zip(mine.nodes, fresh.nodes, strict=True):
        assert (one.name, one.op_type, one.domain) == (other.name, other.op_type, other.domain)
        for mine_, fresh_ in ((one.inputs, other.inputs), (one.outputs, other.outputs)):
            assert [seen(mine, value) for value in mine_] == [seen(fresh, value) for value in fresh_]


def test_types_and_shapes_of_constants_are_known_whether_the_graph_states_them_or_not():
    graph = live()
    mul = node(graph, "Mul")
    made = graph.add_constant(np.zeros((2, 3), np.int64), "made")
    known = [(graph.element_type(value), graph.dims(value)) for value in (*mul.inputs, made)]
    assert known == [(TensorProto.FLOAT, (1, 3)), (TensorProto.FLOAT, (3,)), (TensorProto.INT64, (2, 3))]
    assert graph.element_type(None) is graph.rank(None) is optional(mul, 5) is None
    assert not further_outputs(mul)


def test_types_are_read_again_and_look_ups_begin_anew():
    graph = live()
    graph.begin(["a"])
    mul = node(graph, "Mul")
    assert (graph.node("Mul_b"), graph.largest(mul.inputs[1])) == (mul, 3)
    graph.replace_array(mul.inputs[1], np.array([7, 2, 3], np.float32))
    assert graph.largest(mul.inputs[1]) == 7
    assert (graph.is_pinned(mul.inputs[0]), graph.has_edits) == (True, True)
    new = graph.insert_before(mul, "Neg", [mul.inputs[0]])
    graph.read(mul, 0, new)
    declared = {info.name: info for info in graph.write().graph.value_info}
    declared["b"].type.tensor_type.shape.dim[1].dim_value = 5
    graph.proto.graph.value_info.remove(declared["a"])
    graph.read_types()
    assert (graph.dims(mul.outputs[0]), graph.dims(node(graph, "Relu").outputs[0])) == ((1, 5), None)
    assert graph.node("Mul_b_Neg") is new.producer() in graph.nodes
    assert (len(graph.keep_values), graph.has_edits) == (0, False)


def test_nodes_in_front_and_behind_stand_in_the_order_they_were_put():
    """One behind takes the name, the type and the readers."""
    graph = live()
    mul = node(graph, "Mul")
    first = graph.insert_before(mul, "Neg", [mul.inputs[0]])
    graph.read(mul, 0, graph.insert_before(mul, "Abs", [first]))
    put_behind(graph, mul, "Sqrt")
    graph.append_behind(mul, "Exp", [mul.outputs[0]])
    assert written(graph) == [
        "a = Relu x", "Mul_b_Neg_output = Neg a", "Mul_b_Abs_output = Abs Mul_b_Neg_output",
        "Mul_b_output = Mul Mul_b_Abs_output w", "b = Sqrt Mul_b_output", "Mul_b_Exp_output = Exp Mul_b_output",
        "y = Neg b",
    ]  # fmt: skip
    assert [n.name for n in graph.proto.graph.node][1:3] == ["Mul_b_Neg", "Mul_b_Abs"]
    assert (graph.dims(node(graph, "Sqrt").outputs[0]), graph.dims(mul.outputs[0])) == ((1, 3), None)
    onnx.checker.check_model(graph.proto)


@given(st.lists(st.sampled_from(["behind", "before", "bypass", "rewrite", "collect"]), max_size=12))
def test_rows_of_edits_that_keep_the_function_keep_the_outputs(steps):
    """Two Negs cancel out, wherever they are put; new nodes are never taken for ones that went."""
    graph = live()
    before = copy_model(graph.proto)
    for step in steps:
        graph.begin(())
        mul = node(graph, "Mul")
        if step == "behind":
            put_behind(graph, mul, "Neg")
            put_behind(graph, mul, "Neg")
        elif step == "before":
            graph.read(mul, 0, graph.insert_before(mul, "Neg", [graph.insert_before(mul, "Neg", [mul.inputs[0]])]))
        elif step == "bypass":
            graph.remove(graph.append_behind(mul, "Identity", [mul.outputs[0]]).producer())
            graph.set_attribute(node(graph, "Relu"), "unused", None)
        elif step == "rewrite":
            graph.rewrite(mul, "Mul", list(mul.inputs))
        else:
            gc.collect()
        graph.settle()
    assert_same(before, graph.write(), X)
    names = [name for n in graph.proto.graph.node for name in (n.name, *n.output)]
    assert len(names) == len(set(names))
    onnx.checker.check_model(graph.proto)


def test_a_new_value_has_no_name_of_a_body():
    body = "b (float[3] row) => (float[3] out) <float[3] k = {1, 2, 3}> { t = Mul(row, k) out = Neg(t) }"
    graph = live(f"y = Scan<num_scan_inputs = 1, body = {body}>(x)")
    assert not {graph.fresh_name(name) for name in ("row", "out", "k", "t")} & {"row", "out", "k", "t"}


def test_a_value_renamed_has_its_new_size_in_the_file():
    graph = live()
    graph.rename_grown(node(graph, "Mul").outputs[0], "b_wide", axis=1, size=16)
    infos = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in graph.write().graph.value_info}
    assert infos == {"a": [1, 3], "b_wide": [1, 16]}


def test_a_copy_is_changed_and_the_model_stays():
    source = live().proto
    before = source.SerializeToString(deterministic=True)
    graph = LiveGraph(source, copied=True)
    assert graph.write() is source
    mul = node(graph, "Mul")
    assert graph.is_read_once(mul.inputs[1])
    graph.replace_array(mul.inputs[1], np.array([4, 5, 6], np.float32))
    graph.move_before(node(graph, "Relu"), mul)
    copy = graph.write()
    assert copy is not source
    assert onnx.numpy_helper.to_array(copy.graph.initializer[0]).tolist() == [4, 5, 6]
    assert source.SerializeToString(deterministic=True) == before
    put_behind(graph, mul, "Abs")
    assert (graph.write() is copy, ops(copy)) == (True, ["Relu", "Mul", "Abs", "Neg"])
