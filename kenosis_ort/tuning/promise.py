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

import logging
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from typing import Final, NamedTuple

import onnx

from kenosis_ort.accuracy.outputs import OutputComparison, compare_outputs
from kenosis_ort.bench.harness import LEAST_ROUNDS, MARGIN, SpeedComparison, Verdict
from kenosis_ort.errors import KenosisError, VerificationError
from kenosis_ort.report.facts import SpeedCandidate, SpeedSummary
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


class Basis(str, Enum):
    """Basis of the decision."""

    MEASURED = "measured"
    ESTIMATED = "estimated"  # by the cost table
    UNDECIDED = "undecided"  # neither tells: the float model stays

    def __str__(self) -> str:
        return self.value


class Estimate(NamedTuple):
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


class Form(NamedTuple):
    """One candidate.

    Attributes:
        name: Short and unique, e.g. ``int8``.
        description: What it is, as the report tells it.
        build: Returns the model, or None where there is no such form of this net.
        is_float: It is the float model that all are compared to: neither timed nor checked.
        checked: Its outputs are known to be usable.
        challenges: It is raced against a form above that is taken.
        estimate: Gives what the cost table says of it; None where it says nothing.
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


def record_of(
    name: str,
    description: str,
    status: FormStatus,
    reason: str,
    comparison: SpeedComparison | None = None,
    milliseconds: float | None = None,
    seconds: float = 0.0,
) -> SpeedCandidate:
    """The report's record of a form, with its speed relative to the float model where it was timed."""
    c = comparison
    ratio, low, high, verdict = (None, None, None, "") if c is None else (c.ratio, c.low, c.high, str(c.verdict))
    return SpeedCandidate(name, description, str(status), reason, ratio, low, high, verdict, milliseconds, seconds)


_UNKNOWN: Final = (FormStatus.UNDECIDED, FormStatus.UNTIMED)


def keep_promise(
    float_model: onnx.ModelProto,
    candidates: Sequence[Form],
    setup: RaceSetup,
    *,
    budget_s: float,
    further: Sequence[RaceSetup] = (),
) -> tuple[onnx.ModelProto, SpeedSummary]:
    """Takes the first form that is not slower than the float model, or one that challenges it with success.

    Args:
        float_model: The model as the caller gave it; what "not slower" refers to. Not changed.
        candidates: Candidates in the order of preference; the last one is the float model itself. A form is built only
            when its turn comes.
        setup: Feeds, threads and clock of the races.
        budget_s: Seconds for all of it, by ``setup.budget``. One round of timing is made in any case; a form whose turn
            comes when the time is over is passed by.
        further: Setups of other scenarios; a form is to be slower in none.

    Returns:
        The model that was taken, and the record of all candidates, with what the choice rests on.

    Raises:
        VerificationError: The float model does not run.
        ValueError: The last form is not the float model.
    """
    if not candidates or not candidates[-1].is_float:
        raise ValueError("the last form has to be the float model")
    ladder = _Ladder(float_model, (setup, *further), budget_s)
    for form in candidates:
        ladder.add(form)
    return ladder.outcome()


class _Trial(NamedTuple):
    """Outcome of a form.

    Attributes:
        status: What became of it.
        reason: Why, in one sentence.
        raced: The race against the float model, if there was one.
        model: The model of a form that is taken.
        basis: What that rests on.
        gain: Its speed beside the form whose place it takes, in words.
    """

    status: FormStatus
    reason: str
    raced: Race | None = None
    model: onnx.ModelProto | None = None
    basis: Basis = Basis.MEASURED
    gain: str = ""


