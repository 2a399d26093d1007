"""Never slower than the float model: the candidates in order, and the choice among them.

The forms, in order: the quantized model; the same with its first or last heavy nodes left float; dynamic quantization
of the linear layers or weights only; the float model as it came. The first one that is not slower than the float
model beyond the noise, for prompts as for single tokens, is delivered. Where linear layers read a few rows at once, as
they do for single tokens, reading weights takes the time and no form is ahead of the others on every machine: there
dynamic quantization and weights only are timed against it as well. All forms are where the first is not clearly faster
than the float model: the fastest of them is delivered.

Models are timed on feeds of each length that a net is to serve, and on single samples of batches. A language model's
file serves prompts and single tokens alike: what is fast for 128 rows may be slow for one. The feeds tell which lengths
there are; where they show one only, `Speed.sequence_lengths` says which there are to be, and feeds are cut or repeated
to those.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final, NamedTuple

import numpy as np
import onnx

from kenosis_ort.bench.harness import MARGIN
from kenosis_ort.calibration.cached_samples import model_fingerprint
from kenosis_ort.calibration.feeds import Feed
from kenosis_ort.flow.builder import Builder
from kenosis_ort.flow.call import Call
from kenosis_ort.flow.preparation import prepare_model
from kenosis_ort.flow.request import Request
from kenosis_ort.graph import constants, outside
from kenosis_ort.graph.product_pairs import weight_pair
from kenosis_ort.options import EXPORT_FORMATS
from kenosis_ort.passes.contract import Build
from kenosis_ort.passes.journal import Journal
from kenosis_ort.passes.recipe import SpeedChoice
from kenosis_ort.placement.cost import NetCosts, choose_regions
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.report.facts import SpeedCandidate, SpeedSummary
from kenosis_ort.runtime.machine import machine
from kenosis_ort.runtime.session import Session, open_session, openable
from kenosis_ort.storage.writing import Scratch
from kenosis_ort.targets.model import DYNAMIC, WEIGHT_ONLY
from kenosis_ort.tuning import promise, races

_log = logging.getLogger(__name__)
_RACE_FEEDS: Final = 2
_APART: Final = 4
"""Lengths are scenarios of their own where one is this many times another."""
FEW_ROWS: Final = 8
"""Up to so many rows a linear layer's time is that of reading its weights."""
_CACHE_RANK, _CACHE_AXIS = 4, 2


class Scenario(NamedTuple):
    """Feeds that a model is timed on.

    Attributes:
        name: What tells it from the others, as a report says it; "" where there is one only.
        feeds: The feeds.
        few_rows: Its linear layers read a few rows at once, as for single tokens.
    """

    name: str
    feeds: Sequence[Feed]
    few_rows: bool


_Axis = tuple[str, int]
"""Input and axis, not the batch, that show the length of a feed."""


def _length(feed: Feed, where: _Axis) -> int:
    return int(np.shape(feed[where[0]])[where[1]])


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
    heavy = {node.op_type for node in model.graph.node if node.op_type in constants.HEAVY}
    linear = bool(heavy) and heavy <= {"MatMul", "Gemm"}

    def scenario(feeds: Sequence[Feed], length: int, where: _Axis | None = None) -> Scenario:
        name = "" if where is None else f"{where[0]} of length {length}"
        return Scenario(name, feeds, linear and _rows(feeds[0]) <= FEW_ROWS)

    axes = _open_axes(model, feeds)
    if lengths and axes:
        made = {n: _of_length(model, feeds, axes[0], n, libraries) for n in sorted(set(lengths))}
        lost = [n for n, feed in made.items() if feed is None]
        notes = [f"no feed of length {n} could be made of the samples: not timed for it" for n in lost]
        found = [scenario([feed], n, axes[0]) for n, feed in made.items() if feed is not None]
        return found or [scenario(feeds, 0)], notes
    notes = ["no input of the model is of open length: timed as the samples are"] if lengths else []
    for where in axes:
        ends = sorted(feeds, key=partial(_length, where=where))[:: max(len(feeds) - 1, 1)]
        sizes = [_length(feed, where) for feed in ends]
        if sizes[-1] >= _APART * max(sizes[0], 1):
            return [scenario([feed], n, where) for feed, n in zip(ends, sizes, strict=True)], notes
    return [scenario(feeds, 0)], notes


