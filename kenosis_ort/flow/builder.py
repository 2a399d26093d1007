"""Builds quantized models of one float model: planned before calibration, and with the variations that passes ask for.

Corrections belong to integer nodes: one that is left float has its own weights and biases again, whoever decided it.

Rounded weights and corrected biases make up for the error of int8 arithmetic. In a node that runs in float they make up
for an error that is not there: the first three nodes of MLPerf's ResNet-8 left float with their corrections have an
error of 0.00210, with their own biases of 0.00096.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import onnx
from onnx import TensorProto

from kenosis_ort.calibration.blocked import Feeds
from kenosis_ort.calibration.collector import collect
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import KenosisError, NothingToQuantizeError, OptionError
from kenosis_ort.flow.preparation import Failed, prepare_model, raise_again, rewrite_for_integers
from kenosis_ort.flow.request import Request
from kenosis_ort.flow.target_options import fit_names, renamed
from kenosis_ort.graph.bodies import Body, Opened, has_layers, owners, places
from kenosis_ort.graph.constants import HEAVY, LAYERS, drop_unread
from kenosis_ort.graph.load import LoadedModel, check_not_quantized
from kenosis_ort.graph.opset import PreparedModel
from kenosis_ort.graph.outside import complete, copy_model, copy_with_hollow_weights, is_outside
from kenosis_ort.graph.product_pairs import store_exactly
from kenosis_ort.graph.view import GraphView
from kenosis_ort.graph.walk import all_graphs
from kenosis_ort.passes.choose_ranges import fitted_to_widths
from kenosis_ort.passes.contract import Build
from kenosis_ort.placement import decisions
from kenosis_ort.placement.eligibility import with_widths
from kenosis_ort.placement.planner import Planner
from kenosis_ort.placement.saturation import SeenAs, seen_as, values_of_own_scale
from kenosis_ort.plan import EdgeRole, How, Kind, NodeDecision, PlacementPlan
from kenosis_ort.quantizer.fusion_aware import FusionAwareQDQQuantizer
from kenosis_ort.quantizer.int8_cache import Cache, quantize_cache, scale_for
from kenosis_ort.quantizer.stock import QuantType, stock_tensors
from kenosis_ort.runtime.session import WHOLE_LIMIT
from kenosis_ort.targets.proof import FusionReport


def make_planner(
    view: GraphView | None,
    request: Request,
    excluded: Sequence[str],
    named: Sequence[str],
    keep_float: Mapping[str, str],
    base: Planner | None = None,
) -> Planner | None:
    """The planner; None where stock's placement is used."""
    if view is None:
        return None
    options = request.placement_options(excluded, named, keep_float)
    return Planner(view, request.target, options, partial(_finished, view, request), base)


def _finished(view: GraphView, request: Request, plan: PlacementPlan) -> PlacementPlan:
    """A plan with the widths that the caller wants, and weights as the kernels of the machine like them."""
    explicit = frozenset(
        request.extra_options.get("TensorQuantOverrides") or ()
    )  # the caller's word on how they are stored
    plan = with_widths(plan, view, request.widths, explicit)
    costs = request.target.costs
    if costs is None or not _suits_kernels(request):
        return plan
    return request.target.hooks.refine(plan, view, explicit, costs)


def make_plan(planner: Planner | None, request: Request, table: CalibrationTable | None = None) -> PlacementPlan:
    """The plan, before calibration without a table; an empty one where stock's placement is used."""
    if planner is None:
        return PlacementPlan(request.target.name)
    return planner.plan(None if table is None else _ranges(table))


def _suits_kernels(request: Request) -> bool:
    """Whether weights are stored as the kernels of the machine like them best."""
    types = request.activation_type == QuantType.QUInt8 and request.weight_type == QuantType.QInt8
    options = request.extra_options
    own = request.stages.weights and options.get("WeightSymmetric") is not False and not options.get("MinimumRealRange")
    plain = request.format in ("qdq", "qop")  # other tools expect weights of zero point 0
    return types and own and plain and request.speed.tune != "off"


def _ranges(table: CalibrationTable) -> dict[str, tuple[float, float]]:
    return {name: table.range_of(name) for name in table.tensors}


def beyond_scales(view: GraphView | None, plan: PlacementPlan, table: CalibrationTable) -> dict[str, str]:
    """The integer nodes whose magnitudes no float32 scale holds, with the reason."""
    return {} if view is None else decisions.beyond_scales(view, plan, _ranges(table))


