"""Recipes end to end: what the passes do, and that none makes it worse on data they have not seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from kenosis_ort import KenosisWarning, OptionError, QuantizationReport, Recipe, quantize_static
from tests import models
from tests.flow.support import quality, quantized


def test_passes_are_judged_and_told(tmp_path: Path) -> None:
    model, out = models.bn_net(), tmp_path / "out.onnx"
    report = quantized(model, out, models.feeds(model, 16), recipe="fast")
    assert {p.name for p in report.passes} >= {"ranges", "bias_correction"}
    for outcome in report.passes:
        if outcome.error_before is not None and outcome.error_after is not None:
            assert outcome.kept <= (outcome.error_after < 1.03 * outcome.error_before)
    assert report.recipe is not None
    assert report.recipe.name == "fast"
    assert QuantizationReport.from_json(report.to_json()).passes == report.passes
    plain = tmp_path / "plain.onnx"
    quantized(model, plain, models.feeds(model, 16))
    unseen = models.feeds(model, 16, seed=5)
    assert quality(model, out, unseen) > quality(model, plain, unseen) - 0.5


def test_too_few_samples_to_hold_some_out(tmp_path: Path) -> None:
    model = models.bn_net()
    report = quantized(model, tmp_path / "out.onnx", models.feeds(model, 3), recipe="fast")
    assert "bias_correction" not in {p.name for p in report.passes}
    assert any("3 calibration samples at hand" in note for note in report.notes)


def test_plain_does_nothing(tmp_path: Path) -> None:
    report = quantized(models.bn_net(), tmp_path / "out.onnx", recipe="plain")
    assert report.passes == ()


def test_a_method_that_the_caller_names_is_kept(tmp_path: Path) -> None:
    from onnxruntime.quantization import CalibrationMethod

    model = models.bn_net()
    report = quantized(
        model,
        tmp_path / "out.onnx",
        models.feeds(model, 8),
        recipe="fast",
        calibrate_method=CalibrationMethod.MinMax,
    )
    assert "ranges" not in {p.name for p in report.passes}


def test_the_callers_metric_decides(tmp_path: Path) -> None:
    model = models.bn_net()
    calls = []

    def metric(outputs: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]]) -> float:
        calls.append((len(outputs), set(outputs[0])))
        return 1.0 if outputs is reference else 0.5

    report = quantized(model, tmp_path / "out.onnx", models.feeds(model, 16), recipe="fast", metric=metric)
    assert calls
    assert {count for count, _ in calls} == {8, 2}  # all that are held out, and parts of them for the spread
    assert report.measure is not None
    assert (report.measure.value, report.measure.float_value) == (0.5, 1.0)
    assert "metric" in next(p.measure for p in report.passes if p.measure)


@pytest.mark.parametrize("bad", [float("nan"), "high", None])
def test_a_metric_that_returns_no_number(tmp_path: Path, bad: Any) -> None:
    model = models.bn_net()
    with pytest.raises(OptionError, match="the metric returned"):
        quantized(
            model, tmp_path / "out.onnx", models.feeds(model, 8), recipe="fast", metric=lambda outputs, reference: bad
        )
    assert not list(tmp_path.iterdir())


def test_a_metric_that_raises(tmp_path: Path) -> None:
    model = models.bn_net()

    def metric(outputs: Any, reference: Any) -> float:
        raise KeyError("boxes")

    with pytest.raises(OptionError, match="the metric raised KeyError"):
        quantized(model, tmp_path / "out.onnx", models.feeds(model, 8), recipe="fast", metric=metric)


def test_a_recipe_file_and_a_custom_recipe(tmp_path: Path) -> None:
    model = models.bn_net()
    recipe = Recipe(name="mine", equalize=False, bias_correction=False, ranges="percentile")
    recipe.save(tmp_path / "mine.toml")
    report = quantize_static(
        model, tmp_path / "out.onnx", models.reader(model), recipe=tmp_path / "mine.toml", promise=False
    )
    assert report.recipe == recipe
    assert report.calibration.method == "percentile"


def test_the_callers_model_is_not_changed(tmp_path: Path) -> None:
    model = models.bn_net()
    before = model.SerializeToString()
    quantized(model, tmp_path / "out.onnx", models.feeds(model, 8), recipe="fast")
    assert model.SerializeToString() == before


def test_same_data_same_bytes(tmp_path: Path) -> None:
    model = models.bn_net()
    for name in ("a.onnx", "b.onnx"):
        quantized(model, tmp_path / name, models.feeds(model, 8), recipe="fast")
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


def test_outlier_channels_are_smoothed(tmp_path: Path) -> None:
    """A norm whose gain has two huge channels in front of a linear layer: one scale for all loses the others."""
    rng = np.random.default_rng(0)
    width = 64
    gain = np.ones(width, np.float32)
    gain[[3, 40]] = 60.0
    weight = rng.normal(0, 0.1, (width, 32)).astype(np.float32)
    weight[[3, 40]] /= 60.0
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("LayerNormalization", ["x", "gain", "shift"], ["n"], name="norm"),
            onnx.helper.make_node("MatMul", ["n", "w"], ["y"], name="linear"),
        ],
        "outliers",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 16, width])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 16, 32])],
        [
            onnx.numpy_helper.from_array(gain, "gain"),
            onnx.numpy_helper.from_array(np.zeros(width, np.float32), "shift"),
            onnx.numpy_helper.from_array(weight, "w"),
        ],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    feeds = models.feeds(model, 8)
    plain, smooth, asked = (tmp_path / f"{name}.onnx" for name in ("plain", "smooth", "asked"))
    with pytest.warns(KenosisWarning, match="keeps only"):
        quantized(model, plain, feeds)
    quantized(model, smooth, feeds, recipe="fast")
    quantized(model, asked, feeds, extra_options={"SmoothQuant": True, "SmoothQuantAlpha": 0.5})
    unseen = models.feeds(model, 8, seed=1)
    assert quality(model, smooth, unseen) > quality(model, plain, unseen) + 6
    assert quality(model, asked, unseen) > quality(model, plain, unseen) + 6


def small_classifier(outliers: float) -> onnx.ModelProto:
    """A net of linear layers whose inputs differ much in size between samples."""
    rng = np.random.default_rng(1)
    net = models.Net()
    y = net.input("x", [1, 16])
    for i, width in enumerate((32, 32)):
        gain = rng.lognormal(0, outliers, width)
        w = net.const(rng.normal(0, 0.3, (16 if i == 0 else 32, width)) * gain, f"w{i}")
        y = net.op("Relu", [net.op("Gemm", [y, w, net.const(np.zeros(width), f"b{i}")], name=f"fc{i}")], name=f"r{i}")
    net.output(net.gemm(y, 32, 4, name="head"), [1, 4])
    return net.model()


@pytest.mark.parametrize("count", [6, 8, 12, 24])
@pytest.mark.parametrize("outliers", [0.5, 1.5])
def test_no_recipe_is_worse_than_plain(tmp_path: Path, count: int, outliers: float) -> None:
    """Few samples of heavy tails: what looks better by prediction, or on two of them, is not."""
    model, rng = small_classifier(outliers), np.random.default_rng(count)

    def draw(number: int) -> list[Any]:
        return [{"x": rng.standard_t(3, (1, 16)).astype(np.float32)} for _ in range(number)]

    feeds, unseen = draw(count), draw(64)
    for recipe in ("plain", "fast"):
        quantized(model, tmp_path / f"{recipe}.onnx", feeds, recipe=recipe)
    plain, fast = (quality(model, tmp_path / f"{name}.onnx", unseen) for name in ("plain", "fast"))
    assert fast > plain - 0.7


@pytest.mark.parametrize("count", [6, 12, 40])
def test_biases_are_judged_by_samples_they_were_not_fitted_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Three quarters to fit to, the rest to judge by, of few samples too."""
    from kenosis_ort.passes import correct_biases, runner

    seen: dict[str, list[bytes]] = {"fit": [], "held out": []}
    real_shifts, real_evaluated = correct_biases.bias_shifts, runner.PassRunner._evaluated

    def shifts(model: Any, quantized: Any, feeds: Any, **options: Any) -> Any:
        seen["fit"] += [f["x"].tobytes() for f in feeds]
        return real_shifts(model, quantized, feeds, **options)

    def evaluated(self: Any, each: Any, state: Any, found: Any, evaluator: Any) -> Any:
        if each.name == "bias_correction":
            seen["held out"] += [f["x"].tobytes() for f in evaluator.feeds]
        return real_evaluated(self, each, state, found, evaluator)

    monkeypatch.setattr(correct_biases, "bias_shifts", shifts)
    monkeypatch.setattr(runner.PassRunner, "_evaluated", evaluated)
    model = models.bn_net()
    quantized(model, tmp_path / "out.onnx", models.feeds(model, count), recipe="fast")
    assert not set(seen["fit"]) & set(seen["held out"])
    assert len(seen["held out"]) >= 1
    assert len(seen["fit"]) >= 2 * len(seen["held out"])


