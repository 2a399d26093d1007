"""What the passes of a recipe get to work with: samples to fit to, an evaluator that knows others, and a builder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import onnx

from kenosis_ort.accuracy.biases import with_biases
from kenosis_ort.accuracy.data_free import batch_norm_statistics
from kenosis_ort.accuracy.measures.model import Measured
from kenosis_ort.accuracy.metric import Budget
from kenosis_ort.calibration.collector import collect
from kenosis_ort.calibration.config import CalibrationConfig
from kenosis_ort.calibration.fingerprint import feed_digest, model_fingerprint
from kenosis_ort.calibration.synthetic import SyntheticReader
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.flow import steps
from kenosis_ort.flow.builder import Builder
from kenosis_ort.flow.call import Call
from kenosis_ort.flow.finish import check_rewritten, is_whole
from kenosis_ort.flow.layouts import Draft, Layout
from kenosis_ort.flow.request import Request
from kenosis_ort.flow.rows import as_samples, rows_of
from kenosis_ort.flow.samples import KeepingReader, enough, feeds_wanted
from kenosis_ort.graph.prepare import PreparedModel
from kenosis_ort.graph.session import WHOLE_LIMIT
from kenosis_ort.passes.contract import Context
from kenosis_ort.passes.evaluator import LEAST_FEEDS, Evaluator, Feed, split_feeds
from kenosis_ort.passes.runner import Runner, repeated
from kenosis_ort.passes.smooth_outliers import SmoothQuant
from kenosis_ort.passes.state import Build, State
from kenosis_ort.quantizer.stock import CalibrationDataReader
from kenosis_ort.report.measure import MeasureSummary

_ENOUGH_FEEDS: Final = 16  # fewer are taken apart where they are batches
_FEEDS: Final = 16
_ROWS: Final = 64  # samples, where feeds are batches; and feeds, where they are so small that a layer sees few numbers
_SMALL: Final = 4096  # numbers a feed


def layout_with_passes(
    call: Call, drafted: Draft, reader: CalibrationDataReader | None, data: KeepingReader | None
) -> Layout:
    """Returns the layout, with weights changed for integers where that is better on calibration samples.

    Raises:
        VerificationError: The prepared model does not compute what the original does.
    """
    request, prepared, cache = call.request, drafted.builder.prepared, call.cache
    if cache is not None:
        cache.check_model(prepared.proto)
    whole = len(prepared.proto.graph.node) <= WHOLE_LIMIT
    if request.dictated is not None or not whole or not drafted.plan.integer_nodes():
        return drafted.complete(prepared)
    decided = None if cache is None else cache.decided(request)
    wanted = any(each.before_calibration for each in request.passes)
    tries = wanted and decided is None and data is not None
    peeked: list[Feed] = [] if data is None else _first_samples(data) if tries else list(data.peek(LEAST_FEEDS))
    state = State(prepared)
    if decided:
        with call.stage("equalize"):
            state, outcomes = repeated(request.passes, decided, state, _context_of_draft(call, drafted, (), ()))
            call.passes += outcomes
    elif tries and peeked:
        with call.stage("equalize"):
            state = call.attempt("The change of weights", lambda: _changed(call, drafted, reader, peeked), state)
    elif wanted and decided is None:
        call.notes.append(
            "Equalization and SmoothQuant were not tried: the calibration cache holds no decision about them, and they "
            "are judged by samples. Pass the reader beside the cache."
        )
    if data is None:
        adds_biases = cache is not None and cache.origin is not None and cache.origin.biases
    else:
        adds_biases = request.recipe.bias_correction and sum(map(rows_of, peeked)) >= LEAST_FEEDS
    prepared = state.prepared
    if adds_biases:
        prepared = call.attempt("Adding biases", lambda: _with_movable_biases(state.prepared, drafted), prepared)
    layout = replace(drafted.complete(prepared), changes=state.changes, biases=adds_biases)
    if peeked and request.verify and (layout.builder.prepared.notes or layout.builder.prepared is not prepared):
        with call.stage("check"):
            check_rewritten(call, layout.builder.prepared.proto, peeked[0])
    return layout


def improved(call: Call, builder: Builder, build: Build, feeds: Sequence[Feed]) -> tuple[Builder, Build]:
    """Returns the build after the recipe's passes, with the builder of its float model."""
    request = call.request
    passes = [each for each in request.passes if not each.before_calibration]
    if not passes or request.dictated is not None or not is_whole(build):
        return builder, build

    def improve() -> tuple[Builder, Build]:
        samples = _samples(call, builder.prepared.proto, feeds)
        fit, held_out = _split(call, samples)
        if not held_out:
            call.notes.append(
                f"Range choice and correction were not tried: {len(samples)} calibration samples at hand leave none to "
                f"evaluate on (at least {LEAST_FEEDS} feeds are needed), and ranges from so few are not stable."
                if samples
                else "Range choice and correction were not tried: they need samples. Pass the reader beside the cache."
            )
            return builder, build
        made_up = call.cache is not None and call.cache.origin is not None and call.cache.origin.made_up
        is_real = not made_up if call.trust is None else call.trust.source != "synthetic"
        context = _context(call, builder.prepared.proto, fit, held_out, builder.on)
        call.evaluator = context.evaluator
        runner = Runner(replace(context, real_samples=is_real), call.attempt, call.passes)
        state = runner.run(passes, State(builder.prepared, build))
        return builder.on(state.built.float_model), state.built

    with call.stage("accuracy"):
        return call.attempt("The accuracy passes", improve, (builder, build))


