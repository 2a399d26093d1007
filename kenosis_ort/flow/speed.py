"""Never slower than the float model: the candidates in order, and the choice among them.

The forms, in order: the quantized model; the same with its first or last heavy nodes left float; dynamic quantization
of the linear layers or weights only; the float model as it came. The first one that is not slower than the float
model beyond the noise, for prompts as for single tokens, is delivered. Where linear layers read a few rows at once, as
they do for single tokens, reading weights takes the time and no form is ahead of the others on every machine: there
dynamic quantization and weights only are timed against it as well. All forms are where the first is not clearly faster
than the float model: the fastest of them is delivered.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import onnx

from kenosis_ort.bench.harness import MARGIN
from kenosis_ort.calibration.cached_samples import model_fingerprint
from kenosis_ort.calibration.feeds import Feed
from kenosis_ort.flow.builder import Builder
from kenosis_ort.flow.call import Call
from kenosis_ort.flow.preparation import prepare_model
from kenosis_ort.flow.timed_feeds import scenarios, single_samples
from kenosis_ort.graph import constants, outside
from kenosis_ort.graph.product_pairs import weight_pair
from kenosis_ort.options import EXPORT_FORMATS
from kenosis_ort.passes.contract import Build
from kenosis_ort.passes.journal import Journal
from kenosis_ort.passes.recipe import SpeedChoice
from kenosis_ort.placement.cost import NetCosts
from kenosis_ort.placement.regions import choose_regions
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.report.facts import SpeedCandidate, SpeedSummary
from kenosis_ort.runtime.machine import machine
from kenosis_ort.runtime.session import openable
from kenosis_ort.storage.writing import Scratch
from kenosis_ort.targets.model import DYNAMIC, WEIGHT_ONLY
from kenosis_ort.tuning import promise, races

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
    may_pay = found.plan.integer_nodes() and found.cost.speed * costs.profile.error >= 1
    if costs.anywhere and found.whole_net and request.speed.promise:
        if request.target.hooks.time is not None and may_pay:
            timed = f"{found.reason} by the table, which is off by up to {costs.profile.error:.1f}x: it is timed"
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
        return None if in_float.unknown else promise.Estimate(in_float.float_us / found.planned_us, costs.profile.error)

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
