"""Models to be timed; their paired timings in rounds and blocks, and the comparison: a ratio, its noise and a verdict.

In a round every model gets a fresh runner and one block:
warm-up, then timed runs. The order within a round is random, so a slow drift of the machine hits all alike, and the
ratio of two models is formed within the round. All blocks of a round use the same feed; the rounds take turns through
the feeds.

For the comparison, in every round each model is timed once, so the rounds give paired observations: the logarithm of
(reference's time / own time). The ratio is their median. The interval is the distribution-free one of the median (the
sign test turned around): of n sorted observations the k-th and the (n + 1 - k)-th enclose the true median unless fewer
than k of n fall on one side of it, which happens with probability ``2 * P(Binomial(n, 1/2) < k)``. It supposes nothing
about the shape of the noise, needs no random numbers, and exchanging the two series or scaling both changes nothing but
the sign. Source: Thompson, "On confidence ranges for the median", Annals of Mathematical Statistics 7 (1936), 122-128.
"""

import logging
import math
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort

from kenosis_ort.calibration.feeds import Feed, InputSpec, check_feed
from kenosis_ort.errors import CalibrationError, KenosisError, ModelLoadError, OptionError
from kenosis_ort.graph.files import external_files, uses_external_data
from kenosis_ort.runtime.session import TENSOR_TYPES, Model as Model, Runner, openable
from kenosis_ort.storage.writing import regular

Models = Model | Sequence[Model] | Mapping[str, Model]

_ORT_FORMAT = b"ORTM"


def opened(source: Model, folder: Path, name: str) -> str | bytes:
    """Model in the form that the runtime opens: the path itself, or bytes.

    Args:
        source: As the caller gave it.
        folder: A folder of the model's own, for one in memory that is too large for bytes.
        name: What errors call it.

    Raises:
        ModelLoadError: The path leads to no file, or a ModelProto refers to external data.
    """
    if isinstance(source, bytes):
        return source
    if isinstance(source, onnx.ModelProto):
        if uses_external_data(source):
            raise ModelLoadError(
                "The ModelProto refers to external data that was not loaded, and it has no folder to find it in.",
                where=name,
                fix="Pass the path of the model, or call onnx.load_external_data_for_model(model, folder) first.",
            )
        folder.mkdir(parents=True, exist_ok=True)
        return openable(source, folder)
    path = Path(source)
    if not path.is_file():
        what = "The model path is a folder." if path.is_dir() else "The model file does not exist."
        raise ModelLoadError(what, where=str(path), fix="Check the path.")
    return str(path)


def named_models(models: Models) -> dict[str, Model]:
    """The models by name: keys of a mapping, file names, or their place in the sequence.

    Raises:
        OptionError: There is none, or one is of a type that is no model.
    """
    if isinstance(models, Mapping):
        named = {str(name): source for name, source in models.items()}
    else:
        sources: list[Any] = [models]
        if isinstance(models, Iterable) and not isinstance(models, (str, bytes)):
            sources = [*models]
        named = dict(zip(_names(sources), sources, strict=True))
    if not named:
        raise OptionError("there is no model to time", where="models", fix="give at least one model")
    for name, source in named.items():
        if not isinstance(source, (str, bytes, os.PathLike, onnx.ModelProto)):
            kind = type(source).__name__
            fix = "give paths, bytes or onnx.ModelProto objects"
            raise OptionError(f"a model cannot be a {kind}", where=name, fix=fix)
    return named


def size_of(opened: str | bytes) -> int:
    """The bytes of a model that the runtime has loaded: the file and its files of external data."""
    if isinstance(opened, bytes):
        return len(opened)
    path = Path(opened)
    size = path.stat().st_size
    with regular(path).open("rb") as file:
        if file.read(8)[4:] == _ORT_FORMAT:
            return size
    return size + sum(data.stat().st_size for data in external_files(path))


def _names(sources: Sequence[Model]) -> Iterator[str]:
    """Yields file names, whole paths where two files have the same name, and numbers where even those are equal."""
    paths = [os.fspath(s) if isinstance(s, (str, os.PathLike)) else None for s in sources]
    file_names = Counter(Path(p).name for p in {p for p in paths if p is not None})
    used: Counter[str] = Counter()
    for number, path in enumerate(paths, 1):
        name = f"model {number}" if path is None else Path(path).name
        if path is not None and file_names[name] > 1:
            name = str(path)
        used[name] += 1
        yield name if used[name] == 1 else f"{name} ({used[name]})"


Inputs = tuple[tuple[InputSpec, ...], tuple[InputSpec, ...]]
"""Inputs of a model: those that must be fed, and those with a default value."""


