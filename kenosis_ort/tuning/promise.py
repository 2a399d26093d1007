"""The promise: what is delivered is not slower than the float model it was made from.

The candidates are rungs of a ladder, the best one first and the float model itself last. Each is raced against the
float model, in every situation that there is; the first that is slower in none beyond the margin is taken. Then those
rungs are raced against it that may be faster still, and one that is, and computes as well, takes its place: all of them
where what was planned is not clearly faster than the float model, so that what is delivered instead is the best form
and not the first that will do.

A decision turns at one ratio, 1 / `MARGIN`, and not at 1: many nets are exactly as fast in both forms (what pays was
left float already), and each run would decide anew by chance. For the same reason one form takes another's place only
from `WORTH_IT` on. Near these ratios more rounds are made. Where no number of rounds tells on which side a ratio lies,
the cost table is asked, and where that does not tell either, the form is not delivered: the float model is never slower
than itself.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

import onnx

from kenosis_ort.bench.noise import LEAST_ROUNDS, MARGIN, Comparison, Verdict
from kenosis_ort.errors import KenosisError, VerificationError
from kenosis_ort.tuning.race import Race, Track, race
from kenosis_ort.verify.numerics import OutputComparison, compare_outputs

_log = logging.getLogger(__name__)

_LEAST_LOSS_DB: Final = 1.0
"""A form that is taken for its speed keeps the signal of the one before, but for this much."""
LEAST_SQNR_DB: Final = 10.0
"""An output with less has little in common with the float model's."""
ENOUGH: Final = 1.1
"""Speed relative to the float model at which what was planned is taken without a look at the forms below it."""
WORTH_IT: Final = 1.05
"""Speed relative to the form that is taken from which on another one takes its place."""
_BORDER: Final = 1 / MARGIN
_TELLS: Final = 1.06
"""Upper by lower end of an interval up to which the ratio in it decides."""
_SHARE: Final = 0.6  # of the time left, for one race: what remains must do for the rungs below
_COMPARED_FEEDS: Final = 2

Usable = Callable[[onnx.ModelProto], str | None]
Quality = Callable[[onnx.ModelProto], float]


class Basis(str, Enum):
    """What the decision rests on."""

    MEASURED = "measured"
    ESTIMATED = "estimated"  # by the cost table
    UNDECIDED = "undecided"  # neither tells: the float model stays

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Estimate:
    """What the cost table says of a form.

    Attributes:
        speed: Relative to the float model.
        error: The largest factor that the table was found to be off by.
    """

    speed: float
    error: float

    def tells_faster(self, measured: float | None = None) -> bool:
        """Tells whether a form is faster: beyond the table's error, or where an undecided race leans that way too."""
        return self.speed >= (self.error if measured is None or measured < _BORDER else 1)

    def __str__(self) -> str:
        return (
            f"{self.speed:.2f}x of the float model's speed by the cost table, which is off by up to {self.error:.2f}x"
        )


@dataclass(frozen=True)
class Rung:
    """One candidate.

    Attributes:
        name: Short and unique, e.g. ``int8``.
        description: What it is, as the report tells it.
        build: Returns the model, or None where there is no such form of this net.
        is_float: It is the float model that all are compared to: neither timed nor checked.
        checked: Its outputs are known to be usable.
        challenges: It is raced against a rung above that is taken.
        estimate: Returns what the cost table says of it; None where it says nothing.
    """

    name: str
    description: str
    build: Callable[[], onnx.ModelProto | None]
    is_float: bool = False
    checked: bool = False
    challenges: bool = False
    estimate: Callable[[], Estimate | None] = lambda: None


class Fate(str, Enum):
    """What became of a rung."""

    TAKEN = "taken"
    SLOWER = "slower"  # than the float model, beyond the noise
    UNDECIDED = "undecided"  # neither a race nor the cost table tells whether it is slower
    DROPPED = "dropped"  # does not build, load or run, or its outputs are unusable
    ABSENT = "absent"  # this net has no such form
    UNTIMED = "untimed"  # the time was over before it
    SPARE = "spare"  # below the one that was taken
    OUTRUN = "outrun"  # not slower than the float model, but slower than the one that was taken

    def __str__(self) -> str:
        return self.value


