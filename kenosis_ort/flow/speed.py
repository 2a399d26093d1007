"""Never slower than the float model: the tuning search, and the ladder of forms that keeps the promise.

The forms, in order: the quantized model; the same with its first or last heavy nodes left float; dynamic quantization
of the linear layers or weights only; the float model as it came. The first one that is not slower than the float
model beyond the noise, for prompts as for single tokens, is delivered. Where linear layers read a few rows at once, as
they do for single tokens, reading weights takes the time and no form is ahead of the others on every machine: there
dynamic quantization and weights only are timed against it as well. All forms are where the first is not clearly faster
than the float model: the fastest of them is delivered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import onnx
import onnxruntime as ort

from kenosis_ort.calibration.fingerprint import model_fingerprint
from kenosis_ort.flow import steps
from kenosis_ort.flow.builder import Builder
from kenosis_ort.flow.request import Request
from kenosis_ort.flow.situations import situations
from kenosis_ort.graph.external_data import weight_bytes
from kenosis_ort.graph.operators import HEAVY
from kenosis_ort.graph.session import open_session, openable
from kenosis_ort.passes.contract import Build
from kenosis_ort.placement.regions import choose_regions
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.quantizer.linear_layers import dynamic
from kenosis_ort.recipe import SpeedChoice
from kenosis_ort.report.sections import SpeedRung, SpeedSummary
from kenosis_ort.storage.scratch import Scratch
from kenosis_ort.tuning.cache import CacheKey, TuningCache, options_digest
from kenosis_ort.tuning.machine import machine_fingerprint
from kenosis_ort.tuning.moves import Move, Moves, SearchResult, recall
from kenosis_ort.tuning.promise import Fate, Outcome, Rung, Step, keep_promise
from kenosis_ort.tuning.race import Track
from kenosis_ort.tuning.search import search
from kenosis_ort.weights.kernels import weight_only

_log = logging.getLogger(__name__)

PROMISE_BUDGET_S: Final = 20.0
_BYTES_A_US: Final = 2**17
"""Weights that a thread reads in a microsecond at most; a net with more of them is not tiny."""
TINY_US: Final = 20.0
"""Nets that take less a run stay as the caller asked for them: calling them takes longer than computing them."""
_RACE_FEEDS: Final = 2
_TRIAL_RUNS: Final = 30
_CUTS: Final = (1, 2, 3)
INT8: Final = "int8"
DYNAMIC: Final = "dynamic"
WEIGHT_ONLY: Final = "weight-only"
_APART: Final = frozenset(
    {"promise", "tune", "tune_budget_s", "threads", "verify", "metric", "eval_reader", "calibration_cache_path"}
)
"""Options that say nothing of the placements that tuning chooses among, or stand in the key already."""


@dataclass(frozen=True)
class Delivery:
    """What is to be written, and how it came to be chosen.

    Attributes:
        build: The build; its plan is empty where another form than planned int8 is delivered.
        speed: For the report; None where nothing was timed.
        is_int8: The planned int8 form, or one with float regions, is delivered.
    """

    build: Build
    speed: SpeedSummary | None
    is_int8: bool = True


def float_regions(builder: Builder, plan: PlacementPlan) -> tuple[Mapping[str, str], str]:
    """Returns the nodes that the target's cost table clearly wants float, with the reasons, and a note.

    A whole net that is estimated to be slower in integer is left to the promise, which measures. Where the table speaks
    for every region (`CostTable.anywhere`), all of it stays float, unless the runtime is here and the estimate may be
    as wrong as that: then its cheapest parting is timed.
    """
    request, view = builder.request, builder.view
    costs = request.target.costs
    if request.speed.tune == "off" or costs is None or view is None or not plan:
        return {}, ""
    float_output = request.target.float_output
    replan = partial(_replan, builder)
    found = choose_regions(view, plan, costs, replan, float_output)
    if found.all_integer.float_us < TINY_US:
        return {}, ""
    may_pay = found.plan.integer_nodes() and found.cost.speed * costs.error >= 1
    if costs.anywhere and found.whole_net and request.speed.promise:
        if request.target.time is not None and may_pay:
            return (
                found.keep_float,
                f"{found.reason} by the table, which is off by up to {costs.error:.1f}x: it is timed",
            )
        reason = f"{found.reason}, estimated by the table, not timed"
        return dict.fromkeys(plan.integer_nodes(), reason), reason
    return found.keep_float, "" if found.whole_net else found.reason


def _replan(builder: Builder, keep: Mapping[str, str]) -> PlacementPlan:
    return steps.make_plan(builder.planner(keep), builder.request)


def tune(builder: Builder, build: Build, feeds: Sequence[Any]) -> tuple[Build, SearchResult | None, tuple[str, ...]]:
    """Searches for regions that are faster in float on this machine.

    Args:
        builder: Of the float model.
        build: The plan as it is.
        feeds: A few real feeds.

    Returns:
        The build with what pays, the search (None from the cache), and notes.
    """
    request = builder.request
    moves = _moves(build)
    built: dict[Moves, Build] = {frozenset(): build}

    def make(chosen: Moves) -> onnx.ModelProto | None:
        if chosen not in built:
            built[chosen] = _without(builder, build, [name for move in chosen for name in move.data])
        return built[chosen].quantized

    store, key = _cache(builder, build)
    if store is not None:
        known = store.load(key, lambda data: recall(data, moves))
        if known is not None:
            kept = frozenset(known)
            make(kept)
            names = ", ".join(move.name for move in known) or "the plan as it is"
            return built[kept], None, (f"tuning: {names}, from the tuning cache",)
    samples = _samples(builder.prepared.proto, request, feeds)
    found = search(moves, make, _track(request, samples), budget_s=request.speed.budget_s)
    if store is not None and not found.noisy:
        store.store(key, found.to_dict())
    return built[frozenset(found.accepted)], found, _tuning_notes(found)


def keep_the_promise(
    original: onnx.ModelProto,
    prepared: onnx.ModelProto,
    builder: Builder,
    build: Build,
    feeds: Sequence[Any],
    tuning: Sequence[str] = (),
    *,
    worthless: str | None = None,
    budget_s: float = PROMISE_BUDGET_S,
    challenge_s: float = PROMISE_BUDGET_S,
) -> Delivery:
    """Returns what is not slower than the float model.

    Args:
        original: The float model as the caller gave it, if the runtime takes it.
        prepared: The same in our forms, before passes moved its biases and weights.
        builder: Of the float model that was quantized.
        build: The int8 result.
        feeds: A few real feeds.
        tuning: Notes of the tuning search.
        worthless: Why the int8 result is of no use; None where it is.
        budget_s: Seconds that timing may take.
        challenge_s: Seconds after which nothing is timed that the promise holds without.
    """
    request, float_model = builder.request, original
    found, notes = situations(float_model, feeds, request.speed.sequence_lengths, libraries=request.custom_op_libraries)
    tracks = [replace(_track(request, _samples(float_model, request, each.feeds)), name=each.name) for each in found]
    track, tuning = tracks[0], (*tuning, *notes)
    may_be_tiny = weight_bytes(float_model) < TINY_US * _BYTES_A_US * max(request.speed.threads, 1)
    if worthless is None and may_be_tiny and (least := _least_us(float_model, track)) < TINY_US:
        reason = f"the float model takes {least:.0f} us a run, most of it the call itself: not timed, kept as planned"
        rung = SpeedRung(INT8, "int8 as planned", str(Fate.TAKEN), reason)
        return Delivery(build, replace(summary(None, request, tuning), rungs=(rung,)))
    forms = _Forms(original, prepared, builder, build, worthless)
    few = any(each.few_rows for each in found)
    rungs = [replace(rung, challenges=few and rung.name in (DYNAMIC, WEIGHT_ONLY)) for rung in forms.rungs]
    budget_s, challenge_s = (min(each * len(tracks), PROMISE_BUDGET_S) for each in (budget_s, challenge_s))
    outcome = keep_promise(float_model, rungs, track, further=tracks[1:], budget_s=budget_s, challenge_s=challenge_s)
    return forms.delivery(outcome.taken, outcome.model, summary(outcome, request, tuning))


def tuned_as_recorded(builder: Builder, build: Build, choice: SpeedChoice) -> Build:
    """Returns the build with the nodes left float that tuning chose when the recipe was made."""
    return _without(builder, build, choice.float_nodes) if choice.float_nodes else build


def as_recorded(
    original: onnx.ModelProto,
    prepared: onnx.ModelProto,
    builder: Builder,
    build: Build,
    choice: SpeedChoice,
    *,
    worthless: str | None = None,
) -> Delivery | None:
    """Returns the form that was delivered when the recipe was made, without timing; None where there is no such form.

    Args:
        original: As in `keep_the_promise`.
        prepared: As there.
        builder: As there.
        build: The int8 result, with the nodes left float that the recipe says.
        choice: What the recipe says.
        worthless: As there.
    """
    forms = _Forms(original, prepared, builder, build, worthless)
    rung = next((rung for rung in forms.rungs if rung.name == choice.form), None)
    model = None if rung is None else rung.build()
    if rung is None or model is None:
        return None
    said = SpeedRung(rung.name, rung.description, str(Fate.TAKEN), "as the recipe says; nothing was timed")
    return forms.delivery(rung.name, model, replace(summary(None, builder.request, ()), rungs=(said,)))


class _Forms:
    """The forms of one net that may be delivered, in the order of preference, each built when its turn comes.

    Args:
        original: The float model as the caller gave it, if the runtime takes it.
        prepared: The same in our forms, before passes moved its biases and weights.
        builder: Of the float model that was quantized.
        build: The int8 result.
        worthless: Why the int8 result is of no use; None where it is.
    """

    def __init__(
        self,
        original: onnx.ModelProto,
        prepared: onnx.ModelProto,
        builder: Builder,
        build: Build,
        worthless: str | None,
    ) -> None:
        self._workshop, self._build = builder, build
        self._variants = {INT8: build}
        regions = [self._cut(move.name, move.data) for move in _moves(build) if len(move.data) in (1, 3)]
        timed = builder.request.target.time
        known = () if timed is None else timed.other_forms
        others = (
            Rung(
                DYNAMIC,
                "linear layers in int8 with dynamic ranges, all else float",
                lambda: dynamic(
                    prepared,
                    reduce_range=builder.request.reduce_range,
                    largest_pair=builder.request.types.largest_weight_pair,
                ),
            ),
            Rung(WEIGHT_ONLY, "8-bit weights of the linear layers", lambda: weight_only(prepared)),
        )
        self.rungs = [
            Rung(INT8, "int8 as planned", lambda: build.quantized, checked=worthless is None),
            *(regions if worthless is None else ()),
            *(rung for rung in others if rung.name in known),
            Rung("float", "the float model", lambda: original, is_float=True),
        ]

    def _cut(self, name: str, nodes: Sequence[str]) -> Rung:
        def make() -> onnx.ModelProto | None:
            self._variants[name] = _without(self._workshop, self._build, nodes)
            return self._variants[name].quantized

        return Rung(name, f"int8 with its {name}", make, checked=True)

    def delivery(self, name: str, model: onnx.ModelProto, speed: SpeedSummary) -> Delivery:
        """Returns what is to be written once a form is chosen."""
        build, request = self._build, self._workshop.request
        if name in self._variants:
            taken = self._variants[name]
            proved = build if taken is build else self._workshop.build(taken.table, taken.keep_float)
            return Delivery(proved, speed)
        prove = request.target.prove if request.verify else None
        fusion = None if prove is None else prove(model, custom_op_libraries=request.custom_op_libraries)
        plan = PlacementPlan(request.target.name)
        return Delivery(replace(build, plan=plan, quantized=model, fusion=fusion, notes=()), speed, is_int8=False)


def summary(outcome: Outcome | None, request: Request, tuning: Sequence[str]) -> SpeedSummary:
    """Returns the outcome as the report shows it; None where nothing was timed."""
    if outcome is None:
        return SpeedSummary(threads=request.speed.threads, tune=request.speed.tune, notes=tuple(tuning))
    rungs = tuple(_rung(step) for step in outcome.steps)
    return SpeedSummary(
        rungs,
        noisy=outcome.noisy,
        float_milliseconds=outcome.float_milliseconds,
        threads=request.speed.threads,
        tune=request.speed.tune,
        notes=tuple(tuning),
        seconds=outcome.seconds,
    )


def _least_us(model: onnx.ModelProto, track: Track) -> float:
    """Returns the fastest of a few runs in microseconds."""
    with Scratch("race") as folder:
        runner = track.open(openable(model, folder))
    feed, least, timer = dict(track.feeds[0]), float("inf"), track.timer
    for _ in range(_TRIAL_RUNS):
        start = timer()
        runner.run(None, feed)
        least = min(least, 1e6 * (timer() - start))
        if least > 50 * TINY_US:
            break
    return least


def _rung(step: Step) -> SpeedRung:
    c = step.comparison
    ratio, low, high, verdict = (None, None, None, "") if c is None else (c.ratio, c.low, c.high, str(c.verdict))
    fate, took = str(step.fate), step.seconds
    return SpeedRung(step.name, step.description, fate, step.reason, ratio, low, high, verdict, step.milliseconds, took)


def _moves(build: Build) -> list[Move]:
    """Returns the cuts: the first or last heavy integer nodes left float."""
    integer = set(build.plan.integer_nodes())
    heavy = [n.node for n in build.plan.nodes if n.op_type in HEAVY and n.node in integer]
    moves = []
    for count in _CUTS:
        if count < len(heavy):
            nodes = "node" if count == 1 else f"{count} nodes"
            moves.append(Move(f"first {nodes} float", "prefix", tuple(heavy[:count]), group="prefix"))
            moves.append(Move(f"last {nodes} float", "suffix", tuple(heavy[-count:]), group="suffix"))
    return moves


def _without(builder: Builder, build: Build, nodes: Sequence[str]) -> Build:
    """Returns the build with some nodes left float."""
    keep = {**build.keep_float, **dict.fromkeys(nodes, "float is faster there, measured on this machine")}
    return builder.quantize(build.table, keep)


def _track(request: Request, feeds: Sequence[Any]) -> Track:
    timed, threads, libraries = request.target.time, request.speed.threads, request.custom_op_libraries
    assert timed is not None  # the caller of this module sees to it
    options: dict[str, Any] = {"threads": threads, "custom_op_libraries": libraries}
    return Track(
        feeds=list(feeds[:_RACE_FEEDS]),
        threads=threads,
        custom_op_libraries=libraries,
        open_runner=partial(timed.open, **options),
        make_opener=None if timed.opener is None else partial(timed.opener, **options),
        in_calling_thread=timed.in_calling_thread,
        stopwatch=timed.clock,
    )


def _samples(model: onnx.ModelProto, request: Request, feeds: Sequence[Any]) -> list[Any]:
    """Returns feeds of one sample each where the batch is open: calibration likes large batches, deployment small ones.

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


