"""The speed promise end to end: what is slower is decided by the clock of `tests.pace`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnxruntime.quantization import QuantType

from kenosis_ort import KenosisWarning, OptionError, QuantizationReport, quantize_static
from kenosis_ort.flow import speed
from kenosis_ort.tuning.promise import Estimate
from tests import models
from tests.flow.support import QDQ, session
from tests.pace import Pace


def quantized(model: onnx.ModelProto, out: Path, **options: Any) -> QuantizationReport:
    return quantize_static(model, out, models.reader(model), recipe="plain", **options)


def has_qdq(path: Path) -> bool:
    return any(n.op_type in QDQ for n in onnx.load(path).graph.node)


def test_faster_int8_is_delivered(tmp_path: Path) -> None:
    report = quantized(models.residual_block(), tmp_path / "out.onnx")
    assert has_qdq(tmp_path / "out.onnx")
    assert report.speed is not None
    assert report.speed.taken is not None
    assert (report.speed.taken.name, report.speed.taken.verdict) == ("int8", "faster")
    assert QuantizationReport.from_json(report.to_json()).speed == report.speed


def test_slower_int8_leaves_the_float_model(tmp_path: Path, pace: Pace) -> None:
    pace.int8 = 0.09
    model, out = models.residual_block(), tmp_path / "out.onnx"
    with pytest.warns(KenosisWarning, match="INT8 does not pay here") as caught:
        report = quantized(model, out)
    assert caught[0].filename == __file__
    assert not has_qdq(out)
    assert report.speed is not None
    statuses = {form.name: form.status for form in report.speed.candidates}
    assert statuses["int8"] == "slower"
    assert statuses["float"] == "taken"
    assert "the float model" in report.verdict()
    feed = models.feeds(model, 1)[0]
    for want, got in zip(session(model).run(None, feed), session(out).run(None, feed), strict=True):
        assert (want == got).all()


def test_dynamic_quantization_where_only_that_is_faster(tmp_path: Path, pace: Pace) -> None:
    pace.int8, pace.other = 0.09, 0.03
    out = tmp_path / "out.onnx"
    with pytest.warns(KenosisWarning, match="dynamic"):
        report = quantized(models.mlp(), out)
    assert report.speed is not None
    assert report.speed.taken is not None
    assert report.speed.taken.name == "dynamic"
    assert any(n.domain == "com.microsoft" for n in onnx.load(out).graph.node)


def test_the_promise_can_be_switched_off(tmp_path: Path, pace: Pace) -> None:
    pace.int8 = 0.09
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = quantized(models.residual_block(), tmp_path / "out.onnx", promise=False)
    assert report.speed is None
    assert has_qdq(tmp_path / "out.onnx")


def test_what_the_caller_dictates_is_not_replaced(tmp_path: Path, pace: Pace) -> None:
    pace.int8 = 0.09
    overrides = {"x": [{"quant_type": QuantType.QUInt8}]}
    with pytest.warns(KenosisWarning, match=r"TensorQuantOverrides'\] asks for does not pay here: only 0\.67x"):
        report = quantized(
            models.residual_block(), tmp_path / "out.onnx", extra_options={"TensorQuantOverrides": overrides}
        )
    assert report.speed is not None
    assert report.speed.basis == "measured"
    assert has_qdq(tmp_path / "out.onnx")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tune": "modell"}, "Did you mean 'model'"),
        ({"threads": -1}, "threads=-1"),
        ({"threads": True}, "threads=True"),
    ],
)
def test_bad_options(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        quantized(models.residual_block(), tmp_path / "out.onnx", **options)


def test_the_float_model_is_compared_with_itself(tmp_path: Path, pace: Pace) -> None:
    """Passes move biases of the model that is quantized; what is delivered is not measured against that one."""
    pace.int8 = 0.09
    model = models.bn_net()
    with pytest.warns(KenosisWarning):
        report = quantize_static(model, tmp_path / "out.onnx", models.FeedReader(models.feeds(model, 16)))
    assert all(output.sqnr_db > 100 for output in report.outputs)


@pytest.mark.parametrize(
    ("estimated", "is_float", "basis"),
    [(2.0, False, "estimated"), (1.2, True, "undecided"), (0.5, True, "estimated"), (None, True, "undecided")],
)
def test_nets_too_small_to_time_are_decided_by_the_cost_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, estimated: float | None, is_float: bool, basis: str
) -> None:
    """INT8 only where the table says that it is faster by more than the table may be wrong."""
    found = None if estimated is None else Estimate(estimated, 1.4)
    monkeypatch.setattr(speed, "_least_us", lambda *_: 5.0)
    monkeypatch.setattr(speed._Forms, "_estimate", lambda _: found)
    model = models.conv_relu_chain(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KenosisWarning)
        report = quantize_static(model, tmp_path / "out.onnx", models.reader(model, 4), recipe="plain")
    assert report.is_float is is_float
    assert report.speed is not None
    assert report.speed.basis == basis
    assert report.speed.float_milliseconds is None