def _changed(call: Call, drafted: Draft, reader: CalibrationDataReader | None, peeked: Sequence[Feed]) -> State:
    """Returns the draft's model after the passes before calibration."""
    prepared = drafted.builder.prepared
    samples = _samples(call, prepared.proto, peeked)
    fit, held_out = _split(call, samples)
    known = batch_norm_statistics(call.loaded.proto) if isinstance(reader, SyntheticReader) else {}
    context = _context_of_draft(call, drafted, fit or samples, held_out)
    passes = [each for each in call.request.passes if each.before_calibration]
    return Runner(replace(context, known=known), call.attempt, call.passes).run(passes, State(prepared))


def numbers_to_fit(request: Request, data: KeepingReader) -> list[int]:
    """Returns the numbers of the samples that ranges will be fitted to, as far as that is foreseen.

    Empty where ranges are not chosen, where there are so few samples that batches are taken apart, or so many that they
    cannot be read ahead.
    """
    if not request.chooses_ranges:
        return []
    kept = data.foreseen(feeds_wanted(request))
    return [] if kept is None or len(kept) < _ENOUGH_FEEDS else split_feeds(kept)[0]


def _context_of_draft(call: Call, drafted: Draft, fit: Sequence[Feed], held_out: Sequence[Feed]) -> Context:
    """Returns the context of passes before calibration, where a state has no ranges but those of a few samples."""
    prepared = drafted.builder.prepared

    def on(model: onnx.ModelProto) -> Builder:
        return drafted.complete(replace(prepared, proto=model)).builder

    def build_of(state: State) -> Build:
        layout = drafted.complete(state.prepared)
        table = collect(
            layout.builder.prepared.proto,
            fit,
            tensors=layout.tensors,
            config=CalibrationConfig(sketch=not call.request.widths.are_bytes),
            custom_op_libraries=call.request.custom_op_libraries,
            seen_as=layout.builder.seen_as(),
        )
        return layout.builder.quantize(table)

    return replace(
        _context(call, prepared.proto, fit, held_out, on), build_of=build_of, nodes=frozenset(drafted.adjustable)
    )


