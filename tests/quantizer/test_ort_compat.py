"""The indexed model against stock's own class, call for call, on random graphs; and the patch around it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import base_quantizer, qdq_quantizer, quant_utils
from onnxruntime.quantization.onnx_model import ONNXModel

from kenosis_ort.graph.outside import copy_model
from kenosis_ort.graph.walk import captured_names
from kenosis_ort.quantizer import _ort_compat
from kenosis_ort.quantizer._ort_compat import IndexedONNXModel, linear_time
from tests import models
from tests.planning import prepared

ANY = settings(deadline=None)


@st.composite
def graphs(draw: st.DrawFn) -> onnx.ModelProto:
    """Draws a graph of Adds and Negs in random order of definition, with unused initializers and repeated reads."""
    values = ["x", "z", "w0", "w1", "unused"]
    nodes = []
    for i in range(draw(st.integers(1, 8))):
        count = draw(st.integers(1, 3))
        inputs = [draw(st.sampled_from(values)) for _ in range(count)]
        if draw(st.booleans()):
            inputs.insert(draw(st.integers(0, count)), "")
        outputs = [f"v{i}"] + ([f"u{i}"] if draw(st.booleans()) else [])
        nodes.append(helper.make_node("Op", inputs, outputs, name=f"n{i}", domain="test"))
        values += outputs
    nodes = draw(st.permutations(nodes))
    names = ["w0", "w1", "unused", *(["w0"] if draw(st.booleans()) else [])]
    initializers = [
        numpy_helper.from_array(np.array([float(i)], np.float32), n) for i, n in enumerate(dict.fromkeys(names))
    ]
    info = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, [1])
        for n in ("x", "z", *(["w1"] if draw(st.booleans()) else []))
    ]
    out = [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, [1])]
    graph = helper.make_graph(nodes, "g", info, out, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("test", 1)])


NAMES = st.sampled_from(["x", "z", "w0", "w1", "unused", "v0", "v1", "v2", "v3", "u1", "fresh"])
NODES = st.sampled_from([f"n{i}" for i in range(8)])


def _replace_inputs(m: Any, draw: Any) -> None:
    m.replace_input_of_all_nodes(draw[0], draw[1])


def _replace_some(m: Any, draw: Any) -> None:
    m.replace_input_of_nodes(draw[0], draw[1], {draw[2], "n0"})


def _replace_outputs(m: Any, draw: Any) -> None:
    m.replace_output_of_all_nodes(draw[0], f"{draw[0]}_renamed")


def _remove_node(m: Any, draw: Any) -> None:
    m.remove_nodes([n for n in m.nodes() if n.name == draw[2]])


def _add_node(m: Any, draw: Any) -> None:
    m.add_nodes([helper.make_node("Op", [draw[0]], [f"{draw[1]}_new"], name=f"new_{draw[2]}", domain="test")])


def _add_initializer(m: Any, draw: Any) -> None:
    m.add_initializer(numpy_helper.from_array(np.array([9.0], np.float32), draw[0]))


def _remove_initializer(m: Any, draw: Any) -> None:
    found = m.get_initializer(draw[0])
    if found is not None:
        m.remove_initializer(found)


STEPS: dict[str, Callable[[Any, Any], None]] = {
    "replace_inputs": _replace_inputs,
    "replace_some": _replace_some,
    "replace_outputs": _replace_outputs,
    "remove_node": _remove_node,
    "add_node": _add_node,
    "add_initializer": _add_initializer,
    "remove_initializer": _remove_initializer,
}


def same(stock: ONNXModel, ours: IndexedONNXModel) -> None:
    ours.flush()
    assert [n.SerializeToString() for n in ours.nodes()] == [n.SerializeToString() for n in stock.nodes()]
    assert [i.name for i in ours.model.graph.initializer] == [i.name for i in stock.initializer()]
    assert [i.name for i in ours.initializer()] == [i.name for i in stock.initializer()]
    assert [v.name for v in ours.model.graph.input] == [v.name for v in stock.model.graph.input]

    def names(index: dict[str, Any]) -> dict[str, list[str]]:
        return {k: sorted(n.name for n in v) for k, v in index.items() if k and v}

    assert names(ours.input_name_to_nodes()) == names(stock.input_name_to_nodes())
    assert {k: n.name for k, n in ours.output_name_to_node().items()} == {
        k: n.name for k, n in stock.output_name_to_node().items() if k
    }
    for name in ("w0", "w1", "unused", "fresh", "x"):
        assert (ours.get_initializer(name) is None) == (stock.get_initializer(name) is None)
    assert ours.get_initializer_name_set() == set(stock.get_initializer_name_set())


@ANY
@given(graphs(), st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.tuples(NAMES, NAMES, NODES)), max_size=6))
def test_any_sequence_of_edits_leaves_what_stock_leaves(
    model: onnx.ModelProto, steps: list[tuple[str, tuple[str, str, str]]]
) -> None:
    stock, ours = ONNXModel(copy_model(model)), IndexedONNXModel(copy_model(model))
    same(stock, ours)
    for name, drawn in steps:
        for m in (stock, ours):
            STEPS[name](m, drawn)
        same(stock, ours)


@ANY
@given(graphs())
def test_cleaning_drops_what_stock_drops(model: onnx.ModelProto) -> None:
    stock, ours = ONNXModel(copy_model(model)), IndexedONNXModel(copy_model(model))
    stock.clean_initializers()
    ours.clean_initializers()
    same(stock, ours)


@ANY
@given(graphs())
def test_sorting_gives_the_order_that_stock_gives(model: onnx.ModelProto) -> None:
    stock, ours = ONNXModel(copy_model(model)), IndexedONNXModel(copy_model(model))
    try:
        stock.topological_sort()
    except (AssertionError, RuntimeError):
        with pytest.raises(ValueError, match="not a DAG"):
            ours.topological_sort()
        return
    ours.topological_sort()
    same(stock, ours)


@pytest.mark.parametrize("name", models.ALL)
def test_sorting_a_whole_model(name: str) -> None:
    proto = prepared(models.ALL[name]())
    nodes = list(proto.graph.node)
    del proto.graph.node[:]
    proto.graph.node.extend(reversed(nodes))
    ours = IndexedONNXModel(copy_model(proto))
    ours.topological_sort()
    onnx.checker.check_model(ours.model)
    if name != "net_with_if":  # stock does not know that a body's owner depends on what the body reads
        stock = ONNXModel(copy_model(proto))
        stock.topological_sort()
        assert [n.name for n in ours.nodes()] == [n.name for n in stock.nodes()]


def test_a_cycle_is_an_error_that_names_a_node() -> None:
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("Neg", ["b"], ["a"], name="first"), helper.make_node("Neg", ["a"], ["b"], name="second")],
            "g", [], [helper.make_tensor_value_info("b", TensorProto.FLOAT, [1])],
        )
    )  # fmt: skip
    with pytest.raises(ValueError, match="'first'"):
        IndexedONNXModel(model).topological_sort()


def test_rename_edge_moves_one_input_of_one_node() -> None:
    nodes = [
        helper.make_node("Add", ["x", "x"], ["y"], name="twice"),
        helper.make_node("Neg", ["x"], ["z"], name="once"),
    ]
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1]) for n in ("x", "w", "y", "z")]
    m = IndexedONNXModel(helper.make_model(helper.make_graph(nodes, "g", info[:2], info[2:])))
    m.rename_edge(m.nodes()[0], 1, "w")
    assert list(m.nodes()[0].input) == ["x", "w"]
    assert sorted(n.name for n in m.input_name_to_nodes()["x"]) == ["once", "twice"]
    assert [n.name for n in m.input_name_to_nodes()["w"]] == ["twice"]


# ---- bodies -----------------------------------------------------------------------------------------------------


def test_a_body_s_reads_count_as_the_owner_s() -> None:
    m = IndexedONNXModel(prepared(models.net_with_if()))
    assert sorted(n.name for n in m.input_name_to_nodes()["conv0_out"]) == ["if", "relu0"]


def test_captures_at_depth_and_shadowed_names() -> None:
    def graph(name: str, nodes: list[onnx.NodeProto], out: str) -> onnx.GraphProto:
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(out, TensorProto.FLOAT, None)])

    inner = graph("inner", [helper.make_node("Add", ["deep", "local"], ["i"])], "i")
    innermost = helper.make_node("If", ["flag"], ["j"], then_branch=inner, else_branch=inner)
    outer = graph("outer", [helper.make_node("Neg", ["near"], ["local"]), innermost], "j")
    node = helper.make_node("If", ["cond"], ["y"], then_branch=outer, else_branch=graph("pass", [], "straight"))
    assert set(captured_names(node)) == {"deep", "near", "flag", "straight"}


def test_initializers_that_only_a_body_reads_stay() -> None:
    model = prepared(models.net_with_if())
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "then_branch":
                attribute.g.node[0].op_type = "Add"
                attribute.g.node[0].input.append("bodys")
                attribute.g.initializer.append(numpy_helper.from_array(np.float32(0), "idle"))
    model.graph.initializer.append(numpy_helper.from_array(np.float32(1), "bodys"))
    model.graph.initializer.append(numpy_helper.from_array(np.float32(1), "idle_too"))
    m = IndexedONNXModel(model)
    m.clean_initializers()
    names = m.get_initializer_name_set()
    assert "bodys" in names
    assert "idle_too" not in names
    bodies = [a.g for n in m.nodes() for a in n.attribute if a.name == "then_branch"]
    assert [len(g.initializer) for g in bodies] == [0]


# ---- the patch --------------------------------------------------------------------------------------------------

PATCHED = _ort_compat._LOOKUP_MODULES


def is_stock() -> bool:
    return base_quantizer.ONNXModel is ONNXModel and all(m.find_by_name is quant_utils.find_by_name for m in PATCHED)


def test_stock_is_patched_inside_and_restored_after() -> None:
    assert is_stock()
    with linear_time():
        assert base_quantizer.ONNXModel is IndexedONNXModel
        assert all(m.find_by_name is _ort_compat._find_by_name for m in PATCHED)
    assert is_stock()


def test_stock_is_restored_after_an_error() -> None:
    with pytest.raises(KeyError), linear_time():
        raise KeyError("inside")
    assert is_stock()


def test_a_stock_that_looks_different_is_left_alone_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def other(name: str, items: Any) -> None:
        return None

    monkeypatch.setattr(qdq_quantizer, "find_by_name", other)
    with caplog.at_level(logging.WARNING), linear_time():
        assert base_quantizer.ONNXModel is ONNXModel
        assert qdq_quantizer.find_by_name is other
    assert qdq_quantizer.find_by_name is other
    assert "slow" in caplog.text


def test_only_one_thread_patches_at_a_time() -> None:
    """A second one waits; it must not take the first one's patch for stock."""
    entered, seen = threading.Event(), []

    def second() -> None:
        entered.set()
        with linear_time():
            seen.append(base_quantizer.ONNXModel is IndexedONNXModel)

    with linear_time():
        thread = threading.Thread(target=second)
        thread.start()
        entered.wait(5)
        assert seen == []
    thread.join(5)
    assert seen == [True]
    assert is_stock()