def test_ranges_are_chosen_for_corrected_biases_and_biases_found_anew_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean error, which the correction takes away, would hide what ranges differ by.

    Both times they start from the biases as they were.
    """
    from kenosis_ort.passes import choose_ranges, correct_biases

    model, rng = models.mobile_block(), np.random.default_rng(0)
    feeds = [{"x": rng.standard_t(5, (1, 3, 8, 8)).astype(np.float32)} for _ in range(32)]
    fitted: list[onnx.ModelProto] = []
    compared: list[bool] = []
    started: list[Any] = []
    real, choose = correct_biases.bias_shifts, choose_ranges.RangeChoice.apply
    move = correct_biases.with_shifts

    def shifts(model: Any, quantized: Any, *rest: Any, **options: Any) -> Any:
        fitted.append(quantized)
        return real(model, quantized, *rest, **options)

    def apply(self: Any, state: Any, *rest: Any) -> Any:
        compared.append(bool(state.built.corrections))
        return choose(self, state, *rest)

    def moved(model: Any, shifts: Any, before: Any) -> Any:
        started.append(before)
        return move(model, shifts, before)

    monkeypatch.setattr(correct_biases, "bias_shifts", shifts)
    monkeypatch.setattr(correct_biases, "with_shifts", moved)
    monkeypatch.setattr(choose_ranges.RangeChoice, "apply", apply)
    report = quantized(model, tmp_path / "out.onnx", feeds, recipe="fast")
    assert {p.name for p in report.passes if p.kept} >= {"bias_correction", "ranges"}
    assert compared == [True]
    assert [dict(before) for before in started] == [{}, {}], "no shift on top of another"
    first, second = ({t.name: numpy_helper.to_array(t) for t in m.graph.initializer} for m in fitted)
    scales = [name for name in first if name.endswith("_scale") and first[name].ndim == 0]
    assert any(second[name] < first[name] for name in scales), "the second time for the ranges that were chosen"
