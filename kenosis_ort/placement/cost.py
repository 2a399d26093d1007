"""Costs of a net in float and as planned, from a table of kernel costs.

The time of a net is the sum over its nodes, each by the kernel that runs it, and over the borders between float and
integer: Q or DQ, and changes of layout beside them where pictures are concerned, since integer kernels keep channels
last and float Convs keep them in blocks. Float activations behind a float Conv are part of it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from kenosis_ort.graph.view import GraphView, ir
from kenosis_ort.plan import EdgeRole, How, Kind, PlacementPlan
from kenosis_ort.targets.profile import CostTable, Work

_PICTURE_RANK: Final = 4
_BLOCK: Final = 16
"""Channels of a block; Convs read fewer in rows."""
ON_INTEGERS: Final = (Kind.INTEGER, Kind.PASS_THROUGH)


class NodeCost(NamedTuple):
    """One node, times in microseconds.

    Attributes:
        node: Its name.
        op_type: Its operator.
        kind: What the plan makes of it.
        float_us: In float.
        integer_us: On its integer kernel; None where there is none.
        planned_us: As planned, without the borders beside it.
    """

    node: str
    op_type: str
    kind: Kind
    float_us: float
    integer_us: float | None
    planned_us: float


@dataclass(frozen=True)
class CostEstimate:
    """One net as planned, times in microseconds of one run.

    Attributes:
        nodes: Every node whose shapes are known.
        borders_us: Q, DQ and changes of layout between float and integer, by value.
        run_us: A run besides its kernels.
        unknown: Nodes whose cost is not known, because their shapes are not.
    """

    nodes: tuple[NodeCost, ...]
    borders_us: dict[str, float]
    run_us: float
    unknown: tuple[str, ...]

    @cached_property
    def by_node(self) -> dict[str, NodeCost]:
        """The nodes by name."""
        return {cost.node: cost for cost in self.nodes}

    @property
    def float_us(self) -> float:
        """The whole net in float."""
        return self.run_us + sum(cost.float_us for cost in self.nodes)

    @property
    def planned_us(self) -> float:
        """The whole net as planned."""
        return self.run_us + sum(cost.planned_us for cost in self.nodes) + sum(self.borders_us.values())

    @property
    def speed(self) -> float:
        """Estimated speed as planned relative to float."""
        return self.float_us / self.planned_us


class NetCosts:
    """Costs of a net's kernels, counted once for all its plans, for a batch of one where the batch is free.

    Args:
        view: The prepared model.
        costs: The runtime's table.

    Attributes:
        works: What each node does, by name; None where shapes are not known.
        cold: Share of the kernels' own costs that counts.
        float_us: Times in float of the nodes whose work is known, by name.
        integer_us: Times on integer kernels, likewise; None where there is none.
        shifted_us: Times on second integer kernels, likewise.
        fused: Names of those that a float session makes a part of a Conv before them, or of the node behind them.
        in_float: Times of nodes in a float net: nothing of those, and changes of layout beside Convs included.
        blocked: Nodes of a float net that write blocks of channels.
        laid_out: Values whose change of layout is part of a node's time in a float net.
    """

    def __init__(self, view: GraphView, costs: CostTable) -> None:
        self.view, self.costs = view, costs
        self.works = {str(node.name): costs.work(view, node) for node in view.nodes}
        known = {name: work for name, work in self.works.items() if work is not None}
        self.cold = costs.cold(known.values())
        self.float_us = {name: costs.float_us(work, self.cold) for name, work in known.items()}
        self.integer_us = {name: costs.integer_us(work, self.cold) for name, work in known.items()}
        self.shifted_us = {name: costs.shifted_us(work, self.cold) for name, work in known.items()}
        self._alone = {node: view.sole_consumer(node.outputs[0]) for node in view.nodes if node.outputs}
        self.fused = set[str]()
        for node in view.nodes:  # in the order of the graph: a node may be taken in by one that is taken in
            if (work := known.get(str(node.name))) is not None and self._is_fused(node, work):
                self.fused.add(str(node.name))
        self.in_float = {name: 0.0 if name in self.fused else us for name, us in self.float_us.items()}
        for node in view.nodes:
            behind = self._alone.get(node) if str(node.name) in self.fused else None
            if behind is not None and node.op_type in costs.gates:  # takes with the Mul behind it as long as alone
                self.in_float[str(behind.node.name)] = self.float_us[str(node.name)]
        self.blocked, self.laid_out = set[ir.Node](), set[ir.Value]()
        if costs.blocked:
            self._add_layout_changes()

    def _add_layout_changes(self) -> None:
        """Adds changes of layout, of values that are written in blocks and read in rows or the other way round."""
        written = set[ir.Value]()
        for node in self.view.nodes:
            if self._writes_blocks(node, written):
                self.blocked.add(node)
                written.update(node.outputs)
        for value in self.values():
            readers = value.consumers()
            if value not in written:
                at = next((node for node in readers if node in self.blocked), None)
            else:
                at = value.producer() if not self.blocked.issuperset(readers) or self.view.is_output(value) else None
            shape = None if at is None else self.view.shape_of_one(value)
            if at is not None and shape is not None and len(shape) == _PICTURE_RANK and shape[1] >= _BLOCK:
                self.laid_out.add(value)
                us = self.costs.float_us(Work("blocked", elements=math.prod(shape)), self.cold)
                self.in_float[str(at.name)] += us

    def _writes_blocks(self, node: ir.Node, written: set[ir.Value]) -> bool:
        """Whether a float node writes blocks of channels, as Convs do, and others that read nothing else."""
        work, read = self.works[str(node.name)], node.inputs[: 1 if node.op_type == "Clip" else None]
        if work is None or work.shape_class in self.costs.blocked:
            return work is not None
        gated = any(p.op_type in self.costs.gates and str(p.name) in self.fused for p in (node, *_producers(node)))
        if gated or work.shape_class not in self.costs.passes_blocks or not written.issuperset(read):
            return False  # x * f(x) is one kernel, which reads rows
        shapes = map(self.view.shape_of_one, read)
        if node.op_type == "Concat":
            return all(shape is not None and len(shape) > 1 and not shape[1] % _BLOCK for shape in shapes)
        return len(read) == 1 or len(set(shapes)) == 1

    def estimate(self, plan: PlacementPlan) -> CostEstimate:
        """The net as planned and in float; an empty plan stands for float."""
        planned = PlannedCosts(self, plan)
        nodes = tuple(planned.cost_of(node) for node in self.view.nodes if str(node.name) in self.float_us)
        unknown = tuple(name for name, work in self.works.items() if work is None)
        return CostEstimate(nodes, planned.borders(), self.costs.profile.run, unknown)

    def values(self) -> list[ir.Value]:
        """The inputs, and what nodes compute."""
        values = (*self.view.inputs, *(v for node in self.view.nodes for v in node.outputs))
        return [value for value in values if not value.is_initializer()]

    def _is_fused(self, node: ir.Node, work: Work) -> bool:
        behind = self._alone.get(node) if node.op_type in self.costs.gates else None
        if behind is not None and behind.node.op_type == "Mul" and node.inputs[0] in behind.node.inputs:
            return True
        taken = work.shape_class in self.costs.fused and any(map(self._takes_in, _producers(node)))
        return taken or self._is_bias(node)

    def _is_bias(self, node: ir.Node) -> bool:
        """Whether an Add only puts a bias on constant weights' product: float sessions make both a Gemm."""
        if node.op_type != "Add" or "add" not in self.costs.fused:
            return False
        for product, bias in (node.inputs, node.inputs[::-1]):
            producer = None if product is None else product.producer()
            if producer is not None and producer.op_type == "MatMul" and bias is not None:
                weight, alone = producer.inputs[1], self._alone.get(producer) is not None
                if alone and weight is not None and weight.is_initializer() and self.view.is_row_bias(node, bias):
                    return True
        return False

    def _takes_in(self, producer: ir.Node) -> bool:
        """Whether a float node takes in what stands behind it."""
        if self._alone.get(producer) is None:
            return False
        return producer.op_type in ("Conv", "Gemm") or (
            str(producer.name) in self.fused and producer.op_type not in self.costs.gates
        )