def test_nested_use_in_one_thread_is_harmless() -> None:
    with linear_time(), linear_time():
        assert base_quantizer.ONNXModel is IndexedONNXModel
    assert is_stock()


def test_look_up_in_lists_is_still_stocks() -> None:
    items = [numpy_helper.from_array(np.float32(0), n) for n in "ab"]
    assert _ort_compat._find_by_name("b", items) is items[1]
    assert _ort_compat._find_by_name("c", items) is None
    indexed = _ort_compat.Initializers(items)
    assert _ort_compat._find_by_name("b", indexed) is items[1]
    assert (len(indexed), [i.name for i in indexed]) == (2, ["a", "b"])


CHANGES = st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 99)), max_size=8)


@ANY
@given(CHANGES, CHANGES)
def test_flush_writes_the_initializers_in_order_whatever_was_put_and_removed(
    first: list[tuple[bool, int, int]], second: list[tuple[bool, int, int]]
) -> None:
    model = onnx.ModelProto()
    model.graph.initializer.extend(_tensor(i, -i) for i in (0, 1, 2, 3))
    indexed, expected = IndexedONNXModel(model), {f"w{i}": -i for i in (0, 1, 2, 3)}
    for changes in (first, second):
        for put, i, value in changes:
            if put:
                indexed.initializer_extend([_tensor(i, value)])
                expected[f"w{i}"] = value
            else:
                indexed.remove_initializers([_tensor(i, value)])
                expected.pop(f"w{i}", None)
        indexed.flush()
        assert [(t.name, t.int64_data[0]) for t in model.graph.initializer] == list(expected.items())
        assert {t.name: t.int64_data[0] for t in indexed.initializer()} == expected


def _tensor(i: int, value: int) -> onnx.TensorProto:
    return onnx.TensorProto(name=f"w{i}", data_type=TensorProto.INT64, int64_data=[value], dims=[1])
