"""The call is stock's: names, order, positions, configuration object; the caller's objects stay as they are."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import onnx
import onnxruntime.quantization as stock
import pytest
from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, StaticQuantConfig
from typing_extensions import Unpack

import kenosis_ort
from kenosis_ort import OptionError, QuantizationReport, calibrate, preview, quantize, quantize_static
from kenosis_ort.options import KEYWORDS, Keywords
from tests import models
from tests.flow.support import chosen, initializers, quality, quantized
from tests.models import FeedReader

FIRST = [
    *("recipe", "accuracy_budget", "metric", "eval_reader", "target", "format", "speed", "placement"),
    *("custom_op_libraries", "progress"),
]
FURTHER = [
    *("verify", "evidence", "executor", "kv_cache", "on_failure", "weight_bits", "activation_bits"),
    *("protect_outputs", "primary_inputs", "rewrites", "stages"),
    *("tune", "threads", "promise", "host", "sequence_lengths"),
    "max_opset",
]


class Untouched:
    def get_next(self) -> None:
        raise AssertionError("the data were read")


POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


def test_stock_parameters_in_stock_order() -> None:
    ours = list(inspect.signature(quantize_static).parameters.values())
    theirs = list(inspect.signature(stock.quantize_static).parameters.values())
    own = [p for p in ours if p.kind is POSITIONAL]
    assert [p.name for p in own][: len(theirs)] == [p.name for p in theirs]
    assert own[-1].name == "calibration_cache_path"
    open_types = {"per_channel", "reduce_range", "activation_type", "weight_type", "calibrate_method"}
    open_types |= {"quant_format", "use_external_data_format"}  # at stock's default where nothing states them
    for mine, other in zip(own, theirs, strict=False):
        assert other.kind is POSITIONAL
        required = other.default is inspect.Parameter.empty  # the reader, before there was a cache to take its place
        default = None if required and mine.name == "calibration_data_reader" else other.default
        assert mine.name in open_types or mine.default == default, mine.name


def test_a_newcomer_sees_ten_keyword_only_parameters() -> None:
    *extras, further = (p for p in inspect.signature(quantize_static).parameters.values() if p.kind is not POSITIONAL)
    assert [p.name for p in extras] == FIRST
    assert len(FIRST) == 10
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in extras)
    assert all(p.default is not inspect.Parameter.empty for p in extras)
    assert further.kind is inspect.Parameter.VAR_KEYWORD
    assert [*KEYWORDS] == [*Keywords.__annotations__] == FURTHER
    assert get_type_hints(quantize_static)["further"] == Unpack[Keywords]


@pytest.mark.parametrize("call", [quantize_static, quantize, preview, calibrate])
def test_an_unknown_parameter_is_a_type_error_that_names_the_nearest(tmp_path: Path, call: Any) -> None:
    first: Any = {
        quantize_static: (tmp_path / "out.onnx", Untouched()),
        quantize: (tmp_path / "out.onnx", StaticQuantConfig(Untouched())),
        preview: (),
        calibrate: (Untouched(),),
    }[call]
    for said, meant in (("promis", "promise"), ("weight_tpye", "weight_type"), ("acuracy_budget", "accuracy_budget")):
        with pytest.raises(TypeError, match=f"no parameter '{said}'. Did you mean '{meant}'"):
            call(models.bn_net(), *first, **{said: None})
    assert not [*tmp_path.iterdir()]


def test_quantize_takes_stocks_parameters() -> None:
    ours = list(inspect.signature(quantize).parameters.values())
    theirs = list(inspect.signature(stock.quantize).parameters.values())
    assert [p.name for p in ours][: len(theirs)] == [p.name for p in theirs]


def test_public_names_exist_and_are_documented() -> None:
    assert sorted(kenosis_ort.__all__) == kenosis_ort.__all__ or len(set(kenosis_ort.__all__)) == len(
        kenosis_ort.__all__
    )
    for name in kenosis_ort.__all__:
        member = getattr(kenosis_ort, name)
        assert name == "__version__" or inspect.getdoc(member), name


def test_call_by_position_as_in_existing_scripts(tmp_path: Path) -> None:
    model = models.residual_block()
    source, out = tmp_path / "float.onnx", tmp_path / "int8.onnx"
    onnx.save(model, source)
    report = quantize_static(
        str(source),
        str(out),
        models.reader(model),
        QuantFormat.QDQ,
        ["Conv", "Relu", "Add", "Gemm"],
        True,
        False,
        QuantType.QUInt8,
        QuantType.QInt8,
        [],
        ["head"],
        False,
        CalibrationMethod.MinMax,
        ["CPUExecutionProvider"],
        {"ActivationSymmetric": False},
        None,
    )
    assert isinstance(report, QuantizationReport)
    assert report.model_input == str(source)
    assert report.model_output == str(out)
    assert chosen(report)["nodes_to_exclude"] == (("head",), "caller")
    assert quality(model, out, models.feeds(model)) > 25


@pytest.mark.parametrize("given", ["str", "path", "proto"])
def test_models_and_outputs_of_every_kind(tmp_path: Path, given: str) -> None:
    model = models.bn_net()
    source, out = tmp_path / "float.onnx", tmp_path / "int8.onnx"
    onnx.save(model, source)
    handed: Any = {"str": str(source), "path": source, "proto": model}[given]
    report = quantize_static(handed, str(out) if given == "str" else out, models.reader(model))
    assert quality(model, out, models.feeds(model)) > 25
    assert report.size_after == out.stat().st_size
    assert report.size_before > report.size_after


@pytest.mark.parametrize("bad", [None, 3, b"bytes"])
def test_other_kinds_of_model_are_a_type_error(tmp_path: Path, bad: Any) -> None:
    model = models.bn_net()
    with pytest.raises(TypeError, match="the model must be a path"):
        quantize_static(bad, tmp_path / "out.onnx", models.reader(model))


def test_config_object(tmp_path: Path) -> None:
    model = models.residual_block()
    config = StaticQuantConfig(
        models.reader(model),
        calibrate_method=CalibrationMethod.Percentile,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        nodes_to_exclude=["head"],
        per_channel=True,
        extra_options={"CalibPercentile": 99.9},
    )
    report = quantize(model, tmp_path / "out.onnx", config)
    said = chosen(report)
    assert said["activation_type"] == (QuantType.QUInt8, "caller")
    assert said["per_channel"] == (True, "caller")
    assert said["extra_options.CalibPercentile"] == (99.9, "caller")
    assert said["nodes_to_exclude"] == (("head",), "caller")
    assert report.calibration.method == "percentile"


def test_config_defaults_leave_the_choice_to_the_host(tmp_path: Path) -> None:
    model = models.residual_block()
    report = quantize(
        model, tmp_path / "config.onnx", StaticQuantConfig(models.reader(model)), recipe="plain", promise=False
    )
    quantized(model, tmp_path / "plain.onnx")
    assert {chosen(report)[k][1] for k in ("activation_type", "weight_type", "per_channel")} == {"host default"}
    assert (tmp_path / "config.onnx").read_bytes() == (tmp_path / "plain.onnx").read_bytes()


def test_config_and_extras(tmp_path: Path) -> None:
    model = models.residual_block()
    report = quantize(
        model, tmp_path / "out.onnx", StaticQuantConfig(models.reader(model)), protect_outputs="int8", verify=False
    )
    assert report.fusion is None
    assert chosen(report)["protect_outputs"] == ("int8", "caller")


@pytest.mark.parametrize("config", [stock.DynamicQuantConfig(), None, {}])
def test_other_configurations_are_refused(tmp_path: Path, config: Any) -> None:
    with pytest.raises(OptionError, match="StaticQuantConfig"):
        quantize(models.bn_net(), tmp_path / "out.onnx", config)


@pytest.mark.parametrize("build", [models.bn_net, models.net_with_if, models.mobile_block])
def test_the_callers_objects_are_not_changed(tmp_path: Path, build: Any) -> None:
    model = build()
    feeds = models.feeds(model)
    for feed in feeds:
        for array in feed.values():
            array.setflags(write=False)
    options: dict[str, Any] = {
        "op_types_to_quantize": ["Conv", "Relu", "Clip", "Add", "Gemm", "BatchNormalization"],
        "nodes_to_exclude": [model.graph.node[0].name],
        "calibration_providers": ["CPUExecutionProvider"],
        "extra_options": {"CalibMovingAverage": True, "MinimumRealRange": 0.001},
        "primary_inputs": [model.graph.input[0].name],
        "custom_op_libraries": [],
    }
    before = copy.deepcopy((options, feeds, model.SerializeToString(deterministic=True)))
    quantized(model, tmp_path / "out.onnx", feeds, **options)
    assert options == before[0]
    assert all(
        set(now) == set(then) and all(np.array_equal(now[k], then[k]) for k in then)
        for now, then in zip(feeds, before[1], strict=True)
    )
    assert model.SerializeToString(deterministic=True) == before[2]


def test_a_reader_that_reuses_its_buffers(tmp_path: Path) -> None:
    """A caller may overwrite one array for every sample; what is kept for the comparison has to be a copy."""
    model = models.bn_net()
    samples = [feed["x"] for feed in models.feeds(model)]

    class Reusing(FeedReader):
        buffer = np.empty_like(samples[0])

        def get_next(self) -> dict[str, Any] | None:
            feed = super().get_next()
            if feed is None:
                self.buffer[...] = 1e6
                return None
            self.buffer[...] = feed["x"]
            return {"x": self.buffer}

    quantize_static(
        model, tmp_path / "reused.onnx", Reusing([{"x": s} for s in samples]), recipe="plain", promise=False
    )
    report = quantized(model, tmp_path / "plain.onnx")
    assert (tmp_path / "reused.onnx").read_bytes() == (tmp_path / "plain.onnx").read_bytes()
    assert initializers(tmp_path / "plain.onnx")
    assert report.outputs[0].sqnr_db > 25
