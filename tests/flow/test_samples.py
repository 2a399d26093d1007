"""The reader that keeps feeds for later passes."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from onnxruntime.quantization import CalibrationDataReader

from kenosis_ort.calibration.cached_samples import feed_digest
from kenosis_ort.calibration.feeds import InputSpec
from kenosis_ort.flow.samples import KeepingReader, enough

INPUTS: tuple[list[InputSpec], list[InputSpec]] = ([InputSpec("x", np.dtype("float32"), (4,))], [])


class Counting(CalibrationDataReader):  # type: ignore[misc]
    """Feeds 0, 1, 2, ..., once."""

    def __init__(self, count: int) -> None:
        self.rest = iter(range(count))

    def get_next(self) -> dict[str, Any] | None:
        at = next(self.rest, None)
        return None if at is None else {"x": np.full(4, at, np.float32)}


def drain(reader: KeepingReader) -> list[int]:
    out = []
    while (feed := reader.get_next()) is not None:
        out.append(int(feed["x"][0]))
    return out


@given(st.integers(0, 70), st.integers(0, 9), st.integers(0, 12))
def test_all_feeds_pass_once_and_those_of_least_digest_are_kept(count: int, keep: int, ahead: int) -> None:
    reader = KeepingReader(Counting(count), INPUTS, keep=keep)
    assert [int(f["x"][0]) for f in reader.peek(ahead)] == list(range(min(ahead, count)))
    assert drain(reader) == list(range(count))
    kept = [int(f["x"][0]) for f in reader.feeds]
    digests = {at: feed_digest({"x": np.full(4, at, np.float32)}) for at in range(count)}
    assert kept == sorted(digests, key=lambda at: digests[at])[:keep]
    assert reader.some(3) == reader.feeds[:3]


def test_the_byte_budget_holds() -> None:
    reader = KeepingReader(Counting(20), INPUTS, keep=100, budget=64)
    drain(reader)
    assert sum(f["x"].nbytes for f in reader.feeds) <= 64
    assert reader.feeds
    big = KeepingReader(Counting(3), INPUTS, keep=100, budget=8)
    assert drain(big) == [0, 1, 2]
    assert big.feeds == []


def test_kept_feeds_are_copies() -> None:
    reader = KeepingReader(Counting(1), INPUTS, keep=1)
    feed = reader.get_next()
    assert feed is not None
    feed["x"][:] = -1
    assert reader.feeds[0]["x"][0] == 0


@given(st.lists(st.integers(1, 40), max_size=12), st.integers(1, 100), st.integers(0, 4))
def test_enough_rows(batches: list[int], rows: int, least: int) -> None:
    feeds = [{"x": np.zeros((n, 2), np.float32), "flag": np.array(True)} for n in batches]
    found = enough(feeds, rows=rows, least=least)
    assert found == feeds[: len(found)]
    assert len(found) == len(feeds) or (sum(batches[: len(found)]) >= rows and len(found) >= least)
    if len(found) > max(least, 1):
        assert sum(batches[: len(found) - 1]) < rows


@given(st.integers(0, 200), st.integers(1, 30), st.integers(1, 30), st.integers(0, 12))
def test_what_is_kept_is_foreseen(count: int, keep: int, wanted: int, ahead: int) -> None:
    reader = KeepingReader(Counting(count), INPUTS, keep=keep)
    reader.peek(ahead)
    foreseen = reader.foreseen(wanted)
    assert reader.foreseen(wanted) == foreseen
    assert drain(reader) == list(range(count))
    assert foreseen == [int(feed["x"][0]) for feed in reader.some(wanted)]
    assert count == 0 or reader.foreseen(wanted) is None  # all were handed out


def test_more_than_can_be_put_aside_is_not_read_ahead() -> None:
    reader = KeepingReader(Counting(5000), INPUTS, keep=20, budget=200 * 16)
    assert reader.foreseen(20) is None
    assert len(reader.peek(5000)) < 3000
    assert drain(reader) == list(range(5000))


def test_what_memory_does_not_hold_is_foreseen_all_the_same() -> None:
    reader = KeepingReader(Counting(500), INPUTS, keep=20, budget=200 * 16)
    foreseen = reader.foreseen(20)
    assert len(reader.peek(500)) == 500
    assert drain(reader) == list(range(500))
    assert foreseen == [int(feed["x"][0]) for feed in reader.some(20)]
    assert len(foreseen) == 20
