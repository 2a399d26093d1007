"""What is written: it is close to the float model, it runs as planned, and the report says so."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType

from kenosis_ort import ArrayReader, QuantizationReport, quantize_static
from kenosis_ort.flow.samples import KeepingReader
from kenosis_ort.verify import check_bias_alignment
from tests import models
from tests.flow.support import good, make, quality, quantized, run, session
from tests.planning import parse

DIMS = {"batch": 3}
STAGES = ["load", "prepare", "plan", "rewrite", "calibrate", "quantize", "verify", "evidence", "write"]


@pytest.mark.parametrize("net", sorted(models.ALL))
def test_it_is_close_runs_as_planned_and_has_the_interface_of_the_float_model(tmp_path: Path, net: str) -> None:
    model = models.ALL[net]()
    made = good(model, tmp_path, models.feeds(model, 6, dims=DIMS))
    assert made.report.plan.integer_nodes()
    assert [o.name for o in made.report.outputs] == [o.name for o in model.graph.output]
    assert all(o.sqnr_db > 30 for o in made.report.outputs)
    assert os.listdir(tmp_path) == ["out.onnx"]
    assert [stage for stage in made.report.seconds if stage != "check"] == STAGES  # checked where it was rewritten
    assert "integer kernels" in str(made.report)
    a, b = session(model), session(made.out)
    for side in ("get_inputs", "get_outputs"):
        described = [[(v.name, v.type, v.shape) for v in getattr(s, side)()] for s in (a, b)]
        assert described[0] == described[1]
    onnx.checker.check_model(made.written, full_check=True)


def test_feeds_too_large_to_keep_are_not_compared_but_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kenosis_ort.flow.run.KeepingReader", partial(KeepingReader, budget=0))
    report = quantized(models.residual_block(), tmp_path / "out.onnx")
    assert report.outputs == ()
    assert report.calibration.samples == 4


def test_without_verification(tmp_path: Path) -> None:
    made = make(models.residual_block(), tmp_path, verify=False)
    assert made.report.fusion is None
    assert made.report.outputs == ()
    assert made.db() > 30
    assert QuantizationReport.from_json(made.report.to_json()).fusion is None


# ---- all the ways to ask --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["MinMax", "Entropy", "Percentile", "Distribution"])
@pytest.mark.parametrize(("net", "recipe"), [("residual_block", "plain"), ("mlp_matmul", "plain"), ("bn_net", "fast")])
def test_calibration_methods(tmp_path: Path, method: str, net: str, recipe: str) -> None:
    """The same call gives the same bytes."""
    model, options = models.ALL[net](), {"recipe": recipe, "calibrate_method": CalibrationMethod[method]}
    made, again = (make(model, tmp_path / n, models.feeds(model, 8, dims=DIMS), **options) for n in ("one", "two"))
    assert made.report.calibration.method == method.lower()
    assert made.db() > (30 if method == "MinMax" else 15)
    assert made.report.left_float() == ()
    assert made.out.read_bytes() == again.out.read_bytes()


@pytest.mark.parametrize("options", [
    {"CalibMovingAverage": True, "CalibStridedMinMax": 2},
    *({name: True} for name in ("CalibMovingAverage", "CalibTensorRangeSymmetric", "MatMulConstBOnly")),
    *({"CalibMaxIntermediateOutputs": 2}, {"QDQDisableWeightAdjustForInt32Bias": True}),
], ids=lambda o: "+".join(o))  # fmt: skip
def test_extra_options_keep_the_plan(tmp_path: Path, options: dict[str, Any]) -> None:
    model, out = models.residual_block(), tmp_path / "out.onnx"
    feeds = models.feeds(model, 6)
    reader = ArrayReader({"x": np.concatenate([f["x"] for f in feeds])})
    report = quantize_static(model, out, reader, extra_options=options)
    assert report.plan
    assert report.calibration.samples == 6
    assert quality(model, out, feeds) > 15
    assert report.left_float() == ()


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("weight_type", [QuantType.QInt8, QuantType.QUInt8])
@pytest.mark.parametrize("reduce_range", [False, True])
def test_weight_types(tmp_path: Path, weight_type: QuantType, per_channel: bool, reduce_range: bool) -> None:
    options = {"weight_type": weight_type, "per_channel": per_channel, "reduce_range": reduce_range}
    made = make(models.mobile_block(), tmp_path, activation_type=QuantType.QUInt8, **options)
    assert made.db() > 20
    stem = next(n.removesuffix("_quantized") for n in made.held if n.startswith("stem_w") and "_quantized" in n)
    assert made.held[f"{stem}_quantized"].dtype == (np.int8 if weight_type == QuantType.QInt8 else np.uint8)
    assert made.held[f"{stem}_scale"].shape == ((8,) if per_channel else ())
    assert check_bias_alignment(made.written) == []
    if weight_type == QuantType.QInt8 or not per_channel:
        assert made.report.left_float() == ()


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("net", ["residual_block", "mobile_block", "mlp"])
@pytest.mark.parametrize("quant_format", [QuantFormat.QOperator, "QOperator"], ids=repr)
def test_qoperator_format(tmp_path: Path, net: str, per_channel: bool, quant_format: Any) -> None:
    model = models.ALL[net]()
    feeds = models.feeds(model, 6, dims=DIMS)
    made = make(model, tmp_path, feeds, quant_format=quant_format, per_channel=per_channel)
    assert os.listdir(tmp_path) == ["out.onnx"]
    assert {*made.ops} & {"QLinearConv", "QGemm", "QLinearMatMul"}
    assert made.report.fusion is not None
    assert made.report.plan == make(model, tmp_path / "qdq.onnx", feeds, per_channel=per_channel).report.plan
    assert made.report.calibration.samples == 6
    assert made.db() > 20


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
    other = make(models.residual_block(channels=32, seed=1), out, use_external_data_format=True)
    assert sorted(os.listdir(out.parent)) == ["int8.onnx", "int8.onnx.data"]
    assert other.db() > 30
    report = quantized(source, out, feeds)  # a data file of before is not counted
    assert report.size_after == out.stat().st_size


# ---- bodies and exclusions ------------------------------------------------------------------------------------

LOOP = """net (float[1,3,6,6] x) => (float[1,4,6,6] y) <float[4,3,3,3] w, float[4,4,3,3] v, int64 trip, bool on> {
    outer = Conv <pads = [1, 1, 1, 1]> (x, w)  start = Relu (outer)
    last = Loop (trip, on, start) <body = add (int64 i, bool go, float[1,4,6,6] s) => (bool more, float[1,4,6,6] sum) {
        more = Identity (go)  sum = Add (s, outer) }>
    y = Conv <pads = [1, 1, 1, 1]> (last, v) }"""
"""A Loop that adds a quantized outer value three times."""


def test_a_body_that_reads_quantized_values(tmp_path: Path) -> None:
    made = good(parse(LOOP, {"trip": 3, "on": True}), tmp_path)
    assert [*made.heavy.values()] == [True, True]
    bodies = [a.g for n in made.written.graph.node for a in n.attribute if a.type == onnx.AttributeProto.GRAPH]
    assert bodies
    assert not {"QuantizeLinear", "DequantizeLinear"} & {n.op_type for body in bodies for n in body.node}


def test_exclusion_by_the_models_own_names_holds_where_batch_normalizations_are_folded(tmp_path: Path) -> None:
    made = make(models.bn_net(), tmp_path, nodes_to_exclude=["bn0"])
    assert {n.name for n in made.written.graph.node} & {"bn0", "bn1"} == {"bn0"}
    assert made.db() > 30
    assert make(models.bn_net(), tmp_path, nodes_to_exclude=["conv1"]).heavy == {"conv0": True, "conv1": False}


# ---- readers --------------------------------------------------------------------------------------------------


class Reader:
    """A reader that derives from nothing."""

    def __init__(self, feeds: Any) -> None:
        self.feeds = iter(feeds)

    def get_next(self) -> Any:
        return next(self.feeds, None)


WRITTEN = {
    "nested lists": lambda fs: Reader({k: v.tolist() for k, v in f.items()} for f in fs),
    "lists of arrays": lambda fs: Reader({k: list(v) for k, v in f.items()} for f in fs),
    "float64": lambda fs: Reader({k: v.astype(np.float64) for k, v in f.items()} for f in fs),
    "runtime values": lambda fs: Reader({k: ort.OrtValue.ortvalue_from_numpy(v) for k, v in f.items()} for f in fs),
    "ends with {}": lambda fs: Reader([*fs, {}]), "generator": lambda fs: (f for f in fs), "list": list,
}  # fmt: skip


def test_the_same_numbers_give_the_same_file(tmp_path: Path) -> None:
    model = models.residual_block()
    for name, written in {"reader": Reader, **WRITTEN}.items():
        quantize_static(model, tmp_path / name, written(models.feeds(model, 8)), promise=False, tune="off")
        assert (tmp_path / name).read_bytes() == (tmp_path / "reader").read_bytes(), name


def test_progress(tmp_path: Path) -> None:
    model = models.bn_net()
    seen: list[tuple[int, int | None]] = []
    reader = ArrayReader({"x": np.concatenate([f["x"] for f in models.feeds(model, 5)])})
    quantize_static(model, tmp_path / "out.onnx", reader, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i, 5) for i in range(6)]