def _cache(builder: Builder, build: Build) -> tuple[TuningCache | None, CacheKey]:
    request = builder.request
    options = {name: str(choice.value) for name, choice in request.choices.items() if name not in _APART}
    key = CacheKey(
        model_fingerprint(builder.prepared.proto),
        machine_fingerprint(request.speed.threads),
        options_digest({**options, "keep_float": sorted(build.keep_float), "version": version("kenosis-ort")}),
    )
    return (None if request.speed.cache is None else TuningCache(Path(request.speed.cache))), key


def _tuning_notes(found: SearchResult) -> tuple[str, ...]:
    notes = []
    if found.noisy:
        notes.append("tuning: the machine is too noisy to tell candidates apart; the plan stays as it is")
    notes += [f"tuning: {move.name}" for move in found.accepted]
    if found.gain is not None:
        notes.append(f"tuning: {found.gain.ratio:.2f}x of the plan as it was, in a race of its own")
    dropped = [t for t in found.trials if str(t.stage) == "dropped"]
    notes += [f"tuning: {' + '.join(t.moves)} dropped: {t.reason}" for t in dropped]
    if not found.accepted and not found.noisy:
        notes.append(f"tuning: none of {len(found.trials)} candidates is faster than the plan beyond the noise")
    return tuple(notes)