def tensors_to_observe(proto: onnx.ModelProto, request: Request, plan: PlacementPlan) -> list[str]:
    """The activations whose ranges are needed."""
    if not plan:
        return stock_tensors(proto, request.op_types)
    constants = {i.name for i in proto.graph.initializer}
    return [value for value, _ in plan.quantized_values() if value not in constants]


def quantize_model(
    proto: onnx.ModelProto,
    request: Request,
    plan: PlacementPlan,
    table: CalibrationTable,
    excluded: Sequence[str],
    named: Sequence[str],
) -> onnx.ModelProto:
    """The quantized model, nodes in topological order."""
    own = {d.edge.value for d in plan.decisions if d.role is EdgeRole.WEIGHT and d.how is How.OWN}
    proto = proto if plan else complete(proto)  # stock reads all weights
    weights = {t.name: t for t in proto.graph.initializer if t.name in own or is_outside(t)}
    try:
        quantizer = FusionAwareQDQQuantizer(
            copy_with_hollow_weights(proto, weights.keys()),
            request.per_channel,
            request.reduce_range,
            request.weight_type,
            request.activation_type,
            table.to_tensors_data(),
            list(named),
            list(excluded),
            list(request.op_types),
            request.extra_options,
            plan=plan or None,
            stages=request.stages,
            weights=weights,
        )
        quantized = quantizer.quantize_model()
        quantizer.model.topological_sort()
        types = request.types  # what came quantized keeps its scales
        if types.largest_pair is not None and TensorProto.UINT8 in types.weights and not request.is_stock:
            store_exactly(quantized.graph, {t.name for t in proto.graph.initializer})
    except KenosisError:
        raise
    except (ValueError, TypeError, RuntimeError, KeyError, IndexError, AttributeError, AssertionError) as error:
        if plan:
            raise
        raise OptionError(
            f"stock placement failed: {error}", fix="check extra_options and the named nodes against the model"
        ) from error
    return quantized


def restored(model: onnx.ModelProto, base: onnx.ModelProto, plan: PlacementPlan) -> onnx.ModelProto:
    """The model with the base's weights and biases in all layers that the plan leaves float.

    Args:
        model: The corrected model. Not changed.
        base: The same nodes and names, without corrections. Not changed.
        plan: Says which layers run in integer.

    Returns:
        A changed copy; the model itself where nothing differs.
    """
    integer = set(plan.integer_nodes())
    left = {n.node for n in plan.nodes if n.op_type in LAYERS and n.kind is not Kind.INTEGER}
    integer_layers = {node.name for node in model.graph.node if node.op_type in LAYERS and node.name in integer}
    wanted = _constants(model, left) - _constants(model, integer_layers)
    originals = {tensor.name: tensor for tensor in base.graph.initializer if tensor.name in wanted}
    differ = {
        tensor.name
        for tensor in model.graph.initializer
        if tensor.name in originals and tensor != originals[tensor.name]
    }
    if not differ:
        return model
    changed = copy_model(model)
    for tensor in changed.graph.initializer:
        if tensor.name in differ:
            tensor.CopyFrom(originals[tensor.name])
    return changed


def _constants(model: onnx.ModelProto, layers: Collection[str]) -> set[str]:
    """Values that layers read, and the Adds that add their biases."""
    outputs = {o for node in model.graph.node if node.name in layers for o in node.output}
    return {
        name
        for node in model.graph.node
        if node.name in layers or (node.op_type == "Add" and outputs.intersection(node.input))
        for name in node.input
    }


_REPAIR_ROUNDS = 3


Stage = Callable[[str], AbstractContextManager[None]]


def untimed(_: str) -> AbstractContextManager[None]:
    """Times nothing."""
    return nullcontext()


