"""The passes of a recipe: samples to fit to, an evaluator on other samples, and a builder.

Those that change weights come between calibration and all else: their ranges follow from those collected before.

Recipes that quantize weights alone: in blocks of 4 or 8 bits, activations float; nothing is calibrated or placed.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Final

import onnx

from kenosis_ort.accuracy.channel_statistics import batch_norm_statistics
from kenosis_ort.accuracy.measures import Measured
from kenosis_ort.accuracy.metric import is_within
from kenosis_ort.calibration import cached_samples
from kenosis_ort.calibration.feeds import LEAST_FEEDS, Feed, no_sample, some_of, split_feeds
from kenosis_ort.calibration.readers import is_made_up
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import OptionError
from kenosis_ort.flow import samples
from kenosis_ort.flow.builder import Builder
from kenosis_ort.flow.call import Call
from kenosis_ort.flow.request import Request
from kenosis_ort.flow.reused_tables import Observe, RewrittenNet, following_table
from kenosis_ort.graph.load import LoadedModel
from kenosis_ort.graph.view import PreparedModel
from kenosis_ort.passes.contract import Build, Context, State, changed_weights
from kenosis_ort.passes.correct_biases import with_biases
from kenosis_ort.passes.evaluator import Evaluator
from kenosis_ort.passes.leave_float import MixedPrecision
from kenosis_ort.passes.runner import PassRunner
from kenosis_ort.passes.smooth import SmoothQuant
from kenosis_ort.plan import Kind, NodeDecision, PlacementPlan
from kenosis_ort.report.facts import MeasureSummary
from kenosis_ort.rewrite import BLOCK_FORMS
from kenosis_ort.runtime.session import open_session
from kenosis_ort.targets.model import WEIGHT_ONLY

_MEASURE_SHARE: Final = 0.05
"""Of the call so far, for measuring what is lost on further samples."""
NO_SAMPLES: Final = (
    "they need samples, and the calibration table holds none. Pass the reader beside it, or calibrate again with "
    "samples kept."
)


def improved(call: Call, builder: Builder, build: Build) -> tuple[Builder, Build]:
    """The build after the recipe's passes, and the builder that made it."""
    request = call.request
    passes = [each for each in call.wanted if not each.before_calibration]
    if not passes or request.stock_reason is not None or not build.is_whole:
        return builder, build

    def improve() -> tuple[Builder, Build]:
        feeds = call.feeds
        fit, evaluator = call.divide(builder.prepared.proto, feeds)
        if not evaluator.feeds:
            call.notes.append(
                f"Range choice and correction were not tried: {len(fit)} calibration samples at hand leave none to "
                f"evaluate on (at least {LEAST_FEEDS} feeds are needed), and ranges from so few are not stable."
                if feeds
                else f"Range choice and correction were not tried: {NO_SAMPLES}"
            )
            return builder, build
        context = replace(context_of(call, fit, evaluator, builder), real_samples=_are_real(call, build.table))
        state = PassRunner(context, call).run(passes, State(builder.prepared, build))
        return with_free_weights(call, builder, state.built, evaluator)

    with call.stage("accuracy"):
        return call.attempt("The accuracy passes", improve, (builder, build))


def _are_real(call: Call, table: CalibrationTable) -> bool:
    """Whether some samples are no made-up ones."""
    return not table.made_up if call.trust is None else call.trust.source != "synthetic"


def with_float_nodes(call: Call, builder: Builder, build: Build) -> Build:
    """A poor build with the nodes left float that lose most, within the recipe's budget and share of float work.

    The build itself where that is not tried. A text recognizer with a few large channels: 21 dB for 2, 5 % in float.
    """
    request, recipe = call.request, call.request.recipe
    may_try = call.wanted and recipe.max_float_share and not (recipe.mixed_precision or request.target.whole)
    if not may_try or not build.is_whole or not _are_real(call, build.table):
        return build
    fit, evaluator = call.divide(builder.prepared.proto, call.feeds)
    if not evaluator.feeds:
        return build
    with call.stage("accuracy"):
        runner = PassRunner(context_of(call, fit, evaluator, builder), call)
        asked = MixedPrecision.of(replace(recipe, mixed_precision=True))
        return runner.run([asked], State(builder.prepared, build)).built


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
    wanted = replace(builder.request, target=target)
    free = Builder.of(builder.prepared, wanted, builder.journal)
    free = replace(free, bodies=builder.bodies, idle=builder.idle)
    made = free.build(build.table, build.keep_float, build.corrections)
    if not evaluator.score(made.quantized).beats(evaluator.score(build.quantized)):
        return builder, build
    call.notes.append(f"The file is for processors with VNNI, as '{host.name}': without, products of weights clip.")
    return free, made