def _context(
    call: Call,
    model: onnx.ModelProto,
    fit: Sequence[Feed],
    held_out: Sequence[Feed],
    on: Callable[[onnx.ModelProto], Builder],
) -> Context:
    """Returns what passes may ask for.

    Args:
        call: What gathers on the way.
        model: The prepared float model, the reference where the runtime does not take the original.
        fit: Samples to fit to.
        held_out: Samples to evaluate on.
        on: Returns what quantizes a model with changed weights.
    """
    request, libraries = call.request, call.request.custom_op_libraries
    latest = _latest(on)

    def fitted_ranges(build: Build) -> CalibrationTable:
        swept = build.table.part
        if swept is not None and swept.model_fingerprint == model_fingerprint(build.float_model):
            wanted = f"{sum(map(feed_digest, fit)) % 2**256:064x}"
            if swept.data_fingerprint == wanted:
                return swept
        return collect(
            build.float_model,
            fit,
            tensors=list(build.table.tensors),
            config=replace(build.table.config, strided=None, max_intermediate_outputs=None),
            custom_op_libraries=libraries,
            seen_as=latest(build.float_model).seen_as(),
        )

    return Context(
        fit=fit,
        evaluator=evaluator_on(call, model, held_out),
        build_of=lambda state: state.built,
        quantize=lambda weights, table, keep: latest(weights).quantize(table, keep),
        prove=lambda weights, table, keep: latest(weights).build(table, keep),
        plan=lambda weights, table, keep: steps.make_plan(latest(weights).planner(keep), request, table),
        fitted_ranges=fitted_ranges,
        active=frozenset(each.name for each in request.passes),
        forced=frozenset({SmoothQuant.name} if request.extra_options.get("SmoothQuant") else ()),
        per_channel=request.per_channel,
        inserts_scales=request.inserts_smoothing,
        has_metric=request.metric is not None,
        custom_op_libraries=libraries,
    )


def evaluator_on(call: Call, model: onnx.ModelProto, held_out: Sequence[Feed]) -> Evaluator:
    """Returns an evaluator that compares candidates on held-out samples, and measures on the caller's data if any."""
    return Evaluator(
        call.reference(model),
        held_out,
        graph=call.loaded.proto.graph if call.original is not None else model.graph,
        metric=call.request.metric,
        validation=call.validation,
        custom_op_libraries=call.request.custom_op_libraries,
    )


def measured(call: Call, build: Build) -> MeasureSummary | None:
    """Returns what a build loses against the float model; None where no sample is left to tell it by."""
    evaluator, validation = call.evaluator, call.validation
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
    told = {name: value for name, value in vars(found).items() if name != "higher_is_better"}
    return MeasureSummary(
        **told,
        loss=found.loss,
        best_loss=found.best_loss,
        worst_loss=found.worst_loss,
        source="held-out calibration sample" if validation is None else "evaluation sample",
        budget=budget,
        kept=None if budget is None else Budget(budget).holds(found.loss_for(budget)),
    )


def _split(call: Call, samples: Sequence[Feed]) -> tuple[list[Feed], list[Feed]]:
    """Returns samples to fit to and others to evaluate on; the latter are the caller's held-out data, where given."""
    if call.validation is None or len(samples) < LEAST_FEEDS:
        return split_feeds(samples)
    return list(samples), list(call.validation.some())


def _latest(on: Callable[[onnx.ModelProto], Builder]) -> Callable[[onnx.ModelProto], Builder]:
    """Returns the same function, which keeps its latest result: candidates of one model come one after the other."""
    kept: list[tuple[onnx.ModelProto, Builder]] = []

    def found(model: onnx.ModelProto) -> Builder:
        if not kept or kept[0][0] is not model:
            kept[:] = [(model, on(model))]
        return kept[0][1]

    return found


def _samples(call: Call, model: onnx.ModelProto, feeds: Sequence[Feed]) -> list[Feed]:
    """Returns the feeds, batches taken apart where there are few and their rows are samples of their own.

    Not for a metric that looks labels up by the number of a feed.
    """
    numbered = call.request.metric is not None and call.request.metric.takes_indices and call.validation is None
    if numbered or not 0 < len(feeds) < _ENOUGH_FEEDS:
        return list(feeds)
    return as_samples(call.reference(model).run, feeds, count=_ENOUGH_FEEDS)


def _first_samples(data: KeepingReader) -> list[Feed]:
    """Returns the first few samples, those that weights are changed by."""
    first = data.peek(1)
    size = max((int(np.size(value)) for value in first[0].values()), default=0) if first else 0
    return enough(data.peek(_ROWS if size <= _SMALL else _FEEDS), rows=_ROWS, least=2)


def _with_movable_biases(prepared: PreparedModel, draft: Draft) -> PreparedModel:
    """Returns the model with a bias of its own for each layer that bias correction may follow on."""
    model = with_biases(prepared.proto, nodes=set(draft.adjustable)).model
    return prepared if model is prepared.proto else replace(prepared, proto=model)