def declared_inputs(session: ort.InferenceSession) -> Inputs:
    """The inputs of a model as its session declares them."""
    required, optional = session.get_inputs(), session.get_overridable_initializers()
    return tuple(map(_spec, required)), tuple(map(_spec, optional))


def _spec(declared: Any) -> InputSpec:
    kind = TENSOR_TYPES.get(declared.type, onnx.TensorProto.STRING)
    dtype = None if kind == onnx.TensorProto.STRING else np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind))
    # A session does not tell a scalar from a tensor of any rank: both have an empty shape.
    return InputSpec(declared.name, dtype, tuple(declared.shape) or None)


def check_same(inputs: Mapping[str, Inputs]) -> None:
    """Checks that all models take the inputs of the first one.

    Raises:
        OptionError: A name or a type differs.
    """
    (first, (wanted, _)), *others = inputs.items()
    for name, (taken, _) in others:
        if {spec[:2] for spec in taken} != {spec[:2] for spec in wanted}:
            texts = [", ".join(f"{s.name} {s.dtype or 'no numbers'}" for s in of) or "none" for of in (wanted, taken)]
            raise OptionError(
                f"the models take different inputs: {texts[0]} for '{first}', {texts[1]} for '{name}'",
                where=name,
                fix="compare models that take the same inputs",
            )


def checked(feeds: Iterable[Feed], name: str, inputs: Inputs) -> list[dict[str, Any]]:
    """Feeds that a model takes, with arrays as the runtime takes them without a copy.

    Raises:
        CalibrationError: A name, type or shape is wrong; the message names model, input, expected and got.
    """
    found = []
    for number, feed in enumerate(feeds):
        try:
            arrays = check_feed(feed, *inputs, number)
        except CalibrationError as error:
            raise CalibrationError(error.what, where=f"{error.where}, model '{name}'", fix=error.fix) from error
        found.append({k: np.asarray(v, order="C") if isinstance(v, np.ndarray) else v for k, v in arrays.items()})
    return found


CONFIDENCE: Final = 0.95
MARGIN: Final = 1.02
"""Speeds within this factor count as equal: code placement and memory layout alone move a session that much."""
LEAST_ROUNDS: Final = 6
"""With fewer, no interval of median reaches `CONFIDENCE`."""
_LEAST_TIME: Final = 1e-9


