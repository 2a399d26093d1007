"""The builder of quantized models of one float model, planned before calibration and again with ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto

from kenosis_ort.calibration.collector import Points, collect
from kenosis_ort.calibration.computed_feeds import Feeds
from kenosis_ort.calibration.estimators import fitted_to_widths
from kenosis_ort.calibration.feeds import Feed
from kenosis_ort.calibration.methods import CalibrationConfig
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import KenosisError, NothingToQuantizeError, OptionError
from kenosis_ort.flow import preparation
from kenosis_ort.flow.request import Request
from kenosis_ort.flow.reused_tables import RewrittenNet
from kenosis_ort.graph import outside
from kenosis_ort.graph.bodies import Body, Opened, has_layers, places
from kenosis_ort.graph.constants import HEAVY, drop_unread
from kenosis_ort.graph.product_pairs import store_exactly
from kenosis_ort.graph.view import GraphView, PreparedModel
from kenosis_ort.graph.walk import owners
from kenosis_ort.passes.contract import Build, Overlay, Pass, WeightPass, materialize, overflown
from kenosis_ort.passes.journal import Journal
from kenosis_ort.placement.absorption import SeenAs, seen_as, values_of_own_scale
from kenosis_ort.placement.eligibility import beyond_scales, with_widths
from kenosis_ort.placement.planner import Planner
from kenosis_ort.plan import EdgeRole, How, NodeDecision, PlacementPlan
from kenosis_ort.quantizer.fusion_aware import FusionAwareQDQQuantizer
from kenosis_ort.quantizer.int8_cache import quantize_cache, with_scales
from kenosis_ort.quantizer.stock import stock_tensors
from kenosis_ort.runtime.session import WHOLE_LIMIT, make_room
from kenosis_ort.targets import Hooks


def emit(
    proto: onnx.ModelProto, builder: Builder, plan: PlacementPlan, table: CalibrationTable
) -> FusionAwareQDQQuantizer:
    """The quantizer with the quantized model, nodes in topological order."""
    request = builder.request
    own = {d.edge.value for d in plan.decisions if d.role is EdgeRole.WEIGHT and d.how is How.OWN}
    proto = proto if plan else outside.complete(proto)  # stock reads all weights
    weights = {t.name: t for t in proto.graph.initializer if t.name in own or outside.is_outside(t)}
    try:
        quantizer = FusionAwareQDQQuantizer(
            outside.copy_with_hollow_weights(proto, weights.keys()),
            request.per_channel,
            request.reduce_range,
            request.weight_type,
            request.activation_type,
            table.to_tensors_data(),
            list(request.nodes_to_quantize),
            list(request.nodes_to_exclude),
            list(request.op_types),
            dict(request.extra_options),
            plan=plan or None,
            stages=request.stages,
            weights=weights,
        )
        quantized = quantizer.quantize_model()
        quantizer.model.topological_sort()
        types = request.types  # what came quantized keeps its scales
        if types.largest_pair is not None and TensorProto.UINT8 in types.weights and not request.is_stock:
            store_exactly(quantized.graph, {t.name for t in proto.graph.initializer})
    except (ValueError, TypeError, RuntimeError, KeyError, IndexError, AttributeError, AssertionError) as error:
        if plan or isinstance(error, KenosisError):
            raise
        raise OptionError(
            f"stock placement failed: {error}", fix="check extra_options and the named nodes against the model"
        ) from error
    return quantizer


_REPAIR_ROUNDS = 3
_REAL: Final = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
NOTHING: Final[Overlay] = MappingProxyType({})


class _Emitted(NamedTuple):
    """One quantized model with what made it, of which others with the same plan are copies with other numbers.

    Attributes:
        quantizer: Holds the model, and the names of its scales.
        planned: The plan that it performed.
        keep_float: Nodes left float beyond what the rules say, with the reason.
        own: The corrections of its integer nodes.
        plan: The plan with the nodes of bodies.
    """

    quantizer: FusionAwareQDQQuantizer
    planned: PlacementPlan
    keep_float: Mapping[str, str]
    own: Overlay
    plan: PlacementPlan


@dataclass
class Builder:
    """One float model and the request under which it is planned and quantized.

    Attributes:
        prepared: The float model.
        request: What the caller wants, by the names of the prepared model; it says where stock's placement has to do.
        journal: Times stages, and isolates optional work.
        planner: Plans it, or a net that differs from it in finite weights alone; None where stock's placement is used.
        bodies: Where the bodies of control flow are quantized.
        idle: The nodes of bodies that stay float as a whole, with the reason.
    """

    prepared: PreparedModel
    request: Request
    journal: Journal
    planner: Planner | None
    bodies: tuple[BodyBuilder, ...] = ()
    idle: tuple[NodeDecision, ...] = ()
    _latest: _Emitted | None = field(default=None, init=False, compare=False, repr=False)

    @classmethod
    def of(cls, prepared: PreparedModel, request: Request, journal: Journal, like: Builder | None = None) -> Builder:
        """The builder of a prepared model; ``like``, of a net that differs in weights alone, lends its planner."""
        if request.stock_reason is not None:
            return cls(prepared, request, journal, None)
        with journal.stage("plan"):
            planner = None if like is None else like.planner
            if planner is None:
                finish = partial(_finished, prepared.graph, request)
                planner = Planner(prepared.graph, request.target, request.placement_options(), finish)
        return cls(prepared, request, journal, planner)

    @cached_property
    def plan(self) -> PlacementPlan:
        """The placement as far as it needs no ranges; empty for stock's."""
        with self.journal.stage("plan"):
            return self.planned()

    @cached_property
    def adjustable(self) -> frozenset[str]:
        """Names of the nodes whose weights passes may change: integer ones, but for what the caller speaks about."""
        return frozenset(self.plan.integer_nodes()) - (set() if self.planner is None else self.planner.constrained)

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """The activations whose ranges are needed."""
        return self.observed(self.plan)

    @property
    def may_change(self) -> bool:
        """Whether passes can do anything for the weights: the net is ours to place, and can be run as a whole."""
        whole = len(self.prepared.proto.graph.node) <= WHOLE_LIMIT
        return self.request.stock_reason is None and whole and bool(self.plan.integer_nodes())

    def channels_to_follow(self, integer: Builder, passes: Iterable[Pass]) -> dict[str, int]:
        """The observed values whose channels a pass may scale, with the axis of their channels.

        Args:
            integer: The same net in forms for integers, whose values are observed.
            passes: Those meant; others than `WeightPass` scale nothing.
        """
        if not self.may_change:
            return {}
        nodes, insert, axes = self.adjustable, self.request.inserts_smoothing, dict[str, int]()
        for each in (each for each in passes if isinstance(each, WeightPass)):
            axes = {**each.scaled(self.prepared.graph, nodes=nodes, insert=insert), **axes}
        origins = self.rewritten_as(integer).origins
        return {name: axes[origin] for name in integer.tensors if (origin := origins.get(name)) in axes}

    def rewritten_as(self, integer: Builder) -> RewrittenNet:
        """The net with what became of it in forms for integers."""
        return RewrittenNet(self.prepared.proto, integer.prepared.proto, integer.tensors)

    @property
    def quantizes_bodies(self) -> bool:
        """Whether the model has bodies of control flow with layers in them, and they are quantized."""
        own = self.request.stock_reason is None and self.request.extra_options.get("EnableSubgraph", True)
        return bool(own) and any(has_layers(graph) for node in owners(self.prepared.proto) for _, graph in places(node))

    def for_integers(self, prepared: PreparedModel | None = None, like: Builder | None = None) -> Builder:
        """The builder of the model in forms that suit integer kernels.

        Args:
            prepared: The model, perhaps with other weights; None for its own.
            like: That of the model's own weights; where only weights differ, its plans are taken.

        Raises:
            NothingToQuantizeError: Nothing in it can be quantized.
        """
        rewritten, made, of = prepared or self.prepared, self, self.request
        if self.planner is not None:
            with self.journal.stage("rewrite"):
                nodes = self.planner.integer_candidates() - set(of.nodes_to_exclude) - self.planner.constrained
                found = preparation.rewrite_for_integers(rewritten, nodes, of, self.journal)
                rewritten = found or rewritten
        if rewritten is not self.prepared:
            if like is not None and not _differ_in_weights_alone(rewritten.proto, like.prepared.proto):
                like = None
            made = Builder.of(rewritten, of, self.journal, like)
        if not made.tensors and not made.plan.quantizes() and not made.quantizes_bodies:
            raise nothing_to_quantize(self.request.stock_reason or "nothing matches the options")
        return made

    def planned(
        self, keep_float: Mapping[str, str] | None = None, table: CalibrationTable | None = None
    ) -> PlacementPlan:
        """The plan, before calibration without a table; an empty one where stock's placement is used."""
        if self.planner is None:
            return PlacementPlan(self.request.target.name)
        return self.planner.plan(None if table is None else _ranges(table), keep_float or {})

    def observed(self, plan: PlacementPlan) -> tuple[str, ...]:
        """The activations whose ranges a plan needs."""
        if plan:
            constants = {i.name for i in self.prepared.proto.graph.initializer}
            found = [value for value, _ in plan.quantized_values() if value not in constants]
        else:
            found = stock_tensors(self.prepared.proto, self.request.op_types)
        return tuple(dict.fromkeys([*found, *(name for cache in self.request.caches for name in cache.names)]))

    def collected(
        self,
        feeds: Iterable[Feed],
        tensors: Iterable[str],
        config: CalibrationConfig,
        channels: Mapping[str, int] = MappingProxyType({}),
    ) -> CalibrationTable:
        """The ranges of the model over further samples, as a table of that configuration has them."""
        config = replace(config, strided=None, max_intermediate_outputs=None)
        return collect(self.prepared.proto, feeds, self.points(tensors, config, channels=channels))

    def points(self, tensors: Iterable[str], config: CalibrationConfig, **more: Any) -> Points:
        """Observation points of the model in calibration: some tensors, and ``more`` as `Points` has it."""
        libraries = self.request.custom_op_libraries
        return Points(list(tensors), config, custom_op_libraries=libraries, seen_as=self.seen_as(), **more)

    def seen_as(self) -> dict[str, SeenAs]:
        """Limits of values in calibration: numbers that no consumer sees, as in masks, must not widen a range."""
        if self.request.is_stock:
            return {}
        if self.planner is not None:
            values = values_of_own_scale(self.planner.view, self.planner.plan(None))
            return seen_as(self.planner.view, values, self.planner.saturations)
        view = self.prepared.graph
        found = seen_as(view, [o for node in view.nodes for o in node.outputs])
        return {name: seen for name, seen in found.items() if seen.axes or seen.filling}  # else stock's very ranges

    def quantize(
        self, table: CalibrationTable, keep_float: Mapping[str, str] | None = None, corrections: Overlay = NOTHING
    ) -> Build:
        """The quantized model without the fusion proof; only nodes in integer are corrected.

        Where the plan is that of the model made last, it is a copy with other scales and biases.
        """
        keep = dict(keep_float or {})
        with self.journal.stage("quantize"):
            plan = self.planned(keep, table)
            beyond = beyond_scales(self.prepared.graph, plan, _ranges(table)) if plan else {}
            if beyond := {**beyond, **overflown(corrections)}:
                keep.update(beyond)
                plan = self.planned(keep, table)
            integer = set(plan.integer_nodes())
            own = {node: tensors for node, tensors in corrections.items() if node in integer}
            ranges = fitted_to_widths(table, plan)
            if (patched := self._patched(plan, keep, ranges, own)) is not None:
                return Build(self.prepared.proto, table, keep, *patched, corrections=corrections)
            self._latest = None
            make_room(self.prepared.proto)
            source = materialize(self.prepared.proto, corrections, integer)
            quantizer = emit(source, self, plan, ranges)
            quantized = quantizer.model.model
            if plan:
                self.request.target.hooks.spell(quantized, plan)
        whole = self._put_bodies(quantized, plan, keep)
        if self.request.caches:
            quantize_cache(quantized, with_scales(self.request.caches, table.range_of))
        elif plan and self.request.target.hooks.spell is Hooks().spell:
            self._latest = _Emitted(quantizer, plan, keep, own, whole)
        return Build(self.prepared.proto, table, keep, whole, quantized, corrections=corrections)

    def _patched(
        self, plan: PlacementPlan, keep_float: Mapping[str, str], table: CalibrationTable, own: Overlay
    ) -> tuple[PlacementPlan, onnx.ModelProto] | None:
        """A copy of the model made last, with other scales and biases; None where more than numbers would differ."""
        last = self._latest
        if last is None or plan != last.planned or keep_float != last.keep_float:
            return None
        before, after = ({n: t for tensors in each.values() for n, t in tensors.items()} for each in (last.own, own))
        differ = {n for n in before.keys() | after.keys() if before.get(n) is not after.get(n)}
        weights = self.prepared.proto.graph.initializer if differ else ()
        changed = {t.name: after.get(t.name, t) for t in weights if t.name in differ}
        numbers = last.quantizer.rescaled(table.to_tensors_data(), changed)
        return None if numbers is None else (last.plan, outside.copy_with(last.quantizer.model.model, numbers))

    def _put_bodies(
        self, quantized: onnx.ModelProto, plan: PlacementPlan, keep_float: Mapping[str, str]
    ) -> PlacementPlan:
        """Puts the quantized bodies into a model, in place; returns the plan with the decisions about their nodes."""
        nodes = [*plan.nodes, *self.idle]
        if not self.bodies:
            return replace(plan, nodes=tuple(nodes)) if self.idle else plan
        opened = Opened(quantized)
        for body_builder in self.bodies:
            made = body_builder.quantize(keep_float)
            opened.put_back(body_builder.body, made.quantized)
            nodes += made.plan.nodes
        drop_unread(quantized.graph)
        return replace(plan, nodes=tuple(nodes))

    def build(
        self, table: CalibrationTable, keep_float: Mapping[str, str] | None = None, corrections: Overlay = NOTHING
    ) -> Build:
        """The quantized model with the fusion proof; what the runtime would not run in integer stays float.

        Returns without a proof where the request switches verification off or nothing was quantized.
        """
        keep = dict(keep_float or {})
        notes: list[str] = []
        for round_ in range(_REPAIR_ROUNDS + 1):
            built = self.quantize(table, keep, corrections)
            if not self.request.is_proved or not built.is_quantized:
                return replace(built, notes=tuple(notes))
            with self.journal.stage("verify"):
                fusion = self.request.proof(built.quantized, built.plan)
            may_repair = built.plan and not self.request.asks_int8
            avoidable = fusion.avoidable(built.plan) if fusion is not None and may_repair else ()
            if not avoidable or round_ == _REPAIR_ROUNDS:
                break
            for kernel in avoidable:
                keep[kernel.node] = f"the runtime runs it in float: {kernel.reason}"
                notes.append(f"'{kernel.node}' ({kernel.op_type}) left float after verification: {kernel.reason}.")
        return replace(built, fusion=fusion, notes=tuple(notes))