class PlannedCosts:
    """Costs of the nodes and borders of a net under one plan.

    Args:
        net: The costs of its kernels.
        plan: Its placement.
    """

    def __init__(self, net: NetCosts, plan: PlacementPlan) -> None:
        self.net, self.plan = net, plan
        self._shifted = {d.edge.consumer for d in plan.decisions if d.zero_point}

    def cost_of(self, node: ir.Node) -> NodeCost:
        """The cost of a node of known work."""
        name, kind = str(node.name), self.kind(node)
        in_float = self.net.in_float[name]
        second = self.net.shifted_us[name] if name in self._shifted else None
        in_integer = self.net.integer_us[name] if second is None else second
        if kind in ON_INTEGERS and in_integer is not None:
            planned = in_integer
        elif kind is Kind.ABSORBED:
            planned = 0.0
        else:
            # A float activation behind an integer kernel cannot be one with it.
            alone = any(self.kind(producer) in ON_INTEGERS for producer in _producers(node))
            planned = self.net.float_us[name] if alone else in_float
        return NodeCost(name, node.op_type, kind, in_float, in_integer, planned)

    def kind(self, node: ir.Node) -> Kind:
        """Kind of a node in the plan."""
        decision = self.plan.by_node.get(str(node.name))
        return Kind.FLOAT if decision is None else decision.kind

    def borders(self) -> dict[str, float]:
        """The conversions of each value that is read or written on both sides."""
        quantized = {value for value, _ in self.plan.quantized_values()}
        written, read = dict[ir.Value, list[ir.Node | None]](), dict[ir.Value, list[ir.Node | None]]()
        values = [value for value in self.net.values() if str(value.name) in quantized]
        for value in values:
            producer, decisions = value.producer(), self.plan.by_value[str(value.name)]
            if producer is None or self.kind(producer) is Kind.FLOAT:
                written[value] = [producer]
            floats = [d for d in decisions if d.how is How.DEQUANTIZED or d.role is EdgeRole.OUTPUT]
            if floats:  # read as float, or handed out
                read[value] = [self.net.view.node(d.edge.consumer) for d in floats]
        to_integer, to_float = self.conversions("quantize", written), self.conversions("dequantize", read)
        found = {str(value.name): to_integer.get(value, 0.0) + to_float.get(value, 0.0) for value in values}
        return {name: us for name, us in found.items() if us}

    def conversions(self, name: str, neighbours: Mapping[ir.Value, Sequence[ir.Node | None]]) -> dict[ir.Value, float]:
        """The cost of one side of the borders at values, for those of known shapes.

        Args:
            name: ``quantize`` or ``dequantize``.
            neighbours: The float nodes there, by value.
        """
        shapes = zip(neighbours, map(self.net.view.shape_of_one, neighbours), strict=True)
        known = {value: shape for value, shape in shapes if shape is not None}
        pictures = [value for value, shape in known.items() if len(shape) == _PICTURE_RANK]
        beside = [value for value in pictures if value not in self.net.laid_out]
        blocked = [value for value in beside if not self.net.blocked.isdisjoint(neighbours[value])]
        sizes = {value: math.prod(shape) for value, shape in known.items()}
        found = dict.fromkeys(known, 0.0)
        for kind, values in ((name, list(known)), ("channels-last", pictures), ("blocked", blocked)):
            for value in values:
                found[value] += self.net.costs.float_us(Work(kind, elements=sizes[value]), self.net.cold)
        return found


def _producers(node: ir.Node) -> list[ir.Node]:
    return [p for value in node.inputs if value is not None and (p := value.producer()) is not None]