def _rows(feed: Feed) -> int:
    """Number of rows of the first input that linear layers read: tokens, or vectors."""
    first = np.asarray(next(iter(feed.values())))
    return int(np.prod(first.shape if first.dtype.kind in "iu" else first.shape[:-1], dtype=np.int64))


def _open_axes(model: onnx.ModelProto, feeds: Sequence[Feed]) -> list[_Axis]:
    """The open axes, but for the batch and those of caches, in the order of the inputs."""
    found = []
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        if len(dims) == _CACHE_RANK or any(value.name not in feed for feed in feeds):
            continue
        found += [(value.name, at) for at, d in enumerate(dims) if at and not d.HasField("dim_value")]
    return [where for where in found if all(np.ndim(feed[where[0]]) > where[1] for feed in feeds)]


def _of_length(
    model: onnx.ModelProto, feeds: Sequence[Feed], where: _Axis, length: int, libraries: Sequence[str]
) -> Feed | None:
    """A feed of a length: one that has it, or the nearest, cut or repeated; None if the model refuses it."""
    nearest = min(feeds, key=lambda feed: abs(_length(feed, where) - length))
    if _length(nearest, where) == length:
        return nearest
    made = _resized(model, nearest, _length(nearest, where), length)
    opened = partial(open_session, model, custom_op_libraries=libraries)
    return made if _takes(opened, made, f"no feed of length {length}") else None


def _takes(opened: Callable[[], Session], feed: Feed, otherwise: str) -> bool:
    """Whether a model runs on a feed."""
    try:
        opened().run(None, dict(feed))
    except Exception as error:  # the runtime raises several unrelated classes, all of them plain exceptions
        _log.info("%s: %s", otherwise, error)
        return False
    return True


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


def single_samples(model: onnx.ModelProto, request: Request, feeds: Sequence[Any]) -> list[Any]:
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
    opened = cache(partial(open_session, model, custom_op_libraries=request.custom_op_libraries))
    found = []
    for feed in feeds[:_RACE_FEEDS]:
        sizes = {len(feed[name]) for name in free if name in feed}
        one = {name: value[:1] if name in free else value for name, value in feed.items()}
        is_batch = len(sizes) == 1 and sizes != {1}
        found.append(one if is_batch and _takes(opened, one, "timed on whole batches") else feed)
    return found


PROMISE_BUDGET_S: Final = 20.0
_BYTES_A_US: Final = 2**17
"""Weights that a thread reads in a microsecond at most; a net with more of them is not tiny."""
TINY_US: Final = 20.0
"""Of nets that take less a run the cost table decides: calling them takes longer than computing them."""
_TRIAL_RUNS: Final = 30
_CUTS: Final = (1, 3)
INT8: Final = "int8"


Delivery = tuple[Build, SpeedSummary]
"""The build to write, its plan empty where another form than planned int8 is delivered; and the report's record."""


