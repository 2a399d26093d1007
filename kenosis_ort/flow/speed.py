"""Never slower than the float model: the candidates in order, and the choice among them.

The forms, in order: the quantized model; the same with its first or last heavy nodes left float; dynamic quantization
of the linear layers or weights only; the float model as it came. The first one that is not slower than the float
model beyond the noise, for prompts as for single tokens, is delivered. Where linear layers read a few rows at once, as
they do for single tokens, reading weights takes the time and no form is ahead of the others on every machine: there
dynamic quantization and weights only are timed against it as well. All forms are where the first is not clearly faster
than the float model: the fastest of them is delivered.

A language model's file serves prompts and single tokens alike: what is fast for 128 rows may be slow for one. The feeds
tell which lengths there are; where they show one only, `Speed.sequence_lengths` says which there are to be, and feeds
are cut or repeated to those.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime as ort

from kenosis_ort.bench.harness import MARGIN
from kenosis_ort.calibration.cached_samples import model_fingerprint
from kenosis_ort.calibration.feeds import sample_feeds
from kenosis_ort.calibration.synthetic import SyntheticReader
from kenosis_ort.errors import CalibrationError
from kenosis_ort.flow.builder import Builder
from kenosis_ort.flow.call import Call, Journal
from kenosis_ort.flow.preparation import prepare_model
from kenosis_ort.flow.request import Request
from kenosis_ort.graph import constants, outside
from kenosis_ort.graph.view import GraphView
from kenosis_ort.options import EXPORT_FORMATS
from kenosis_ort.passes.contract import Build
from kenosis_ort.passes.evaluator import Feed
from kenosis_ort.placement.cost import estimate
from kenosis_ort.placement.planner import choose_regions
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.quantizer.linear_layers import dynamic
from kenosis_ort.recipe import SpeedChoice
from kenosis_ort.report.sections import SpeedCandidate, SpeedSummary
from kenosis_ort.runtime.limits import machine
from kenosis_ort.runtime.session import open_session, openable
from kenosis_ort.storage.writing import Scratch
from kenosis_ort.tuning import promise, races
from kenosis_ort.weights.blocks import weight_only

_log = logging.getLogger(__name__)
_APART: Final = 4
"""Lengths are scenarios of their own where one is this many times another."""
FEW_ROWS: Final = 8
"""Up to so many rows a linear layer's time is that of reading its weights."""
_CACHE_RANK, _CACHE_AXIS = 4, 2


@dataclass(frozen=True)
class Scenario:
    """Feeds that a model is timed on.

    Attributes:
        name: What tells it from the others, as a report says it; "" where there is one only.
        feeds: The feeds.
        few_rows: Its linear layers read a few rows at once, as for single tokens.
    """

    name: str
    feeds: Sequence[Feed]
    few_rows: bool


@dataclass(frozen=True)
class _Length:
    """Axis of an input that is not the batch and shows the length of a feed."""

    name: str
    axis: int

    def of(self, feed: Feed) -> int:
        return int(np.shape(feed[self.name])[self.axis])


def scenarios(
    model: onnx.ModelProto, feeds: Sequence[Feed], lengths: Sequence[int] = (), *, libraries: Sequence[str] = ()
) -> tuple[list[Scenario], list[str]]:
    """The scenarios that feeds show, the shortest first, and notes on those that they cannot show.

    Args:
        model: The float model.
        feeds: At least one.
        lengths: Lengths to time; where none are given, those of the feeds.
        libraries: Libraries with custom operators to register.
    """
    linear = _is_linear(model)
    open_lengths = _lengths(model, feeds)
    if lengths and open_lengths:
        found, missing = [], []
        for length in sorted(set(lengths)):
            feed = _of_length(model, feeds, open_lengths[0], length, libraries)
            if feed is None:
                missing.append(f"no feed of length {length} could be made of the samples: not timed for it")
            else:
                name = f"{open_lengths[0].name} of length {length}"
                found.append(Scenario(name, [feed], linear and _rows(feed) <= FEW_ROWS))
        if found:
            return found, missing
        return [Scenario("", feeds, linear and _rows(feeds[0]) <= FEW_ROWS)], missing
    notes = ["no input of the model is of open length: timed as the samples are"] if lengths else []
    for where in open_lengths:
        ordered = sorted(feeds, key=where.of)
        short, long = where.of(ordered[0]), where.of(ordered[-1])
        if long >= _APART * max(short, 1):
            ends = ((short, ordered[0]), (long, ordered[-1]))
            few = [linear and _rows(feed) <= FEW_ROWS for _, feed in ends]
            return [Scenario(f"{where.name} of length {n}", [f], w) for (n, f), w in zip(ends, few, strict=True)], notes
    return [Scenario("", feeds, linear and _rows(feeds[0]) <= FEW_ROWS)], notes


