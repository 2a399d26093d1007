"""What is written: it loads, it is close to the float model, it runs as planned, and the report says so."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType

from kenosis_ort import ArrayReader, QuantizationReport, quantize_static
from kenosis_ort.errors import KenosisWarning
from kenosis_ort.flow.samples import KeepingReader
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.runtime.limits import runtime_limits
from kenosis_ort.verify import check_bias_alignment
from tests import models
from tests.flow.support import heavy, initializers, pairs, proof, quality, quantized, run, session
from tests.models import Array, Feed, Net

METHODS = ["MinMax", "Entropy", "Percentile", "Distribution"]
DIMS = {"batch": 3}


def feeds_for(net: str) -> list[Feed]:
    return models.feeds(models.ALL[net](), 6, dims=DIMS)


# ---- quality and proof ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", sorted(models.ALL))
def test_result_is_close_and_runs_as_planned(tmp_path: Path, net: str) -> None:
    model, feeds, out = models.ALL[net](), feeds_for(net), tmp_path / "out.onnx"
    report = quantized(model, out, feeds)
    assert quality(model, out, feeds) > 30
    assert [o.name for o in report.outputs] == [o.name for o in model.graph.output]
    assert all(o.sqnr_db > 30 for o in report.outputs)
    assert report.plan.integer_nodes()
    assert report.left_float() == ()
    assert proof(report).silently_quantized() == ()
    assert not any(k.weights_per_run for k in proof(report).kernels)
    assert check_bias_alignment(onnx.load(out)) == []
    assert report.warnings == ()
    assert os.listdir(tmp_path) == ["out.onnx"]


@pytest.mark.parametrize("net", sorted(models.ALL))
def test_interface_is_the_float_models(tmp_path: Path, net: str) -> None:
    model, out = models.ALL[net](), tmp_path / "out.onnx"
    quantized(model, out, feeds_for(net))
    a, b = session(model), session(out)
    for side in ("get_inputs", "get_outputs"):
        described = [[(v.name, v.type, v.shape) for v in getattr(s, side)()] for s in (a, b)]
        assert described[0] == described[1]
    onnx.checker.check_model(onnx.load(out), full_check=True)


@pytest.mark.parametrize("net", ["residual_block", "two_input_detector"])
def test_report_goes_through_json(tmp_path: Path, net: str) -> None:
    report = quantized(models.ALL[net](), tmp_path / "out.onnx")
    back = QuantizationReport.from_json(report.to_json())
    assert back.to_dict() == report.to_dict()
    assert back.plan == report.plan
    assert back.verdict() == report.verdict()
    assert [k.node for k in back.fusion.kernels] == [k.node for k in proof(report).kernels]  # type: ignore[union-attr]
    assert PlacementPlan.from_json(report.plan.to_json()) == report.plan
    assert "integer kernels" in str(report)
    assert report.calibration.samples == 4
    stages = ["load", "prepare", "plan", "rewrite", "calibrate", "check", "quantize", "verify", "evidence", "write"]
    assert list(report.seconds) == stages
    assert set(report.versions) == {"onnxruntime", "onnx", "numpy"}


def test_explain_names_rule_and_reason(tmp_path: Path) -> None:
    report = quantized(models.residual_block(), tmp_path / "out.onnx", nodes_to_exclude=["conv2"])
    assert "Conv 'conv2': float" in report.plan.explain("conv2")
    assert "excluded" in report.plan.explain("conv2")
    assert "Conv 'conv1': integer" in report.plan.explain("conv1")


def test_no_data_kept_for_the_comparison_still_counts_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Feeds too large to keep: no comparison, but the report knows how many there were."""
    monkeypatch.setattr("kenosis_ort.flow.run.KeepingReader", partial(KeepingReader, budget=0))
    report = quantized(models.residual_block(), tmp_path / "out.onnx")
    assert report.outputs == ()
    assert report.calibration.samples == 4


def test_without_verification(tmp_path: Path) -> None:
    model, out = models.residual_block(), tmp_path / "out.onnx"
    report = quantized(model, out, verify=False)
    assert report.fusion is None
    assert report.outputs == ()
    assert quality(model, out, models.feeds(model)) > 30
    assert QuantizationReport.from_json(report.to_json()).fusion is None


# ---- all the ways to ask --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("net", ["residual_block", "mlp_matmul"])
def test_calibration_methods(tmp_path: Path, method: str, net: str) -> None:
    model, out = models.ALL[net](), tmp_path / "out.onnx"
    feeds = models.feeds(model, 8, dims=DIMS)
    report = quantized(model, out, feeds, calibrate_method=CalibrationMethod[method])
    assert report.calibration.method == method.lower()
    assert quality(model, out, feeds) > (30 if method == "MinMax" else 15)
    assert report.left_float() == ()