@dataclass(frozen=True)
class Builder:
    """One float model and the request under which it is quantized.

    Attributes:
        prepared: The float model.
        request: What the caller wants.
        excluded: Names, in the prepared model, of nodes that the caller excludes.
        named: Names of the only nodes to quantize, empty for all.
        stage: Times a named stage.
        bodies: Where the bodies of control flow are quantized.
        idle: The nodes of bodies that stay float as a whole, with the reason.
        base: The float model without corrections, which layers left float go back to; None where it is `prepared`.
    """

    prepared: PreparedModel
    request: Request
    excluded: Sequence[str]
    named: Sequence[str]
    stage: Stage = untimed
    bodies: tuple[BodyBuilder, ...] = ()
    base: onnx.ModelProto | None = None
    idle: tuple[NodeDecision, ...] = ()
    _planners: dict[tuple[str, ...], Planner | None] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @cached_property
    def view(self) -> GraphView | None:
        """The indexed graph; None where stock's placement is used."""
        return None if self.request.stock_reason is not None else GraphView(self.prepared.proto)

    @property
    def quantizes_bodies(self) -> bool:
        """Whether the model has bodies of control flow with layers in them, and they are quantized."""
        own = self.request.stock_reason is None and self.request.extra_options.get("EnableSubgraph", True)
        return bool(own) and any(has_layers(graph) for node in owners(self.prepared.proto) for _, graph in places(node))

    def on(self, model: onnx.ModelProto, *notes: str) -> Builder:
        """The builder for the same net with corrected weights."""
        if model is self.prepared.proto and not notes:
            return self
        prepared = PreparedModel(model, (*self.prepared.notes, *notes), self.prepared.nodes)
        base = self.prepared.proto if self.base is None else self.base
        return replace(self, prepared=prepared, base=base)

    def planner(self, keep_float: Mapping[str, str] | None = None) -> Planner | None:
        """The planner, made once for each set of nodes left float; None where stock's placement is used."""
        keep = dict(keep_float or {})
        key = tuple(part for item in keep.items() for part in item)
        if key not in self._planners:
            base = self._planners.get(())  # of an empty ``keep_float``
            self._planners[key] = make_planner(self.view, self.request, self.excluded, self.named, keep, base)
        return self._planners[key]

    def tensors_to_observe(self, plan: PlacementPlan) -> list[str]:
        """The activations whose ranges are needed."""
        found = tensors_to_observe(self.prepared.proto, self.request, plan)
        return list(dict.fromkeys([*found, *(name for cache in self.request.caches for name in cache.names)]))

    def seen_as(self) -> dict[str, SeenAs]:
        """Limits of values in calibration: numbers that no consumer sees, as in masks, must not widen a range."""
        if self.request.is_stock:
            return {}
        planner = self.planner()
        if planner is not None:
            values = values_of_own_scale(planner.view, planner.plan(None))
            return seen_as(planner.view, values, planner.saturations)
        view = GraphView(self.prepared.proto)
        found = seen_as(view, [o for node in view.nodes for o in node.outputs])
        return {name: seen for name, seen in found.items() if seen.axes or seen.filling}  # else stock's very ranges

    def quantize(self, table: CalibrationTable, keep_float: Mapping[str, str] | None = None) -> Build:
        """The quantized model without the fusion proof."""
        keep = dict(keep_float or {})
        with self.stage("quantize"):
            plan = make_plan(self.planner(keep), self.request, table)
            extreme = beyond_scales(self.view, plan, table)
            if extreme:
                keep.update(extreme)
                plan = make_plan(self.planner(keep), self.request, table)
            proto = self.prepared.proto
            source = proto if self.base is None or self.base is proto else restored(proto, self.base, plan)
            ranges = fitted_to_widths(table, plan)
            quantized = quantize_model(source, self.request, plan, ranges, self.excluded, self.named)
            if plan:
                self.request.target.hooks.spell(quantized, plan)
        if self.bodies or self.idle:
            plan = self._put_bodies(quantized, plan, keep)
        if self.request.caches:
            quantize_cache(quantized, with_scales(self.request.caches, table))
        return Build(proto, table, keep, plan, quantized)

    def _put_bodies(
        self, quantized: onnx.ModelProto, plan: PlacementPlan, keep_float: Mapping[str, str]
    ) -> PlacementPlan:
        """Puts the quantized bodies into a model, in place; returns the plan with the decisions about their nodes."""
        opened, nodes = Opened(quantized), [*plan.nodes, *self.idle]
        for body_builder in self.bodies:
            made = body_builder.builder.quantize(body_builder.table, {**body_builder.keep_float, **keep_float})
            opened.put_back(body_builder.body, made.quantized)
            nodes += made.plan.nodes
        drop_unread(quantized.graph)
        return replace(plan, nodes=tuple(nodes))

    def build(self, table: CalibrationTable, keep_float: Mapping[str, str] | None = None) -> Build:
        """The quantized model with the fusion proof; what the runtime would not run in integer stays float.

        Returns without a proof where the request switches verification off or nothing was quantized.
        """
        keep = dict(keep_float or {})
        notes: list[str] = []
        for round_ in range(_REPAIR_ROUNDS + 1):
            built = self.quantize(table, keep)
            if not self.request.is_proved or not is_quantized(built.quantized):
                return replace(built, notes=tuple(notes))
            with self.stage("verify"):
                fusion = self.proof(built)
            may_repair = built.plan and not requests_int8(self.request)
            avoidable = fusion.avoidable(built.plan) if fusion is not None and may_repair else ()
            if not avoidable or round_ == _REPAIR_ROUNDS:
                break
            for kernel in avoidable:
                keep[kernel.node] = f"the runtime runs it in float: {kernel.reason}"
                notes.append(f"'{kernel.node}' ({kernel.op_type}) left float after verification: {kernel.reason}.")
        return replace(built, fusion=fusion, notes=tuple(notes))

    def proof(self, build: Build) -> FusionReport | None:
        """The kernels that the runtime uses for a build; None for a target that cannot be asked."""
        prove, libraries = self.request.target.hooks.prove, self.request.custom_op_libraries
        return None if prove is None else prove(build.quantized, plan=build.plan or None, custom_op_libraries=libraries)


