"""A calibration cache switches no pass off: the first run, later ones and one without a cache make the same file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import cache as once
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import CalibrationMethod

from kenosis_ort import (
    CalibrationError,
    QuantizationReport,
    Recipe,
    SyntheticReader,
    quantize_static,
)
from tests import models
from tests.models import FeedReader, Net

EXACT = "exact"
EXACTLY = Recipe(EXACT, ranges="minmax", bias_correction=False)  # nothing that needs samples after the ranges


def unbalanced(seed: int = 0) -> onnx.ModelProto:
    """Two Convs that equalization gains much in: channels of very different size between them."""
    net, rng, channels = Net(), np.random.default_rng(seed), 8
    x = net.input("x", [1, 3, 8, 8])
    sizes = np.exp(rng.normal(0, 2.0, channels))
    first = rng.normal(0, 0.3, (channels, 3, 3, 3)) * sizes[:, None, None, None]
    second = rng.normal(0, 0.3, (4, channels, 3, 3)) / sizes[None, :, None, None]
    h = net.op("Conv", [x, net.const(first, "w1"), net.const(np.zeros(channels), "b1")], name="c1", pads=[1, 1, 1, 1])
    h = net.op("Relu", [h], name="relu")
    y = net.op("Conv", [h, net.const(second, "w2"), net.const(np.zeros(4), "b2")], name="c2", pads=[1, 1, 1, 1])
    net.output(y, [1, 4, 8, 8])
    return net.model()


MODEL = unbalanced()
FEEDS = models.feeds(MODEL, 24)


def run(out: Path, feeds: Any = FEEDS, model: onnx.ModelProto = MODEL, **options: Any) -> QuantizationReport:
    reader = FeedReader(feeds) if isinstance(feeds, list) else feeds
    if options.get("recipe") == EXACT:
        options["recipe"] = EXACTLY
    return quantize_static(model, out, reader, **{"promise": False, "evidence": "none", **options})


@once
def made(recipe: str = "fast") -> tuple[bytes, str, set[str]]:
    """The file of a call, the cache that it wrote, and the passes that it kept."""
    with tempfile.TemporaryDirectory() as folder:
        out, cache = Path(folder, "out.onnx"), Path(folder, "ranges.json")
        report = run(out, recipe=recipe, calibration_cache_path=cache)
        return out.read_bytes(), cache.read_text(), kept(report)


@once
def without_cache(**options: Any) -> tuple[bytes, set[str]]:
    """The file of a call without a cache, and the passes that it kept."""
    with tempfile.TemporaryDirectory() as folder:
        report = run(out := Path(folder, "out.onnx"), **options)
        return out.read_bytes(), kept(report)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """The cache of a call with the default recipe."""
    path = tmp_path / "ranges.json"
    path.write_text(made()[1])
    return path


def kept(report: QuantizationReport) -> set[str]:
    return {p.name for p in report.passes if p.kept}


def test_with_a_cache_every_run_makes_the_file_that_one_without_makes(tmp_path: Path, cache: Path) -> None:
    second = tmp_path / "second.onnx"
    plain, kept_then = without_cache()
    assert {"equalize", "bias_correction"} <= kept_then
    assert made()[2] == kept(run(second, calibration_cache_path=cache))
    assert plain == made()[0] == second.read_bytes()


@pytest.mark.parametrize("recipe", [EXACT, "fast"], ids=["equalized", "fast"])
def test_the_cache_alone_makes_the_file_that_its_reader_made(tmp_path: Path, recipe: str) -> None:
    alone, cache = tmp_path / "alone.onnx", tmp_path / "ranges.json"
    content, text, kept_then = made(recipe)
    cache.write_text(text)
    report = run(alone, None, recipe=recipe, calibration_cache_path=cache)
    assert kept(report) == kept_then >= {"equalize"}
    assert content == alone.read_bytes()
    assert not any("were not tried" in note for note in report.notes)


@pytest.mark.filterwarnings("ignore::kenosis_ort.KenosisWarning")
def test_made_up_samples(tmp_path: Path) -> None:
    plain, first, second = (tmp_path / f"{name}.onnx" for name in ("plain", "first", "second"))
    for out, options in ((plain, {}), (first, {"calibration_cache_path": tmp_path / "c"})):
        run(out, SyntheticReader(MODEL, samples=16), **options)
    run(second, SyntheticReader(MODEL, samples=16), calibration_cache_path=tmp_path / "c")
    assert plain.read_bytes() == first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("options", [{"recipe": "plain"}, {"per_channel": False}, {"recipe": EXACT}])
def test_one_cache_serves_other_recipes_and_types(tmp_path: Path, cache: Path, options: dict[str, Any]) -> None:
    """It is of the weights as they came, whatever was done to them then."""
    run(out := tmp_path / "out.onnx", None, calibration_cache_path=cache, **options)
    assert without_cache(**options)[0] == out.read_bytes()


@pytest.mark.parametrize("recipe", [EXACT, "plain", "fast"], ids=["equalized", "plain", "fast"])
@pytest.mark.parametrize("other", [models.feeds(MODEL, 24, seed=9), FEEDS[:-1], [*FEEDS, FEEDS[0]]])
def test_other_data_are_refused(tmp_path: Path, recipe: str, other: Any) -> None:
    cache = tmp_path / "ranges.json"
    cache.write_text(made(recipe)[1])
    with pytest.raises(CalibrationError, match="produced from other data") as caught:
        run(tmp_path / "second.onnx", other, recipe=recipe, calibration_cache_path=cache)
    assert caught.value.where == str(cache)
    assert caught.value.fix
    assert not (tmp_path / "second.onnx").exists()


def test_the_order_of_the_data_does_not_matter(tmp_path: Path) -> None:
    cache = tmp_path / "ranges.json"
    cache.write_text(made(EXACT)[1])
    run(tmp_path / "second.onnx", FEEDS[::-1], recipe=EXACT, calibration_cache_path=cache)
    assert made(EXACT)[0] == (tmp_path / "second.onnx").read_bytes()


OTHERS: dict[str, tuple[onnx.ModelProto, dict[str, Any]]] = {
    "another model": (unbalanced(1), {}),
    "another graph": (models.residual_block(), {}),
    "another method": (MODEL, {"calibrate_method": CalibrationMethod.Entropy}),
}


@pytest.mark.parametrize("with_data", [True, False])
@pytest.mark.parametrize("other", OTHERS)
def test_another_model_or_options_are_refused(tmp_path: Path, cache: Path, other: str, with_data: bool) -> None:
    out = tmp_path / "out.onnx"
    model, options = OTHERS[other]
    feeds = models.feeds(model, 24) if with_data else None
    with pytest.raises(CalibrationError, match="produced"):
        run(out, feeds, model, calibration_cache_path=cache, **options)
    assert not out.exists()


def edit_range(text: str) -> str:
    raw = json.loads(text)
    next(iter(raw["kenosis"]["tensors"].values()))["high"] *= 2
    return json.dumps(raw)


def edit_stock_range(text: str) -> str:
    raw = json.loads(text)
    next(iter(raw["data"].values()))["highest"]["data"][0] *= 2
    return json.dumps(raw)


@pytest.mark.parametrize(
    "damage",
    [lambda t: t[:-2], lambda t: t[: len(t) // 2], lambda _: "", lambda t: t + "x", edit_range, edit_stock_range],
    ids=["last characters", "half", "empty", "longer", "edited", "edited for stock"],
)
def test_a_damaged_or_edited_file_is_refused(tmp_path: Path, cache: Path, damage: Callable[[str], str]) -> None:
    out = tmp_path / "out.onnx"
    cache.write_text(damage(cache.read_text()))
    for feeds in (FEEDS, None):
        with pytest.raises(CalibrationError) as caught:
            run(out, feeds, calibration_cache_path=cache)
        assert caught.value.where == str(cache)
    assert not out.exists()


def test_a_cache_that_cannot_be_written_is_refused_before_data_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    reader = FeedReader(FEEDS)
    with pytest.raises(CalibrationError, match="cannot be written"):
        run(tmp_path / "out.onnx", reader, calibration_cache_path=tmp_path / "file" / "ranges.json")
    assert reader.handed_out == 0