def _is_linear(model: onnx.ModelProto) -> bool:
    heavy = [node.op_type for node in model.graph.node if node.op_type in constants.HEAVY]
    return bool(heavy) and set(heavy) <= {"MatMul", "Gemm"}


def _rows(feed: Feed) -> int:
    """Number of rows of the first input that linear layers read: tokens, or vectors."""
    first = np.asarray(next(iter(feed.values())))
    return int(np.prod(first.shape if first.dtype.kind in "iu" else first.shape[:-1], dtype=np.int64))


def _lengths(model: onnx.ModelProto, feeds: Sequence[Feed]) -> list[_Length]:
    """The open axes, but for the batch and those of caches, in the order of the inputs."""
    found = []
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        if len(dims) == _CACHE_RANK or any(value.name not in feed for feed in feeds):
            continue
        found += [_Length(value.name, at) for at, d in enumerate(dims) if at and not d.HasField("dim_value")]
    return [where for where in found if all(np.ndim(feed[where.name]) > where.axis for feed in feeds)]


def _of_length(
    model: onnx.ModelProto, feeds: Sequence[Feed], where: _Length, length: int, libraries: Sequence[str]
) -> Feed | None:
    """A feed of a length: one that has it, or the nearest, cut or repeated; None if the model refuses it."""
    nearest = min(feeds, key=lambda feed: abs(where.of(feed) - length))
    if where.of(nearest) == length:
        return nearest
    made = _resized(model, nearest, where.of(nearest), length)
    try:
        open_session(model, custom_op_libraries=libraries).run(None, made)
    except Exception as error:  # the runtime raises several unrelated classes, all of them plain exceptions
        _log.info("no feed of length %d: %s", length, error)
        return None
    return made


def _resized(model: onnx.ModelProto, feed: Feed, now: int, length: int) -> dict[str, Any]:
    """A feed of another length on each open axis that counts tokens, with those in a cache or without."""
    caches = [v for v in model.graph.input if len(v.type.tensor_type.shape.dim) == _CACHE_RANK and v.name in feed]
    past = max((np.shape(feed[v.name])[_CACHE_AXIS] for v in caches), default=0)
    sizes = {now: length, now + past: length + past}
    made = dict(feed)
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        if value.name not in feed or len(dims) == _CACHE_RANK:
            continue
        array = np.asarray(feed[value.name])
        for axis in range(1, array.ndim):
            wanted = sizes.get(array.shape[axis])
            if wanted is not None and axis < len(dims) and not dims[axis].HasField("dim_value"):
                array = np.take(array, np.arange(wanted) % max(array.shape[axis], 1), axis)
        made[value.name] = array
    return made


PROMISE_BUDGET_S: Final = 20.0
_BYTES_A_US: Final = 2**17
"""Weights that a thread reads in a microsecond at most; a net with more of them is not tiny."""
TINY_US: Final = 20.0
"""Of nets that take less a run the cost table decides: calling them takes longer than computing them."""
_RACE_FEEDS: Final = 2
_TRIAL_RUNS: Final = 30
_CUTS: Final = (1, 3)
INT8: Final = "int8"
DYNAMIC: Final = "dynamic"
WEIGHT_ONLY: Final = "weight-only"


@dataclass(frozen=True)
class Delivery:
    """The build to write, and the record of its choice.

    Attributes:
        build: The build; its plan is empty where another form than planned int8 is delivered.
        speed: For the report.
        is_int8: The planned int8 form, or one with float regions, is delivered.
    """

    build: Build
    speed: SpeedSummary
    is_int8: bool = True


