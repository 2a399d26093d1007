"""The promise: what is delivered is not slower than the float model it was made from.

The candidates are forms of the net in order of preference, the float model itself last. Each is raced against the float
model in every scenario; the first that is slower in none beyond the margin is taken. Then those candidates are raced
against it that may be faster still, and one that is, and computes as well, takes its place: all of them where what was
planned is not clearly faster than the float model, so that what is delivered instead is the best form and not the first
that will do.

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

from kenosis_ort.accuracy.outputs import OutputComparison, compare_outputs
from kenosis_ort.bench.harness import LEAST_ROUNDS, MARGIN, SpeedComparison, Verdict
from kenosis_ort.errors import KenosisError, VerificationError
from kenosis_ort.tuning.races import Race, RaceSetup, race

_log = logging.getLogger(__name__)

_LEAST_LOSS_DB: Final = 1.0
"""A form that is taken for its speed keeps the signal of the one before, but for this much."""
LEAST_SQNR_DB: Final = 10.0
"""An output with less has little in common with the float model's."""
ENOUGH: Final = 1.1
"""Speed relative to the float model at which what was planned is taken without a race of the forms below it."""
WORTH_IT: Final = 1.05
"""Speed relative to the form that is taken from which on another one takes its place."""
_BORDER: Final = 1 / MARGIN
_TELLS: Final = 1.06
"""Upper by lower end of an interval up to which the ratio in it decides."""
_LEAST_DEVIATION: Final = 0.02
_OF_FEW_ROUNDS: Final = 0.2
_SHARE: Final = 0.6  # of the time left, for one race: what remains must do for the candidates below
_COMPARED_FEEDS: Final = 2

Usable = Callable[[onnx.ModelProto], str | None]
Quality = Callable[[onnx.ModelProto], float]


class Basis(str, Enum):
    """Basis of the decision."""

    MEASURED = "measured"
    ESTIMATED = "estimated"  # by the cost table
    UNDECIDED = "undecided"  # neither tells: the float model stays

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Estimate:
    """Speed of a form by the cost table.

    Attributes:
        speed: Relative to the float model.
        error: The largest factor that the table was found to be off by.
    """

    speed: float
    error: float

    def tells_faster(self, race: SpeedComparison | None = None, rounds: int = LEAST_ROUNDS) -> bool:
        """Whether a form is faster: beyond the table's error, or by a race and the table weighed by their variances.

        Args:
            race: One that does not tell by itself; None where there was none.
            rounds: Of the race; few may agree by chance.
        """
        if race is None:
            return self.speed >= self.error
        # Both are taken for normal in the logarithm: an interval of 95 % has 4 deviations, an error is two.
        noise = max(math.log(race.high / race.low) / 4, _LEAST_DEVIATION if rounds >= LEAST_ROUNDS else _OF_FEW_ROUNDS)
        trust = (noise / max(math.log(self.error) / 2, _LEAST_DEVIATION)) ** 2  # of the table, beside 1 of the race
        return (math.log(race.ratio) + trust * math.log(self.speed)) / (1 + trust) >= math.log(_BORDER)

    def __str__(self) -> str:
        return (
            f"{self.speed:.2f}x of the float model's speed by the cost table, which is off by up to {self.error:.2f}x"
        )


@dataclass(frozen=True)
class Form:
    """One candidate.

    Attributes:
        name: Short and unique, e.g. ``int8``.
        description: What it is, as the report tells it.
        build: Returns the model, or None where there is no such form of this net.
        is_float: It is the float model that all are compared to: neither timed nor checked.
        checked: Its outputs are known to be usable.
        challenges: It is raced against a form above that is taken.
        estimate: Returns what the cost table says of it; None where it says nothing.
    """

    name: str
    description: str
    build: Callable[[], onnx.ModelProto | None]
    is_float: bool = False
    checked: bool = False
    challenges: bool = False
    estimate: Callable[[], Estimate | None] = lambda: None


class FormStatus(str, Enum):
    """Result of a form."""

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


