"""Builds quantized models of one float model: always the same request, with the variations that passes ask for.

Corrections belong to integer nodes: one that is left float has its own weights and biases again, whoever decided it.

Rounded weights and corrected biases make up for the error of int8 arithmetic. In a node that runs in float they make up
for an error that is not there: the first three nodes of MLPerf's ResNet-8 left float with their corrections have an
error of 0.00210, with their own biases of 0.00096.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property

import onnx

from kenosis_ort.calibration.blocked import Feeds
from kenosis_ort.calibration.collector import collect
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.flow import steps
from kenosis_ort.flow.emission import with_scales
from kenosis_ort.flow.request import Request
from kenosis_ort.graph.bodies import Body, Opened, has_layers, owners, places
from kenosis_ort.graph.constants import LAYERS
from kenosis_ort.graph.opset import PreparedModel
from kenosis_ort.graph.outside import copy_model
from kenosis_ort.graph.view import GraphView
from kenosis_ort.graph.walk import all_graphs
from kenosis_ort.passes.choose_ranges import fitted_to_widths
from kenosis_ort.passes.contract import Build
from kenosis_ort.placement.planner import Planner
from kenosis_ort.placement.saturation import SeenAs, seen_as, values_of_own_scale
from kenosis_ort.plan import Kind, NodeDecision, PlacementPlan
from kenosis_ort.quantizer.int8_cache import quantize_cache
from kenosis_ort.quantizer.stock import QuantType
from kenosis_ort.targets.proof import FusionReport


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
            self._planners[key] = steps.make_planner(self.view, self.request, self.excluded, self.named, keep, base)
        return self._planners[key]

    def tensors_to_observe(self, plan: PlacementPlan) -> list[str]:
        """The activations whose ranges are needed."""
        found = steps.tensors_to_observe(self.prepared.proto, self.request, plan)
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
            plan = steps.make_plan(self.planner(keep), self.request, table)
            extreme = steps.beyond_scales(self.view, plan, table)
            if extreme:
                keep.update(extreme)
                plan = steps.make_plan(self.planner(keep), self.request, table)
            proto = self.prepared.proto
            source = proto if self.base is None or self.base is proto else restored(proto, self.base, plan)
            ranges = fitted_to_widths(table, plan)
            quantized = steps.quantize_model(source, self.request, plan, ranges, self.excluded, self.named)
            if plan and self.request.target.spell is not None:
                self.request.target.spell(quantized, plan)
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
        opened.drop_unread()
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
        prove, libraries = self.request.target.prove, self.request.custom_op_libraries
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