def context_of(call: Call, fit: Sequence[Feed], evaluator: Evaluator, builder: Builder) -> Context:
    """Context of the passes over a net."""
    request = call.request

    def fitted_ranges(state: State) -> CalibrationTable:
        table, swept = state.built.table, state.built.table.part
        fingerprint = cached_samples.model_fingerprint(state.prepared.proto)
        if swept is not None and swept.model_fingerprint == fingerprint and _is_of(swept, fit):
            return swept
        return builder.collected(fit, table.tensors, table.config)

    return Context(
        fit=fit,
        evaluator=evaluator,
        build_of=lambda state: state.built,
        quantize=builder.quantize,
        prove=builder.build,
        plan=lambda table, keep: builder.planned(keep, table),
        fitted_ranges=fitted_ranges,
        active={each.name: each for each in call.wanted},
        forced=frozenset({SmoothQuant.name} if request.extra_options.get("SmoothQuant") else ()),
        per_channel=request.per_channel,
        inserts_scales=request.inserts_smoothing,
        mixes=not request.target.whole,
        has_metric=request.metric is not None,
        custom_op_libraries=request.custom_op_libraries,
        executor=call.executor,
    )


def measured(call: Call, build: Build, further: Sequence[Feed] = ()) -> MeasureSummary | None:
    """The loss of a build against the float model; None where no sample is left to tell it by.

    Args:
        call: What gathers on the way.
        build: What is to be delivered.
        further: Kept samples that no pass was fitted to or chose by; as many are used as take a small part of the call.
    """
    evaluator, validation = call.evaluator_of(build), call.validation
    if evaluator is None:
        return None
    found: Measured | None
    if validation is None and further:
        evaluator = call.evaluator_on(build.float_model, [*evaluator.feeds, *_affordable(call, build, further)])
        with call.stage("measure"):
            compared, found = evaluator.comparison(build.quantized)
        call.outputs = compared if call.outputs else ()
    elif call.measured is not None and call.measured[0] is build:
        found = call.measured[1]
    else:
        with call.stage("measure"):
            found = evaluator.measured(build.quantized)
    if found is None:
        return None
    recipe = call.request.recipe
    budget = recipe.accuracy_budget if recipe.mixed_precision else None
    return MeasureSummary(
        **vars(found),
        source=call.held_out_kind,
        budget=budget,
        kept=None if budget is None else is_within(found.loss_for(budget), budget),
    )


def _affordable(call: Call, build: Build, feeds: Sequence[Feed]) -> Sequence[Feed]:
    """The first of some samples, as many as both models run in a small part of the call's processor time."""
    reference, budget = call.reference(build.float_model), _MEASURE_SHARE * (time.process_time() - call.begun_cpu)
    with open_session(build.quantized, custom_op_libraries=call.request.custom_op_libraries) as session:
        spent = []
        for _ in range(3):  # memory is planned in the first run
            began = time.process_time()
            reference.run(feeds[0])
            session.answer(feeds[0])
            spent.append(time.process_time() - began)
    return feeds[: int(budget / max(min(spent), 1e-6))]


def _is_of(table: CalibrationTable, feeds: Sequence[Feed]) -> bool:
    """Whether a table was collected over these samples."""
    return table.data_fingerprint == f"{sum(map(cached_samples.feed_digest, feeds)) % 2**256:064x}"


_ENOUGH: Final = 24
"""Samples for histograms of what a pass has scaled: what the fast recipe fits to where a reader has single samples."""


def with_weight_passes(
    call: Call, drafted: Builder, builder: Builder, table: CalibrationTable
) -> tuple[Builder, CalibrationTable]:
    """Builder and ranges with weights changed for integers, where that is better on calibration samples.

    Args:
        call: What gathers on the way.
        drafted: The net whose weights passes change.
        builder: The same in forms for integers.
        table: Its ranges.

    Raises:
        VerificationError: The prepared model does not compute what the original does.
    """
    request, prepared = call.request, drafted.prepared
    if not drafted.may_change:
        return builder, table
    feeds = call.feeds
    passes = [each for each in call.wanted if each.before_calibration]
    if passes and not feeds:
        call.notes.append(f"Equalization and SmoothQuant were not tried: {NO_SAMPLES}")
    ranges = _Ranges(call, drafted, builder, table, feeds)
    state = State(prepared)
    if passes and feeds:

        def change() -> State:
            made_up = call.data is not None and is_made_up(call.data.reader)
            known = batch_norm_statistics(call.loaded.proto) if made_up else {}  # which say more about channels
            return PassRunner(replace(ranges.context(), known=known), call).run(passes, state)

        with call.stage("equalize"):
            state = call.attempt("The change of weights", change, state)
    changed = state.prepared
    if request.recipe.bias_correction and sum(map(samples.rows_of, feeds)) >= LEAST_FEEDS:

        def with_movable_biases() -> onnx.ModelProto:
            return with_biases(changed.proto, nodes=set(drafted.adjustable))

        model = call.attempt("Adding biases", with_movable_biases, changed.proto)
        changed = changed if model is changed.proto else changed_weights(changed, model, ())

    def with_ranges() -> tuple[Builder, CalibrationTable]:
        completed = builder if changed is prepared else ranges.completed(changed)
        with call.stage("equalize"):
            return completed, ranges.final(completed, replace(state, prepared=changed))

    if changed is not prepared or call.wanted:
        builder, table = call.attempt("The change of weights", with_ranges, (builder, table))
    if feeds and request.verify and (builder.prepared.notes or builder.prepared is not changed):
        # A sample whose outputs are at hand, and of one row where batches were taken apart.
        held_out = [] if call.divided is None else call.divided[1].feeds
        with call.stage("check"):
            call.check_rewritten(builder.prepared.proto, (held_out or feeds)[0])
    return builder, table


