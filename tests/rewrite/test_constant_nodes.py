"""Nodes that compute nothing at run time: copies, constants, branches of a constant condition."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort.rewrite import PREPARATION, drop_identity, fold_constants, inline_branch
from tests.graph.build import assert_same, model, ops, ready, value

X = {"x": np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)}


def dropped(proto, **options):
    return ready(proto, rewrites=[drop_identity], **options)


def chain(*steps, outputs=("y",), weights=None):
    nodes = [helper.make_node(op, [*inputs], [output], name=f"n{i}") for i, (op, inputs, output) in enumerate(steps)]
    return model(nodes, [value("x", [2, 3])], [value(name, [2, 3]) for name in outputs], weights)


def check(proto, expected, **options):
    prepared = dropped(proto, **options)
    assert ops(prepared.proto) == expected
    assert_same(proto, prepared.proto, X, rtol=0)
    return prepared


def test_copies_inside_the_graph_go():
    proto = chain(("Identity", ["x"], "a"), ("Relu", ["a"], "b"), ("Identity", ["b"], "c"), ("Neg", ["c"], "y"))
    prepared = check(proto, ["Relu", "Neg"])
    assert prepared.nodes == {"n0": (), "n2": ()}


def test_the_producer_takes_over_an_outputs_name():
    check(chain(("Relu", ["x"], "a"), ("Identity", ["a"], "b"), ("Identity", ["b"], "y")), ["Relu"])


def test_an_output_that_only_copies_a_needed_value_stays():
    proto = chain(("Relu", ["x"], "a"), ("Identity", ["a"], "y"), ("Neg", ["a"], "z"), outputs=("y", "z"))
    check(proto, ["Relu", "Identity", "Neg"])
    check(chain(("Identity", ["x"], "y")), ["Identity"])
    check(chain(("Relu", ["x"], "a"), ("Identity", ["a"], "y"), outputs=("a", "y")), ["Relu", "Identity"])


def test_what_joins_or_adds_one_value_alone_goes():
    join = helper.make_node("Concat", ["a"], ["b"], axis=1, name="n1")
    nodes = [helper.make_node("Relu", ["x"], ["a"], name="n0"), join, helper.make_node("Neg", ["b"], ["y"], name="n2")]
    check(model(nodes, [value("x", [2, 3])], [value("y", [2, 3])]), ["Relu", "Neg"])
    check(chain(("Relu", ["x"], "a"), ("Max", ["a"], "b"), ("Sum", ["b"], "c"), ("Neg", ["c"], "y")), ["Relu", "Neg"])
    both = helper.make_node("Concat", ["x", "x"], ["y"], axis=1, name="both")
    check(model([both], [value("x", [2, 3])], [value("y", [2, 6])]), ["Concat"])
    # A cache that is handed on is read as it came.
    cache = chain(("Sum", ["x"], "a"), ("Relu", ["a"], "y"))
    assert check(cache, ["Relu"]).proto.graph.node[0].input[0] == "x"


def test_dropout_in_inference_goes_and_in_training_stays():
    weights = {"r": np.float32(0.5), "off": np.array(False), "on": np.array(True)}
    check(chain(("Dropout", ["x", "r"], "a"), ("Relu", ["a"], "y"), weights=weights), ["Relu"])
    check(chain(("Dropout", ["x", "r", "off"], "a"), ("Relu", ["a"], "y"), weights=weights), ["Relu"])
    training = chain(("Dropout", ["x", "r", "on"], "a"), ("Relu", ["a"], "y"), weights=weights)
    assert ops(dropped(training).proto) == ["Dropout", "Relu"]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["Identity", "Neg"]), st.integers(0, 9)), min_size=1, max_size=10), st.data())
def test_any_graph_of_copies_computes_the_same(steps, data):
    """Nodes read any earlier value, several values are outputs."""
    names = ["x"]
    nodes = []
    for op, at in steps:
        nodes.append(helper.make_node(op, [names[at % len(names)]], [f"v{len(names)}"]))
        names.append(f"v{len(names)}")
    outputs = data.draw(st.lists(st.sampled_from(names[1:]), min_size=1, unique=True))
    kept = data.draw(st.lists(st.sampled_from(names[1:]), max_size=2))
    proto = model(nodes, [value("x", [2, 3])], [value(name, [2, 3]) for name in outputs])
    prepared = dropped(proto, keep_values=kept).proto
    assert_same(proto, prepared, X, rtol=0)
    assert set(kept) <= {name for node in prepared.graph.node for name in node.output}
    assert all(v.type.tensor_type.elem_type == TensorProto.FLOAT for v in prepared.graph.value_info)


RNG = np.random.default_rng(0)


def check_constants(nodes, weights, expected, *, shape=(2, 3), outputs=("y",), feeds=None, **options):
    proto = model(nodes, [value("x", list(shape))], [value(name, None) for name in outputs], weights)
    prepared = ready(proto, rewrites=[fold_constants], **options)
    assert ops(prepared.proto) == expected
    assert_same(proto, prepared.proto, feeds or X, rtol=0)
    return prepared


def test_a_weight_behind_a_transpose_becomes_a_weight():
    nodes = [
        helper.make_node("Transpose", ["w"], ["t"], name="t"),
        helper.make_node("Reshape", ["t", "s"], ["r"], name="r"),
        helper.make_node("MatMul", ["x", "r"], ["y"], name="m"),
    ]
    weights = {"w": RNG.normal(size=(4, 3)).astype(np.float32), "s": np.int64([3, 4])}
    prepared = check_constants(nodes, weights, ["MatMul"])
    assert [t.name for t in prepared.proto.graph.initializer] == ["r"]
    assert prepared.nodes == {"t": (), "r": ()}


def test_a_shape_that_is_known_is_constant():
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "i"], ["d"]),
        helper.make_node("Concat", ["d", "m"], ["t"], axis=0),
        helper.make_node("Reshape", ["x", "t"], ["y"]),
    ]
    weights = {"i": np.int64([0]), "m": np.int64([-1])}
    check_constants(nodes, weights, ["Reshape"])
    check_constants(nodes, weights, ["Shape", "Gather", "Concat", "Reshape"], shape=("N", 3))


@pytest.mark.parametrize(
    ("bounds", "expected"), [({}, [2, 3]), ({"start": 1}, [3]), ({"start": -2, "end": -1}, [2]), ({"end": 9}, [2, 3])]
)
def test_part_of_a_shape(bounds, expected):
    nodes = [helper.make_node("Shape", ["x"], ["s"], **bounds), helper.make_node("Cast", ["s"], ["y"], to=1)]
    proto = model(nodes, [value("x", [2, 3])], [value("y", None)])
    prepared = ready(proto, rewrites=[fold_constants]).proto
    assert_same(proto, prepared, X)
    assert ops(prepared) == ["Cast"]  # what is an output stays a node


def test_large_results_stay_nodes():
    nodes = [
        helper.make_node("ConstantOfShape", ["s"], ["c"]),
        helper.make_node("ReduceSum", ["c"], ["r"]),
        helper.make_node("Add", ["x", "r"], ["y"]),
    ]
    check_constants(nodes, {"s": np.int64([1000, 1000])}, ["ConstantOfShape", "ReduceSum", "Add"])


def test_half_precision_weights_that_are_cast_are_folded():
    nodes = [helper.make_node("Cast", ["w"], ["f"], to=1), helper.make_node("MatMul", ["x", "f"], ["y"])]
    check_constants(nodes, {"w": RNG.normal(size=(3, 90000)).astype(np.float16)}, ["MatMul"])


def test_weights_stored_quantized_stay_so():
    nodes = [helper.make_node("DequantizeLinear", ["w", "s"], ["f"]), helper.make_node("MatMul", ["x", "f"], ["y"])]
    check_constants(nodes, {"w": np.ones((3, 4), np.int8), "s": np.float32(0.5)}, ["DequantizeLinear", "MatMul"])


def test_random_and_foreign_operators_and_values_to_keep_stay():
    nodes = [
        helper.make_node("RandomNormal", [], ["n"], shape=[3]),
        helper.make_node("Mul", ["n", "z"], ["m"]),
        helper.make_node("Add", ["x", "m"], ["y"]),
    ]
    check_constants(nodes, {"z": np.zeros(3, np.float32)}, ["RandomNormal", "Mul", "Add"])
    nodes = [helper.make_node("Neg", ["z"], ["m"]), helper.make_node("Add", ["x", "m"], ["y"])]
    check_constants(nodes, {"z": np.zeros(3, np.float32)}, ["Neg", "Add"], keep_values=["m"])


def test_several_outputs_and_nodes_in_a_row():
    nodes = [
        helper.make_node("Split", ["w"], ["a", "b"], axis=0),
        helper.make_node("Mul", ["a", "b"], ["p"]),
        helper.make_node("Add", ["x", "p"], ["h"]),
        helper.make_node("Add", ["h", "b"], ["y"]),
    ]
    prepared = check_constants(nodes, {"w": RNG.normal(size=(4, 3)).astype(np.float32)}, ["Add", "Add"])
    assert {t.name for t in prepared.proto.graph.initializer} == {"p", "b"}


def test_a_node_that_the_runtime_refuses_stops_nothing():
    nodes = [
        helper.make_node("Gather", ["c", "i"], ["g"]),  # out of range: fails when run
        helper.make_node("If", ["f"], ["y"], then_branch=_branch("x"), else_branch=_branch("g")),
    ]
    proto = model(
        nodes,
        [value("x", [2, 3])],
        [value("y", None)],
        {"c": np.ones(3, np.float32), "i": np.int64([7]), "f": np.array(True)},
    )
    assert ops(ready(proto, rewrites=[fold_constants]).proto) == ["Gather", "If"]


def _branch(name):
    return helper.make_graph([helper.make_node("Identity", [name], ["t"])], "t", [], [value("t", None)])


def test_all_preparation_rewrites_together():
    nodes = [
        helper.make_node("Identity", ["w"], ["i"]),
        helper.make_node("Transpose", ["i"], ["t"]),
        helper.make_node("Gemm", ["x", "t", "d"], ["h"], beta=0.5),
        helper.make_node("Dropout", ["h"], ["e"]),
        helper.make_node("BatchNormalization", ["e", "g", "b", "m", "v"], ["n"]),
        helper.make_node("Identity", ["n"], ["y"]),
    ]
    weights = {k: RNG.uniform(0.5, 1, 4).astype(np.float32) for k in "gbmvd"}
    weights["w"] = RNG.normal(size=(4, 3)).astype(np.float32)
    proto = model(nodes, [value("x", [2, 3])], [value("y", [2, 4])], weights)
    prepared = ready(proto, rewrites=PREPARATION).proto
    assert ops(prepared) == ["Gemm"]
    assert_same(proto, prepared, X)
    assert all(t.data_type == TensorProto.FLOAT for t in prepared.graph.initializer)


BRANCH_X = np.random.default_rng(0).normal(size=(2, 1, 4)).astype(np.float32)


def branch(tag: str, *steps: tuple[str, list[str], str], weights: dict[str, np.ndarray] | None = None):
    """Returns a body; its last step writes its output."""
    nodes = [helper.make_node(op, inputs, [out], name=f"{tag}_{out}") for op, inputs, out in steps]
    stored = [numpy_helper.from_array(a, n) for n, a in (weights or {}).items()]
    return helper.make_graph(nodes, tag, [], [value(steps[-1][2], None)], stored)


def net(condition, then, other, *more, weights=None, x=("N", 1, 4)):
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], name="relu"),
        *condition,
        helper.make_node("If", ["c"], ["i"], name="if", then_branch=then, else_branch=other),
        *more,
        helper.make_node("Neg", ["i"], ["y"], name="neg"),
    ]
    return model(nodes, [value("x", list(x))], [value("y", None)], weights)


def static(proto):
    return ready(proto, rewrites=PREPARATION)


@settings(max_examples=20, deadline=None)
@given(st.booleans(), st.booleans())
def test_the_branch_of_a_constant_condition_takes_the_place(taken: bool, scalar: bool) -> None:
    then = branch("t", ("Mul", ["r", "tw"], "tm"), ("Add", ["tm", "x"], "ty"), weights={"tw": np.float32([[2.0]])})
    other = branch("e", ("Exp", ["r"], "ey"))
    proto = net([], then, other, weights={"c": np.array(taken) if scalar else np.array([taken])})
    result = static(proto)
    assert ops(result.proto) == (["Relu", "Mul", "Add", "Neg"] if taken else ["Relu", "Exp", "Neg"])
    assert_same(proto, result.proto, {"x": BRANCH_X}, rtol=0)
    assert result.nodes["if"] == ()
    assert any("constant condition" in note for note in result.notes)


@pytest.mark.parametrize("known", [True, False])
def test_a_condition_on_one_known_dimension(known: bool) -> None:
    """As exporters write a Squeeze: the batch is open, the squeezed dimension is known."""
    shape = helper.make_node("Shape", ["r"], ["s"], name="shape")
    size = helper.make_node("Gather", ["s", "one"], ["d"], name="gather")
    equal = helper.make_node("Equal", ["d", "one"], ["c"], name="equal")
    then = branch("t", ("Squeeze", ["r", "one_axis"], "ty"))
    other = branch("e", ("Identity", ["r"], "ey"))
    weights = {"one": np.array(1), "one_axis": np.array([1])}
    proto = net([shape, size, equal], then, other, weights=weights, x=("N", 1 if known else "C", 4))
    result = static(proto).proto
    assert ("If" in ops(result)) is not known
    assert_same(proto, result, {"x": BRANCH_X}, rtol=0)


def test_a_condition_on_the_rank_and_one_behind_it() -> None:
    """The first branch settles the rank that the second condition asks for."""

    def asks(source: str, tag: str, rank: int):
        return [
            helper.make_node("Shape", [source], [f"{tag}s"], name=f"{tag}shape"),
            helper.make_node("Size", [f"{tag}s"], [f"{tag}n"], name=f"{tag}size"),
            helper.make_node("Equal", [f"{tag}n", f"rank{rank}"], [f"{tag}c"], name=f"{tag}equal"),
        ]

    def choice(source: str, tag: str, output: str):
        then = branch(f"{tag}t", ("Squeeze", [source, "axis"], f"{tag}ty"))
        other = branch(f"{tag}e", ("Identity", [source], f"{tag}ey"))
        return helper.make_node("If", [f"{tag}c"], [output], name=f"{tag}if", then_branch=then, else_branch=other)

    nodes = [*asks("x", "a", 3), choice("x", "a", "p"), *asks("p", "b", 2), choice("p", "b", "q")]
    nodes.append(helper.make_node("Relu", ["q"], ["y"], name="relu"))
    weights = {"rank2": np.array(2), "rank3": np.array(3), "axis": np.array([1])}
    proto = model(nodes, [value("x", ["N", 1, 1])], [value("y", None)], weights)
    result = static(proto).proto
    assert "If" not in ops(result)
    assert_same(proto, result, {"x": BRANCH_X[:, :, :1]}, rtol=0)


def test_names_that_other_bodies_use_as_well() -> None:
    def twin(tag: str, op: str):
        return branch(tag, ("Mul", ["r", "w"], "m"), (op, ["m"], "o"), weights={"w": np.float32([3.0])})

    second = helper.make_node(
        "If", ["open"], ["j"], name="second", then_branch=twin("c", "Neg"), else_branch=twin("d", "Exp")
    )
    proto = net([], twin("a", "Tanh"), twin("b", "Exp"), second, weights={"c": np.array(True)})
    proto.graph.input.append(value("open", [], TensorProto.BOOL))
    proto.graph.output.append(value("j", None))
    result = static(proto).proto
    assert ops(result).count("If") == 1
    assert_same(proto, result, {"x": BRANCH_X, "open": np.array(False)}, rtol=0)


def test_an_output_that_is_a_constant_of_the_branch_or_unread() -> None:
    constant = helper.make_node("Constant", [], ["k"], name="k", value=numpy_helper.from_array(np.float32([5.0])))
    then = helper.make_graph([constant], "t", [], [value("k", None)])
    proto = net([], then, branch("e", ("Exp", ["r"], "ey")), weights={"c": np.array(True)})
    assert_same(proto, static(proto).proto, {"x": BRANCH_X}, rtol=0)


def test_open_conditions_and_overridable_ones_stay() -> None:
    branches = branch("t", ("Exp", ["r"], "ty")), branch("e", ("Neg", ["r"], "ey"))
    proto = net([], *branches)
    proto.graph.input.append(value("c", [], onnx.TensorProto.BOOL))
    assert inline_branch(ready(proto).proto).notes == ()
    proto.graph.initializer.append(numpy_helper.from_array(np.array(True), "c"))
    assert inline_branch(ready(proto, keep_inputs=["c"]).proto).notes == ()