def float_regions(builder: Builder, plan: PlacementPlan) -> tuple[Mapping[str, str], str]:
    """The nodes that the target's cost table clearly wants float, with the reasons, and a note.

    A whole net that is estimated to be slower in integer is left to the promise, which measures. Where the table speaks
    for every region (`CostTable.anywhere`), all of it stays float, unless the runtime is here and the estimate may be
    as wrong as that: then its cheapest parting is timed.
    """
    request, view = builder.request, builder.view
    costs = request.target.costs
    if request.speed.tune == "off" or costs is None or view is None or not plan:
        return {}, ""
    float_output = request.target.float_output
    found = choose_regions(view, plan, costs, builder.planned, float_output)
    if found.all_integer.float_us < TINY_US:
        return {}, ""
    may_pay = found.plan.integer_nodes() and found.cost.speed * costs.error >= 1
    if costs.anywhere and found.whole_net and request.speed.promise:
        if request.target.hooks.time is not None and may_pay:
            return (
                found.keep_float,
                f"{found.reason} by the table, which is off by up to {costs.error:.1f}x: it is timed",
            )
        reason = f"{found.reason}, estimated by the table, not timed"
        return dict.fromkeys(plan.integer_nodes(), reason), reason
    return found.keep_float, "" if found.whole_net else found.reason