class BodyBuilder(NamedTuple):
    """One body of control flow, quantized as a model of its own.

    Attributes:
        body: The body, as it was taken out of the float model.
        builder: Of the body's model.
        build: What it is quantized to: made again with its ranges, corrections and nodes left float.
        feeds_of: Gives what feeds the body where the model around it is fed so.
    """

    body: Body
    builder: Builder
    build: Build
    feeds_of: Callable[[Feeds], Feeds]

    def quantize(self, keep_float: Mapping[str, str] = MappingProxyType({})) -> Build:
        """The quantized body, with further nodes left float."""
        build = self.build
        return self.builder.quantize(build.table, {**build.keep_float, **keep_float}, build.corrections)

    def seeing(self, outer: Feeds) -> BodyBuilder:
        """Returns the same with the ranges of these feeds of the model around it, in nested bodies too."""
        fed, builder, table = self.feeds_of(outer), self.builder, self.build.table
        nested = tuple(each.seeing(fed) for each in builder.bodies)
        if next(fed(), None) is None:
            return self
        seen = builder.collected(fed(), table.tensors, table.config)
        tensors = {name: s if s.fixed else seen.tensors[name] for name, s in table.tensors.items()}
        build = replace(self.build, table=replace(table, tensors=tensors))
        return self._replace(builder=replace(builder, bodies=nested), build=build)


