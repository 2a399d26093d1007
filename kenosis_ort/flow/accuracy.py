"""Context of the passes of a recipe: samples to fit to, an evaluator on other samples, and a builder."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import onnx

from kenosis_ort.accuracy.measures.base import Measured
from kenosis_ort.accuracy.metric import Budget
from kenosis_ort.calibration.cached_samples import feed_digest, model_fingerprint
from kenosis_ort.calibration.collector import collect
from kenosis_ort.calibration.feeds import Cut, Part
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.flow import steps
from kenosis_ort.flow.builder import Builder
from kenosis_ort.flow.call import Call, Divided
from kenosis_ort.flow.finish import is_whole
from kenosis_ort.flow.samples import Division, KeepingReader, feeds_wanted, find_division
from kenosis_ort.graph.model_session import FeedRunner as Session
from kenosis_ort.passes.contract import Build, Context, SmoothQuant, State
from kenosis_ort.passes.evaluator import LEAST_FEEDS, Evaluator, Feed, split_feeds
from kenosis_ort.passes.runner import PassRunner
from kenosis_ort.report.sections import MeasureSummary

_FEW_FEEDS: Final = 16
"""Fewer are taken apart where they are batches."""
_PIECES: Final = 32
"""So many at least are made of them: of so many a fourth is enough to evaluate on."""
_MEASURE_SHARE: Final = 0.05
"""Of the call so far, for measuring what is lost on further samples."""
NO_SAMPLES: Final = (
    "they need samples, and the calibration table holds none. Pass the reader beside it, or calibrate again with "
    "samples kept."
)


def improved(call: Call, builder: Builder, build: Build, feeds: Sequence[Feed]) -> tuple[Builder, Build]:
    """The build after the recipe's passes, with the builder of its float model."""
    request = call.request
    passes = [each for each in request.passes if not each.before_calibration]
    if not passes or request.stock_reason is not None or not is_whole(build):
        return builder, build

    def improve() -> tuple[Builder, Build]:
        divided = divide(call, builder.prepared.proto, feeds)
        if not divided.held_out:
            call.notes.append(
                f"Range choice and correction were not tried: {len(divided.fit)} calibration samples at hand leave "
                f"none to evaluate on (at least {LEAST_FEEDS} feeds are needed), and ranges from so few are not stable."
                if feeds
                else f"Range choice and correction were not tried: {NO_SAMPLES}"
            )
            return builder, build
        is_real = not build.table.made_up if call.trust is None else call.trust.source != "synthetic"
        context = context_of(call, divided, builder.on)
        runner = PassRunner(replace(context, real_samples=is_real), call.attempt, call.passes)
        state = runner.run(passes, State(builder.prepared, build))
        return with_free_weights(call, builder.on(state.built.float_model), state.built, divided.evaluator)

    with call.stage("accuracy"):
        return call.attempt("The accuracy passes", improve, (builder, build))


def with_free_weights(call: Call, builder: Builder, build: Build, evaluator: Evaluator) -> tuple[Builder, Build]:
    """The build with weights whose pairs may clip in int16, where the caller names a host that adds pairs in int32.

    They are kept if they are better on held-out samples by more than chance: 0.2 dB in the mean were measured.
    """
    request, host = call.request, call.request.host
    if request.speed.host is None or host is None or host.saturates or build.plan.largest_pair is None:
        return builder, build
    if request.types.saturates:
        call.notes.append("Weights are exact on every processor: what free ones gain cannot be measured on this one.")
        return builder, build
    target = replace(request.target, types=replace(request.target.types, largest_pair=None))
    free = replace(builder, request=replace(builder.request, target=target))
    made = free.build(build.table, build.keep_float)
    if not evaluator.score(made.quantized).beats(evaluator.score(build.quantized)):
        return builder, build
    call.notes.append(f"The file is for processors with VNNI, as '{host.name}': without, products of weights clip.")
    return free, made


def divide(call: Call, model: onnx.ModelProto, feeds: Sequence[Feed]) -> Divided:
    """The samples divided, as at the first time that it was asked for in a call.

    Args:
        call: What gathers on the way; it keeps the evaluator.
        model: The prepared float model, the reference where the runtime does not take the original.
        feeds: The kept samples.
    """
    if call.divided is None:
        samples = _division(call, model, feeds).of(feeds)
        fit, held_out = split_feeds(samples)
        if call.validation is not None and fit:
            fit, held_out = samples, list(call.validation.some())
        call.divided = Divided(fit if held_out else samples, held_out, evaluator_on(call, model, held_out))
        call.evaluator = call.divided.evaluator if held_out else None
    return call.divided


def part_to_fit(call: Call, model: onnx.ModelProto, data: KeepingReader) -> Part:
    """The part of the samples that passes will be fitted to, where it is known before they are read.

    Args:
        call: What gathers on the way; it keeps how the samples are taken apart.
        model: As for `divide`.
        data: The samples, none of which was handed out.
    """
    if not (call.request.chooses_ranges or any(each.before_calibration for each in call.request.passes)):
        return {}
    places = data.foreseen(feeds_wanted(call.request)) or []
    feeds = data.ahead(places)
    whole = Division(tuple(() for _ in feeds))
    division = call.attempt("Taking batches apart", lambda: _division(call, model, feeds), whole)
    if division.is_full:
        return {}  # rows are repeated there: what is read as it comes is another thing
    ends = list(itertools.accumulate(max(len(rows), 1) for rows in division.rows))
    numbers = range(ends[-1] if ends else 0)
    fit = set(split_feeds(numbers)[0] if call.validation is None or len(numbers) < LEAST_FEEDS else numbers)
    part: dict[int, Sequence[Cut]] = {}
    for place, rows, first in zip(places, division.rows, (0, *ends), strict=False):
        if rows:
            part[place] = [Cut(r.start, r.stop, n in fit) for n, r in enumerate(rows, first)]
        elif first in fit:
            part[place] = ()
    return part