class _Forms:
    """The forms of one net that may be delivered, in the order of preference, each built when its turn comes.

    Args:
        original: The float model as the caller gave it, if the runtime takes it; else as it was prepared.
        builder: Of the float model that was quantized.
        build: The int8 result.
        worthless: Why the int8 result is of no use; None where it is.
    """

    def __init__(self, original: onnx.ModelProto, builder: Builder, build: Build, worthless: str | None) -> None:
        self._original, self._builder, self._build, self._request = original, builder, build, builder.request
        self._worthless, prepared = worthless, builder.prepared.proto
        self._variants = {INT8: build}
        regions = [self._cut(name, nodes) for name, nodes in _ends(build)]
        timed = self._request.target.hooks.time
        known = () if timed is None else timed.other_forms
        others = (
            promise.Form(
                DYNAMIC,
                "linear layers in int8 with dynamic ranges, all else float",
                lambda: dynamic(
                    prepared,
                    reduce_range=self._request.reduce_range,
                    largest_pair=self._request.types.largest_weight_pair,
                ),
            ),
            promise.Form(WEIGHT_ONLY, "8-bit weights of the linear layers", lambda: weight_only(prepared)),
        )
        self.candidates = [
            promise.Form(
                INT8,
                "int8 as planned",
                lambda: build.quantized,
                checked=worthless is None,
                estimate=lambda: self._estimate(),
            ),
            *(regions if worthless is None else ()),
            *(form for form in others if form.name in known),
            promise.Form("float", "the float model", lambda: original, is_float=True),
        ]

    def keeping_the_promise(self, feeds: Sequence[Feed], budget_s: float) -> Delivery:
        """The build that is delivered: one that is not slower than the float model.

        Args:
            feeds: A few real feeds.
            budget_s: Seconds that timing may take.
        """
        request, lengths = self._request, self._request.speed.sequence_lengths
        found, notes = scenarios(self._original, feeds, lengths, libraries=request.custom_op_libraries)
        setups = [replace(self._setup(each.feeds), name=each.name) for each in found]
        may_be_tiny = outside.weight_bytes(self._original) < TINY_US * _BYTES_A_US * max(request.speed.threads, 1)
        if self._worthless is None and may_be_tiny and (least := _least_us(self._original, setups[0])) < TINY_US:
            why = f"the float model takes {least:.0f} us a run, most of it the call itself, and is not timed"
            return self.by_table(why, notes)
        few = any(each.few_rows for each in found)
        forms = [replace(form, challenges=few and form.name in (DYNAMIC, WEIGHT_ONLY)) for form in self.candidates]
        budget_s = min(budget_s * len(setups), PROMISE_BUDGET_S)
        outcome = promise.keep_promise(self._original, forms, setups[0], further=setups[1:], budget_s=budget_s)
        return self.delivery(outcome.taken, outcome.model, summary(outcome, request, notes))

    def as_requested(self, feeds: Sequence[Feed], budget_s: float) -> SpeedSummary:
        """Speed of a form that the caller asked for: the float model does not take its place."""
        model = self._build.quantized
        found = races.race(self._original, model, self._setup(feeds), budget_s=budget_s, border=1 / MARGIN)
        if (c := found.comparison) is None:
            return summary(None, self._request, ())
        reason = f"{c.ratio:.2f}x of the float model's speed ({c.low:.2f} to {c.high:.2f}), measured"
        step = promise.Step(INT8, "int8 as asked for", promise.FormStatus.TAKEN, reason, c, found.milliseconds)
        outcome = promise.Outcome(model, INT8, (step,), promise.Basis.MEASURED, found.reference_milliseconds, 0.0)
        return summary(outcome, self._request, ())

    def as_recorded(self, choice: SpeedChoice) -> Delivery | None:
        """The form that was delivered when the recipe was made, without timing; None where there is no such form."""
        form = next((form for form in self.candidates if form.name == choice.form), None)
        model = None if form is None else form.build()
        if form is None or model is None:
            return None
        recorded = SpeedCandidate(form.name, form.description, "taken", "as the recipe says; nothing was timed")
        return self.delivery(form.name, model, replace(summary(None, self._request, ()), candidates=(recorded,)))

    def _setup(self, feeds: Sequence[Feed]) -> races.RaceSetup:
        request, timed = self._request, self._request.target.hooks.time
        assert timed is not None  # the caller of this module sees to it
        samples, timed = _samples(self._original, request, feeds)[:_RACE_FEEDS], machine().timed(timed)
        return races.RaceSetup(samples, request.speed.threads, request.custom_op_libraries, runtime=timed)

    def _cut(self, name: str, nodes: Sequence[str]) -> promise.Form:
        def make() -> onnx.ModelProto | None:
            left = dict.fromkeys(nodes, "float is faster there, measured on this machine")
            self._variants[name] = self._builder.quantize(
                self._build.table, {**self._build.keep_float, **left}, self._build.corrections
            )
            return self._variants[name].quantized

        return promise.Form(name, f"int8 with its {name}", make, checked=True)

    def _estimate(self) -> promise.Estimate | None:
        """Estimate of the planned form's speed by the target's cost table.

        Of the other forms none is asked for: they are tried where the table was wrong about this one.
        """
        view, costs, plan = self._builder.view, self._request.target.costs, self._build.plan
        if view is None or costs is None or not plan.integer_nodes():
            return None
        found, in_float = estimate(view, plan, costs), self._in_float
        if found.unknown or in_float is None:
            return None
        return promise.Estimate(in_float / found.planned_us, costs.error)

    @cached_property
    def _in_float(self) -> float | None:
        """Estimated microseconds of the float model as it came: forms that suit integers may take longer in float."""
        request = self._request
        assert request.target.costs is not None  # the caller has looked
        plain = prepare_model(self._original, replace(request, rewrites=frozenset()), Journal())
        found = estimate(GraphView(plain.proto), PlacementPlan(request.target.name), request.target.costs)
        return None if found.unknown else found.float_us

    def by_table(self, why: str, notes: Sequence[str]) -> Delivery:
        """The planned form if the cost table tells that it is faster, else the float model.

        Args:
            why: Why nothing is timed.
            notes: For the report.
        """
        found, planned, stays = self._estimate(), self.candidates[0], self.candidates[-1]
        is_faster = found is not None and found.tells_faster()
        basis = (
            promise.Basis.ESTIMATED if found is not None and (is_faster or found.speed < 1) else promise.Basis.UNDECIDED
        )
        other = promise.FormStatus.SLOWER if basis is promise.Basis.ESTIMATED else promise.FormStatus.UNDECIDED
        status = promise.FormStatus.TAKEN if is_faster else other
        doubt = "undecided: " if status is promise.FormStatus.UNDECIDED else ""
        reason = f"{doubt}{f'estimated at {found}' if found else 'the cost table says nothing of it'}; {why}"
        taken, last = (planned, promise.FormStatus.SPARE) if is_faster else (stays, promise.FormStatus.TAKEN)
        besides = "not needed" if is_faster else "the float model stays as it is"
        steps = (
            promise.Step(planned.name, planned.description, status, reason),
            promise.Step(stays.name, stays.description, last, besides),
        )
        model = taken.build()
        assert model is not None  # the planned form is built, the float model is there
        outcome = promise.Outcome(model, taken.name, steps, basis, None, 0.0)
        return self.delivery(taken.name, model, summary(outcome, self._request, notes))

    def delivery(self, name: str, model: onnx.ModelProto, speed: SpeedSummary) -> Delivery:
        """The build to write once a candidate is chosen."""
        build, request = self._build, self._request
        if name in self._variants:
            taken = self._variants[name]
            proved = build if taken is build else self._builder.build(taken.table, taken.keep_float, taken.corrections)
            return Delivery(proved, speed)
        fusion = request.proof(model) if request.verify else None
        plan = PlacementPlan(request.target.name)
        return Delivery(replace(build, plan=plan, quantized=model, fusion=fusion, notes=()), speed, is_int8=False)


