"""Samples kept for the passes that need data again: those of least digest, whoever read them and in whatever order.

A digest of the content is as good as a draw, and it is the same on every machine: what three shards kept, put together
and cut again, is what one reader of all samples would have kept. So a calibration table can take its reader's place.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import Any

import numpy as np

from kenosis_ort.calibration.feeds import Sample
from kenosis_ort.calibration.fingerprint import feed_digest

MOST_BYTES = 64 * 2**20
"""Of all kept samples together."""
MOST_FOR_PASSES = 64
"""Samples that a recipe of the package wants at most: so many are kept for a table that is to serve every recipe."""

_NO_CUT = 2**256


class KeptSamples:
    """The samples of least digest among all that were added, as many as a number and a budget of bytes allow.

    A sample that comes twice is kept once; one that alone is beyond the budget is none that can be kept.

    Args:
        most: Number of samples to keep at most.
        budget: Bytes to keep at most.
        copies: Arrays of their own are kept: a reader may refill the same buffer.

    Attributes:
        cut: The digest from which on nothing is kept, since there is no room for it.
    """

    def __init__(self, most: int, budget: int = MOST_BYTES, *, copies: bool = True) -> None:
        self.most, self.budget = most, budget
        self.cut = _NO_CUT
        self._copies = copies
        self._digests: list[int] = []
        self._samples: list[Sample] = []
        self._bytes = 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KeptSamples):
            return NotImplemented
        same = [digest_of(s) for s in self.samples] == [digest_of(s) for s in other.samples]
        return same and (self.cut, self.most, self.budget) == (other.cut, other.most, other.budget)

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def bytes(self) -> int:
        """Bytes of all of them."""
        return self._bytes

    @property
    def samples(self) -> list[Sample]:
        """The samples, in the order of their digests."""
        return list(self._samples)

    def add(self, sample: Sample) -> None:
        """Keeps a sample, checked against the model's inputs, if it is among those of least digest."""
        digest, size = digest_of(sample), bytes_of(sample)
        at = bisect.bisect_left(self._digests, digest)
        if digest >= self.cut or size > self.budget or digest in self._digests[at : at + 1]:
            return
        self._digests.insert(at, digest)
        self._samples.insert(at, copied(sample) if self._copies else sample)
        self._bytes += size
        while len(self._samples) > self.most or self._bytes > self.budget:
            self._drop()

    def cut_at(self, digest: int) -> None:
        """Drops what lies at or beyond a digest, and keeps none of it from now on."""
        while self._digests and self._digests[-1] >= digest:
            self._drop()
        self.cut = min(self.cut, digest)

    def merge(self, other: KeptSamples) -> KeptSamples:
        """Returns what would have been kept of both data sets together."""
        merged = KeptSamples(min(self.most, other.most), min(self.budget, other.budget), copies=False)
        merged.cut_at(min(self.cut, other.cut))
        for sample in (*self._samples, *other._samples):
            merged.add(sample)
        return merged

    def _drop(self) -> None:
        self.cut = self._digests.pop()
        self._bytes -= bytes_of(self._samples.pop())


def digest_of(sample: Sample) -> int:
    """Returns the digest of a sample's content, computed where it was not before."""
    return feed_digest(sample) if sample.digest is None else sample.digest


def bytes_of(feed: Mapping[str, Any]) -> int:
    """Returns the bytes of a feed's arrays."""
    return sum(_bytes(value) for value in feed.values())


def _bytes(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(map(_bytes, value))
    return int(getattr(value, "nbytes", 0))


def copied(sample: Sample) -> Sample:
    """Returns a sample with arrays of its own."""
    own = {name: np.array(value) if isinstance(value, np.ndarray) else value for name, value in sample.items()}
    return Sample(own, sample.index, sample.digest)
