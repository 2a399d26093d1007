"""Held-out data of the caller's: what is refused, what it decides, and that nothing is calibrated on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from kenosis_ort import (
    RECIPES,
    ArrayReader,
    CalibrationError,
    KenosisWarning,
    OptionError,
    QuantizationReport,
    quantize_static,
)
from kenosis_ort.calibration.cached_samples import feed_digest
from kenosis_ort.flow.held_data import Validation
from kenosis_ort.runtime.session import open_session
from tests.models import Net


def _net() -> onnx.ModelProto:
    """Two convolutions and a head of five classes."""
    rng = np.random.default_rng(3)
    net = Net()
    value = net.input("x", [None, 3, 8, 8])
    for channels, width in ((3, 16), (16, 16)):
        weight = net.const(rng.normal(size=(width, channels, 3, 3)).astype(np.float32) / 3)
        value = net.op("Relu", [net.op("Conv", [value, weight], pads=[1, 1, 1, 1])])
    value = net.op("Flatten", [net.op("GlobalAveragePool", [value])])
    head = net.const(rng.normal(size=(16, 5)).astype(np.float32) * 6)
    net.output(net.op("Softmax", [net.op("MatMul", [value, head])], axis=1), [None, 5])
    return net.model()


def _feeds(count: int, seed: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [{"x": rng.normal(size=(1, 3, 8, 8)).astype(np.float32) * rng.uniform(0.3, 2)} for _ in range(count)]


def _labels(model: onnx.ModelProto, feeds: list[Any]) -> np.ndarray:
    session = open_session(model)
    return np.array([session.run(None, feed)[0].argmax() for feed in feeds])


def _top(outputs: Any) -> int:
    return int(next(iter(outputs.values())).argmax())


class Top1:
    """Counts what is right, sample by sample."""

    def __init__(self, labels: np.ndarray) -> None:
        self.labels, self.right, self.seen = labels, 0, []

    def update(self, outputs: Any, reference: Any, index: int) -> None:
        self.right += int(_top(outputs) == self.labels[index])
        self.seen.append(index)

    def compute(self) -> float:
        return self.right / len(self.seen)

    def reset(self) -> None:
        self.right, self.seen = 0, []


class Reader:
    """A reader as ORT's users write them: one buffer, once through."""

    def __init__(self, feeds: list[Any]) -> None:
        self._feeds = iter(feeds)
        self._buffer = np.zeros((1, 3, 8, 8), np.float32)

    def get_next(self) -> Any:
        feed = next(self._feeds, None)
        if feed is None:
            return None
        self._buffer[:] = feed["x"]
        return {"x": self._buffer}


def test_a_budget_on_labels_of_held_out_data(tmp_path: Path) -> None:
    """Everything wrong in the metric's eyes but by label: what is measured is top-1 on the caller's data, all of it."""
    model, held_out = _net(), _feeds(60, seed=9)
    labels = _labels(model, held_out)
    labels[:6] = (labels[:6] + 1) % 5  # the float model is right on 90 %
    report = quantize_static(
        model,
        tmp_path / "out.onnx",
        ArrayReader(_feeds(16, seed=1)),
        metric=Top1(labels),
        eval_reader=Reader(held_out),
        accuracy_budget=0.05,
        promise=False,
    )
    found = report.measure
    assert found is not None
    assert (found.measure, found.samples, found.float_value) == ("metric 'Top1'", 60, pytest.approx(0.9))
    assert found.source == "evaluation sample"
    assert found.budget == 0.05
    assert found.kept == (found.loss <= 0.05)
    written = open_session(tmp_path / "out.onnx")
    got = np.mean([written.run(None, feed)[0].argmax() == label for feed, label in zip(held_out, labels, strict=True)])
    assert found.value == pytest.approx(float(got))
    assert QuantizationReport.from_json(report.to_json()).measure == found
    assert "metric 'Top1'" in str(report)
    assert "allowed" in str(report)
    assert "evaluation sample" in report.to_html()


