from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from kenosis_ort.rewrite import PREPARATION, fold_constants
from tests.graph.build import assert_same, model, ops, ready, value

RNG = np.random.default_rng(0)
X = {"x": RNG.normal(size=(2, 3)).astype(np.float32)}


def check(nodes, weights, expected, *, shape=(2, 3), outputs=("y",), feeds=None, **options):
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
    prepared = check(nodes, weights, ["MatMul"])
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
    check(nodes, weights, ["Reshape"])
    check(nodes, weights, ["Shape", "Gather", "Concat", "Reshape"], shape=("N", 3))


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
    check(nodes, {"s": np.int64([1000, 1000])}, ["ConstantOfShape", "ReduceSum", "Add"])


def test_half_precision_weights_that_are_cast_are_folded():
    nodes = [helper.make_node("Cast", ["w"], ["f"], to=1), helper.make_node("MatMul", ["x", "f"], ["y"])]
    check(nodes, {"w": RNG.normal(size=(3, 90000)).astype(np.float16)}, ["MatMul"])


def test_weights_stored_quantized_stay_so():
    nodes = [helper.make_node("DequantizeLinear", ["w", "s"], ["f"]), helper.make_node("MatMul", ["x", "f"], ["y"])]
    check(nodes, {"w": np.ones((3, 4), np.int8), "s": np.float32(0.5)}, ["DequantizeLinear", "MatMul"])


def test_random_and_foreign_operators_and_values_to_keep_stay():
    nodes = [
        helper.make_node("RandomNormal", [], ["n"], shape=[3]),
        helper.make_node("Mul", ["n", "z"], ["m"]),
        helper.make_node("Add", ["x", "m"], ["y"]),
    ]
    check(nodes, {"z": np.zeros(3, np.float32)}, ["RandomNormal", "Mul", "Add"])
    nodes = [helper.make_node("Neg", ["z"], ["m"]), helper.make_node("Add", ["x", "m"], ["y"])]
    check(nodes, {"z": np.zeros(3, np.float32)}, ["Neg", "Add"], keep_values=["m"])


def test_several_outputs_and_nodes_in_a_row():
    nodes = [
        helper.make_node("Split", ["w"], ["a", "b"], axis=0),
        helper.make_node("Mul", ["a", "b"], ["p"]),
        helper.make_node("Add", ["x", "p"], ["h"]),
        helper.make_node("Add", ["h", "b"], ["y"]),
    ]
    prepared = check(nodes, {"w": RNG.normal(size=(4, 3)).astype(np.float32)}, ["Add", "Add"])
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
