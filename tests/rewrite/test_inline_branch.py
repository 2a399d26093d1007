from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort.rewrite import PREPARATION, inline_branch
from tests.graph.build import assert_same, model, ops, ready, value

X = np.random.default_rng(0).normal(size=(2, 1, 4)).astype(np.float32)


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
    assert_same(proto, result.proto, {"x": X}, rtol=0)
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
    assert_same(proto, result, {"x": X}, rtol=0)


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
    assert_same(proto, result, {"x": X[:, :, :1]}, rtol=0)


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
    assert_same(proto, result, {"x": X, "open": np.array(False)}, rtol=0)


def test_an_output_that_is_a_constant_of_the_branch_or_unread() -> None:
    constant = helper.make_node("Constant", [], ["k"], name="k", value=numpy_helper.from_array(np.float32([5.0])))
    then = helper.make_graph([constant], "t", [], [value("k", None)])
    proto = net([], then, branch("e", ("Exp", ["r"], "ey")), weights={"c": np.array(True)})
    assert_same(proto, static(proto).proto, {"x": X}, rtol=0)


def test_open_conditions_and_overridable_ones_stay() -> None:
    branches = branch("t", ("Exp", ["r"], "ty")), branch("e", ("Neg", ["r"], "ey"))
    proto = net([], *branches)
    proto.graph.input.append(value("c", [], onnx.TensorProto.BOOL))
    assert inline_branch(ready(proto).proto).notes == ()
    proto.graph.initializer.append(numpy_helper.from_array(np.array(True), "c"))
    assert inline_branch(ready(proto, keep_inputs=["c"]).proto).notes == ()
