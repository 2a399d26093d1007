"""Optional steps that fail are undone; a defect is an error, or the float model as it came where the caller says so."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from kenosis_ort import CalibrationError, KenosisWarning, QuantizationReport, Stages, quantize_static
from kenosis_ort.accuracy.outputs import OutputComparison
from kenosis_ort.errors import InternalError
from kenosis_ort.flow.finish import RewriteMismatchError, worthless
from tests import models
from tests.flow.support import own_warnings, quality, quantized, sqnr_db
from tests.models import Feed, FeedReader, Net

FEEDS = 12


def nothing_to_do() -> onnx.ModelProto:
    net = Net()
    net.output(net.op("Erf", [net.input("x", [1, 4])], name="erf"), [1, 4])
    return net.model()


def saved(model: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "float.onnx"
    onnx.save(model, path)
    return path


def told(out: Path, source: Any, feeds: list[Feed] | None = None, **options: Any) -> QuantizationReport:
    """Quantizes by the default recipe; the float model is delivered, with a warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = quantized(source, out, feeds, **{"recipe": "fast", **options})
    assert report.is_float
    assert report.float_because
    assert report.float_because in report.verdict()
    assert QuantizationReport.from_json(report.to_json()).float_because == report.float_because
    assert any(f"float model as it came: {report.float_because}" in text for text in own_warnings(list(caught)))
    return report


# ---- nothing to quantize, or nothing worth it -------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"stages": Stages.none()}, {"stages": Stages(placement=False)}],
    ids=["all stages", "stock", "stock placement"],
)
def test_nothing_to_quantize_is_delivered_byte_for_byte(tmp_path: Path, options: dict[str, Any]) -> None:
    path, out = saved(nothing_to_do(), tmp_path), tmp_path / "out.onnx"
    told(out, path, **options)
    assert out.read_bytes() == path.read_bytes()


def test_everything_excluded(tmp_path: Path) -> None:
    model = models.mlp()
    names = [node.name for node in model.graph.node]
    told(tmp_path / "out.onnx", model, nodes_to_exclude=names)
    assert onnx.load(tmp_path / "out.onnx") == model


def test_the_float_model_over_itself(tmp_path: Path) -> None:
    path = saved(nothing_to_do(), tmp_path)
    before = path.read_bytes()
    told(path, path)
    assert path.read_bytes() == before


def test_a_worthless_result_gives_way_to_the_float_model(tmp_path: Path) -> None:
    """One step of the input's scale is larger than all of its values."""
    net = Net()
    net.output(net.conv(net.input("x", [1, 3, 8, 8]), 3, 4, bias=False, name="conv"), [1, 4, 8, 8])
    report = told(tmp_path / "out.onnx", net.model(), extra_options={"MinimumRealRange": 1e4})
    assert "worthless" in report.float_because
    assert quality(net.model(), tmp_path / "out.onnx", models.feeds(net.model())) == float("inf")


def test_one_usable_output_does_not_make_up_for_one_without_signal() -> None:
    def output(sqnr_db: float) -> OutputComparison:
        return OutputComparison("y", sqnr_db, 0.0, 1.0, None, 0.0, 4, floating=True)

    assert worthless([output(30.0), output(-3.0)]) is not None
    assert worthless([output(0.5), output(0.6)]) is not None
    assert worthless([output(30.0), output(0.5)]) is None
    assert worthless([]) is None


def test_outputs_of_zero_are_not_worthless(tmp_path: Path) -> None:
    """What the float model returns is zero but for the sign of noise: decibels say nothing."""
    net = Net()
    y = net.conv(net.input("x", [1, 3, 8, 8]), 3, 4, name="conv0")
    net.output(net.conv(y, 4, 4, name="conv1"), [1, 4, 8, 8])
    net.output(net.op("Relu", [net.op("Sub", [y, net.const(1e6)])], name="nothing"), [1, 4, 8, 8])
    report = quantized(net.model(), tmp_path / "out.onnx", recipe="fast")
    assert not report.is_float


# ---- steps that fail --------------------------------------------------------------------------------------------


def broken(*_: Any, **__: Any) -> Any:
    raise IndexError("a step that fails")


STEPS = {
    "bias_correction": "kenosis_ort.passes.correct_biases.bias_shifts",
    "cost model": "kenosis_ort.flow.speed.float_regions",
    "evidence": "kenosis_ort.flow.finish.gather_evidence",
    "rows": "kenosis_ort.flow.call.find_division",
}


@pytest.mark.parametrize("step", list(STEPS))
def test_a_step_that_fails_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    model, out = models.residual_block(), tmp_path / "out.onnx"
    feeds = models.feeds(model, FEEDS)
    monkeypatch.setattr(STEPS[step], broken)
    caplog.set_level(logging.DEBUG, "kenosis_ort")
    with pytest.warns(KenosisWarning, match="report this as a bug") as caught:
        report = quantized(model, out, feeds, recipe="strict")
    assert all("a step that fails" in text for text in own_warnings(list(caught)))
    assert any("Traceback" in (r.exc_text or "") for r in caplog.records)
    assert report.plan.integer_nodes()
    assert quality(model, out, feeds) > 30