@pytest.mark.parametrize(
    "options",
    [
        {"CalibMovingAverage": True},
        {"CalibMovingAverage": True, "CalibStridedMinMax": 2},
        {"CalibMaxIntermediateOutputs": 2},
        {"CalibTensorRangeSymmetric": True},
        {"ActivationSymmetric": True},
        {"WeightSymmetric": False},
        {"MinimumRealRange": 0.001},
        {"QDQDisableWeightAdjustForInt32Bias": True},
        {"MatMulConstBOnly": True},
    ],
    ids=lambda o: "+".join(o),
)
def test_extra_options_keep_the_plan(tmp_path: Path, options: dict[str, Any]) -> None:
    model, out = models.residual_block(), tmp_path / "out.onnx"
    feeds = models.feeds(model, 6)
    reader = ArrayReader({"x": np.concatenate([f["x"] for f in feeds])})
    report = quantize_static(model, out, reader, extra_options=options)
    assert report.plan
    assert quality(model, out, feeds) > 15
    assert report.left_float() == ()


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("weight_type", [QuantType.QInt8, QuantType.QUInt8])
@pytest.mark.parametrize("reduce_range", [False, True])
def test_weight_types(tmp_path: Path, weight_type: QuantType, per_channel: bool, reduce_range: bool) -> None:
    model, out = models.mobile_block(), tmp_path / "out.onnx"
    feeds = models.feeds(model)
    report = quantized(
        model,
        out,
        feeds,
        weight_type=weight_type,
        per_channel=per_channel,
        reduce_range=reduce_range,
        activation_type=QuantType.QUInt8,
    )
    assert quality(model, out, feeds) > 20
    held = initializers(out)
    stem = next(name.removesuffix("_quantized") for name in held if name.startswith("stem_w") and "_quantized" in name)
    assert held[f"{stem}_quantized"].dtype == (np.int8 if weight_type == QuantType.QInt8 else np.uint8)
    assert held[f"{stem}_scale"].shape == ((8,) if per_channel else ())
    assert check_bias_alignment(onnx.load(out)) == []
    if weight_type == QuantType.QInt8 or not per_channel:
        assert report.left_float() == ()


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("net", ["residual_block", "mobile_block", "mlp"])
def test_qoperator_format(tmp_path: Path, net: str, per_channel: bool) -> None:
    model, out = models.ALL[net](), tmp_path / "out.onnx"
    feeds = models.feeds(model, 6, dims=DIMS)
    report = quantized(model, out, feeds, quant_format=QuantFormat.QOperator, per_channel=per_channel)
    types = {n.op_type for n in onnx.load(out).graph.node}
    assert types & {"QLinearConv", "QGemm", "QLinearMatMul"}
    assert report.fusion is not None
    plain = quantized(model, tmp_path / "out.onnx.qdq", feeds, per_channel=per_channel)
    (tmp_path / "out.onnx.qdq").unlink()
    assert plain.fusion is not None
    assert report.plan == plain.plan
    assert report.calibration.samples == 6
    assert quality(model, out, feeds) > 20
    assert os.listdir(tmp_path) == ["out.onnx"]


# ---- files ----------------------------------------------------------------------------------------------------


def test_external_data(tmp_path: Path) -> None:
    model = models.residual_block(channels=32)
    feeds = models.feeds(model)
    source, out = tmp_path / "in" / "float.onnx", tmp_path / "out" / "int8.onnx"
    source.parent.mkdir()
    out.parent.mkdir()
    onnx.save_model(model, source, save_as_external_data=True, location="float.bin", size_threshold=0)
    report = quantized(source, out, feeds, use_external_data_format=True)
    float_bytes = sum(p.stat().st_size for p in source.parent.iterdir())
    assert 0.9 * float_bytes < report.size_before <= float_bytes
    assert sorted(os.listdir(out.parent)) == ["int8.onnx", "int8.onnx.data"]
    assert sorted(os.listdir(source.parent)) == ["float.bin", "float.onnx"]
    assert report.size_after == sum(p.stat().st_size for p in out.parent.iterdir())
    assert quality(models.residual_block(channels=32), out, feeds) > 30
    quantized(source, tmp_path / "single.onnx", feeds)
    assert run(out, feeds)[0][0].tolist() == run(tmp_path / "single.onnx", feeds)[0][0].tolist()