def summary(outcome: promise.Outcome | None, request: Request, notes: Sequence[str]) -> SpeedSummary:
    """The outcome as the report shows it; None where nothing was timed."""
    if outcome is None:
        return SpeedSummary(threads=request.speed.threads, tune=request.speed.tune, notes=tuple(notes))
    candidates = tuple(_candidate(step) for step in outcome.steps)
    return SpeedSummary(
        candidates,
        basis=str(outcome.basis),
        float_milliseconds=outcome.float_milliseconds,
        threads=request.speed.threads,
        tune=request.speed.tune,
        notes=tuple(notes),
        seconds=outcome.seconds,
    )


def _least_us(model: onnx.ModelProto, setup: races.RaceSetup) -> float:
    """The fastest of a few runs in microseconds."""
    with Scratch("race") as folder:
        runner = setup.opener(openable(model, folder))()
    feed, least, timer = dict(setup.feeds[0]), float("inf"), setup.timer
    for _ in range(_TRIAL_RUNS):
        start = timer()
        runner.run(None, feed)
        least = min(least, 1e6 * (timer() - start))
        if least > 50 * TINY_US:
            break
    return least


def _candidate(step: promise.Step) -> SpeedCandidate:
    c = step.comparison
    ratio, low, high, verdict = (None, None, None, "") if c is None else (c.ratio, c.low, c.high, str(c.verdict))
    status, ms, took = str(step.status), step.milliseconds, step.seconds
    return SpeedCandidate(step.name, step.description, status, step.reason, ratio, low, high, verdict, ms, took)


def _ends(build: Build) -> list[tuple[str, tuple[str, ...]]]:
    """The first or last heavy integer nodes, by the name of the candidate that leaves them float."""
    integer = set(build.plan.integer_nodes())
    heavy = tuple(n.node for n in build.plan.nodes if n.op_type in constants.HEAVY and n.node in integer)
    found = []
    for count in _CUTS:
        if count < len(heavy):
            nodes = "node" if count == 1 else f"{count} nodes"
            found += [(f"first {nodes} float", heavy[:count]), (f"last {nodes} float", heavy[-count:])]
    return found


def _samples(model: onnx.ModelProto, request: Request, feeds: Sequence[Any]) -> list[Any]:
    """Feeds of one sample each where the batch is open: calibration likes large batches, deployment small ones.

    A feed with which the model runs only as a whole stays whole.
    """
    defaults = {i.name for i in model.graph.initializer}
    free = {
        value.name
        for value in model.graph.input
        if value.name not in defaults
        and value.type.tensor_type.shape.dim
        and not value.type.tensor_type.shape.dim[0].HasField("dim_value")
    }
    opened = cache(lambda: open_session(model, custom_op_libraries=request.custom_op_libraries))
    return [_cut(opened, feed, free) for feed in feeds[:_RACE_FEEDS]]