def test_nothing_is_calibrated_on_it(tmp_path: Path) -> None:
    """Held-out data of a hundred times the size leaves ranges as they are."""
    model = _net()
    wide = [{"x": feed["x"] * 100} for feed in _feeds(8, seed=2)]
    files = []
    for name, data in (("with", wide), ("without", _feeds(8, seed=2))):
        reader = ArrayReader(_feeds(12, seed=1))
        quantize_static(model, tmp_path / name, reader, recipe="plain", eval_reader=data, promise=False)
        files.append((tmp_path / name).read_bytes())
    assert files[0] == files[1]


def test_labels_of_calibration_samples_are_found_by_their_numbers(tmp_path: Path) -> None:
    model, feeds = _net(), _feeds(24, seed=1)
    labels, seen = _labels(model, feeds), set()

    def top1(outputs: Any, reference: Any, indices: Any) -> float:
        seen.update(indices)
        return float(np.mean([_top(r) == labels[i] for r, i in zip(reference, indices, strict=True)]))

    report = quantize_static(model, tmp_path / "out.onnx", ArrayReader(feeds), metric=top1, promise=False)
    assert report.measure is not None
    assert report.measure.float_value == 1.0  # else numbers and samples are not the same
    assert seen
    in_order = sorted(range(24), key=lambda i: feed_digest(feeds[i]))
    assert seen <= set(in_order[1::2])  # those held out


def test_batches_are_not_taken_apart_under_labels(tmp_path: Path) -> None:
    model = _net()
    batches = [{"x": np.concatenate([f["x"] for f in _feeds(4, seed=s)])} for s in range(6)]
    sizes = set()

    def metric(outputs: Any, reference: Any, indices: Any) -> float:
        sizes.update(len(next(iter(o.values()))) for o in outputs)
        return 1.0

    quantize_static(model, tmp_path / "out.onnx", ArrayReader(batches), metric=metric, promise=False)
    assert sizes == {4}


def test_the_measure_of_the_default_call(tmp_path: Path) -> None:
    model = _net()
    report = quantize_static(model, tmp_path / "out.onnx", ArrayReader(_feeds(32, seed=1)), promise=False)
    assert report.measure is not None
    assert report.measure.measure.startswith("top-1 agreement")
    assert report.measure.source == "held-out calibration sample"
    assert report.measure.samples == 8
    assert report.measure.low < report.measure.value
    assert (report.measure.budget, report.measure.kept, report.measure.verdict()) == (None, None, "")


def _raising() -> Iterator[Any]:
    yield _feeds(1, seed=0)[0]
    raise RuntimeError("the camera is off")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "no sample"),
        ([{"y": np.zeros((1, 3, 8, 8), np.float32)}], "has an input 'y'"),
        ([{"x": np.zeros((1, 3, 9, 8), np.float32)}], "wrong shape"),
        (_raising(), "camera is off"),
        ([3], "not a dictionary"),
    ],
)
def test_wrong_data_is_refused_before_calibration(tmp_path: Path, data: Any, message: str) -> None:
    class Untouched:
        def get_next(self) -> Any:
            raise AssertionError("calibration data was read")

    with pytest.raises(CalibrationError, match=message) as caught:
        quantize_static(_net(), tmp_path / "out.onnx", Untouched(), eval_reader=data, promise=False)
    assert "eval_reader" in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", [3, "samples.npz", {"x": np.zeros(3)}])