def test_timing_that_fails_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kenosis_ort.tuning.promise.keep_promise", broken)
    model = models.residual_block()
    with pytest.warns(KenosisWarning, match="Timing failed"):
        report = quantized(model, tmp_path / "out.onnx", promise=True)
    assert report.plan.integer_nodes()


@pytest.mark.parametrize("form", ["fold_batch_norm", "collapse_clip", "linear_to_gemm", "fold_channel_shuffle"])
def test_a_rewrite_that_fails_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    def spoils(proto: onnx.ModelProto, **_: Any) -> Any:
        del proto.graph.node[:]
        raise KeyError("spoilt")

    spoils.__name__ = form
    for name in ("PREPARATION", "FLOAT_FORMS", "INTEGER_FORMS"):
        rules = __import__("kenosis_ort.flow.preparation", fromlist=[name])
        replaced = tuple(spoils if f.__name__ == form else f for f in getattr(rules, name))
        monkeypatch.setattr(f"kenosis_ort.flow.preparation.{name}", replaced)
    model, out = models.mobile_block(), tmp_path / "out.onnx"
    with pytest.warns(KenosisWarning, match=f"'{form}' failed"):
        report = quantized(model, out)
    assert report.plan.integer_nodes()
    assert quality(model, out, models.feeds(model)) > 25


def test_a_rewrite_that_is_wrong_is_not_delivered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rewritten model is compared with the model as it came, not with itself."""
    from kenosis_ort.rewrite.rule import RewriteResult

    def collapse_clip(proto: onnx.ModelProto, **_: Any) -> RewriteResult:
        for node in proto.graph.node:
            if node.op_type == "Relu":
                node.op_type = "Abs"
        return RewriteResult(("Relu is nearly Abs.",))

    monkeypatch.setattr("kenosis_ort.flow.preparation.FLOAT_FORMS", (collapse_clip,))
    model, out = models.residual_block(), tmp_path / "out.onnx"
    with pytest.warns(KenosisWarning, match="rewritten float model is off"):
        report = quantized(model, out)
    assert report.plan.integer_nodes()
    assert quality(model, out, models.feeds(model)) > 30


DEFECTS = {
    "planner": "kenosis_ort.flow.builder.Planner",
    "emitter": "kenosis_ort.flow.builder.emit",
    "proof": "kenosis_ort.targets.ort_cpu.cpu_proof.prove_by",
}


@pytest.mark.parametrize("part", list(DEFECTS))
def test_a_defect_is_an_error_that_asks_for_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(DEFECTS[part], broken)
    model, out = models.residual_block(), tmp_path / "out.onnx"
    with pytest.raises(InternalError, match=r"quantize_static\(.*out\.onnx\) failed: .*a step that fails") as raised:
        quantized(model, out)
    assert "report this as a bug" in str(raised.value)
    assert isinstance(raised.value.__cause__, IndexError)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("part", list(DEFECTS))
def test_a_defect_is_the_float_model_where_the_caller_wants_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(DEFECTS[part], broken)
    model, out = models.residual_block(), tmp_path / "out.onnx"
    report = told(out, model, on_failure="float")
    assert "a step that fails" in report.float_because
    assert report.fallbacks == (f"The float model as it came: {report.float_because}.",)
    assert "on_failure" in report.recipe_file().to_toml()
    assert onnx.load(out) == model


def test_a_wrong_rewrite_is_named_among_the_fallbacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(call: Any, *_: Any) -> None:
        if call.request.rewrites:
            raise RewriteMismatchError("the rewritten float model is off")

    monkeypatch.setattr("kenosis_ort.flow.finish.check_rewritten", wrong)
    with pytest.warns(KenosisWarning, match="is off"):
        report = quantized(models.bn_net(), tmp_path / "out.onnx")
    assert report.plan.integer_nodes()
    assert report.fallbacks == ("Placement without rewrites and passes: the rewritten float model is off.",)


@pytest.mark.parametrize("verify", [True, False])
def test_a_result_that_the_runtime_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: bool) -> None:
    def broken(proto: onnx.ModelProto, *_: object) -> SimpleNamespace:
        model = SimpleNamespace(model=with_broken_node(proto))
        return SimpleNamespace(model=model, rescaled=lambda *_: None)

    monkeypatch.setattr("kenosis_ort.flow.builder.emit", broken)
    out = tmp_path / "out.onnx"
    out.write_bytes(b"the model of yesterday")
    model = models.residual_block()
    with pytest.raises(InternalError, match="does not load"):
        quantized(model, out, verify=verify)
    assert out.read_bytes() == b"the model of yesterday"
    report = told(out, model, verify=verify, on_failure="float")
    assert "does not load" in report.float_because
    assert quality(model, out, models.feeds(model)) == float("inf")
    assert [p.name for p in tmp_path.iterdir()] == ["out.onnx"]


def with_broken_node(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a model with a DequantizeLinear that the runtime does not load."""
    model = onnx.ModelProto()
    model.CopyFrom(proto)
    model.graph.node.insert(0, onnx.helper.make_node("DequantizeLinear", ["nothing", "none"], ["never"], name="broken"))
    return model


