"""Each spelling of a model means to the prepared model what it means to the runtime."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort.graph.canonical import sort_nodes
from kenosis_ort.rewrite import PREPARATION
from tests.graph.build import assert_same, model, ops, ready, run, value

node = helper.make_node
X = np.arange(8, dtype=np.float32).reshape(2, 2, 2)


def constant(*numbers, name=""):
    return numpy_helper.from_array(np.float32(numbers), name)


def of_opsets(*imports):
    proto = model([node("Softmax", ["x"], ["y"])], [value("x", [2, 2, 2])], [value("y", [2, 2, 2])])
    del proto.opset_import[:]
    proto.opset_import.extend(helper.make_opsetid(domain, version) for domain, version in imports)
    return proto


@pytest.mark.parametrize(
    "imports",
    [
        [("", 11), ("", 17)],
        [("", 17), ("", 11)],
        [("ai.onnx", 13), ("", 12)],
        [("", 12), ("ai.onnx", 13)],
        [("com.microsoft", 1)],
        [("", 13), ("nobody.knows", 3)],
    ],
)
def test_operator_sets_as_the_runtime_reads_them(imports):
    proto = of_opsets(*imports)
    prepared = ready(proto).proto
    assert [entry.domain for entry in prepared.opset_import].count("") == 1
    assert_same(proto, prepared, {"x": X})


@pytest.mark.parametrize("width", [2, 200])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_of_several_constants_the_one_counts_that_the_runtime_reads(width, order):
    """It reads the last of small initializers and the first of large ones, and Constant nodes before both."""
    rng = np.random.default_rng(0)

    def tensor(name=""):
        return numpy_helper.from_array(rng.normal(size=width).astype(np.float32), name)

    nodes = [
        node("Constant", [], ["c"], value=tensor(), name="first"),
        node("Constant", [], ["c"], value=tensor(), name="last"),
        *(node("Add", [a, b], [y]) for a, b, y in (("x", "k", "z"), ("z", "c", "u"), ("u", "s", "y"))),
    ]
    proto = model(nodes, [value("x", [width])], [value("y", [width])])
    several = [tensor("k") for _ in order]
    proto.graph.initializer.extend([*(several[at] for at in order), tensor("c"), tensor("s")])
    five = helper.make_sparse_tensor(constant(5, name="s"), numpy_helper.from_array(np.int64([1])), [width])
    proto.graph.sparse_initializer.append(five)
    prepared = ready(proto)
    assert_same(proto, prepared.proto, {"x": rng.normal(size=width).astype(np.float32)})
    assert sorted(t.name for t in prepared.proto.graph.initializer) == ["c", "k", "s"]
    assert any("5 constants in whose place" in note for note in prepared.notes)


@pytest.mark.parametrize("by_axis", [False, True])
@pytest.mark.parametrize("as_node", [False, True])
def test_sparse_constants_become_dense(by_axis, as_node):
    dense = np.float32([[0, 2, 0], [0, 0, 3]])
    indices = np.argwhere(dense) if by_axis else np.flatnonzero(dense)
    values = numpy_helper.from_array(dense[dense != 0], "w")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(indices.astype(np.int64)), [2, 3])
    nodes = [node("Constant", [], ["w"], sparse_value=sparse)] if as_node else []
    proto = model([*nodes, node("MatMul", ["x", "w"], ["y"])], [value("x", [1, 2])], [value("y", [1, 3])], ir=11)
    if not as_node:
        proto.graph.sparse_initializer.append(sparse)
    prepared = ready(proto).proto
    assert [t.name for t in prepared.graph.initializer] == ["w"]
    np.testing.assert_array_equal(run(prepared, {"x": np.float32([[1, 1]])})[0], [[0, 2, 3]])


def test_nodes_come_after_what_they_read():
    body = helper.make_graph(
        [node("Add", ["n", "late"], ["out"]), node("Neg", ["x"], ["n"])], "b", [], [value("out", None)]
    )
    nodes = [
        node("If", ["flag"], ["y"], then_branch=body, else_branch=body),
        node("Abs", ["mid"], ["late"]),
        node("Exp", ["x"], ["mid"]),
        node("Less", ["zero", "one"], ["flag"]),
    ]
    proto = model(nodes, [value("x", [2])], [value("y", [2])], {"zero": np.float32(0), "one": np.float32(1)})
    x = np.float32([1, 2])
    prepared = ready(proto).proto
    assert ops(prepared) == ["Exp", "Abs", "Less", "If"]
    assert [n.op_type for n in prepared.graph.node[-1].attribute[0].g.node] == ["Neg", "Add"]
    np.testing.assert_allclose(run(prepared, {"x": x})[0], np.exp(x) - x, rtol=1e-6)
    assert not sort_nodes(prepared)


def test_a_cycle_is_left_to_the_runtime():
    proto = model([node("Neg", ["b"], ["a"]), node("Neg", ["a"], ["b"])], [value("x", [2])], [value("b", [2])])
    assert not sort_nodes(proto)


def test_optional_outputs_that_nothing_reads_are_dropped():
    nodes = [
        node("MaxPool", ["x"], ["p", "where"], kernel_shape=[2]),
        node("Dropout", ["p"], ["d", "mask"]),
        node("Dropout", ["d"], ["e", "read"]),
        node("TopK", ["e", "k"], ["t", "index"]),
        node("Where", ["read", "e", "e"], ["y"]),
    ]
    proto = model(nodes, [value("x", [1, 2, 4])], [value("y", [1, 2, 3]), value("t", [1, 2, 1])], {"k": np.int64([1])})
    prepared = ready(proto).proto
    assert [len(n.output) for n in prepared.graph.node] == [1, 1, 2, 2, 1]
    assert_same(proto, prepared, {"x": np.float32([[[1, 5, 2, 3], [4, 0, 1, 2]]])})
    assert len(ready(proto, keep_values=["where"]).proto.graph.node[0].output) == 2


@pytest.mark.parametrize("opset", [9, 13])
def test_a_batch_norm_with_statistics_declared_normalizes_by_the_batch(opset):
    norm = node("BatchNormalization", ["x", *"abab"], ["y", "m", "v", "sm", "sv"])
    weights = {"a": np.float32([1, 2, 3]), "b": np.float32([3, 2, 1])}
    proto = model([norm], [value("x", [4, 3, 2])], [value("y", None)], weights, opset=opset)
    x = np.random.default_rng(0).normal(size=(4, 3, 2)).astype(np.float32)
    assert_same(proto, ready(proto, rewrites=PREPARATION).proto, {"x": x})


def function(name, inputs, outputs, nodes, *, opset=17):
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("own", 1)]
    return helper.make_function("own", name, inputs, outputs, nodes, imports)


def test_functions_are_read_by_the_models_operator_set_whatever_they_are_called():
    """A function may be called Conv; its body means what it says, in the model's operator set."""
    conv = function(
        "Conv", ["a", "b"], ["o"], [node("Softmax", ["a"], ["s"]), node("Mul", ["s", "b"], ["o"])], opset=12
    )
    outer = function("Relu", ["a"], ["o"], [node("Conv", ["a", "a"], ["c"], domain="own"), node("Neg", ["c"], ["o"])])
    nodes = [
        node("Relu", ["x"], ["r"], domain="own", name="call"),
        node("Conv", ["r", "x"], ["y"], domain="own", name="other"),
    ]
    functions = [conv, outer]
    proto = model(nodes, [value("x", [2, 2, 2])], [value("y", None)], opset=13, domains={"own": 1}, functions=functions)
    prepared = ready(proto)
    assert ops(prepared.proto) == ["Softmax", "Mul", "Neg", "Softmax", "Mul"]
    assert_same(proto, prepared.proto, {"x": X})
    names = [n.name for n in prepared.proto.graph.node]
    assert prepared.nodes["call"] == tuple(names[:3])
    assert prepared.nodes["other"] == tuple(names[3:])