_UNKNOWN: Final = (Fate.UNDECIDED, Fate.UNTIMED)


@dataclass(frozen=True)
class Step:
    """One rung's record.

    Attributes:
        name: Of the rung.
        description: Of the rung.
        fate: What became of it.
        reason: Why, in one sentence.
        comparison: Its speed relative to the float model; None if it was not timed.
        milliseconds: Median time of a run; None if it was not timed.
        seconds: What building, checking and timing it took.
    """

    name: str
    description: str
    fate: Fate
    reason: str
    comparison: Comparison | None = None
    milliseconds: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What is to be delivered, and why.

    Attributes:
        model: The model that was taken.
        taken: Name of its rung.
        steps: All rungs, in order.
        basis: What that rests on.
        float_milliseconds: Median time of a run of the float model; None if nothing was timed.
        seconds: What it took.
    """

    model: onnx.ModelProto
    taken: str
    steps: tuple[Step, ...]
    basis: Basis
    float_milliseconds: float | None
    seconds: float

    @property
    def step(self) -> Step:
        """The record of the rung that was taken."""
        return next(step for step in self.steps if step.fate is Fate.TAKEN)

    def __str__(self) -> str:
        gone = [
            f"{s.description}: {s.reason}" for s in self.steps if s.fate in (Fate.SLOWER, Fate.UNDECIDED, Fate.DROPPED)
        ]
        before = f" ({'; '.join(gone)})" if gone else ""
        return f"{self.step.description}: {self.step.reason}{before}"


def keep_promise(
    float_model: onnx.ModelProto,
    rungs: Sequence[Rung],
    track: Track,
    *,
    budget_s: float,
    usable: Usable | None = None,
    quality: Quality | None = None,
    further: Sequence[Track] = (),
) -> Outcome:
    """Takes the first rung that is not slower than the float model, or one that challenges it with success.

    Args:
        float_model: The model as the caller gave it; what "not slower" refers to. Not changed.
        rungs: Candidates in the order of preference; the last one is the float model itself. A rung is built only
            when its turn comes.
        track: Feeds, threads and clock of the races.
        budget_s: Seconds for all of it, by ``track.budget``. One round of timing is made in any case; a rung whose turn
            comes when the time is over is passed by.
        usable: Returns why a model's outputs are unusable, or None; by default each output of two feeds must keep
            `LEAST_SQNR_DB` against the float model.
        quality: Returns the least signal-to-noise ratio of a model's outputs in dB; by default over two feeds.
        further: Tracks of other situations; a rung is to be slower in none.

    Raises:
        VerificationError: The float model does not run.
        ValueError: The last rung is not the float model.
    """
    if not rungs or not rungs[-1].is_float:
        raise ValueError("the last rung has to be the float model")
    tracks = (track, *further)
    compared = _Compared(float_model, tracks)
    ladder = _Ladder(float_model, tracks, budget_s, usable or compared.usable, quality or compared.least)
    for rung in rungs:
        ladder.climb(rung)
    return ladder.outcome()


class _Ladder:
    """The rungs so far."""

    def __init__(
        self,
        float_model: onnx.ModelProto,
        tracks: Sequence[Track],
        budget_s: float,
        usable: Usable,
        quality: Quality,
    ) -> None:
        self.float_model = float_model
        self.tracks = tracks
        self.track = tracks[0]
        self.usable = usable
        self.quality = quality
        self.clock = self.track.budget
        self.begin = self.clock()
        self.deadline = self.begin + budget_s
        self.steps: list[Step] = []
        self.model: onnx.ModelProto | None = None
        self.kept_db: tuple[onnx.ModelProto, float] | None = None
        self.basis = Basis.MEASURED
        self.enough = False
        self.timed = 0
        self.float_ms: float | None = None

    def climb(self, rung: Rung) -> None:
        """Tries a rung, unless one is taken already."""
        start = self.clock()
        if self.model is not None:
            may_win = rung.challenges or not (self.enough or rung.is_float)
            may_win = may_win and self.basis is Basis.MEASURED
            if may_win and start >= self.deadline:
                self._record(rung, Fate.SPARE, "the time for measuring was over", start)
            elif may_win:
                self._challenge(rung, self.model, start)
            else:
                self._record(rung, Fate.SPARE, "not needed", start)
        elif self.timed and not rung.is_float and start >= self.deadline:
            self._record(rung, Fate.UNTIMED, "the time for measuring was over", start)
        else:
            self._try(rung, start)

    def _try(self, rung: Rung, start: float) -> None:
        try:
            model = rung.build()
        except Exception as error:  # whatever a quantizer raises on a net it does not know: this rung is no option
            _log.info("'%s' cannot be built", rung.name, exc_info=True)
            what = error.what if isinstance(error, KenosisError) else f"{type(error).__name__}: {error}"
            self._record(rung, Fate.DROPPED, f"it cannot be built: {what}", start)
            return
        if model is None:
            self._record(rung, Fate.ABSENT, "this net has no such form", start)
            return
        if rung.is_float:
            self.model = model
            self._record(rung, Fate.TAKEN, "the float model stays as it is", start)
            return
        reason = None if rung.checked else self.usable(model)
        if reason is not None:
            self._record(rung, Fate.DROPPED, reason, start)
            return
        found: list[tuple[Race, str]] = []
        for track in self.tracks:
            raced = self._race(self.float_model, model, track, _BORDER)
            if raced.comparison is None:
                self._record(rung, Fate.DROPPED, raced.reason, start)
                return
            found.append((raced, track.name))
            if track is self.track:
                self.float_ms = raced.reference_milliseconds
            if raced.comparison.ratio < _BORDER:
                break
        worst, where = min(found, key=lambda pair: pair[0].comparison.ratio if pair[0].comparison else 0.0)
        self._judge(rung, model, worst, start, where)

    def _race(self, reference: onnx.ModelProto, model: onnx.ModelProto, track: Track, border: float) -> Race:
        budget = max(_SHARE * (self.deadline - self.clock()) / len(self.tracks), 0.0)
        return race(reference, model, track, budget_s=budget, border=border, seed=len(self.steps))

    def _challenge(self, rung: Rung, taken: onnx.ModelProto, start: float) -> None:
        """Races a rung against the one that is taken, which gives way where it is slower and computes no better."""
        before = next(step for step in self.steps if step.fate is Fate.TAKEN)
        try:
            model = rung.build()
            if model is None:
                self._record(rung, Fate.ABSENT, "no such form", start)
                return
            lost = self._quality_of(taken) - self.quality(model)
            if lost > _LEAST_LOSS_DB:
                self._record(rung, Fate.SPARE, f"it keeps {lost:.1f} dB less of the signal", start)
                return
            races = [self._race(taken, model, track, WORTH_IT) for track in self.tracks]
        except Exception as error:  # the rung that is taken stays, whatever happens here
            _log.info("'%s' cannot be raced", rung.name, exc_info=True)
            self._record(rung, Fate.DROPPED, f"it cannot be raced: {type(error).__name__}: {error}", start)
            return
        known = [race.comparison for race in races if race.comparison is not None]
        if len(known) < len(races):
            self._record(rung, Fate.DROPPED, next(race.reason for race in races if race.reason), start)
            return
        gain = statistics.geometric_mean(comparison.ratio for comparison in known)
        each = ", ".join(
            f"{c.ratio:.2f}x for {track.name}" for c, track in zip(known, self.tracks, strict=True) if track.name
        )
        said = f"{gain:.2f}x of the speed of {before.description}{f' ({each})' if each else ''}"
        is_clear = any(comparison.verdict is Verdict.FASTER for comparison in known)
        if not is_clear or gain < WORTH_IT:
            self._record(rung, Fate.SPARE, said, start)
            return
        self._try(replace(rung, build=lambda: model), start)
        if self.steps[-1].fate is Fate.TAKEN:
            self.steps[self.steps.index(before)] = replace(before, fate=Fate.OUTRUN, reason=f"{rung.name} has {said}")

    def _quality_of(self, taken: onnx.ModelProto) -> float:
        """Returns the quality of the form that is taken, asked for once."""
        if self.kept_db is None or self.kept_db[0] is not taken:
            self.kept_db = taken, self.quality(taken)
        return self.kept_db[1]

    def _judge(self, rung: Rung, model: onnx.ModelProto, raced: Race, start: float, where: str) -> None:
        """Decides by a race, or by the cost table where that does not tell."""
        comparison = raced.comparison
        assert comparison is not None  # the caller has dropped what does not run
        self.timed += 1
        ratio, low, high = comparison.ratio, comparison.low, comparison.high
        speed = f"{ratio:.2f}x of the float model's speed" + (f" for {where}" if where else "")
        noise = f"{low:.2f} to {high:.2f}"
        if not _tells(comparison, raced.rounds):
            estimate = rung.estimate()
            unsure = f"the machine is too noisy to tell ({speed}, {noise}, in {raced.rounds} rounds)"
            by_table = f"estimated at {estimate}" if estimate else "the cost table says nothing of it"
            if estimate is None or not estimate.tells_faster(ratio):
                self._record(rung, Fate.UNDECIDED, f"undecided: {unsure}; {by_table}", start, raced)
                return
            self.model, self.basis = model, Basis.ESTIMATED
            self._record(rung, Fate.TAKEN, f"{by_table}; {unsure}", start, raced)
            return
        if ratio < _BORDER:
            self._record(rung, Fate.SLOWER, f"only {speed} ({noise}), measured", start, raced)
            return
        self.model = model
        self.enough = not self.steps and ratio >= ENOUGH
        faster = comparison.verdict is Verdict.FASTER
        reason = f"{speed} ({noise})" if faster else f"not slower than the float model beyond the noise ({noise})"
        self._record(rung, Fate.TAKEN, f"{reason}, measured", start, raced)

    def outcome(self) -> Outcome:
        """Returns what is to be delivered."""
        if self.model is None:
            raise VerificationError(
                f"not even the float model can be delivered: {self.steps[-1].reason}",
                fix="check the float model in onnxruntime alone",
            )
        step = next(step for step in self.steps if step.fate is Fate.TAKEN)
        doubted = step.comparison is None and any(each.fate in _UNKNOWN for each in self.steps)
        basis, seconds = Basis.UNDECIDED if doubted else self.basis, self.clock() - self.begin
        return Outcome(self.model, step.name, tuple(self.steps), basis, self.float_ms, seconds)

    def _record(self, rung: Rung, fate: Fate, reason: str, start: float, raced: Race | None = None) -> None:
        comparison = None if raced is None else raced.comparison
        milliseconds = None if raced is None else raced.milliseconds
        seconds = self.clock() - start
        self.steps.append(Step(rung.name, rung.description, fate, reason, comparison, milliseconds, seconds))


def _tells(comparison: Comparison, rounds: int) -> bool:
    """Tells whether a race says on which side of the border a ratio lies."""
    if comparison.verdict is Verdict.NOISY and rounds < LEAST_ROUNDS:
        return False
    return not comparison.low <= _BORDER <= comparison.high or comparison.high <= _TELLS * comparison.low


class _Compared:
    """The default judgements of outputs, against the float model's on a few feeds of each situation."""

    def __init__(self, float_model: onnx.ModelProto, tracks: Sequence[Track]) -> None:
        self._float = float_model
        self._track = tracks[0]
        each = _COMPARED_FEEDS if len(tracks) == 1 else 1
        self._feeds = [feed for track in tracks for feed in track.feeds[:each]]

    def usable(self, model: onnx.ModelProto) -> str | None:
        """Returns why a model's outputs are unusable, None where they are not."""
        try:
            compared = self._compare(model)
        except KenosisError as error:
            return error.what
        bad = [c for c in compared if c.sqnr_db < LEAST_SQNR_DB]
        return f"output '{bad[0].name}' keeps only {bad[0].sqnr_db:.1f} dB of the float model's" if bad else None

    def least(self, model: onnx.ModelProto) -> float:
        """Returns the least signal-to-noise ratio of a model's outputs in dB."""
        return min((compared.sqnr_db for compared in self._compare(model)), default=math.inf)

    def _compare(self, model: onnx.ModelProto) -> Sequence[OutputComparison]:
        libraries, threads = self._track.custom_op_libraries, self._track.threads
        return compare_outputs(self._float, model, self._feeds, custom_op_libraries=libraries, threads=threads)
