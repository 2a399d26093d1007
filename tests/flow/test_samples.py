"""The reader that keeps feeds for later passes, and batches that are taken apart into samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.calibration.cached_samples import feed_digest
from kenosis_ort.calibration.collector import Points, collect
from kenosis_ort.calibration.feeds import InputSpec
from kenosis_ort.calibration.part_session import block_size
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.flow import builder
from kenosis_ort.flow.finish import few_of
from kenosis_ort.flow.samples import KeepingReader, find_division
from kenosis_ort.passes.evaluator import Rows, some_of
from kenosis_ort.runtime.session import counted
from tests import models
from tests.flow.support import quantized
from tests.models import FeedReader
from tests.processor import X86

INPUTS: tuple[list[InputSpec], list[InputSpec]] = ([InputSpec("x", np.dtype("float32"), (4,))], [])


def numbered(at: int) -> dict[str, Any]:
    return {"x": np.full(4, at, np.float32)}


def keeping(count: int, keep: int, **options: Any) -> KeepingReader:
    """A keeping reader of feeds 0, 1, 2, ..."""
    return KeepingReader(FeedReader([numbered(at) for at in range(count)]), INPUTS, keep=keep, **options)


def numbers(feeds: list[Any]) -> list[int]:
    return [int(feed["x"][0]) for feed in feeds]


def drain(reader: KeepingReader) -> list[int]:
    return numbers(list(iter(reader.get_next, None)))


@given(st.integers(0, 200), st.integers(0, 30), st.integers(1, 30), st.integers(0, 12))
def test_all_feeds_pass_once_and_those_of_least_digest_are_kept(count: int, keep: int, wanted: int, ahead: int) -> None:
    reader = keeping(count, keep)
    assert numbers(reader.peek(ahead)) == list(range(min(ahead, count)))
    foreseen = reader.foreseen(wanted)
    assert reader.foreseen(wanted) == foreseen
    assert drain(reader) == list(range(count))
    assert numbers(reader.feeds) == sorted(range(count), key=lambda at: feed_digest(numbered(at)))[:keep]
    assert foreseen == numbers(reader.feeds[:wanted])
    assert count == 0 or reader.foreseen(wanted) is None  # all were handed out


def test_the_byte_budget_holds_and_kept_feeds_are_copies() -> None:
    for count, budget, kept in ((20, 64, 4), (3, 8, 0)):
        reader = keeping(count, 100, budget=budget)
        feeds = [*iter(reader.get_next, None)]
        assert numbers(feeds) == list(range(count))
        before = numbers(reader.feeds)
        assert len(before) == kept
        for feed in feeds:
            feed["x"][:] = -1
        assert numbers(reader.feeds) == before


@given(st.lists(st.integers(1, 40), max_size=12))
def test_few_samples_with_enough_rows(batches: list[int]) -> None:
    feeds = [{"x": np.zeros((n, 2), np.float32), "flag": np.array(True)} for n in batches]
    found, spread = few_of(feeds), feeds[:: max(1, -(-len(feeds) // 4))]
    assert found == spread[: len(found)]
    rows = [len(feed["x"]) for feed in found]
    assert sum(rows[:-1]) < 32
    assert sum(rows) >= 32 or len(found) == len(spread)


def test_what_memory_does_not_hold_is_foreseen_but_no_more_is_read_ahead_than_can_be_put_aside() -> None:
    reader = keeping(500, 20, budget=200 * 16)
    foreseen = reader.foreseen(20)
    assert len(reader.peek(500)) == 500
    assert drain(reader) == list(range(500))
    assert foreseen == numbers(reader.feeds[:20])
    assert len(foreseen) == 20
    more = keeping(5000, 20, budget=200 * 16)
    assert more.foreseen(20) is None
    assert len(more.peek(5000)) < 3000
    assert drain(more) == list(range(5000))


# ---- batches --------------------------------------------------------------------------------------------------

BATCH = {"x": np.random.default_rng(0).normal(0, 1, (24, 3)).astype(np.float32)}
JOINED = {
    "alone": lambda x: x, "mean": lambda x: x - x.mean(0), "first": lambda x: x - x[0],
    "cumulated": lambda x: x.cumsum(0),
}  # fmt: skip


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("what", JOINED)
def test_rows_are_tried_on_the_last_of_them(what: str, count: int) -> None:
    """Nine of 24 rows are run to know it; whatever joins rows joins those of two parts too."""
    seen = []

    def run(feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        seen.append(len(feed["x"]))
        return [JOINED[what](feed["x"])]

    found = find_division(run, [BATCH], count=count).of([BATCH])
    if what != "alone":
        assert found == [BATCH]
        return
    assert {type(each) for each in found} == {Rows}
    np.testing.assert_array_equal(np.concatenate([each["x"] for each in found]), BATCH["x"])
    assert (len(found), sum(seen)) == (count, 9)


def test_a_model_of_a_fixed_batch_gets_it_full() -> None:
    def run(feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        return [feed["x"].reshape(24, 3) * 2]

    found = find_division(run, [BATCH], count=8).of([BATCH])
    assert [(len(each["x"]), isinstance(each, Rows)) for each in found] == [(24, False)] * 8


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

    def recorded(model: onnx.ModelProto, feeds: list[Any], points: Points) -> CalibrationTable:
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
    in_blocks = X86 and 8 % block_size() == 0  # of channels: the model is opened once more to be read in them
    assert (swept.sessions, swept.runs) == (2 + in_blocks, 32 + 2)  # and one for the trial of two pieces
    assert next(each for each in report.passes if each.name == "equalize").kept
    assert again == [(18, 1)]  # 24 rows or a few more, for the one value between two layers
