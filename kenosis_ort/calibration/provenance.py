"""Where calibration samples come from, and what was assumed when they were made up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType


class Known(str, Enum):
    """How well the scale of an input's values is known."""

    GIVEN = "given by the caller"
    REAL = "taken from the real samples"
    GRAPH = "found in the graph"
    STATISTICS = "fitted to the statistics of a BatchNormalization"
    CONVENTION = "a convention"
    GUESS = "a guess"


@dataclass(frozen=True)
class Provenance:
    """Where samples come from.

    Attributes:
        inputs: What was assumed about each input, for people.
        known: How well the scale of each input's values is known, by its name.
        natural: Whether the samples are made after what the inputs are in nature; random tokens and features are not.
        real: Number of real feeds, which come first.
    """

    inputs: tuple[str, ...] = ()
    known: Mapping[str, Known] = field(default_factory=dict)
    natural: bool = False
    real: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "known", MappingProxyType(dict(self.known)))