def draft(proto: onnx.ModelProto, request: Request, journal: Journal) -> Builder:
    """The builder of a model that is prepared and planned, before its weights and its form are changed for integers.

    Args:
        proto: The model, or a body of one.
        request: Fitted to it.
        journal: Takes what gathers.

    Raises:
        KenosisError: The model is not usable.
        NothingToQuantizeError: No node can run in integer.
    """
    with journal.stage("prepare"):
        prepared = preparation.prepare_model(proto, request, journal)
    builder = Builder.of(prepared, request.with_names_of(prepared), journal)
    if builder.planner is not None and not builder.plan.quantizes() and not builder.quantizes_bodies:
        raise nothing_to_quantize(why_float(builder.plan))
    return builder


def for_integers(proto: onnx.ModelProto, request: Request, journal: Journal | None = None) -> Builder:
    """The builder of a model whose weights, and whose bodies of control flow, stay as they are.

    Args:
        proto: The model.
        request: Fitted to it.
        journal: Takes what gathers; None for nobody who asks for it.

    Raises:
        KenosisError: As `draft` and `Builder.for_integers`; a rewrite that fails raises.
        NothingToQuantizeError: Nothing in the main graph can be quantized.
    """
    builder = draft(proto, request, journal or Journal()).for_integers()
    if not builder.tensors:
        raise nothing_to_quantize("its layers are in bodies of control flow")
    return builder