class _Ladder:
    """The candidates so far.

    Args:
        float_model: What "not slower" refers to.
        setups: Of the scenarios.
        budget_s: Seconds for all of it.
    """

    def __init__(self, float_model: onnx.ModelProto, setups: Sequence[RaceSetup], budget_s: float) -> None:
        self._float_model, self._setups = float_model, setups
        self._clock = setups[0].budget
        self._begin = self._clock()
        self._deadline = self._begin + budget_s
        self._records: list[SpeedCandidate] = []
        self._taken: tuple[SpeedCandidate, _Trial] | None = None
        self._taken_db: float | None = None
        self._enough = False
        self._float_ms: float | None = None

    def add(self, form: Form) -> None:
        """Tries a form, unless one is taken already that it cannot replace, and records what became of it."""
        start = self._clock()
        before = self._taken
        trial = self._trial(form, before, late=start >= self._deadline)
        comparison = None if trial.raced is None else trial.raced.comparison
        milliseconds = None if trial.raced is None else trial.raced.milliseconds
        took = self._clock() - start
        record = record_of(form.name, form.description, trial.status, trial.reason, comparison, milliseconds, took)
        if trial.status is FormStatus.TAKEN:
            self._enough = not self._records and record.ratio is not None and record.ratio >= ENOUGH
            self._taken, self._taken_db = (record, trial), None
            if before is not None:
                outrun = replace(before[0], status=str(FormStatus.OUTRUN), reason=f"{form.name} has {trial.gain}")
                self._records[self._records.index(before[0])] = outrun
        self._records.append(record)

    def outcome(self) -> tuple[onnx.ModelProto, SpeedSummary]:
        """The model to deliver, with the record of all candidates."""
        if self._taken is None or self._taken[1].model is None:
            raise VerificationError(
                f"not even the float model can be delivered: {self._records[-1].reason}",
                fix="check the float model in onnxruntime alone",
            )
        record, trial = self._taken
        doubted = record.ratio is None and any(each.status in _UNKNOWN for each in self._records)
        basis, seconds = str(Basis.UNDECIDED if doubted else trial.basis), self._clock() - self._begin
        assert trial.model is not None
        found = SpeedSummary(tuple(self._records), basis, self._float_ms, self._setups[0].threads, seconds=seconds)
        return trial.model, found

    def _trial(self, form: Form, taken: tuple[SpeedCandidate, _Trial] | None, *, late: bool) -> _Trial:
        if taken is None:
            timed = any(record.ratio is not None for record in self._records)
            if timed and late and not form.is_float:
                return _Trial(FormStatus.UNTIMED, "the time for measuring was over")
            return self._against_float(form)
        may_win = form.challenges or not (self._enough or form.is_float)
        if not may_win or taken[1].basis is not Basis.MEASURED:
            return _Trial(FormStatus.SPARE, "not needed")
        if late:
            return _Trial(FormStatus.SPARE, "the time for measuring was over")
        return self._against_taken(form, *taken)

    def _against_float(self, form: Form) -> _Trial:
        """Builds a form, checks its outputs and races it against the float model in every scenario."""
        try:
            model = form.build()
        except Exception as error:  # whatever a quantizer raises on a net it does not know: this form is no option
            _log.info("'%s' cannot be built", form.name, exc_info=True)
            what = error.what if isinstance(error, KenosisError) else f"{type(error).__name__}: {error}"
            return _Trial(FormStatus.DROPPED, f"it cannot be built: {what}")
        if model is None:
            return _Trial(FormStatus.ABSENT, "this net has no such form")
        if form.is_float:
            return _Trial(FormStatus.TAKEN, "the float model stays as it is", model=model)
        reason = None if form.checked else self._why_unusable(model)
        if reason is not None:
            return _Trial(FormStatus.DROPPED, reason)
        worst, where = None, ""
        for setup in self._setups:
            raced = self._race(self._float_model, model, setup, _BORDER)
            if raced.comparison is None:
                return _Trial(FormStatus.DROPPED, raced.reason)
            if setup is self._setups[0]:
                self._float_ms = raced.reference_milliseconds
            if worst is None or worst.comparison is None or raced.comparison.ratio < worst.comparison.ratio:
                worst, where = raced, setup.name
            if raced.comparison.ratio < _BORDER:
                break
        assert worst is not None, "there is a scenario"
        return _decided(form, model, worst, where)

    def _against_taken(self, form: Form, taken: SpeedCandidate, trial: _Trial) -> _Trial:
        """Races a form against the one that is taken, which gives way where it is slower and computes no better."""
        assert trial.model is not None
        try:
            model = form.build()
            if model is None:
                return _Trial(FormStatus.ABSENT, "no such form")
            if self._taken_db is None:
                self._taken_db = self._least_db(trial.model)
            lost = self._taken_db - self._least_db(model)
            if lost > _LEAST_LOSS_DB:
                return _Trial(FormStatus.SPARE, f"it keeps {lost:.1f} dB less of the signal")
            races = [self._race(trial.model, model, setup, WORTH_IT) for setup in self._setups]
        except Exception as error:  # the form that is taken stays, whatever happens here
            _log.info("'%s' cannot be raced", form.name, exc_info=True)
            return _Trial(FormStatus.DROPPED, f"it cannot be raced: {type(error).__name__}: {error}")
        known = [race.comparison for race in races if race.comparison is not None]
        if len(known) < len(races):
            return _Trial(FormStatus.DROPPED, next(race.reason for race in races if race.reason))
        gain = statistics.geometric_mean(comparison.ratio for comparison in known)
        each = ", ".join(f"{c.ratio:.2f}x for {s.name}" for c, s in zip(known, self._setups, strict=True) if s.name)
        text = f"{gain:.2f}x of the speed of {taken.description}{f' ({each})' if each else ''}"
        is_clear = any(comparison.verdict is Verdict.FASTER for comparison in known)
        if not is_clear or gain < WORTH_IT:
            return _Trial(FormStatus.SPARE, text)
        return self._against_float(form._replace(build=lambda: model))._replace(gain=text)

    def _race(self, reference: onnx.ModelProto, model: onnx.ModelProto, setup: RaceSetup, border: float) -> Race:
        budget = max(_SHARE * (self._deadline - self._clock()) / len(self._setups), 0.0)
        return race(reference, model, setup, budget_s=budget, border=border, seed=len(self._records))

    def _why_unusable(self, model: onnx.ModelProto) -> str | None:
        """Reason why a model's outputs are unusable, None where they are not."""
        try:
            compared = self._compared(model)
        except KenosisError as error:
            return error.what
        bad = [c for c in compared if c.sqnr_db < LEAST_SQNR_DB]
        return f"output '{bad[0].name}' keeps only {bad[0].sqnr_db:.1f} dB of the float model's" if bad else None

    def _least_db(self, model: onnx.ModelProto) -> float:
        """The least signal-to-noise ratio of a model's outputs in dB."""
        return min((compared.sqnr_db for compared in self._compared(model)), default=math.inf)

    def _compared(self, model: onnx.ModelProto) -> Sequence[OutputComparison]:
        """A model's outputs beside the float model's, on a few feeds of each scenario."""
        first, each = self._setups[0], _COMPARED_FEEDS if len(self._setups) == 1 else 1
        feeds = [feed for setup in self._setups for feed in setup.feeds[:each]]
        libraries = first.custom_op_libraries
        return compare_outputs(self._float_model, model, feeds, custom_op_libraries=libraries, threads=first.threads)


