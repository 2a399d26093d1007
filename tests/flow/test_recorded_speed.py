"""What timing decided is in the report's recipe, and that recipe makes the same bytes without any timing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kenosis_ort import Recipe
from kenosis_ort.flow import speed as flow_speed
from kenosis_ort.tuning import promise
from kenosis_ort.tuning.promise import Basis, FormStatus, Outcome, Step
from tests import models
from tests.flow.support import quantized

pytestmark = pytest.mark.filterwarnings("ignore::kenosis_ort.KenosisWarning")


def deciding(form: str) -> Any:
    """Returns a promise whose clock makes one form the first that is not slower."""

    def decided(_: Any, candidates: Any, *args: Any, **kwargs: Any) -> Outcome:
        candidate = next(each for each in candidates if each.name == form)
        model = candidate.build()
        assert model is not None
        step = Step(form, candidate.description, FormStatus.TAKEN, "fast")
        return Outcome(model, form, (step,), Basis.MEASURED, 1.0, 1.0)

    return decided


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("timed")


@pytest.mark.parametrize("form", ["int8", "first node float", "weight-only", "dynamic", "float"])
def test_the_saved_recipe_repeats_what_timing_decided(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.mlp(n_in=256, hidden=256, n_out=64)
    monkeypatch.setattr(promise, "keep_promise", deciding(form))
    report = quantized(model, tmp_path / "first.onnx", promise=True, tune="model")
    assert report.recipe is not None
    assert report.recipe.speed is not None
    assert report.recipe.speed.form == form
    report.recipe.save(tmp_path / "saved.toml")
    assert Recipe.load(tmp_path / "saved.toml") == report.recipe
    monkeypatch.setattr(promise, "keep_promise", never)
    monkeypatch.setattr(flow_speed, "_least_us", never)
    again = quantized(model, tmp_path / "again.onnx", recipe=tmp_path / "saved.toml", promise=True)
    assert again.recipe == report.recipe
    assert (tmp_path / "first.onnx").read_bytes() == (tmp_path / "again.onnx").read_bytes()
    assert again.speed is not None
    assert again.speed.taken is not None
    assert "nothing was timed" in again.speed.taken.reason


def test_another_model_is_timed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promise, "keep_promise", deciding("float"))
    report = quantized(models.residual_block(), tmp_path / "first.onnx", promise=True)
    assert report.recipe is not None
    monkeypatch.setattr(promise, "keep_promise", deciding("int8"))
    other = quantized(models.residual_block(seed=3), tmp_path / "other.onnx", recipe=report.recipe, promise=True)
    assert other.recipe is not None
    assert other.recipe.speed is not None
    assert other.recipe.speed.form == "int8"
    assert other.recipe.speed.model != report.recipe.speed.model  # type: ignore[union-attr]