def test_external_data_twice_to_the_same_place(tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    for seed in (0, 1):
        model = models.residual_block(channels=32, seed=seed)
        quantized(model, out, use_external_data_format=True)
        assert quality(model, out, models.feeds(model)) > 30
    assert sorted(os.listdir(tmp_path)) == ["out.onnx", "out.onnx.data"]
    report = quantized(model, out)  # a data file of before is not counted
    assert report.size_after == out.stat().st_size


def test_over_the_float_file_itself(tmp_path: Path) -> None:
    model, path = models.residual_block(), tmp_path / "model.onnx"
    onnx.save(model, path)
    before = path.stat().st_size
    with pytest.warns(KenosisWarning, match="the float model's own file, which is replaced"):
        report = quantized(path, path)
    assert (report.size_before, report.size_after) == (before, path.stat().st_size)
    assert quality(model, path, models.feeds(model)) > 30


def test_relative_output_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = quantized(models.bn_net(), Path("out.onnx"))
    assert report.model_output == "out.onnx"
    assert os.listdir(tmp_path) == ["out.onnx"]


# ---- graphs ---------------------------------------------------------------------------------------------------


def test_several_outputs_also_inner_ones(tmp_path: Path) -> None:
    net = Net()
    x = net.conv(net.input("x", [1, 3, 8, 8]), 3, 8, name="stem", out="stem_out")
    r = net.op("Relu", [x], name="relu", out="relu_out")
    y = net.conv(r, 8, 8, name="body", out="body_out")
    for name in (x, r, y):
        net.output(name, [1, 8, 8, 8])
    net.output(net.conv(net.op("Relu", [y], name="relu2"), 8, 4, name="head", out="head_out"), [1, 4, 8, 8])
    model, out = net.model(), tmp_path / "out.onnx"
    feeds = models.feeds(model)
    report = quantized(model, out, feeds)
    assert [o.name for o in report.outputs] == ["stem_out", "relu_out", "body_out", "head_out"]
    assert all(quality(model, out, feeds, output=i) > 25 for i in range(4))
    assert report.left_float() == ()


def test_an_input_that_is_an_output(tmp_path: Path) -> None:
    net = Net()
    x = net.input("x", [1, 3, 8, 8])
    net.output(net.conv(x, 3, 4, name="conv"), [1, 4, 8, 8])
    net.output(x, [1, 3, 8, 8])
    model, out = net.model(), tmp_path / "out.onnx"
    feeds = models.feeds(model)
    quantized(model, out, feeds)
    assert np.array_equal(run(out, feeds)[0][1], feeds[0]["x"])
    assert quality(model, out, feeds) > 30


@pytest.mark.parametrize("batches", [[1, 4, 2], [5]])
def test_dynamic_batch(tmp_path: Path, batches: list[int]) -> None:
    net = Net()
    x = net.op("Relu", [net.conv(net.input("x", ["N", 3, "H", "W"]), 3, 8, name="conv0")], name="relu")
    y = net.conv(x, 8, 8, name="conv1", stride=2)
    y = net.op("Flatten", [net.op("GlobalAveragePool", [y], name="pool")], name="flatten")
    net.output(net.gemm(y, 8, 5, name="head"), ["N", 5])
    model, out = net.model(), tmp_path / "out.onnx"
    feeds = [models.feeds(model, 1, seed=b, dims={"N": b, "H": 8 + b, "W": 12})[0] for b in batches]
    report = quantized(model, out, feeds)
    others = [models.feeds(model, 1, seed=9, dims={"N": 7, "H": 16, "W": 16})[0]]
    assert run(out, others)[0][0].shape == (7, 5)
    assert quality(model, out, feeds) > 30
    assert all(heavy(report).values())


def test_unnamed_nodes(tmp_path: Path) -> None:
    model, out = models.residual_block(), tmp_path / "out.onnx"
    for node in model.graph.node:
        node.name = ""
    report = quantized(model, out)
    assert quality(model, out, models.feeds(model)) > 30
    assert len(heavy(report)) == 4
    assert all(heavy(report).values())


def loop_net() -> onnx.ModelProto:
    """A Loop that adds a quantized outer value three times."""
    net = Net()
    x = net.conv(net.input("x", [1, 3, 6, 6]), 3, 4, name="conv0", out="outer")
    r = net.op("Relu", [x], name="relu0", out="start")
    shape = [1, 4, 6, 6]
    infos = [
        helper.make_tensor_value_info("i", TensorProto.INT64, []),
        helper.make_tensor_value_info("keep", TensorProto.BOOL, []),
        helper.make_tensor_value_info("carried", TensorProto.FLOAT, shape),
    ]
    body = helper.make_graph(
        [
            helper.make_node("Add", ["carried", "outer"], ["sum"], name="body_add"),
            helper.make_node("Identity", ["keep"], ["keep_out"], name="body_keep"),
        ],
        "body",
        infos,
        [
            helper.make_tensor_value_info("keep_out", TensorProto.BOOL, []),
            helper.make_tensor_value_info("sum", TensorProto.FLOAT, shape),
        ],
    )
    trip, true = net.const(3, "trip"), net.const(np.array(True), "true", dtype=bool)
    y = net.op("Loop", [trip, true, r], name="loop", body=body)
    net.output(net.conv(y, 4, 4, name="conv1"), shape)
    return net.model()


@pytest.mark.parametrize(
    "build",
    [models.net_with_if, lambda: models.net_with_if(capture_conv=False), loop_net],
    ids=["if captures the Conv", "if captures the Relu", "loop"],
)
def test_bodies_that_read_quantized_values(tmp_path: Path, build: Any) -> None:
    model, out = build(), tmp_path / "out.onnx"
    feeds = models.feeds(model, 6)
    report = quantized(model, out, feeds)
    assert quality(model, out, feeds) > 30
    assert heavy(report) == {"conv0": True, "conv1": True}
    bodies = [
        n.op_type
        for node in onnx.load(out).graph.node
        for a in node.attribute
        if a.type == onnx.AttributeProto.GRAPH
        for n in a.g.node
    ]
    assert bodies
    assert not {"QuantizeLinear", "DequantizeLinear"} & set(bodies)


@pytest.mark.parametrize("opset", [7, 9, 11, 12, 13, 21])
def test_opsets(tmp_path: Path, opset: int) -> None:
    model, out = models.conv_relu_chain(4, opset=opset), tmp_path / "out.onnx"
    report = quantized(model, out, per_channel=True)
    assert quality(model, out, models.feeds(model)) > 25
    assert all(heavy(report).values())
    assert {o.version for o in onnx.load(out).opset_import if not o.domain} >= {max(opset, 13)}


def test_ir_version_is_lowered(tmp_path: Path) -> None:
    model, out = models.residual_block(), tmp_path / "out.onnx"
    feeds = models.feeds(model)
    reference = run(model, feeds)
    model.ir_version = runtime_limits().max_ir + 1
    quantized(model, out, feeds)
    assert onnx.load(out).ir_version <= runtime_limits().max_ir
    assert all(np.allclose(a[0], b[0], atol=0.2) for a, b in zip(reference, run(out, feeds), strict=True))


def test_initializers_listed_as_inputs(tmp_path: Path) -> None:
    model, out = models.residual_block(), tmp_path / "out.onnx"
    feeds = models.feeds(model)
    for tensor in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    report = quantized(model, out, feeds)
    assert [i.name for i in session(out).get_inputs()] == ["x"]
    assert initializers(out)["conv1_w_quantized"].dtype == np.int8
    assert all(heavy(report).values())
    assert quality(model, out, feeds) > 30


def test_weights_as_constant_nodes(tmp_path: Path) -> None:
    model, out = models.residual_block(), tmp_path / "out.onnx"
    feeds = models.feeds(model)
    constants = [
        helper.make_node("Constant", [], [t.name], name=f"{t.name}_node", value=t) for t in model.graph.initializer
    ]
    nodes = list(model.graph.node)
    del model.graph.initializer[:]
    del model.graph.node[:]
    model.graph.node.extend([*constants, *nodes])
    report = quantized(model, out, feeds)
    assert all(heavy(report).values())
    assert quality(model, out, feeds) > 30


@pytest.mark.parametrize("excluded", [["conv1"], ["stem", "head"], ["conv2", "add"]])
def test_excluded_nodes_are_float_in_the_runtime(tmp_path: Path, excluded: list[str]) -> None:
    model, out = models.residual_block(), tmp_path / "out.onnx"
    report = quantized(model, out, nodes_to_exclude=excluded)
    kernels = {k.node: k for k in proof(report).kernels}
    for name in excluded:
        assert kernels[name].integer is False
        assert kernels[name].absorbed_into is None
    assert proof(report).silently_quantized() == ()
    others = [n for n in heavy(report) if n not in excluded]
    assert any(heavy(report)[n] for n in others)
    assert {f"{n}_w" for n in excluded if n != "add"} <= set(initializers(out))
    assert quality(model, out, models.feeds(model)) > 30


def test_excluded_batch_normalization_is_not_folded(tmp_path: Path) -> None:
    model, out = models.bn_net(), tmp_path / "out.onnx"
    quantized(model, out, nodes_to_exclude=["bn0"])
    names = {n.name for n in onnx.load(out).graph.node}
    assert "bn0" in names
    assert "bn1" not in names
    assert quality(model, out, models.feeds(model)) > 30


def test_excluded_conv_before_a_folded_batch_normalization(tmp_path: Path) -> None:
    """The exclusion by the model's own node name still holds after folding."""
    report = quantized(models.bn_net(), tmp_path / "out.onnx", nodes_to_exclude=["conv1"])
    assert heavy(report) == {"conv0": True, "conv1": False}


def test_marked_as_preprocessed(tmp_path: Path) -> None:
    model, out = models.bn_net(), tmp_path / "out.onnx"
    entry = model.metadata_props.add()
    entry.key, entry.value = "onnx.quant.pre_process", "onnxruntime.quant"
    quantized(model, out)
    assert "BatchNormalization" in {n.op_type for n in onnx.load(out).graph.node}
    assert quality(model, out, models.feeds(model)) > 20


def test_progress(tmp_path: Path) -> None:
    model = models.bn_net()
    seen: list[tuple[int, int | None]] = []
    reader = ArrayReader({"x": np.concatenate([f["x"] for f in models.feeds(model, 5)])})
    quantize_static(model, tmp_path / "out.onnx", reader, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i, 5) for i in range(6)]
    seen.clear()
    quantized(model, tmp_path / "out.onnx", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i, None) for i in range(5)]