def test_bad_data_is_an_error_all_the_same(tmp_path: Path) -> None:
    model = models.residual_block()
    feeds = models.feeds(model, 3)
    feeds[2]["x"][0, 0, 0, 0] = np.nan
    with pytest.raises(CalibrationError, match="sample 2"):
        quantize_static(model, tmp_path / "out.onnx", FeedReader(feeds))
    assert not list(tmp_path.iterdir())


# ---- batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ["N", 32], ids=["open", "fixed"])
def test_a_batch_of_32_is_32_samples(tmp_path: Path, rows: Any) -> None:
    rng = np.random.default_rng(0)
    net = Net()
    y = net.input("x", [rows, 16])
    for i in range(3):
        y = net.op("Relu", [net.gemm(y, 16, 16, name=f"fc{i}")], name=f"relu{i}")
    net.output(net.gemm(y, 16, 4, name="head"), [rows, 4])
    model = net.model()
    feed = {"x": (rng.normal(0, 1, (32, 16)) * rng.lognormal(0, 1, (1, 16))).astype(np.float32)}
    report = quantized(model, tmp_path / "one.onnx", [feed], recipe="fast")
    assert {p.name for p in report.passes} >= {"bias_correction", "ranges"}
    if rows == "N":
        parts = [{"x": feed["x"][i : i + 8]} for i in range(0, 32, 8)]
        quantized(model, tmp_path / "four.onnx", parts, recipe="fast")
        unseen = {"x": (rng.normal(0, 1, (64, 16)) * rng.lognormal(0, 1, (1, 16))).astype(np.float32)}
        one, four = (quality(model, tmp_path / f"{name}.onnx", [unseen]) for name in ("one", "four"))
        assert one > four - 1


def test_a_sequence_is_not_taken_for_a_batch(tmp_path: Path) -> None:
    """Sequence first: the rows depend on each other, as a shorter run shows."""
    from kenosis_ort.flow.samples import find_division
    from tests.flow.support import session

    net = Net()
    x = net.input("x", ["T", 1, 4])
    w, r = (net.const(net.rng.normal(0, 0.5, (1, 16, 4)), name) for name in "wr")
    net.model_nodes = net.op("LSTM", [x, w, r], name="lstm", hidden_size=4)
    net.output(net.model_nodes, ["T", 1, 1, 4])
    feeds = [{"x": np.random.default_rng(0).normal(0, 1, (32, 1, 4)).astype(np.float32)}]
    opened = session(net.model())
    assert find_division(lambda feed: opened.run(None, feed), feeds, count=16).of(feeds) == feeds


def test_signal_is_measured_against_the_model_as_it_came(tmp_path: Path) -> None:
    model, out = models.bn_net(), tmp_path / "out.onnx"
    feeds = models.feeds(model, 4)
    report = quantized(model, out, feeds)
    from tests.flow.support import run

    want, got = run(model, feeds), run(out, feeds)
    assert report.outputs[0].sqnr_db == pytest.approx(sqnr_db([o[0] for o in want], [o[0] for o in got]), abs=0.2)


def test_the_bytes_of_a_picture_are_not_a_batch() -> None:
    """A part of a compressed picture is none: the decoder of a custom operator may end the process."""
    from kenosis_ort.flow.samples import rows_of

    assert rows_of({"bytes": np.zeros(64, np.uint8)}) == 1
    assert rows_of({"x": np.zeros((8, 3)), "length": np.zeros(8)}) == 1
    assert rows_of({"x": np.zeros((8, 3)), "y": np.zeros((8, 1))}) == 8


def test_what_the_model_computes_is_no_bug(tmp_path: Path) -> None:
    """NaN inside that the outputs do not show: the runtime runs it, so there is a result, and nobody's bug is told."""
    net = Net()
    x = net.conv(net.input("x", [1, 3, 8, 8]), 3, 4, name="conv0")
    root = net.op("Sqrt", [x], name="root")
    y = net.op("Where", [net.op("IsNaN", [root], name="bad"), net.const(0.0), root], name="masked")
    net.output(net.conv(y, 4, 4, name="conv1"), [1, 4, 8, 8])
    model, out = net.model(), tmp_path / "out.onnx"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quantized(model, out, recipe="fast")
    assert not any("bug" in text for text in own_warnings(list(caught)))
    assert quality(model, out, models.feeds(model)) > 20