def _cut(
    opened: Callable[[], ort.InferenceSession], feed: Mapping[str, Any], free: Collection[str]
) -> Mapping[str, Any]:
    sizes = {len(feed[name]) for name in free if name in feed}
    if len(sizes) != 1 or sizes == {1}:
        return feed
    one = {name: value[:1] if name in free else value for name, value in feed.items()}
    try:
        opened().run(None, one)
    except Exception as error:  # the runtime raises several unrelated classes, all of them plain exceptions
        _log.info("timed on whole batches: %s", error)
        return feed
    return one


_TIMING_SHARE: Final = 0.2
"""Of the call, for the promise."""
_LEAST_TIMING_S: Final = 2.0
"""For the promise in a shorter call, at most; a race ends as soon as it is clear."""


def delivered(
    call: Call,
    builder: Builder,
    build: Build,
    feeds: Sequence[Feed],
    worthless: str | None,
) -> tuple[Build, bool]:
    """The build to deliver after timing, and whether it is known to be of use.

    Args:
        call: What has gathered so far.
        builder: Of the float model that was quantized.
        build: The int8 result.
        feeds: Kept samples.
        worthless: Why the int8 result is of no use; None where it is.
    """
    request, as_it_is = builder.request, (build, worthless is None)
    explicit = request.explicit_option or request.stock_reason
    # Where nothing can or shall be timed, the integer form is delivered.
    if not request.speed.promise:
        return as_it_is
    if request.target.hooks.time is None:
        call.notes.append(f"Not timed: {request.target.unasked}.")
        return as_it_is
    if request.speed.host is not None and not request.is_for_this_machine:
        call.notes.append("Not timed: the file is laid out for another machine than this one.")
        return as_it_is
    if request.format in EXPORT_FORMATS:
        call.notes.append(f"Not timed against the float model: {explicit} says what is quantized.")
        return as_it_is
    model = model_fingerprint(call.loaded.proto)
    recorded = request.recipe.speed
    recorded = None if recorded is None or recorded.model != model else recorded
    feeds = feeds or made_up(call)
    if not feeds and recorded is None:
        call.notes.append("Nothing was timed: there is no sample to run the model on.")
        return as_it_is
    # A form that the caller asked for is only timed; else the first candidate is taken that is not slower.
    original = call.loaded.proto if call.original is not None else builder.prepared.proto
    forms = _Forms(original, builder, build, worthless)
    with call.stage("speed"):
        share = _TIMING_SHARE / (1 - _TIMING_SHARE) * (time.process_time() - call.begun_cpu)
        budget = max(share, _LEAST_TIMING_S)
        if explicit is not None:
            call.speed = forms.as_requested(feeds, budget)
            taken = call.speed.taken
            if taken is not None and taken.verdict == "slower":
                call.warnings.append(
                    f"What {explicit} asks for does not pay here: only {taken.reason}. The file holds it all the same. "
                    "Fix: leave the option out, or promise=False where speed does not matter."
                )
            return as_it_is
        delivery = None if recorded is None else forms.as_recorded(recorded)
        if delivery is None:
            delivery = forms.keeping_the_promise(feeds, budget)
    call.speed = delivery.speed
    # A note or a warning where another form is delivered.
    first, taken = delivery.speed.candidates[0], delivery.speed.taken
    call.choice = None if taken is None else SpeedChoice(model, taken.name)
    if delivery.is_int8 or taken is None:
        return delivery.build, worthless is None or not delivery.is_int8
    if any(form.status == promise.FormStatus.OUTRUN for form in delivery.speed.candidates):
        call.notes.append(f"Faster than static INT8 here, and delivered: {taken.description}.")
        return delivery.build, True
    pays = "is not known to pay here" if delivery.speed.basis == promise.Basis.UNDECIDED else "does not pay here"
    call.warnings.append(
        f"INT8 {pays}: {first.reason}. The file holds: {taken.description}. "
        "Fix: nothing, or promise=False to get INT8 all the same."
    )
    return delivery.build, True


def made_up(call: Call) -> list[Feed]:
    """Synthetic feed where no sample is at hand; none where its kind is not known."""
    try:
        return list(sample_feeds(SyntheticReader(call.loaded, samples=1)))
    except CalibrationError as error:
        _log.info("no sample made up: %s", error)
        return []