def float_regions(builder: Builder, plan: PlacementPlan) -> tuple[Mapping[str, str], str]:
    """The nodes that the target's cost table clearly wants float, with the reasons, and a note.

    A whole net that is estimated to be slower in integer is left to the promise, which measures. Where the table speaks
    for every region (`CostTable.anywhere`), all of it stays float, unless the runtime is here and the estimate may be
    as wrong as that: then its cheapest parting is timed.
    """
    request, costs = builder.request, builder.request.target.costs
    if request.speed.tune == "off" or costs is None or not plan:
        return {}, ""
    found = choose_regions(builder.prepared.graph, plan, costs, builder.planned, request.target.float_output)
    if found.all_integer.float_us < TINY_US:
        return {}, ""
    may_pay = found.plan.integer_nodes() and found.cost.speed * costs.error >= 1
    if costs.anywhere and found.whole_net and request.speed.promise:
        if request.target.hooks.time is not None and may_pay:
            timed = f"{found.reason} by the table, which is off by up to {costs.error:.1f}x: it is timed"
            return found.keep_float, timed
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
        self._worthless = worthless
        self._variants = {INT8: build}
        usable, timed = worthless is None, self._request.target.hooks.time
        dynamic = "linear layers in int8 with dynamic ranges, all else float"
        self.candidates = [
            promise.Form(
                INT8, "int8 as planned", lambda: build.quantized, checked=usable, estimate=lambda: self._estimate()
            ),
            *(
                promise.Form(name, f"int8 with its {name}", partial(self._cut, name, nodes), checked=True)
                for name, nodes in (_ends(build) if usable else ())
            ),
            *(
                promise.Form(name, description, make)
                for name, description, make in (
                    (DYNAMIC, dynamic, self._dynamic),
                    (WEIGHT_ONLY, "8-bit weights of the linear layers", self._weight_only),
                )
                if timed is not None and name in timed.other_forms
            ),
            promise.Form("float", "the float model", lambda: original, is_float=True),
        ]

    def _dynamic(self) -> onnx.ModelProto | None:
        from kenosis_ort.quantizer.linear_layers import dynamic  # few calls come to it, nor to the next

        reduced, pair = self._request.reduce_range, weight_pair(self._request.types.largest_pair)
        return dynamic(self._builder.prepared.proto, reduce_range=reduced, largest_pair=pair)

    def _weight_only(self) -> onnx.ModelProto | None:
        from kenosis_ort.weights.blocks import weight_only

        return weight_only(self._builder.prepared.proto)

    def _cut(self, name: str, nodes: Sequence[str]) -> onnx.ModelProto:
        build = self._build
        left = dict.fromkeys(nodes, "float is faster there, measured on this machine")
        made = self._builder.quantize(build.table, {**build.keep_float, **left}, build.corrections)
        self._variants[name] = made
        return made.quantized

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
        forms = [form._replace(challenges=few and form.name in (DYNAMIC, WEIGHT_ONLY)) for form in self.candidates]
        budget_s = min(budget_s * len(setups), PROMISE_BUDGET_S)
        model, raced = promise.keep_promise(self._original, forms, setups[0], further=setups[1:], budget_s=budget_s)
        assert raced.taken is not None  # the float model at last
        speed = replace(raced, tune=request.speed.tune, notes=tuple(notes))
        return self._delivery(raced.taken.name, model, speed)

    def as_requested(self, feeds: Sequence[Feed], budget_s: float) -> SpeedSummary:
        """Speed of a form that the caller asked for: the float model does not take its place."""
        model = self._build.quantized
        found = races.race(self._original, model, self._setup(feeds), budget_s=budget_s, border=1 / MARGIN)
        if (c := found.comparison) is None:
            return self._summary(())
        reason = f"{c.ratio:.2f}x of the float model's speed ({c.low:.2f} to {c.high:.2f}), measured"
        taken = promise.record_of(INT8, "int8 as asked for", promise.FormStatus.TAKEN, reason, c, found.milliseconds)
        return self._summary((taken,), basis="measured", float_milliseconds=found.reference_milliseconds)

    def as_recorded(self, choice: SpeedChoice) -> Delivery | None:
        """The form that was delivered when the recipe was made, without timing; None where there is no such form."""
        form = next((form for form in self.candidates if form.name == choice.form), None)
        model = None if form is None else form.build()
        if form is None or model is None:
            return None
        reason = "as the recipe says; nothing was timed"
        recorded = promise.record_of(form.name, form.description, promise.FormStatus.TAKEN, reason)
        return self._delivery(form.name, model, self._summary((recorded,)))

    def by_table(self, why: str, notes: Sequence[str]) -> Delivery:
        """The planned form if the cost table tells that it is faster, else the float model.

        Args:
            why: Why nothing is timed.
            notes: For the report.
        """
        found, planned, stays = self._estimate(), self.candidates[0], self.candidates[-1]
        is_faster = found is not None and found.tells_faster()
        tells = is_faster or (found is not None and found.speed < 1)
        basis, status = promise.Basis.ESTIMATED, promise.FormStatus.TAKEN if is_faster else promise.FormStatus.SLOWER
        if not tells:
            basis, status = promise.Basis.UNDECIDED, promise.FormStatus.UNDECIDED
        known = f"estimated at {found}" if found else "the cost table says nothing of it"
        reason = f"{'' if tells else 'undecided: '}{known}; {why}"
        taken, other, besides = planned, promise.FormStatus.SPARE, "not needed"
        if not is_faster:
            taken, other, besides = stays, promise.FormStatus.TAKEN, "the float model stays as it is"
        steps = (
            promise.record_of(planned.name, planned.description, status, reason),
            promise.record_of(stays.name, stays.description, other, besides),
        )
        model = taken.build()
        assert model is not None  # the planned form is built, the float model is there
        return self._delivery(taken.name, model, self._summary(steps, notes, basis=str(basis)))

    def _setup(self, feeds: Sequence[Feed]) -> races.RaceSetup:
        request, timed = self._request, self._request.target.hooks.time
        assert timed is not None  # the caller of this module sees to it
        samples, timed = single_samples(self._original, request, feeds), machine().timed(timed)
        return races.RaceSetup(samples, request.speed.threads, request.custom_op_libraries, runtime=timed)

    def _estimate(self) -> promise.Estimate | None:
        """Estimate of the planned form's speed by the target's cost table.

        Of the other forms none is asked for: they are tried where the table was wrong about this one. Against the float
        model as it came: forms that suit integers may take longer in float.
        """
        request, plan = self._request, self._build.plan
        costs = request.target.costs
        if costs is None or not plan.integer_nodes():
            return None
        found = NetCosts(self._builder.prepared.graph, costs).estimate(plan)
        if found.unknown:
            return None
        plain = prepare_model(self._original, request.unrewritten, Journal())
        in_float = NetCosts(plain.graph, costs).estimate(PlacementPlan(request.target.name))
        return None if in_float.unknown else promise.Estimate(in_float.float_us / found.planned_us, costs.error)

    def _summary(self, records: Sequence[SpeedCandidate], notes: Sequence[str] = (), **more: Any) -> SpeedSummary:
        speed = self._request.speed
        return SpeedSummary(tuple(records), threads=speed.threads, tune=speed.tune, notes=tuple(notes), **more)

    def _delivery(self, name: str, model: onnx.ModelProto, speed: SpeedSummary) -> Delivery:
        """The build to write once a candidate is chosen."""
        build, request = self._build, self._request
        if name in self._variants:
            taken = self._variants[name]
            proved = build if taken is build else self._builder.build(taken.table, taken.keep_float, taken.corrections)
            return proved, speed
        fusion = request.proof(model) if request.verify else None
        plan = PlacementPlan(request.target.name)
        return replace(build, plan=plan, quantized=model, fusion=fusion, notes=()), speed


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


