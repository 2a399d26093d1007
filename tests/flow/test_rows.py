from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.calibration.accumulators import block_size
from kenosis_ort.calibration.collector import Points, collect
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.flow import builder
from kenosis_ort.flow.samples import find_division
from kenosis_ort.passes.evaluator import Rows, some_of
from kenosis_ort.runtime.session import counted
from tests import models
from tests.flow.support import quantized

BATCH = {"x": np.random.default_rng(0).normal(0, 1, (24, 3)).astype(np.float32)}


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("what", ["alone", "mean", "first", "cumulated"])
def test_rows_are_tried_on_the_last_of_them(what: str, count: int) -> None:
    """Nine of 24 rows are run to know it; whatever joins rows joins those of two parts too."""
    seen = []

    def run(feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        x = feed["x"]
        seen.append(len(x))
        joined = {"alone": x, "mean": x - x.mean(0), "first": x - x[0], "cumulated": x.cumsum(0)}
        return [joined[what]]

    found = find_division(run, [BATCH], count=count).of([BATCH])
    if what == "alone":
        assert all(isinstance(each, Rows) for each in found)
        np.testing.assert_array_equal(np.concatenate([each["x"] for each in found]), BATCH["x"])
        assert len(found) == count
        assert sum(seen) == 9
    else:
        assert found == [BATCH]


def test_a_model_of_a_fixed_batch_gets_it_full() -> None:
    def run(feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        if len(feed["x"]) != 24:
            raise ValueError("24 rows")
        return [feed["x"] * 2]

    found = find_division(run, [BATCH], count=8).of([BATCH])
    assert [len(each["x"]) for each in found] == [24] * 8
    assert not any(isinstance(each, Rows) for each in found)


@given(st.lists(st.integers(2, 9), min_size=1, max_size=6), st.integers(1, 40))
def test_all_rows_are_somewhere_once_and_in_order(sizes: list[int], count: int) -> None:
    ends = np.cumsum(sizes)
    feeds = [{"x": np.arange(end - n, end)[:, None]} for n, end in zip(sizes, ends, strict=True)]
    division = find_division(lambda feed: [feed["x"].astype(np.float32)], feeds, count=count)
    found = division.of(feeds)
    assert [row for feed in found for row in feed["x"][:, 0]] == list(range(ends[-1]))
    assert len(found) >= min(count, ends[-1], 2 * len(feeds) if count > len(feeds) else len(feeds))
    if not division.is_full and division.rows[0]:
        some = some_of(found, 5)
        assert len(some) == len({id(feed) for feed in some})
        assert sum(len(feed["x"]) for feed in some) >= 2 or some == found  # some feeds have more rows than others


def test_batches_are_swept_as_they_are_taken_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What passes are fitted to comes from the one sweep over all, but for what a pass has scaled."""
    again: list[tuple[int, int]] = []

    def recorded(model: onnx.ModelProto, feeds: Sequence[Any], points: Points) -> CalibrationTable:
        again.append((len(feeds), len(points.tensors)))
        return collect(model, feeds, points)

    monkeypatch.setattr(builder, "collect", recorded)
    model = models.with_free_batch(models.residual_block(seed=5))
    rows = models.feeds(model, 48, seed=3)
    feeds = [{"x": np.concatenate([row["x"] for row in rows[at : at + 12]])} for at in range(0, 48, 12)]
    with counted() as counts:
        report = quantized(model, tmp_path / "out.onnx", feeds, recipe="fast")
    assert report.calibration.samples == 4
    swept = counts.by_stage["calibrate"]
    in_blocks = 8 % block_size() == 0  # of channels: the model is opened once more to be read in them
    assert (swept.sessions, swept.runs) == (2 + in_blocks, 32 + 2)  # and one for the trial of two pieces
    scaled = next(each for each in report.passes if each.name == "equalize")
    assert scaled.kept
    assert again == [(18, 1)]  # 24 rows or a few more, for the one value between two layers