class Verdict(str, Enum):
    """Verdict of a comparison of two times."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "no difference"
    NOISY = "too noisy"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class SpeedComparison:
    """One model's speed relative to another's.

    Attributes:
        ratio: Median over the rounds of (reference's time / own time); above 1 is faster than the reference.
        low: Lower end of the noise interval of the ratio.
        high: Its upper end.
        verdict: ``no difference`` where the whole interval lies within the factor `MARGIN` of 1; ``faster`` or
            ``slower`` where it lies on one side of 1 and the ratio beyond the margin; ``too noisy`` otherwise, and
            with fewer than `LEAST_ROUNDS` rounds.
    """

    ratio: float
    low: float
    high: float
    verdict: Verdict


def compare(reference: Sequence[float], own: Sequence[float]) -> SpeedComparison:
    """Compares two series of times.

    Args:
        reference: Time of the reference model by round, in any unit.
        own: Time of the model in question by round, in the same unit.

    Raises:
        ValueError: The series are empty or of different length.
    """
    if not reference or len(reference) != len(own):
        raise ValueError(f"the series hold {len(reference)} and {len(own)} rounds")
    logs = sorted(
        math.log(max(theirs, _LEAST_TIME)) - math.log(max(ours, _LEAST_TIME))
        for theirs, ours in zip(reference, own, strict=True)
    )
    rank = interval_rank(len(logs))
    low, high = logs[(rank or 1) - 1], logs[-(rank or 1)]
    middle = statistics.median(logs)
    verdict = Verdict.NOISY if rank is None else _verdict(low, middle, high, math.log(MARGIN))
    return SpeedComparison(math.exp(middle), math.exp(low), math.exp(high), verdict)


def interval_rank(rounds: int, confidence: float = CONFIDENCE) -> int | None:
    """K such that the k-th smallest and k-th largest observation enclose the median; None with too few.

    Args:
        rounds: Number of observations.
        confidence: Least probability of enclosing it, 0..1.
    """
    tail, rank = 0.0, 0
    while rank < rounds:
        tail += math.comb(rounds, rank) / 2**rounds  # exact integers first: no underflow however many rounds
        if 1 - 2 * tail < confidence:
            break
        rank += 1
    return rank or None


def _verdict(low: float, middle: float, high: float, margin: float) -> Verdict:
    """The verdict for a log ratio and its interval."""
    if -margin <= low and high <= margin:
        return Verdict.SAME
    if low > 0 and middle > margin:
        return Verdict.FASTER
    if high < 0 and middle < -margin:
        return Verdict.SLOWER
    return Verdict.NOISY


_log = logging.getLogger(__name__)

_AIM = 0.9  # of the time left, so that one slow block does not cost the last round

Clock = Callable[[], float]
Opener = Callable[[str], Runner]


@dataclass(frozen=True)
class Schedule:
    """Numbers of rounds and runs.

    Attributes:
        rounds: Rounds at most.
        deadline: Time of the clock by which all is done, give or take a run. The first round is made in any case; a
            further one only if one warm-up and one timed run of each model still fit.
        warmup: Runs at most before the timed ones; at least one is made.
        seed: Of the order.
        block_s: Seconds of timed runs in a block at most (a single run may take longer).
    """

    rounds: int
    deadline: float
    warmup: int
    seed: int = 0
    block_s: float = 0.25


@dataclass(frozen=True)
class Block:
    """One model's part of one round, all in seconds: making the runner, and each timed run."""

    load: float
    runs: npt.NDArray[np.float64]

    @property
    def median(self) -> float:
        """Median time of a run."""
        return float(np.median(self.runs))

    @property
    def least(self) -> float:
        """Time that another block would take at least: loading, one warm-up and one timed run."""
        return self.load + 2 * self.median


@dataclass
class Timings:
    """Times of all models, by round.

    Attributes:
        blocks: By name, one block a round.
        failed: By name, what stopped a model; such a model has no blocks.
        rounds: Rounds made.
    """

    blocks: dict[str, list[Block]]
    failed: dict[str, str] = field(default_factory=dict)
    rounds: int = 0

    def round_ms(self, name: str) -> tuple[float, ...]:
        """The median milliseconds of a run by round."""
        return tuple(block.median * 1e3 for block in self.blocks[name])

    def load_seconds(self, name: str) -> float:
        """The median time to make a runner."""
        return statistics.median(block.load for block in self.blocks[name])


def time_interleaved(
    names: Sequence[str],
    open_runner: Opener,
    feeds: Sequence[Feed],
    schedule: Schedule,
    *,
    clock: Clock = time.perf_counter,
    must_run: str | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> Timings:
    """Times several models against each other.

    Args:
        names: The models' names.
        open_runner: Makes a fresh runner for a name.
        feeds: At least one feed; all models take the same.
        schedule: How much is timed.
        clock: Seconds from any fixed point on.
        must_run: Name of a model without which the rest is worth nothing: if it fails, timing ends.
        progress: Called with (rounds done, rounds at most) after each round.

    Returns:
        The blocks of the models that ran; a model that fails in any round is dropped and reported.
    """
    timings = Timings({name: [] for name in names})
    order = random.Random(schedule.seed)
    for index in range(schedule.rounds):
        if index and schedule.deadline - clock() < sum(blocks[-1].least for blocks in timings.blocks.values()):
            _log.info("the time is up after %d of %d rounds", index, schedule.rounds)
            break
        turn = list(timings.blocks)
        order.shuffle(turn)
        waiting = (schedule.rounds - index) * len(turn)
        for name in turn:
            share = _AIM * (schedule.deadline - clock()) / waiting
            waiting -= 1
            try:
                block = _time_block(partial(open_runner, name), feeds[index % len(feeds)], schedule, share, clock)
            except Exception as error:  # the runtime raises several unrelated classes, all of them plain exceptions
                timings.failed[name] = error.what if isinstance(error, KenosisError) else f"it does not run: {error}"
                del timings.blocks[name]
                if name == must_run or not timings.blocks:
                    return timings
                continue
            timings.blocks[name].append(block)
        timings.rounds = index + 1
        if progress is not None:
            progress(index + 1, schedule.rounds)
    return timings


def _time_block(open_one: Callable[[], Runner], feed: Feed, schedule: Schedule, share: float, clock: Clock) -> Block:
    """Times one model.

    Args:
        open_one: Makes the runner.
        feed: What it takes.
        schedule: Says how much warm-up there is and how long the timed part is at most.
        share: Seconds for all of the block, half of them for loading and warm-up; both end early when they are over.
        clock: Says the time.
    """
    begin = clock()
    runner = open_one()
    now = clock()
    load = now - begin
    for _ in range(max(schedule.warmup, 1)):
        runner.run(None, feed)
        now = clock()
        if now - begin >= share / 2:
            break
    end = min(begin + share, now + schedule.block_s)
    runs: list[float] = []
    while not runs or now < end:
        start = clock()
        runner.run(None, feed)
        now = clock()
        runs.append(now - start)
    return Block(load, np.asarray(runs))