def context_of(call: Call, divided: Divided, on: Callable[[onnx.ModelProto], Builder]) -> Context:
    """Context of the passes; ``on`` gives the function that quantizes a model with changed weights."""
    request, libraries = call.request, call.request.custom_op_libraries
    fit, latest = divided.fit, _latest(on)

    def fitted_ranges(state: State) -> CalibrationTable:
        model, table = state.prepared.proto, state.built.table
        swept = table.part
        if swept is not None and swept.model_fingerprint == model_fingerprint(model):
            wanted = f"{sum(map(feed_digest, fit)) % 2**256:064x}"
            if swept.data_fingerprint == wanted:
                return swept
        return collect(
            model,
            fit,
            tensors=list(table.tensors),
            config=replace(table.config, strided=None, max_intermediate_outputs=None),
            custom_op_libraries=libraries,
            seen_as=latest(model).seen_as(),
        )

    return Context(
        fit=fit,
        evaluator=divided.evaluator,
        build_of=lambda state: state.built,
        quantize=lambda weights, table, keep: latest(weights).quantize(table, keep),
        prove=lambda weights, table, keep: latest(weights).build(table, keep),
        plan=lambda weights, table, keep: steps.make_plan(latest(weights).planner(keep), request, table),
        fitted_ranges=fitted_ranges,
        active=frozenset(each.name for each in request.passes),
        forced=frozenset({SmoothQuant.name} if request.extra_options.get("SmoothQuant") else ()),
        per_channel=request.per_channel,
        inserts_scales=request.inserts_smoothing,
        mixes=not request.target.whole,
        has_metric=request.metric is not None,
        custom_op_libraries=libraries,
        executor=call.executor,
    )


def evaluator_on(call: Call, model: onnx.ModelProto, held_out: Sequence[Feed]) -> Evaluator:
    """An evaluator that compares candidates on held-out samples, and measures on the caller's data if any."""
    return Evaluator(
        call.reference(model),
        held_out,
        graph=call.loaded.proto.graph if call.original is not None else model.graph,
        metric=call.request.metric,
        validation=call.validation,
        custom_op_libraries=call.request.custom_op_libraries,
        executor=call.executor,
    )


def measured(call: Call, build: Build, further: Sequence[Feed] = ()) -> MeasureSummary | None:
    """The loss of a build against the float model; None where no sample is left to tell it by.

    Args:
        call: What gathers on the way.
        build: What is to be delivered.
        further: Kept samples that no pass was fitted to or chose by; as many are used as take a small part of the call.
    """
    evaluator, validation = call.evaluator, call.validation
    if evaluator is not None and validation is None and further:
        evaluator = evaluator_on(call, build.float_model, [*evaluator.feeds, *_affordable(call, build, further)])
        call.measured = None
    if evaluator is None and validation is not None and is_whole(build):
        evaluator = evaluator_on(call, build.float_model, validation.some())
    if evaluator is None:
        return None
    if call.measured is not None and call.measured[0] is build:
        found: Measured | None = call.measured[1]
    else:
        with call.stage("measure"):
            found = evaluator.measured(build.quantized)
    if found is None:
        return None
    recipe = call.request.recipe
    budget = recipe.accuracy_budget if recipe.mixed_precision else None
    fields = {name: value for name, value in vars(found).items() if name != "higher_is_better"}
    return MeasureSummary(
        **fields,
        loss=found.loss,
        best_loss=found.best_loss,
        worst_loss=found.worst_loss,
        source="held-out calibration sample" if validation is None else "evaluation sample",
        budget=budget,
        kept=None if budget is None else Budget(budget).holds(found.loss_for(budget)),
    )


def _affordable(call: Call, build: Build, feeds: Sequence[Feed]) -> Sequence[Feed]:
    """The first of some samples, as many as both models run in a small part of the call's processor time."""
    reference, budget = call.reference(build.float_model), _MEASURE_SHARE * (time.process_time() - call.begun_cpu)
    with Session(build.quantized, custom_op_libraries=call.request.custom_op_libraries) as session:
        spent = []
        for _ in range(3):  # memory is planned in the first run
            began = time.process_time()
            reference.run(feeds[0])
            session.run(feeds[0])
            spent.append(time.process_time() - began)
    return feeds[: int(budget / max(min(spent), 1e-6))]


def _latest(on: Callable[[onnx.ModelProto], Builder]) -> Callable[[onnx.ModelProto], Builder]:
    """The same function, which keeps its latest result: candidates of one model come one after the other."""
    cached: list[tuple[onnx.ModelProto, Builder]] = []

    def found(model: onnx.ModelProto) -> Builder:
        if not cached or cached[0][0] is not model:
            cached[:] = [(model, on(model))]
        return cached[0][1]

    return found


def _division(call: Call, model: onnx.ModelProto, feeds: Sequence[Feed]) -> Division:
    """Division of the recorded samples, as at its first use in a call.

    Batches are where there are few and their rows are samples of their own; not for a metric that looks labels up by
    the number of a feed.
    """
    if call.division is None or len(call.division.rows) != len(feeds):
        metric = call.request.metric
        numbered = metric is not None and metric.takes_indices and call.validation is None
        count = _PIECES if 0 < len(feeds) < _FEW_FEEDS and not numbered else 0
        call.division = find_division(lambda feed: call.reference(model).run(feed), feeds, count=count)
    return call.division