def test_functions_in_bodies_and_with_bodies():
    branch = helper.make_graph([node("Abs", ["h"], ["t"])], "t", [], [value("t", None)])
    other = helper.make_graph([node("Neg", ["a"], ["e"])], "e", [], [value("e", None)])
    choose = function(
        "Choose",
        ["a", "c"],
        ["o"],
        [node("Exp", ["a"], ["h"]), node("If", ["c"], ["o"], then_branch=branch, else_branch=other)],
    )
    call = helper.make_graph([node("Choose", ["h", "c"], ["t"], domain="own")], "t", [], [value("t", None)])
    nodes = [
        node("Choose", ["x", "c"], ["h"], domain="own"),
        node("If", ["c"], ["y"], then_branch=call, else_branch=other_of("x")),
    ]
    inputs = [value("x", [2]), value("c", [], TensorProto.BOOL)]
    proto = model(nodes, inputs, [value("y", None)], domains={"own": 1}, functions=[choose])
    prepared = ready(proto).proto
    assert not prepared.functions
    for flag in (True, False):
        assert_same(proto, prepared, {"x": np.float32([-1, 2]), "c": np.array(flag)})


def other_of(name):
    return helper.make_graph([node("Neg", [name], ["e"])], "e", [], [value("e", None)])


def test_names_of_weights_are_not_taken_by_what_is_inlined():
    twice = function("Twice", ["a"], ["o"], [node("Add", ["a", "a"], ["w"]), node("Neg", ["w"], ["o"])])
    nodes = [node("Twice", ["x"], ["h"], domain="own"), node("Twice", ["h"], ["g"], domain="own")]
    nodes.append(node("Add", ["g", "w__1"], ["y"]))
    weights = {"w__1": np.float32([1, 2]), "w__2": np.float32([1, 2])}
    proto = model(nodes, [value("x", [2])], [value("y", [2])], weights, domains={"own": 1}, functions=[twice])
    assert_same(proto, ready(proto).proto, {"x": np.float32([3, 4])})