def test_no_reader_at_all(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(OptionError, match="eval_reader"):
        quantize_static(_net(), tmp_path / "out.onnx", ArrayReader(_feeds(4, seed=1)), eval_reader=wrong)


def test_the_calibration_reader_again_is_refused(tmp_path: Path) -> None:
    reader = ArrayReader(_feeds(4, seed=1))
    with pytest.raises(OptionError, match="is the reader that calibration reads"):
        quantize_static(_net(), tmp_path / "out.onnx", reader, eval_reader=reader)


@pytest.mark.parametrize("wrong", [lambda outputs: 0.0, Top1, object()])
def test_wrong_metrics_are_refused_before_the_model_is_read(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(OptionError, match="metric"):
        quantize_static(tmp_path / "missing.onnx", tmp_path / "out.onnx", metric=wrong)


def test_memory_does_not_grow_with_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kenosis_ort.flow.held_data._LOOKED_AT_BYTES", 4000)
    feeds = _feeds(50, seed=0)
    found = Validation(Reader(feeds), _net())
    assert len(found) == 50
    assert all(np.array_equal(a["x"], b["x"]) for a, b in zip(found, feeds, strict=True))
    assert [feed.index for feed in found] == list(range(50))
    few = found.some()
    assert 1 <= len(few) <= 6
    assert [f.index for f in found[10:12]] == [10, 11]


def test_evaluation_samples_that_are_calibrated_on_are_told(tmp_path: Path) -> None:
    feeds = _feeds(12, seed=1)
    with pytest.warns(KenosisWarning, match="12 of 12 calibration samples looked at are among the evaluation samples"):
        quantize_static(_net(), tmp_path / "out.onnx", ArrayReader(feeds), eval_reader=Reader(feeds), promise=False)


def _detector() -> onnx.ModelProto:
    """Small bright marks on a dark ground: a mask of few pixels, whose edges are where noise counts."""
    net, rng = Net(), np.random.default_rng(5)
    value, channels = net.input("x", [1, 1, 32, 32]), 1
    for _ in range(4):
        mix = rng.uniform(size=(8, channels, 3, 3)).astype(np.float32) ** 4
        mix /= mix.sum(axis=(1, 2, 3), keepdims=True)
        value = net.op("Relu", [net.op("Conv", [value, net.const(mix)], pads=[1, 1, 1, 1])])
        channels = 8
    weight, bias = net.const(np.full((1, 8, 1, 1), 5.0, np.float32)), net.const(np.full(1, -12.0, np.float32))
    net.output(net.op("Sigmoid", [net.op("Conv", [value, weight, bias])]), [1, 1, 32, 32])
    return net.model()


def _marks(count: int, seed: int) -> list[dict[str, np.ndarray]]:
    rng, feeds = np.random.default_rng(seed), []
    for _ in range(count):
        page = rng.uniform(0, 0.1, (32, 32))
        for _ in range(4):
            y, x = rng.integers(2, 26, 2)
            page[y : y + rng.integers(2, 6), x : x + rng.integers(2, 6)] += rng.uniform(0.3, 1)
        feeds.append({"x": page[None, None].astype(np.float32)})
    return feeds


def test_a_budget_of_a_detector_is_about_its_masks(tmp_path: Path) -> None:
    """Noise power below the budget hid masks beyond it; the budget is judged by masks now."""
    model, budget = _detector(), 0.007
    plain, kept = tmp_path / "plain.onnx", tmp_path / "kept.onnx"
    before = quantize_static(model, plain, ArrayReader(_marks(32, 1)), recipe="fast", promise=False, tune="off")
    assert before.measure is not None
    assert before.measure.measure.startswith("mask IoU")
    noise = [o.error_after for o in before.passes if o.error_after is not None]
    assert min(noise) < budget < before.measure.loss
    recipe = replace(RECIPES["fast"], mixed_precision=True, accuracy_budget=budget, max_float_share=0.8)
    after = quantize_static(model, kept, ArrayReader(_marks(32, 1)), recipe=recipe, promise=False, tune="off")
    assert after.measure is not None
    assert after.measure.kept == (after.measure.loss <= budget * (1 + 1e-6))
    assert after.measure.loss < before.measure.loss
    assert any("Left float for accuracy" in note for note in after.notes)
