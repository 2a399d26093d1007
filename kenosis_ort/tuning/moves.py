"""The vocabulary of the search: moves away from the plan, and what became of each combination tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import onnx

from kenosis_ort.bench.noise import Comparison
from kenosis_ort.storage.data import to_data


@dataclass(frozen=True)
class Move:
    """One change that may make a net faster.

    Attributes:
        name: Short and unique, e.g. ``float prefix of 2``; stands in reports and caches.
        kind: What sort of change, e.g. ``prefix``, ``suffix``, ``rewrite``, ``weight-only``.
        data: What the builder needs, e.g. names of nodes to leave float or of a rewrite.
        group: Of all moves of a group at most one is made; a further one takes the place of the first.
        alone: It goes together with no other move, e.g. another kind of quantization altogether.
    """

    name: str
    kind: str
    data: tuple[str, ...] = ()
    group: str | None = None
    alone: bool = False


Moves = frozenset[Move]
Build = Callable[[Moves], onnx.ModelProto | None]


def add_move(moves: Moves, move: Move) -> Moves:
    """Returns the combination after a further move, without those that it excludes."""
    if move.alone:
        return frozenset({move})
    stay = (m for m in moves if not m.alone and (move.group is None or m.group != move.group))
    return frozenset({*stay, move})


def label(moves: Iterable[Move]) -> str:
    """Returns the names of a combination's moves."""
    return " + ".join(sorted(move.name for move in moves)) or "as planned"


class Stage(str, Enum):
    """How far a combination came."""

    DROPPED = "dropped"  # does not build, load or run
    SCREENED = "screened out"  # not faster in the screening race
    REFUTED = "not confirmed"  # faster there, but not in the final race with new sessions
    ACCEPTED = "accepted"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Trial:
    """One combination that was tried.

    Attributes:
        moves: Names of its moves.
        stage: How far it came.
        comparison: Its speed relative to the combination it had to beat, in the last race it took part in; None if
            it was dropped before.
        reason: Why it came no further; empty if accepted.
    """

    moves: tuple[str, ...]
    stage: Stage
    comparison: Comparison | None = None
    reason: str = ""


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        accepted: The moves to make; empty for the plan as it is.
        model: The model with them.
        gain: Its speed relative to the plan as it is, from a race of its own; None without an accepted move.
        trials: All combinations that were tried, in order.
        noisy: The machine was too noisy to search; the plan stays as it is.
        complete: Nothing was left out for lack of time.
        seconds: What it took.
    """

    accepted: tuple[Move, ...]
    model: onnx.ModelProto
    gain: Comparison | None
    trials: tuple[Trial, ...]
    noisy: bool
    complete: bool
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON, enough to repeat the result without measuring; the model is not in it."""
        data = {name: to_data(getattr(self, name)) for name in ("gain", "trials", "noisy", "complete", "seconds")}
        return {"accepted": [move.name for move in self.accepted], **data}


def recall(data: Mapping[str, Any], moves: Iterable[Move]) -> tuple[Move, ...]:
    """Returns the accepted moves that `SearchResult.to_dict` wrote down.

    Args:
        data: What it returned.
        moves: All moves there are.

    Raises:
        KeyError: A move is unknown, or the data holds none.
        TypeError: The data is something else.
    """
    known = {move.name: move for move in moves}
    names = data["accepted"]
    if not isinstance(names, list):
        raise TypeError("the accepted moves are not a list")
    return tuple(known[name] for name in names)
