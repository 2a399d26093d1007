"""Under a byte budget the graph runs in parts, once, with the same result."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from kenosis_ort.calibration import CalibrationConfig, collect
from kenosis_ort.calibration.part_session import (
    ObservedModel,
    Segment,
    SessionSettings,
    constant_values,
    element_types,
)
from kenosis_ort.calibration.parts import cut, estimate_bytes
from kenosis_ort.errors import CalibrationError
from kenosis_ort.graph.walk import read_names
from tests import models
from tests.calibration.support import node_outputs, one_node_model, random_feeds

NAMES = ["residual_block", "silu_net", "two_input_detector", "transformer_block", "net_with_if", "concat_net", "mlp"]


def annotated(net: str) -> onnx.ModelProto:
    return onnx.shape_inference.infer_shapes(models.ALL[net]())


def config(budget: int, method: str = "percentile") -> CalibrationConfig:
    return CalibrationConfig(method=method, bit_exact=True, fetch_budget=budget)


@pytest.mark.parametrize("net", NAMES)
@pytest.mark.parametrize("budget", [1, 1500, 2**28])
@pytest.mark.parametrize("method", ["percentile", "minmax"])
def test_parts_give_the_same_table(net: str, budget: int, method: str) -> None:
    model = models.ALL[net]()
    samples = models.feeds(model, 2)
    names = node_outputs(model)
    whole = collect(model, samples, tensors=names, config=config(2**30, method), threads=1)
    parts = collect(model, samples, tensors=names, config=config(budget, method), threads=2 if budget == 1500 else 1)
    assert parts.tensors == whole.tensors


@pytest.mark.parametrize("net", NAMES)
@pytest.mark.parametrize("budget", [1, 200])
def test_parts_cover_each_needed_node_once(net: str, budget: int) -> None:
    model = annotated(net)
    feed = models.feeds(model, 1)[0]
    observed = [n for n in node_outputs(model) if n not in feed]
    parts = cut(model, observed, estimate_bytes(model, feed, observed), element_types(model), budget)
    assert len(parts) > 1
    assert [p.start for p in parts] == [0, *(p.end for p in parts[:-1])]
    made = set(feed)
    seen: list[str] = []
    for part in parts:
        assert set(part.inputs) <= made
        made.update(part.passed_on)
        seen += part.observed
    assert seen == observed


@pytest.mark.parametrize("budget", [1000, 5000])
def test_parts_stay_within_the_budget(budget: int) -> None:
    model = annotated("residual_block")
    feed = models.feeds(model, 1)[0]
    observed = [n for n in node_outputs(model) if n != "x"]
    sizes = estimate_bytes(model, feed, observed)
    for part in cut(model, observed, sizes, element_types(model), budget):
        held = [sizes[name] for name in part.observed]
        assert sum(held) <= budget or len(held) == 1


def test_only_what_is_observed_is_computed() -> None:
    model = models.residual_block()
    early = model.graph.node[0].output[0]
    (part,) = cut(model, [early], {early: 10}, element_types(model), 5)
    assert (part.start, part.end, part.observed, part.passed_on) == (0, 1, (early,), ())


def test_no_cut_across_a_value_without_a_tensor_type() -> None:
    tensor = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Neg", ["x"], ["a"]),
        helper.make_node("SequenceConstruct", ["a", "x"], ["s"]),
        helper.make_node("Neg", ["a"], ["b"]),
        helper.make_node("ConcatFromSequence", ["s"], ["c"], axis=0),
        helper.make_node("Neg", ["c"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "g", [tensor("x", TensorProto.FLOAT, [2])], [tensor("y", TensorProto.FLOAT, [4])])
    model = onnx.shape_inference.infer_shapes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    )
    samples = [{"x": np.array([1, -2], np.float32)}]
    whole = collect(model, samples, tensors=["a", "b", "c", "y"], config=config(2**20))
    parts = collect(model, samples, tensors=["a", "b", "c", "y"], config=config(1))
    assert whole.tensors == parts.tensors
    found = cut(model, ["a", "b", "c", "y"], dict.fromkeys("abcy", 8), element_types(model), 1)
    assert not any(part.start in (2, 3) for part in found)


def test_sizes_follow_the_feed() -> None:
    model = annotated("mlp")
    name = model.graph.node[0].output[0]
    for batch in (1, 7):
        feed = {"x": np.zeros((batch, 16), np.float32)}
        assert estimate_bytes(model, feed, [name]) == {name: batch * 32 * 4}


def test_sizes_are_measured_where_annotations_do_not_tell(caplog: Any) -> None:
    model = one_node_model(annotate=False)
    with caplog.at_level(logging.INFO, "kenosis_ort.calibration"):
        table = collect(model, random_feeds(2, (40, 50)), tensors=["y", "z"], config=config(9000))
    assert table.tensors["z"].count == 4000
    assert "2 parts" in caplog.text


def test_a_larger_feed_is_planned_anew(caplog: Any) -> None:
    samples = [*random_feeds(1, (2, 2)), *random_feeds(1, (80, 80)), *random_feeds(1, (2, 2))]
    with caplog.at_level(logging.INFO, "kenosis_ort.calibration"):
        table = collect(one_node_model(), samples, tensors=["y", "z"], config=config(9000))
    assert caplog.text.count("2 parts") == 1
    assert table.tensors["y"].count == 4 + 6400 + 4


def test_what_a_node_reads_sees_captured_values() -> None:
    model = models.net_with_if()
    node = next(n for n in model.graph.node if n.op_type == "If")
    assert set(read_names(node)) == {"flag", "conv0_out"}


def test_large_weights_go_to_a_file_that_is_removed(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = models.mlp(hidden=128)
    feeds = models.feeds(model, 1)
    with ObservedModel(model, SessionSettings(threads=1)) as observed:
        assert len(list(tmp_path.iterdir())) == 1
        name = model.graph.node[0].output[0]
        whole = observed.session([name])
        part = observed.segment(Segment(0, 1, ("x",), (name,), ()), [name], feeds[0])
        for session, feed in itertools.product((whole, part), feeds):
            assert session.run([name], feed)[0].shape == (feed["x"].shape[0], 128)
    assert not list(tmp_path.iterdir())
    broken = {"x": np.full((1, 16), np.nan, np.float32)}
    with pytest.raises(ValueError, match="NaN"):
        collect(model, [broken], tensors=[name])
    assert not list(tmp_path.iterdir())


def test_custom_operators_run_with_their_library_and_only_then() -> None:
    extensions = pytest.importorskip("onnxruntime_extensions")
    graph = helper.make_graph(
        [helper.make_node("Inverse", ["x"], ["y"], domain="ai.onnx.contrib"), helper.make_node("Neg", ["y"], ["z"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 2])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.contrib", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    samples = [{"x": np.array([[2, 0], [0, 4]], np.float32)}]
    library = extensions.get_library_path()
    for method in ("minmax", "percentile"):
        options = {"tensors": ["y", "z"], "config": CalibrationConfig(method=method)}
        with pytest.raises(ValueError, match="custom_op_libraries"):
            collect(model, samples, **options)
        table = collect(model, samples, custom_op_libraries=[library], **options)
        assert table.tensors["y"].high == 0.5


def net_of_cut_constants(*, fold: bool) -> onnx.ModelProto:
    """Resize by computed sizes, a Pad and a TopK whose amounts come from Constant nodes far in front of them."""
    tensor = helper.make_tensor_value_info
    constants = {"head": np.array([2]), "sizes": np.array([9, 7]), "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1])}
    constants |= {"zero": np.array([0]), "two": np.array([2]), "k": np.array([3]), "empty": np.array([], np.float32)}
    stored = [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()]
    nodes = [helper.make_node("Constant", [], [t.name], value=t) for t in stored] if not fold else []
    nodes += [
        helper.make_node("Mul", ["k", "head"], ["twice"]),
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Slice", ["shape", "zero", "two"], ["batch"]),
        helper.make_node("Concat", ["batch", "sizes"], ["wanted"], axis=0),
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Resize", ["a", "", "empty", "wanted"], ["b"]),
        helper.make_node("Pad", ["b", "pads"], ["c"]),
        helper.make_node("ReduceMean", ["c"], ["mean"], keepdims=0),
        helper.make_node("Sub", ["c", "mean"], ["d"]),
        helper.make_node("TopK", ["d", "twice"], ["e", "index"]),
        helper.make_node("GatherElements", ["d", "index"], ["y"], axis=3),
    ]
    inputs, outputs = [tensor("x", TensorProto.FLOAT, ["n", 2, 4, 5])], [tensor("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "g", inputs, outputs, stored if fold else [])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("annotate", [False, True])
@pytest.mark.parametrize("fold", [False, True])
def test_constants_and_ranks_outlive_a_cut(fold: bool, annotate: bool) -> None:
    model = net_of_cut_constants(fold=fold)
    model = onnx.shape_inference.infer_shapes(model) if annotate else model
    samples = random_feeds(2, (3, 2, 4, 5))
    names = [*"abcdey", "mean"]
    whole = collect(model, samples, tensors=names, config=config(2**30))
    parts = collect(model, samples, tensors=names, config=config(1))
    assert parts.tensors == whole.tensors
    types = {**element_types(model), "wanted": TensorProto.INT64, "shape": TensorProto.INT64}
    found = cut(model, names, dict.fromkeys(names, 8), {**types, **dict.fromkeys([*names, "index"], 1)}, 1)
    constants = {"head", "sizes", "pads", "zero", "two", "k", "empty", "twice"}
    assert len(found) > 3
    assert not constants.intersection(itertools.chain(*(p.inputs for p in found)))


def test_what_cannot_run_by_itself_runs_from_the_first_node_on(monkeypatch: Any, caplog: Any) -> None:
    model = annotated("residual_block")
    samples = models.feeds(model, 3)
    names = node_outputs(model)
    whole = collect(model, samples, tensors=names, config=config(2**30))
    make = ObservedModel.segment

    def refuse(self: Any, part: Segment, *args: Any, **options: Any) -> Any:
        if part.start > 1:
            raise CalibrationError("refused")
        return make(self, part, *args, **options)

    monkeypatch.setattr(ObservedModel, "segment", refuse)
    with caplog.at_level(logging.INFO, "kenosis_ort.calibration"):
        parts = collect(model, samples, tensors=names, config=config(1))
    assert parts.tensors == whole.tensors
    assert caplog.text.count("cannot run by itself") == 1


def test_random_nodes_are_no_constants() -> None:
    nodes = [helper.make_node("RandomNormal", [], ["noise"], shape=[2]), helper.make_node("Add", ["x", "noise"], ["y"])]
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", value[:1], value[1:])
    names, indices = constant_values(helper.make_model(graph))
    assert not names
    assert not indices


@pytest.mark.parametrize("budget", [1, 2**30])
def test_nodes_in_another_order_give_the_same_table(budget: int) -> None:
    model = models.residual_block()
    samples, names = models.feeds(model, 2), node_outputs(model)
    want = collect(model, samples, tensors=names, config=config(2**30))
    nodes = [*model.graph.node][::-1]
    kept = onnx.GraphProto()
    kept.node.extend(nodes)
    del model.graph.node[:]
    model.graph.node.extend(kept.node)
    before = model.SerializeToString(deterministic=True)
    assert collect(model, samples, tensors=names, config=config(budget)).tensors == want.tensors
    assert model.SerializeToString(deterministic=True) == before