@dataclass(frozen=True)
class _Ranges:
    """Ranges of a net with whatever weights, from those of the weights as they came.

    Candidates get the ranges of the samples that passes are fitted to. Those of all samples would hold what is held
    out, and hide that channels made alike leave less room for data beyond the ranges seen.
    """

    call: Call
    drafted: Builder
    builder: Builder
    table: CalibrationTable
    feeds: Sequence[Feed]
    _completed: list[tuple[PreparedModel, Builder]] = field(default_factory=list, init=False)

    def completed(self, prepared: PreparedModel) -> Builder:
        """The builder of the net with other weights, in forms for integers; the last one is remembered."""
        if not self._completed or self._completed[0][0] is not prepared:
            self._completed.clear()  # it holds a model in memory
            self._completed.append((prepared, self.drafted.for_integers(prepared, self.builder)))
        return self._completed[0][1]

    def context(self) -> Context:
        """The context of passes whose states have no build yet."""
        prepared = self.drafted.prepared

        def build_of(state: State) -> Build:
            if state.prepared is prepared:
                return self.builder.quantize(self.fitted)
            completed = self.completed(state.prepared)
            needs_histograms = self.table.method != "minmax" or not completed.request.widths.are_bytes
            few = self._few(completed) if needs_histograms else None
            return completed.quantize(self._following(self.fitted, completed, state, few))

        context = context_of(self.call, *self._divided, self.builder)
        return replace(context, build_of=build_of, nodes=self.drafted.adjustable)

    def final(self, builder: Builder, state: State) -> CalibrationTable:
        """The ranges of a changed net over all samples, and as its part those of the samples to fit to."""
        keeps = self.table.config.keeps_histogram
        few = self._few(builder) if keeps else None
        fingerprint = cached_samples.model_fingerprint(builder.prepared.proto)
        found = replace(self._following(self.table, builder, state, few), model_fingerprint=fingerprint)
        wanted = builder.request.chooses_ranges and keeps and not self.table.made_up and len(self.feeds) > 0
        if not wanted or not self._divided[1].feeds:
            return found
        part = replace(self._following(self.fitted, builder, state, few), model_fingerprint=fingerprint)
        return replace(found, part=part)

    @cached_property
    def fitted(self) -> CalibrationTable:
        """Ranges of the weights as they came over the samples to fit to: those of the sweep, where it foresaw these."""
        fit, part = self._divided[0], self.table.part
        return (
            part if part is not None and _is_of(part, fit) else self._collected(self.builder, fit, self.builder.tensors)
        )

    @cached_property
    def _net(self) -> RewrittenNet:
        return self.drafted.rewritten_as(self.builder)

    @cached_property
    def _divided(self) -> tuple[list[Feed], Evaluator]:
        return self.call.divide(self.drafted.prepared.proto, self.feeds)

    def _following(
        self, table: CalibrationTable, builder: Builder, state: State, few: Observe | None
    ) -> CalibrationTable:
        return following_table(
            table,
            self._net,
            RewrittenNet(state.prepared.proto, builder.prepared.proto, builder.tensors),
            state.rescaled if state.is_reported else None,
            partial(self._collected, builder, self.feeds if table is self.table else self._divided[0]),
            few,
        )

    def _few(self, builder: Builder) -> Observe:
        """Collector of histograms over a few of the samples to fit to, once for the same tensors."""
        return cache(lambda tensors: self._collected(builder, some_of(self._divided[0], _ENOUGH), tensors))

    def _collected(self, builder: Builder, feeds: Sequence[Feed], tensors: Sequence[str]) -> CalibrationTable:
        channels = self.drafted.channels_to_follow(self.builder, self.call.wanted)
        return builder.collected(feeds, tensors, self.table.config, channels)