_TIMING_SHARE: Final = 0.2
"""Of the call, for the promise."""
_LEAST_TIMING_S: Final = 1.0
"""For the promise in a short call, at most: a race ends as soon as it is clear."""
_TIMING_S: Final = 2.0
"""The same in a call that took as long before."""


def delivered(
    call: Call, builder: Builder, build: Build, feeds: Sequence[Feed], worthless: str | None
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
    elsewhere = request.speed.host is not None and not request.is_for_this_machine
    for cannot, why in (
        (request.target.hooks.time is None, f"Not timed: {request.target.unasked}."),
        (elsewhere, "Not timed: the file is laid out for another machine than this one."),
        (request.format in EXPORT_FORMATS, f"Not timed against the float model: {explicit} says what is quantized."),
    ):
        if cannot:
            call.notes.append(why)
            return as_it_is
    model = model_fingerprint(call.loaded.proto)
    recorded = request.recipe.speed
    recorded = None if recorded is None or recorded.model != model else recorded
    feeds = feeds or call.made_up()
    if not feeds and recorded is None:
        call.notes.append("Nothing was timed: there is no sample to run the model on.")
        return as_it_is
    # A form that the caller asked for is only timed; else the first candidate is taken that is not slower.
    original = call.loaded.proto if call.original is not None else builder.prepared.proto
    forms = _Forms(original, builder, build, worthless)
    with call.stage("speed"):
        spent = time.process_time() - call.begun_cpu
        apart = machine().timed(request.target.hooks.time).clock is not None  # none of this process' time
        share, usual = _TIMING_SHARE / (1 - _TIMING_SHARE) * spent, _TIMING_S if apart else min(spent, _TIMING_S)
        budget = max(share, usual, _LEAST_TIMING_S)
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
        made, call.speed = delivery or forms.keeping_the_promise(feeds, budget)
    # A note or a warning where another form is delivered.
    (first, *_), taken, is_int8 = call.speed.candidates, call.speed.taken, bool(made.plan)
    call.choice = None if taken is None else SpeedChoice(model, taken.name)
    if is_int8 or taken is None:
        return made, worthless is None or not is_int8
    if any(form.status == promise.FormStatus.OUTRUN for form in call.speed.candidates):
        call.notes.append(f"Faster than static INT8 here, and delivered: {taken.description}.")
        return made, True
    pays = "is not known to pay here" if call.speed.basis == promise.Basis.UNDECIDED else "does not pay here"
    call.warnings.append(
        f"INT8 {pays}: {first.reason}. The file holds: {taken.description}. "
        "Fix: nothing, or promise=False to get INT8 all the same."
    )
    return made, True