@dataclass(frozen=True)
class BodyBuilder:
    """One body of control flow, quantized as a model of its own.

    Attributes:
        body: The body, as it was taken out of the float model.
        builder: Of the body's model.
        table: The ranges of its activations.
        keep_float: Nodes left float beyond what the rules say, with the reason.
        feeds_of: Returns what feeds the body where the model around it is fed so.
    """

    body: Body
    builder: Builder
    table: CalibrationTable
    keep_float: Mapping[str, str]
    feeds_of: Callable[[Feeds], Feeds]

    def seeing(self, outer: Feeds) -> BodyBuilder:
        """Returns the same with the ranges of these feeds of the model around it, in nested bodies too."""
        fed, builder = self.feeds_of(outer), self.builder
        nested = tuple(each.seeing(fed) for each in builder.bodies)
        if next(fed(), None) is None:
            return self
        seen = collect(
            builder.prepared.proto,
            fed(),
            tensors=list(self.table.tensors),
            config=replace(self.table.config, strided=None, max_intermediate_outputs=None),
            custom_op_libraries=builder.request.custom_op_libraries,
            seen_as=builder.seen_as(),
        )
        tensors = {name: s if s.fixed else seen.tensors[name] for name, s in self.table.tensors.items()}
        return replace(self, builder=replace(builder, bodies=nested), table=replace(self.table, tensors=tensors))


def is_quantized(model: onnx.ModelProto) -> bool:
    """Whether anything in the model is quantized."""
    return any(node.op_type == "DequantizeLinear" for graph in all_graphs(model.graph) for node in graph.node)


def requests_int8(request: Request) -> bool:
    """The caller wants int8 activations on a machine whose kernels take uint8: perhaps for another machine."""
    int8 = QuantType.QInt8
    return bool(request.activation_type == int8 and request.types.activation != int8.tensor_type)


def is_whole(build: Build) -> bool:
    """Whether the model is small enough to be run as a whole."""
    return _pieces(build) == 1


def _pieces(build: Build) -> int:
    return build.fusion.pieces if build.fusion is not None else int(len(build.quantized.graph.node) <= WHOLE_LIMIT)


def with_scales(caches: Sequence[Cache], table: CalibrationTable) -> tuple[Cache, ...]:
    """Caches with the scales that they have by ranges, where they have none yet."""
    return tuple(
        replace(cache, scale=scale_for([table.range_of(name) for name in cache.names]))
        if cache.scale is None
        else cache
        for cache in caches
    )