_REFUSED: Final = (FormStatus.SLOWER, FormStatus.UNDECIDED, FormStatus.DROPPED)
_UNKNOWN: Final = (FormStatus.UNDECIDED, FormStatus.UNTIMED)


@dataclass(frozen=True)
class Step:
    """One form's record.

    Attributes:
        name: Of the form.
        description: Of the form.
        status: What became of it.
        reason: Why, in one sentence.
        comparison: Its speed relative to the float model; None if it was not timed.
        milliseconds: Median time of a run; None if it was not timed.
        seconds: What building, checking and timing it took.
    """

    name: str
    description: str
    status: FormStatus
    reason: str
    comparison: SpeedComparison | None = None
    milliseconds: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """The form to deliver, and why.

    Attributes:
        model: The model that was taken.
        taken: Name of its form.
        steps: All candidates, in order.
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
        """The record of the form that was taken."""
        return next(step for step in self.steps if step.status is FormStatus.TAKEN)

    def __str__(self) -> str:
        gone = [f"{s.description}: {s.reason}" for s in self.steps if s.status in _REFUSED]
        before = f" ({'; '.join(gone)})" if gone else ""
        return f"{self.step.description}: {self.step.reason}{before}"


def keep_promise(
    float_model: onnx.ModelProto,
    candidates: Sequence[Form],
    setup: RaceSetup,
    *,
    budget_s: float,
    usable: Usable | None = None,
    quality: Quality | None = None,
    further: Sequence[RaceSetup] = (),
) -> Outcome:
    """Takes the first form that is not slower than the float model, or one that challenges it with success.

    Args:
        float_model: The model as the caller gave it; what "not slower" refers to. Not changed.
        candidates: Candidates in the order of preference; the last one is the float model itself. A form is built only
            when its turn comes.
        setup: Feeds, threads and clock of the races.
        budget_s: Seconds for all of it, by ``setup.budget``. One round of timing is made in any case; a form whose turn
            comes when the time is over is passed by.
        usable: Returns why a model's outputs are unusable, or None; by default each output of two feeds must keep
            `LEAST_SQNR_DB` against the float model.
        quality: Returns the least signal-to-noise ratio of a model's outputs in dB; by default over two feeds.
        further: Setups of other scenarios; a form is to be slower in none.

    Raises:
        VerificationError: The float model does not run.
        ValueError: The last form is not the float model.
    """
    if not candidates or not candidates[-1].is_float:
        raise ValueError("the last form has to be the float model")
    setups = (setup, *further)
    compared = _Compared(float_model, setups)
    selection = _Selection(float_model, setups, budget_s, usable or compared.usable, quality or compared.least)
    for form in candidates:
        selection.consider(form)
    return selection.outcome()


class _Selection:
    """The candidates so far."""

    def __init__(
        self,
        float_model: onnx.ModelProto,
        setups: Sequence[RaceSetup],
        budget_s: float,
        usable: Usable,
        quality: Quality,
    ) -> None:
        self.float_model = float_model
        self.setups = setups
        self.setup = setups[0]
        self.usable = usable
        self.quality = quality
        self.clock = self.setup.budget
        self.begin = self.clock()
        self.deadline = self.begin + budget_s
        self.steps: list[Step] = []
        self.model: onnx.ModelProto | None = None
        self.cached_db: tuple[onnx.ModelProto, float] | None = None
        self.basis = Basis.MEASURED
        self.enough = False
        self.timed = 0
        self.float_ms: float | None = None

    def consider(self, form: Form) -> None:
        """Tries a form, unless one is taken already."""
        start = self.clock()
        if self.model is not None:
            may_win = form.challenges or not (self.enough or form.is_float)
            may_win = may_win and self.basis is Basis.MEASURED
            if may_win and start >= self.deadline:
                self._record(form, FormStatus.SPARE, "the time for measuring was over", start)
            elif may_win:
                self._challenge(form, self.model, start)
            else:
                self._record(form, FormStatus.SPARE, "not needed", start)
        elif self.timed and not form.is_float and start >= self.deadline:
            self._record(form, FormStatus.UNTIMED, "the time for measuring was over", start)
        else:
            self._try(form, start)

    def _try(self, form: Form, start: float) -> None:
        try:
            model = form.build()
        except Exception as error:  # whatever a quantizer raises on a net it does not know: this form is no option
            _log.info("'%s' cannot be built", form.name, exc_info=True)
            what = error.what if isinstance(error, KenosisError) else f"{type(error).__name__}: {error}"
            self._record(form, FormStatus.DROPPED, f"it cannot be built: {what}", start)
            return
        if model is None:
            self._record(form, FormStatus.ABSENT, "this net has no such form", start)
            return
        if form.is_float:
            self.model = model
            self._record(form, FormStatus.TAKEN, "the float model stays as it is", start)
            return
        reason = None if form.checked else self.usable(model)
        if reason is not None:
            self._record(form, FormStatus.DROPPED, reason, start)
            return
        found: list[tuple[Race, str]] = []
        for setup in self.setups:
            raced = self._race(self.float_model, model, setup, _BORDER)
            if raced.comparison is None:
                self._record(form, FormStatus.DROPPED, raced.reason, start)
                return
            found.append((raced, setup.name))
            if setup is self.setup:
                self.float_ms = raced.reference_milliseconds
            if raced.comparison.ratio < _BORDER:
                break
        worst, where = min(found, key=lambda pair: pair[0].comparison.ratio if pair[0].comparison else 0.0)
        self._decide(form, model, worst, start, where)

    def _race(self, reference: onnx.ModelProto, model: onnx.ModelProto, setup: RaceSetup, border: float) -> Race:
        budget = max(_SHARE * (self.deadline - self.clock()) / len(self.setups), 0.0)
        return race(reference, model, setup, budget_s=budget, border=border, seed=len(self.steps))

    def _challenge(self, form: Form, taken: onnx.ModelProto, start: float) -> None:
        """Races a form against the one that is taken, which gives way where it is slower and computes no better."""
        old = next(step for step in self.steps if step.status is FormStatus.TAKEN)
        try:
            model = form.build()
            if model is None:
                self._record(form, FormStatus.ABSENT, "no such form", start)
                return
            lost = self._quality_of(taken) - self.quality(model)
            if lost > _LEAST_LOSS_DB:
                self._record(form, FormStatus.SPARE, f"it keeps {lost:.1f} dB less of the signal", start)
                return
            races = [self._race(taken, model, setup, WORTH_IT) for setup in self.setups]
        except Exception as error:  # the form that is taken stays, whatever happens here
            _log.info("'%s' cannot be raced", form.name, exc_info=True)
            self._record(form, FormStatus.DROPPED, f"it cannot be raced: {type(error).__name__}: {error}", start)
            return
        known = [race.comparison for race in races if race.comparison is not None]
        if len(known) < len(races):
            self._record(form, FormStatus.DROPPED, next(race.reason for race in races if race.reason), start)
            return
        gain = statistics.geometric_mean(comparison.ratio for comparison in known)
        each = ", ".join(
            f"{c.ratio:.2f}x for {setup.name}" for c, setup in zip(known, self.setups, strict=True) if setup.name
        )
        text = f"{gain:.2f}x of the speed of {old.description}{f' ({each})' if each else ''}"
        is_clear = any(comparison.verdict is Verdict.FASTER for comparison in known)
        if not is_clear or gain < WORTH_IT:
            self._record(form, FormStatus.SPARE, text, start)
            return
        self._try(replace(form, build=lambda: model), start)
        if self.steps[-1].status is FormStatus.TAKEN:
            self.steps[self.steps.index(old)] = replace(old, status=FormStatus.OUTRUN, reason=f"{form.name} has {text}")

    def _quality_of(self, taken: onnx.ModelProto) -> float:
        """The quality of the form that is taken, asked for once."""
        if self.cached_db is None or self.cached_db[0] is not taken:
            self.cached_db = taken, self.quality(taken)
        return self.cached_db[1]

    def _decide(self, form: Form, model: onnx.ModelProto, raced: Race, start: float, where: str) -> None:
        """Decides by a race, or by the cost table where that does not tell."""
        comparison = raced.comparison
        assert comparison is not None  # the caller has dropped what does not run
        self.timed += 1
        ratio, low, high = comparison.ratio, comparison.low, comparison.high
        speed = f"{ratio:.2f}x of the float model's speed" + (f" for {where}" if where else "")
        noise = f"{low:.2f} to {high:.2f}"
        if not _tells(comparison, raced.rounds):
            estimate = form.estimate()
            unsure = f"the machine is too noisy to tell ({speed}, {noise}, in {raced.rounds} rounds)"
            by_table = f"estimated at {estimate}" if estimate else "the cost table says nothing of it"
            if estimate is None or not estimate.tells_faster(comparison, raced.rounds):
                self._record(form, FormStatus.UNDECIDED, f"undecided: {unsure}; {by_table}", start, raced)
                return
            self.model, self.basis = model, Basis.ESTIMATED
            self._record(form, FormStatus.TAKEN, f"{by_table}; {unsure}", start, raced)
            return
        if ratio < _BORDER:
            self._record(form, FormStatus.SLOWER, f"only {speed} ({noise}), measured", start, raced)
            return
        self.model = model
        self.enough = not self.steps and ratio >= ENOUGH
        faster = comparison.verdict is Verdict.FASTER
        reason = f"{speed} ({noise})" if faster else f"not slower than the float model beyond the noise ({noise})"
        self._record(form, FormStatus.TAKEN, f"{reason}, measured", start, raced)

    def outcome(self) -> Outcome:
        """The form to deliver, with the record of all candidates."""
        if self.model is None:
            raise VerificationError(
                f"not even the float model can be delivered: {self.steps[-1].reason}",
                fix="check the float model in onnxruntime alone",
            )
        step = next(step for step in self.steps if step.status is FormStatus.TAKEN)
        doubted = step.comparison is None and any(each.status in _UNKNOWN for each in self.steps)
        basis, seconds = Basis.UNDECIDED if doubted else self.basis, self.clock() - self.begin
        return Outcome(self.model, step.name, tuple(self.steps), basis, self.float_ms, seconds)

    def _record(self, form: Form, status: FormStatus, reason: str, start: float, raced: Race | None = None) -> None:
        comparison = None if raced is None else raced.comparison
        milliseconds = None if raced is None else raced.milliseconds
        seconds = self.clock() - start
        self.steps.append(Step(form.name, form.description, status, reason, comparison, milliseconds, seconds))


def _tells(comparison: SpeedComparison, rounds: int) -> bool:
    """Whether a race says on which side of the border a ratio lies."""
    if comparison.verdict is Verdict.NOISY and rounds < LEAST_ROUNDS:
        return False
    return not comparison.low <= _BORDER <= comparison.high or comparison.high <= _TELLS * comparison.low


class _Compared:
    """The default checks of outputs, against the float model's on a few feeds of each scenario."""

    def __init__(self, float_model: onnx.ModelProto, setups: Sequence[RaceSetup]) -> None:
        self._float = float_model
        self._setup = setups[0]
        each = _COMPARED_FEEDS if len(setups) == 1 else 1
        self._feeds = [feed for setup in setups for feed in setup.feeds[:each]]

    def usable(self, model: onnx.ModelProto) -> str | None:
        """Reason why a model's outputs are unusable, None where they are not."""
        try:
            compared = self._compare(model)
        except KenosisError as error:
            return error.what
        bad = [c for c in compared if c.sqnr_db < LEAST_SQNR_DB]
        return f"output '{bad[0].name}' keeps only {bad[0].sqnr_db:.1f} dB of the float model's" if bad else None

    def least(self, model: onnx.ModelProto) -> float:
        """The least signal-to-noise ratio of a model's outputs in dB."""
        return min((compared.sqnr_db for compared in self._compare(model)), default=math.inf)

    def _compare(self, model: onnx.ModelProto) -> Sequence[OutputComparison]:
        libraries, threads = self._setup.custom_op_libraries, self._setup.threads
        return compare_outputs(self._float, model, self._feeds, custom_op_libraries=libraries, threads=threads)