@pytest.mark.parametrize("convert", [np.ndarray.tolist, None], ids=["lists", "OrtValue"])
def test_feeds_that_are_no_arrays(tmp_path: Path, convert: Any) -> None:
    """Stock hands feeds to the runtime as they are, so lists of ints and OrtValues work there."""
    net = Net()
    ids = net.input("ids", [1, 4], TensorProto.INT64)
    y = net.op("Gather", [net.weight((9, 8), scale=1.0, name="table"), ids], name="gather")
    net.output(net.linear(y, 8, 4, name="fc"), [1, 4, 4])
    model = net.model()
    plain = models.feeds(model, 3, high=9)

    def wrap(array: Array) -> Any:
        return convert(array) if convert else ort.OrtValue.ortvalue_from_numpy(array)

    out = tmp_path / "out.onnx"
    report = quantize_static(model, out, models.FeedReader([{"ids": wrap(f["ids"])} for f in plain]))
    assert report.outputs[0].sqnr_db > 25
    assert quality(model, out, plain) > 25


def test_shared_weights_and_biases(tmp_path: Path) -> None:
    """One weight and one bias behind inputs of very different scales: a private bias for each."""
    net = Net()
    x = net.input("x", [1, 4, 8, 8])
    w, b = net.weight((4, 4, 3, 3), name="w"), net.const(net.rng.normal(0, 1, 4), "b")
    big = net.op("Mul", [x, net.const(40.0)], name="big")
    one, two = (net.op("Conv", [v, w, b], name=f"conv_{i}", pads=[1, 1, 1, 1]) for i, v in enumerate((x, big)))
    net.output(one, [1, 4, 8, 8])
    net.output(two, [1, 4, 8, 8])
    model, out = net.model(), tmp_path / "out.onnx"
    feeds = models.feeds(model)
    report = quantized(model, out, feeds)
    assert heavy(report) == {"conv_0": True, "conv_1": True}
    assert [a.dtype for n, a in initializers(out).items() if n.endswith("_quantized")].count(np.dtype(np.int32)) == 2
    assert quality(model, out, feeds, 0) > 25
    assert quality(model, out, feeds, 1) > 25
    assert pairs(out)


@pytest.mark.parametrize("quant_format", list(QuantFormat), ids=lambda f: f.name)
def test_strided_readers(tmp_path: Path, quant_format: QuantFormat) -> None:
    model, out = models.residual_block(), tmp_path / "out.onnx"
    feeds = models.feeds(model, 6)
    reader = ArrayReader({"x": np.concatenate([f["x"] for f in feeds])})
    report = quantize_static(model, out, reader, quant_format, extra_options={"CalibStridedMinMax": 3})
    assert report.calibration.samples == 6
    assert quality(model, out, feeds) > 20


def test_a_list_of_feeds_is_a_reader_too(tmp_path: Path) -> None:
    model = models.residual_block()
    feeds: Any = models.feeds(model)
    quantize_static(model, tmp_path / "list.onnx", feeds, recipe="plain", promise=False)
    quantized(model, tmp_path / "reader.onnx")
    assert (tmp_path / "list.onnx").read_bytes() == (tmp_path / "reader.onnx").read_bytes()