def test_outputs_of_open_size_get_no_made_up_names():
    proto = model([node("NonZero", ["x"], ["y"])], [value("x", ["n", 3])], [onnx.ValueInfoProto(name="y")])
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64
    (dim, open_dim) = ready(proto).proto.graph.output[0].type.tensor_type.shape.dim
    assert dim.dim_value == 2
    assert not open_dim.WhichOneof("value")


def referring(op_type, inputs, outputs, attribute):
    """A node whose ``alpha`` is an attribute of the function around it."""
    made = node(op_type, inputs, outputs)
    made.attribute.add(name="alpha", type=onnx.AttributeProto.FLOAT, ref_attr_name=attribute)
    return made


@pytest.mark.parametrize("given", [{}, {"slope": 0.5}, {"slope": 0.5, "bend": 0.2}, {"bend": 0.2}])
def test_attributes_of_functions_given_by_default_and_left_out(given):
    act = function(
        "Act", ["a"], ["o"], [referring("LeakyRelu", ["a"], ["l"], "slope"), referring("Elu", ["l"], ["o"], "bend")]
    )
    act.attribute.append("bend")
    branch = helper.make_graph([referring("LeakyRelu", ["a"], ["t"], "slope")], "b", [], [value("t", None)])
    choose = function("Choose", ["a", "c"], ["o"], [node("If", ["c"], ["o"], then_branch=branch, else_branch=branch)])
    for owner, slope in ((act, 0.3), (choose, 0.7)):
        owner.attribute_proto.append(helper.make_attribute("slope", slope))
    nodes = [node("Act", ["x"], ["h"], domain="own", **given), node("Choose", ["h", "c"], ["y"], domain="own")]
    inputs = [value("x", [4]), value("c", [], TensorProto.BOOL)]
    proto = model(nodes, inputs, [value("y", None)], domains={"own": 1}, functions=[act, choose])
    assert_same(proto, ready(proto).proto, {"x": np.float32([-2, -1, 1, 2]), "c": np.array(True)})
