"""Greedy search over moves, by races on this machine.

In every step all remaining moves are screened against the model so far, in heats that also hold a copy of that model:
what the copy seems to gain is noise, and a move has to gain more. The best of them then meet the model so far in a
race of their own with new sessions, and only a move that wins there is made. In the end the whole combination meets
the plan as it was; if it does not win, all of it is undone. (A search without these two races accepted steps of 1.16
and 1.53 that were noise.)
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Final

import onnx

from kenosis_ort.bench.noise import MARGIN, Comparison, Verdict
from kenosis_ort.errors import KenosisError, VerificationError
from kenosis_ort.tuning.looks import FULL, SCREENING, Looks
from kenosis_ort.tuning.moves import Build, Move, Moves, SearchResult, Stage, Trial, add_move, label
from kenosis_ort.tuning.race import Race, Track, race

_log = logging.getLogger(__name__)

_HEAT: Final = 4  # combinations in a heat: few, so that a round is short against the drifts of the machine
_FINALISTS: Final = 2
_NOISE_LIMIT: Final = 1.10  # where a copy of a model seems this much faster or slower, no gain worth having shows
_RESERVE: Final = 0.25  # of the budget, for the race at the end
_SO_FAR, _COPY, _PLAN = "so far", "copy of it", "as planned"


def search(moves: Sequence[Move], build: Build, track: Track, *, budget_s: float) -> SearchResult:
    """Looks for moves that make a net faster on this machine.

    Args:
        moves: What may be done, in the order of trust; the order of heats follows it.
        build: Returns the model with some moves made, None where that combination makes no sense. It is called with
            no moves first.
        track: Feeds, threads, seed and clock of the races.
        budget_s: Seconds for all of it; what does not fit is left out, and `SearchResult.complete` says so.

    Returns:
        The moves to make. On a machine too noisy to tell there are none.

    Raises:
        VerificationError: The model without moves does not build or run.
        ValueError: Two moves have the same name.
    """
    if len({move.name for move in moves}) < len(moves):
        raise ValueError("two moves have the same name")
    return _Search(moves, build, track, budget_s).result()


class _Search:
    """One search.

    Args:
        moves: What may be done.
        build: Makes a model.
        track: Feeds, threads and clock.
        budget_s: Seconds for all of it.
    """

    def __init__(self, moves: Sequence[Move], build: Build, track: Track, budget_s: float) -> None:
        self.build = build
        self.track = track
        self.begin = track.clock()
        self.deadline = self.begin + budget_s
        self.last_race = self.begin + (1 - _RESERVE) * budget_s
        self.open = list(moves)
        self.trials: list[Trial] = []
        self.numbers = count()
        self.complete = True
        self.noisy = False
        self.made: Moves = frozenset()
        plan = build(self.made)
        if plan is None:
            raise VerificationError("the model without any move cannot be built", where=_PLAN)
        self.plan = self.model = plan

    def result(self) -> SearchResult:
        """Searches."""
        while self.open and self._step():
            pass
        gain = self._confirm() if self.made else None
        accepted = tuple(sorted(self.made, key=lambda move: move.name))
        seconds = self.track.clock() - self.begin
        return SearchResult(accepted, self.model, gain, tuple(self.trials), self.noisy, self.complete, seconds)

    def _step(self) -> bool:
        """Makes one move; tells whether it found one."""
        promising: list[tuple[float, Move, Moves, onnx.ModelProto]] = []
        for at in range(0, len(self.open), _HEAT):
            if self._is_late():
                break
            heat = {move: add_move(self.made, move) for move in self.open[at : at + _HEAT]}
            promising += self._screen(heat)
            if self.noisy:
                return False
        promising.sort(key=lambda entry: -entry[0])  # stable: equal ones keep the order of trust
        for _, move, combination, model in promising[:_FINALISTS]:
            if self._is_late():
                return False
            if self._beats(combination, model):
                self.made, self.model = combination, model
                known = {entry[1] for entry in promising}
                self.open = [m for m in self.open if m in known and m is not move]
                return True
        return False

    def _screen(self, heat: Mapping[Move, Moves]) -> list[tuple[float, Move, Moves, onnx.ModelProto]]:
        """Returns the moves of a heat that gained more than the copy, with their speed, combination and model."""
        models = self._built(heat)
        if not models:
            return []
        names = {label(heat[move]): move for move in models}
        field = {_SO_FAR: self.model, _COPY: self.model, **{name: models[move] for name, move in names.items()}}
        for _ in range(2):  # once more after what may have been a passing disturbance
            found = self._race(field, _SO_FAR, SCREENING)
            noise = _noise(found)
            if noise <= _NOISE_LIMIT:
                break
        else:
            _log.info("a copy of the model differs from it by %.2f: too noisy to search", noise)
            self.noisy = True
            return []
        promising = []
        for name, move in names.items():
            standing = found.standing(name)
            if standing is None:
                self._note(heat[move], Stage.DROPPED, None, found.why_dropped(name) or "it does not run")
            elif standing.comparison.verdict is Verdict.SLOWER or standing.comparison.ratio <= noise:
                reason = f"it gains no more than a copy of the model does ({noise:.2f}x)"
                self._note(heat[move], Stage.SCREENED, standing.comparison, reason)
            else:
                promising.append((standing.comparison.ratio, move, heat[move], models[move]))
        return promising

    def _built(self, heat: Mapping[Move, Moves]) -> dict[Move, onnx.ModelProto]:
        models = {}
        for move, combination in heat.items():
            try:
                model = self.build(combination)
            except Exception as error:  # whatever a quantizer raises: this combination is no option
                _log.info("'%s' cannot be built", label(combination), exc_info=True)
                what = error.what if isinstance(error, KenosisError) else f"{type(error).__name__}: {error}"
                self._note(combination, Stage.DROPPED, None, f"it cannot be built: {what}")
                continue
            if model is None:
                self._note(combination, Stage.DROPPED, None, "this net has no such form")
            else:
                models[move] = model
        return models

    def _beats(self, combination: Moves, model: onnx.ModelProto) -> bool:
        """Tells whether a combination wins against the model so far in a race of their own."""
        name = label(combination)
        found = self._race({_SO_FAR: self.model, name: model}, _SO_FAR, FULL)
        standing = found.standing(name)
        if standing is None:
            self._note(combination, Stage.DROPPED, None, found.why_dropped(name) or "it does not run")
            return False
        if standing.comparison.verdict is not Verdict.FASTER:
            reason = f"in a race of its own: {standing.comparison.verdict}"
            self._note(combination, Stage.REFUTED, standing.comparison, reason)
            return False
        self._note(combination, Stage.ACCEPTED, standing.comparison, "")
        return True

    def _confirm(self) -> Comparison | None:
        """Races the whole combination against the plan; undoes it if it does not win."""
        name = label(self.made)
        found = self._race({_PLAN: self.plan, name: self.model}, _PLAN, FULL, last=True)
        standing = found.standing(name)
        if standing is not None and standing.comparison.verdict is Verdict.FASTER:
            return standing.comparison
        why = found.why_dropped(name) if standing is None else f"against the plan: {standing.comparison.verdict}"
        self._note(self.made, Stage.REFUTED, None if standing is None else standing.comparison, str(why))
        self.made, self.model = frozenset(), self.plan
        return None

    def _race(self, models: Mapping[str, onnx.ModelProto], baseline: str, looks: Looks, *, last: bool = False) -> Race:
        """Runs a race with sessions and an order of its own."""
        left = (self.deadline if last else self.last_race) - self.track.clock()
        budget = max(left, 0.0)
        return race(models, self.track, baseline=baseline, budget_s=budget, looks=looks, seed=next(self.numbers))

    def _is_late(self) -> bool:
        late = self.track.clock() >= self.last_race
        self.complete = self.complete and not late
        return late

    def _note(self, combination: Moves, stage: Stage, comparison: Comparison | None, reason: str) -> None:
        names = tuple(sorted(move.name for move in combination))
        _log.info("%s: %s%s", label(combination), stage, f", {reason}" if reason else "")
        self.trials.append(Trial(names, stage, comparison, reason))


def _noise(found: Race) -> float:
    """Returns the factor by which a model seems faster or slower than its copy, as far as its interval reaches."""
    copy = found.standing(_COPY)
    return MARGIN if copy is None else max(copy.comparison.high, 1 / copy.comparison.low, MARGIN)