_WITH_BLOCKS: Final = ("MatMul", "Gemm", "Gather")
_FLOAT: Final = "the recipe quantizes weights of linear layers and embeddings alone"


def weight_only(call: Call) -> tuple[Build, list[Feed], int]:
    """The build with weights in blocks, samples to compare it on, and how many were given.

    Where the recipe has a budget that 4 bits do not keep, 8 are delivered.

    Args:
        call: What gathers on the way; its samples are those that rounding follows, without any it is to nearest.

    Raises:
        OptionError: The target or the format has no such form.
        NothingToQuantizeError: There is no linear layer and no embedding.
    """
    from kenosis_ort.weights.block_model import weights_in_blocks  # which few calls need

    request, data = call.request, call.data
    _check_form(request)
    with call.stage("calibrate"):
        feeds: list[Feed] = [] if data is None else list(data.peek(request.feeds_wanted))
    if data is not None and not feeds:
        raise no_sample()
    fit, held_out = split_feeds(feeds)
    if call.validation is not None:
        fit, held_out = list(feeds), list(call.validation.some())
    if held_out:
        call.divided = fit, call.evaluator_on(call.loaded.proto, held_out)
    bits, recipe = request.recipe.weight_only, request.recipe
    for stored in (bits, 8):
        with call.stage("quantize"):
            made = weights_in_blocks(
                call.loaded.proto,
                fit or feeds,
                forms=BLOCK_FORMS,
                bits=stored,
                nodes_to_exclude=_float_layers(call.loaded.proto, request),
                custom_op_libraries=request.custom_op_libraries,
                progress=request.progress,
            )
        with call.stage("verify"):
            fusion = request.proof(made.model) if request.verify else None
        plan = PlacementPlan(request.target.name)
        build = Build(call.loaded.proto, CalibrationTable({}), {}, plan, made.model, fusion)
        call.measure = call.attempt("The measure of what is lost", partial(measured, call, build), None)
        keeps = not recipe.mixed_precision or call.measure is None or call.measure.kept is not False
        if keeps or stored == 8:
            break
        call.notes.append(f"{bits} bits do not keep the budget of {recipe.accuracy_budget:g}: all weights have 8.")
    call.notes += made.notes
    low = sum(layer.bits < 8 for layer in made.layers)
    count = f"{low} of {len(made.layers)} layers and embeddings have {bits} bits, the others 8"
    count = count if low else f"{len(made.layers)} layers and embeddings have 8 bits"
    call.notes.append(f"Weights alone: {count}; activations are float.")
    given = len(feeds)
    if not feeds and (feeds := call.made_up()):
        call.notes.append("Outputs were compared on made-up samples: real ones were not given.")
    return build, feeds, given


def planned_weights(loaded: LoadedModel, request: Request) -> PlacementPlan:
    """Plan of a recipe of weights alone, by node; the bits of the most sensitive layers need samples.

    Raises:
        OptionError: The target or the format has no such form.
        NothingToQuantizeError: There is no linear layer and no embedding.
    """
    from kenosis_ort.weights.block_model import nodes_in_blocks

    _check_form(request)
    model, chosen = nodes_in_blocks(
        loaded.proto,
        forms=BLOCK_FORMS,
        nodes_to_exclude=_float_layers(loaded.proto, request),
        custom_op_libraries=request.custom_op_libraries,
    )
    bits = request.recipe.weight_only
    stored = f"its weights have {bits} bits in blocks, its data are float"
    stored += ", or 8 where samples show that they are worth it" if bits < 8 else ""
    kinds = {True: (Kind.INTEGER, "weights-in-blocks", stored), False: (Kind.FLOAT, "weights-alone", _FLOAT)}
    nodes = tuple(NodeDecision(n.name, n.op_type, *kinds[n.name in chosen]) for n in model.graph.node)
    return PlacementPlan(request.target.name, nodes=nodes)


def _float_layers(model: onnx.ModelProto, request: Request) -> set[str]:
    """Names of the nodes that the caller excludes, or leaves out of a list of nodes or operators."""
    layers = (node for node in model.graph.node if node.op_type in _WITH_BLOCKS)
    nodes, types = request.nodes_to_quantize, request.op_types if request.op_types_named else _WITH_BLOCKS
    left_out = (n.name for n in layers if n.op_type not in types or (nodes and n.name not in nodes))
    return {*request.nodes_to_exclude, *left_out}


def _check_form(request: Request) -> None:
    timed = request.target.hooks.time
    if timed is None or WEIGHT_ONLY not in timed.other_forms or request.format != "qdq":
        raise OptionError(
            f"target '{request.target.name}' in format '{request.format}' has no form of weights alone",
            where="recipe",
            fix="target='ort-cpu' with format='qdq', or another recipe",
        )