@dataclass(frozen=True)
class Layout:
    """Graph, plan and wanted statistics before calibration.

    Attributes:
        builder: The prepared and rewritten model; its request says where stock's placement has to do.
        plan: The placement as far as it needs no ranges; empty for stock's.
        tensors: Activations whose ranges are needed.
    """

    builder: Builder
    plan: PlacementPlan
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class LayoutDraft:
    """A prepared model with its first plan, before its weights and its form are changed for integers.

    Attributes:
        builder: The prepared model.
        plan: The placement that it would get; empty for stock's.
        failed: Called with the name of a rewrite that failed and was left out.
        adjustable: Names of the nodes that run in integer, but for those whose tensors the caller speaks about: passes
            may change their weights.
    """

    builder: Builder
    plan: PlacementPlan
    failed: Failed
    adjustable: frozenset[str] = frozenset()

    def complete(self, prepared: PreparedModel) -> Layout:
        """The layout of the model, in forms that suit integer kernels.

        Args:
            prepared: The draft's model, perhaps with other weights.

        Raises:
            NothingToQuantizeError: Nothing in it can be quantized.
        """
        builder, plan, request = self.builder, self.plan, self.builder.request
        planner = builder.planner()
        rewritten = prepared
        if planner is not None:
            with builder.stage("rewrite"):
                found = rewrite_for_integers(prepared, planner, request, builder.excluded, self.failed)
            rewritten = found or prepared
        if rewritten is not builder.prepared:
            builder = replace(builder, prepared=rewritten)
            with builder.stage("plan"):
                plan = make_plan(builder.planner(), request)
        tensors = tuple(builder.tensors_to_observe(plan))
        if not tensors and not plan.quantizes() and not builder.quantizes_bodies:
            raise nothing_to_quantize(request.stock_reason or "nothing matches the options")
        return Layout(builder, plan, tensors)


def draft(
    loaded: LoadedModel,
    request: Request,
    stage: Stage = untimed,
    failed: Failed = raise_again,
) -> LayoutDraft:
    """Prepares and plans a model.

    Args:
        loaded: The model.
        request: What the caller wants.
        stage: Times a named stage.
        failed: Called with the name of a rewrite that failed and was left out.

    Raises:
        KenosisError: The model or the names in the request are not usable.
        NothingToQuantizeError: No node can run in integer.
    """
    request = fit_names(loaded.proto, request)
    if not request.is_stock:
        check_not_quantized(loaded.proto)
        if request.stock_reason is None and _has_dequantized_weights(loaded):
            request = request.with_stock_placement("the model brings quantized weights of its own")
    return draft_of(loaded.proto, request, stage, failed)


def draft_of(
    proto: onnx.ModelProto,
    request: Request,
    stage: Stage = untimed,
    failed: Failed = raise_again,
) -> LayoutDraft:
    """Prepares and plans a model that `draft` has checked, or a body of one.

    Raises:
        NothingToQuantizeError: No node can run in integer.
    """
    with stage("prepare"):
        prepared = prepare_model(proto, request, failed)
    excluded, named = (renamed(names, prepared) for names in (request.nodes_to_exclude, request.nodes_to_quantize))
    by_node = {n: bits for name, bits in request.widths.by_node.items() for n in renamed([name], prepared)}
    request = replace(request, widths=replace(request.widths, by_node=by_node))
    builder = Builder(prepared, request, excluded, named, stage)
    with stage("plan"):
        planner = builder.planner()
        plan = make_plan(planner, request)
    if planner is not None and not plan.quantizes() and not builder.quantizes_bodies:
        raise nothing_to_quantize(f"no node can run in integer on {request.target.name}: {_why_nothing(plan)}")
    constrained = set() if planner is None else planner.constrained
    return LayoutDraft(builder, plan, failed, frozenset(plan.integer_nodes()) - constrained)


def layout_of(loaded: LoadedModel, request: Request) -> Layout:
    """The layout of a model whose weights, and whose bodies of control flow, stay as they are.

    Raises:
        KenosisError: As `draft` and `LayoutDraft.complete`; a rewrite that fails raises.
        NothingToQuantizeError: Nothing in the main graph can be quantized.
    """
    made = draft(loaded, request)
    layout = made.complete(made.builder.prepared)
    if not layout.tensors:
        raise nothing_to_quantize("its layers are in bodies of control flow")
    return layout


def nothing_to_quantize(why: str) -> NothingToQuantizeError:
    """The error for a model of which nothing is left to quantize."""
    return NothingToQuantizeError(
        f"no node of the model can be quantized ({why})",
        fix="check op_types_to_quantize, nodes_to_quantize and nodes_to_exclude; deploy the float model otherwise",
    )


def _has_dequantized_weights(loaded: LoadedModel) -> bool:
    return any(node.op_type == "DequantizeLinear" for node in loaded.proto.graph.node)


def _why_nothing(plan: PlacementPlan) -> str:
    heavy = [n for n in plan.nodes if n.op_type in HEAVY]
    return f"'{heavy[0].node}' ({heavy[0].op_type}): {heavy[0].reason}" if heavy else "no Conv, Gemm or MatMul"
