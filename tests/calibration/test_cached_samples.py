"""Samples of least digest: the same whoever read them, in whatever order, and in a file."""

from __future__ import annotations

import json
from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.calibration.cached_samples import CachedSamples, feed_digest, pack_samples, unpack_samples
from kenosis_ort.calibration.feeds import Sample
from kenosis_ort.errors import CalibrationError


def sample(number: int, size: int) -> Sample:
    return Sample({"x": np.full(size, number, np.uint8)}, number)


def kept_of(samples: list[Sample], most: int, budget: int) -> CachedSamples:
    kept = CachedSamples(most, budget)
    for each in samples:
        kept.add(each)
    return kept


SAMPLES = st.lists(st.builds(sample, st.integers(0, 30), st.integers(1, 12)), max_size=24)


@given(SAMPLES, st.integers(1, 8), st.integers(1, 40), st.data())
def test_shards_in_any_order_keep_what_one_reader_keeps(
    samples: list[Sample], most: int, budget: int, data: st.DataObject
) -> None:
    whole = kept_of(samples, most, budget)
    owners = data.draw(st.lists(st.integers(0, 2), min_size=len(samples), max_size=len(samples)))
    shards = [[s for s, owner in zip(samples, owners, strict=True) if owner == which] for which in range(3)]
    order = data.draw(st.permutations(range(3)))
    merged = reduce(CachedSamples.merge, [kept_of(shards[which], most, budget) for which in order])
    assert merged == whole
    assert merged.bytes == whole.bytes <= budget
    digests = [feed_digest(s) for s in whole.samples]
    assert digests == sorted(set(digests))
    assert (
        len(whole) == most
        or budget < sum(s["x"].size for s in samples)
        or len(whole) == len({feed_digest(s) for s in samples})
    )


@given(SAMPLES, st.integers(1, 8), st.integers(1, 8))
def test_who_keeps_more_keeps_the_same_first(samples: list[Sample], few: int, more: int) -> None:
    """So a table that serves every recipe gives each what its own reader would have."""
    many, some = (kept_of(samples, most, 60).samples for most in (few + more, few))
    assert [s.index for s in many[:few]] == [s.index for s in some]


VALUES: dict[str, Any] = {
    "float32": np.arange(6, dtype=np.float32).reshape(2, 3),
    "int64": np.array([[1, -2]]),
    "bool": np.array([True, False]),
    "nothing": np.zeros((0, 3), np.float16),
    "scalar": np.float32(3) * np.ones(()),
    "texts": np.array([["a", "bc"]]),
    "objects": np.array(["a", "bcd"], object),
    "sequence": [np.ones(2, np.float32), np.zeros((1, 1), np.float32)],
}


@pytest.mark.parametrize("kind", VALUES)
def test_a_file_holds_them_to_the_bit(kind: str) -> None:
    kept = kept_of([Sample({"x": VALUES[kind]}, 7)], 3, 1000)
    head, packed = json.loads(json.dumps(pack_samples(kept)))
    found = unpack_samples(head, packed)
    assert found == kept
    assert feed_digest(found.samples[0]) == feed_digest(kept.samples[0])


def test_what_no_file_holds_is_left_out() -> None:
    assert pack_samples(kept_of([Sample({"x": np.array([{}], object)}, 0)], 3, 1000)) == (None, [])


@pytest.mark.parametrize(
    "change", [{"shape": [2**40]}, {"shape": [-2, -3]}, {"dtype": "object"}, {"base64": "AAAA"}, {"base64": "x" * 32}]
)
def test_sizes_are_checked_before_memory_is_taken(change: dict[str, Any]) -> None:
    head, packed = pack_samples(kept_of([Sample({"x": VALUES["float32"]}, 0)], 3, 1000))
    packed[0]["x"] |= change
    with pytest.raises((ValueError, KeyError)):
        unpack_samples(head, packed)


def test_more_than_the_budget_is_refused() -> None:
    head, packed = pack_samples(kept_of([Sample({"x": VALUES["float32"]}, 0)], 3, 1000))
    assert head is not None
    with pytest.raises(CalibrationError, match="24 bytes"):
        unpack_samples({**head, "budget": 20}, packed)
    huge = {"width": 2**28, "shape": [1], "text": ["a"]}
    with pytest.raises(CalibrationError, match="bytes"):
        unpack_samples({**head, "budget": 2**40}, [{"x": huge}])