def why_float(plan: PlacementPlan, where: str = "") -> str:
    """Why a plan quantizes nothing, by its first heavy node; ``where`` says where one was looked for."""
    heavy = [n for n in plan.nodes if n.op_type in HEAVY]
    why = f"'{heavy[0].node}' ({heavy[0].op_type}): {heavy[0].reason}" if heavy else f"no Conv, Gemm or MatMul{where}"
    return f"no node can run in integer on {plan.target}: {why}"


def nothing_to_quantize(why: str) -> NothingToQuantizeError:
    """The error for a model of which nothing is left to quantize."""
    return NothingToQuantizeError(
        f"no node of the model can be quantized ({why})",
        fix="check op_types_to_quantize, nodes_to_quantize and nodes_to_exclude; deploy the float model otherwise",
    )


def _differ_in_weights_alone(one: onnx.ModelProto, other: onnx.ModelProto) -> bool:
    """Whether two models have equal nodes, and constants equal in what a plan depends on: all but finite numbers."""
    pairs = list(zip(one.graph.initializer, other.graph.initializer, strict=False))
    return (
        len(one.graph.initializer) == len(other.graph.initializer)
        and one.graph.node == other.graph.node
        and all((a.name, a.data_type, a.dims) == (b.name, b.data_type, b.dims) for a, b in pairs)
        and all(
            a == b or (a.dims and a.data_type in _REAL and np.isfinite(outside.array_in(a)).all()) for a, b in pairs
        )
    )


def _ranges(table: CalibrationTable) -> dict[str, tuple[float, float]]:
    return {name: table.range_of(name) for name in table.tensors}


def _finished(view: GraphView, request: Request, plan: PlacementPlan) -> PlacementPlan:
    """A plan with the widths that the caller wants, and weights as the kernels of the machine like them."""
    overridden = frozenset(request.extra_options.get("TensorQuantOverrides") or ())
    plan = with_widths(plan, view, request.widths, overridden)
    costs = request.target.costs
    if costs is None or not request.suits_kernels:
        return plan
    return request.target.hooks.refine(plan, view, overridden, costs)
