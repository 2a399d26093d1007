"""Samples in parts: some that get statistics of their own, and some that run through a large model together."""

from __future__ import annotations

from typing import Any

from kenosis_ort.calibration.observer import Array, Collector
from kenosis_ort.calibration.statistics import TensorStatistics
from kenosis_ort.storage.spool import Spool


class Bundle:
    """What is to run through a model of many weights together.

    Attributes:
        feeds: What it runs on.
        numbers: Of the samples that these are of, for messages.
        chosen: Whether each is of the part.
    """

    def __init__(self) -> None:
        self.feeds = Spool()
        self.numbers: list[int] = []
        self.chosen: list[bool] = []

    def append(self, feed: dict[str, Any], number: int, chosen: bool) -> None:
        """Puts one at the end."""
        self.feeds.append(feed)
        self.numbers.append(number)
        self.chosen.append(chosen)

    @property
    def samples(self) -> int:
        """How many samples they are of."""
        return len(set(self.numbers))


class Parted:
    """Collects from some samples apart from the others; together they are what one collector would have, exactly.

    Args:
        chosen: For the samples of the part.
        others: For the rest.

    Attributes:
        is_chosen: What comes next is of the part.
    """

    def __init__(self, chosen: Collector, others: Collector) -> None:
        self.chosen, self._others = chosen, others
        self.is_chosen = False

    @property
    def _now(self) -> Collector:
        return self.chosen if self.is_chosen else self._others

    def add(self, name: str, array: Array, ends: tuple[float, float] | None = None) -> bool:
        return self._now.add(name, array, ends)

    def end_sample(self) -> None:
        self._now.end_sample()

    def end_chunk(self) -> None:
        self.chosen.end_chunk()
        self._others.end_chunk()

    def statistics(self) -> dict[str, TensorStatistics]:
        others = self._others.statistics()
        return {n: s.merge(others[n], weights=(1, 1)) for n, s in self.chosen.statistics().items()}