def _decided(form: Form, model: onnx.ModelProto, raced: Race, where: str) -> _Trial:
    """Decides by a race against the float model, or by the cost table where that does not tell."""
    comparison = raced.comparison
    assert comparison is not None, "what does not run was dropped"
    ratio, low, high = comparison.ratio, comparison.low, comparison.high
    speed = f"{ratio:.2f}x of the float model's speed" + (f" for {where}" if where else "")
    noise = f"{low:.2f} to {high:.2f}"
    if not _tells(comparison, raced.rounds):
        estimate = form.estimate()
        why = "the machine is too noisy" if raced.rounds >= LEAST_ROUNDS else "the time is too short"
        unsure = f"{why} to tell ({speed}, {noise}, in {raced.rounds} rounds)"
        by_table = f"estimated at {estimate}" if estimate else "the cost table says nothing of it"
        if estimate is None or not estimate.tells_faster(comparison, raced.rounds):
            return _Trial(FormStatus.UNDECIDED, f"undecided: {unsure}; {by_table}", raced)
        return _Trial(FormStatus.TAKEN, f"{by_table}; {unsure}", raced, model, Basis.ESTIMATED)
    if ratio < _BORDER:
        return _Trial(FormStatus.SLOWER, f"only {speed} ({noise}), measured", raced)
    faster = comparison.verdict is Verdict.FASTER or low > MARGIN
    reason = f"{speed} ({noise})" if faster else f"not slower than the float model beyond the noise ({noise})"
    return _Trial(FormStatus.TAKEN, f"{reason}, measured", raced, model)


def _tells(comparison: SpeedComparison, rounds: int) -> bool:
    """Whether a race says on which side of the border a ratio lies; few rounds do two deviations above it."""
    if comparison.verdict is Verdict.NOISY and rounds < LEAST_ROUNDS:
        return math.log(comparison.low / _BORDER) >= 2 * _OF_FEW_ROUNDS
    return not comparison.low <= _BORDER <= comparison.high or comparison.high <= _TELLS * comparison.low
