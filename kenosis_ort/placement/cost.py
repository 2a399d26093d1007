"""Costs of a net in float and as planned, from a table of kernel costs, and the cheapest way to part it in two.

The time of a net is the sum over its nodes, each by the kernel that runs it, and over the borders between float and
integer: Q or DQ, and changes of layout beside them where pictures are concerned, since integer kernels keep channels
last and float Convs keep them in blocks. Float activations behind a float Conv are part of it.

Nodes are parted in two, where some cost more on one side and some pairs cost to be apart, by a minimum cut of a
directed graph from source to sink, found by a maximum flow (Dinic's algorithm).
"""

import math
from collections import deque
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Generic, TypeVar

import onnx

from kenosis_ort.graph.outside import copy_model
from kenosis_ort.graph.shapes import infer_shapes
from kenosis_ort.graph.view import FLOAT, GraphView, ir
from kenosis_ort.plan import EdgeRole, How, Kind, PlacementPlan
from kenosis_ort.rewrite.norms import norm_around
from kenosis_ort.rewrite.rule import Editor
from kenosis_ort.targets.profile import CostTable, Work

T = TypeVar("T", bound=Hashable)
_USUAL_SIZE: Final = 128
_NOTHING: Final = 1e-9  # a capacity below it is none: costs are microseconds
_SOURCE: Final = 0
_SINK: Final = 1


class MinCut(Generic[T]):
    """A problem to be solved once."""

    def __init__(self) -> None:
        self._number: dict[T, int] = {}
        self._arcs: list[list[int]] = [[], []]  # by vertex, numbers of arcs; an arc and its reverse are 2k and 2k + 1
        self._head: list[int] = []
        self._left: list[float] = []

    def cost(self, thing: T, *, here: float, there: float) -> None:
        """Says what a thing costs on either side."""
        self._arc(self._of(thing), _SINK, here)
        self._arc(_SOURCE, self._of(thing), there)

    def part(self, here: T, there: T, cost: float) -> None:
        """Says what it costs to have one thing here and the other there, and not the other way round."""
        self._arc(self._of(here), self._of(there), cost)

    def solve(self) -> set[T]:
        """The things that are cheapest here; where both sides cost the same, they are there."""
        while True:
            level = self._levels()
            if level[_SINK] < 0:
                return {thing for thing, number in self._number.items() if level[number] >= 0}
            at = [0] * len(self._arcs)
            while self._augment(level, at):
                pass

    def _of(self, thing: T) -> int:
        if thing not in self._number:
            self._number[thing] = len(self._arcs)
            self._arcs.append([])
        return self._number[thing]

    def _arc(self, tail: int, head: int, capacity: float) -> None:
        for begin, end, left in ((tail, head, capacity), (head, tail, 0.0)):
            self._arcs[begin].append(len(self._head))
            self._head.append(end)
            self._left.append(left)

    def _levels(self) -> list[int]:
        """Each vertex' distance from the source by arcs that have something left, -1 where there is none."""
        level = [-1] * len(self._arcs)
        level[_SOURCE] = 0
        waiting = deque([_SOURCE])
        while waiting:
            vertex = waiting.popleft()
            for arc in self._arcs[vertex]:
                if self._left[arc] > _NOTHING and level[self._head[arc]] < 0:
                    level[self._head[arc]] = level[vertex] + 1
                    waiting.append(self._head[arc])
        return level

    def _augment(self, level: list[int], at: list[int]) -> bool:
        """Sends what one shortest path still takes; tells whether there was one."""
        path: list[int] = []
        vertex = _SOURCE
        while vertex != _SINK:
            arcs = self._arcs[vertex]
            while at[vertex] < len(arcs):
                arc = arcs[at[vertex]]
                if self._left[arc] > _NOTHING and level[self._head[arc]] == level[vertex] + 1:
                    path.append(arc)
                    vertex = self._head[arc]
                    break
                at[vertex] += 1
            else:
                if not path:
                    return False
                level[vertex] = -1
                vertex = self._head[path.pop() ^ 1]
        sent = min(self._left[arc] for arc in path)
        for arc in path:
            self._left[arc] -= sent
            self._left[arc ^ 1] += sent
        return True


_PICTURE_RANK: Final = 4
_INTEGER: Final = (Kind.INTEGER, Kind.PASS_THROUGH)


@dataclass(frozen=True)
class NodeCost:
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


def estimate(view: GraphView, plan: PlacementPlan, costs: CostTable) -> CostEstimate:
    """Estimates a net as planned and in float, for a batch of one where the batch is free.

    Args:
        view: The prepared model.
        plan: Its placement; an empty one stands for float.
        costs: The runtime's table.
    """
    net = _Net(view, plan, costs)
    nodes = tuple(net.cost_of(node, work) for node in view.nodes if (work := net.works[str(node.name)]) is not None)
    unknown = tuple(name for name, work in net.works.items() if work is None)
    return CostEstimate(nodes, dict(net.borders()), costs.run, unknown)


def least_us(model: onnx.ModelProto, costs: CostTable) -> float:
    """Microseconds of a float model if each node ran on the faster of its kernels, conversions left out.

    Norms written as arithmetic count as the one kernel that the runtime makes of them at load.

    Args:
        model: The model; a free first dimension of an input counts as 1, others as 128.
        costs: The runtime's table.
    """
    if any(not dim.dim_value for value in model.graph.input for dim in value.type.tensor_type.shape.dim):
        model = copy_model(model)
        for value in model.graph.input:
            for axis, dim in enumerate(value.type.tensor_type.shape.dim):
                dim.dim_value = dim.dim_value or (_USUAL_SIZE if axis else 1)
        del model.graph.value_info[:]
        infer_shapes(model, thorough=False)
    editor = Editor(model)
    found = estimate(editor, PlacementPlan(""), costs)
    norms = [norm for node in editor.find("Sqrt") if (norm := norm_around(editor, node))]
    parts = {node.name for norm in norms for node in norm.inner}
    return found.run_us + sum(min(c.float_us, c.integer_us or c.float_us) for c in found.nodes if c.node not in parts)


def cheapest_in_float(
    view: GraphView, plan: PlacementPlan, costs: CostTable, writes_float: Collection[str]
) -> set[str]:
    """The integer nodes of a plan that had better be float, wherever they are: the sum of all is the least.

    Each node costs what its kernel does on its side, each value that is written on one side and read on the other a
    conversion. A minimum cut of the net finds the cheapest way to part it.

    Args:
        view: The prepared model.
        plan: Its placement.
        costs: The runtime's table.
        writes_float: Operators whose integer kernels write float without a DQ.
    """
    net = _Net(view, plan, costs)
    outside = ("outside", "")
    cut: MinCut[tuple[str, str]] = MinCut()
    cut.cost(outside, here=math.inf, there=0.0)
    # Kernels: here is integer, there is float.
    for node in view.nodes:
        name, kind, work = ("node", str(node.name)), net.kind(node), net.works[str(node.name)]
        in_integer = None if work is None else costs.integer_us(work, net.cold)
        in_float = 0.0 if work is None or net.is_fused(node, work) else costs.float_us(work, net.cold)
        producer = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
        before = None if producer is None else ("node", str(producer.name))
        if kind is Kind.ABSORBED and before is not None:
            cut.cost(name, here=0.0, there=in_float)
            cut.part(name, before, math.inf)
            cut.part(before, name, math.inf)
        elif kind in _INTEGER and in_integer is not None:
            cut.cost(name, here=in_integer, there=in_float)
            if work is not None and before is not None and not in_float:
                cut.part(before, name, costs.float_us(work, net.cold))
        else:
            cut.cost(name, here=math.inf, there=0.0)
    # Conversions of what is written on one side and read on the other.
    for value in (*view.inputs, *(v for node in view.nodes for v in node.outputs)):
        shape = None if value.is_initializer() else view.shape_of_one(value)
        if shape is None or value.dtype != FLOAT:
            continue
        read, producer = str(value.name), value.producer()
        maker = outside if producer is None else ("node", str(producer.name))
        free = producer is not None and producer.op_type in writes_float
        cut.part(maker, ("dequantized", read), 0.0 if free else net.conversion("dequantize", value, shape, []))
        cut.part(("quantized", read), maker, net.conversion("quantize", value, shape, []))
        readers = {("node", str(c.node.name)) for c in view.consumers(value)}
        for reader in (*readers, *([outside] if view.is_output(value) else [])):
            cut.part(("dequantized", read), reader, math.inf)
            cut.part(reader, ("quantized", read), math.inf)
    return set(plan.integer_nodes()) - {name for what, name in cut.solve() if what == "node"}


class _Net:
    """What the nodes and borders of a planned net cost.

    Args:
        view: The prepared model.
        plan: Its placement.
        costs: The runtime's table.

    Attributes:
        works: What each node does, by name; None where shapes are not known.
        cold: Share of the kernels' own costs that counts.
    """

    def __init__(self, view: GraphView, plan: PlacementPlan, costs: CostTable) -> None:
        self.view, self.plan, self.costs = view, plan, costs
        self.works = {str(node.name): costs.work(view, node) for node in view.nodes}
        self.cold = costs.cold([work for work in self.works.values() if work is not None])
        self._fused: dict[str, bool] = {}  # by node, in the order of the graph
        self._shifted = {d.edge.consumer for d in plan.decisions if d.zero_point}

    def cost_of(self, node: ir.Node, work: Work) -> NodeCost:
        """The cost of a node of known work."""
        kind = self.kind(node)
        in_float = 0.0 if self.is_fused(node, work) else self.costs.float_us(work, self.cold)
        second = self.costs.shifted_us(work, self.cold) if str(node.name) in self._shifted else None
        in_integer = self.costs.integer_us(work, self.cold) if second is None else second
        if kind in _INTEGER and in_integer is not None:
            planned = in_integer
        elif kind is Kind.ABSORBED:
            planned = 0.0
        else:
            # A float activation behind an integer kernel cannot be one with it.
            alone = any(self.kind(producer) in _INTEGER for producer in self._producers(node))
            planned = self.costs.float_us(work, self.cold) if alone else in_float
        return NodeCost(str(node.name), node.op_type, kind, in_float, in_integer, planned)

    def kind(self, node: ir.Node) -> Kind:
        """What the plan makes of a node."""
        decision = self.plan.by_node.get(str(node.name))
        return Kind.FLOAT if decision is None else decision.kind

    def is_fused(self, node: ir.Node, work: Work) -> bool:
        """Whether a float session makes the node a part of a Conv before it, or of the node behind it."""
        if str(node.name) not in self._fused:
            behind = self.view.sole_consumer(node.outputs[0]) if node.op_type in self.costs.gates else None
            gates = behind is not None and behind.node.op_type == "Mul" and node.inputs[0] in behind.node.inputs
            taken = work.shape_class in self.costs.fused and any(map(self._takes_in, self._producers(node)))
            self._fused[str(node.name)] = gates or taken or self._is_bias(node)
        return self._fused[str(node.name)]

    def _is_bias(self, node: ir.Node) -> bool:
        """Whether an Add only puts a bias on constant weights' product: float sessions make both a Gemm."""
        if node.op_type != "Add" or "add" not in self.costs.fused:
            return False
        for product, bias in (node.inputs, node.inputs[::-1]):
            producer = None if product is None else product.producer()
            if producer is not None and producer.op_type == "MatMul" and bias is not None:
                weight = producer.inputs[1]
                alone = self.view.sole_consumer(producer.outputs[0]) is not None
                if alone and weight is not None and weight.is_initializer() and self.view.is_row_bias(node, bias):
                    return True
        return False

    def _takes_in(self, producer: ir.Node) -> bool:
        """Whether a float node takes in what stands behind it."""
        if self.view.sole_consumer(producer.outputs[0]) is None:
            return False
        return producer.op_type in ("Conv", "Gemm") or (
            self._fused.get(str(producer.name), False) and producer.op_type not in self.costs.gates
        )

    def _producers(self, node: ir.Node) -> list[ir.Node]:
        return [p for value in node.inputs if value is not None and (p := value.producer()) is not None]

    def borders(self) -> Iterator[tuple[str, float]]:
        """Yields the conversions of each value that is read or written on both sides."""
        quantized = {value for value, _ in self.plan.quantized_values()}
        values = [*self.view.inputs, *(v for node in self.view.nodes for v in node.outputs)]
        for value in values:
            name = str(value.name)
            if name not in quantized or value.is_initializer():
                continue
            shape, producer = self.view.shape_of_one(value), value.producer()
            if shape is None:
                continue
            us = 0.0
            if producer is None or self.kind(producer) is Kind.FLOAT:
                us += self.conversion("quantize", value, shape, [producer])
            floats = [d for d in self.plan.by_value[name] if d.how is How.DEQUANTIZED or d.role is EdgeRole.OUTPUT]
            if floats:  # read as float, or handed out
                us += self.conversion("dequantize", value, shape, [self.view.node(d.edge.consumer) for d in floats])
            if us:
                yield name, us

    def conversion(
        self, name: str, value: ir.Value, shape: Sequence[int], neighbours: Sequence[ir.Node | None]
    ) -> float:
        """The cost of one side of a border; ``neighbours`` are the float nodes there."""
        elements = math.prod(shape)
        us = self.costs.float_us(Work(name, elements=elements), self.cold)
        if self.view.rank(value) == _PICTURE_RANK:
            us += self.costs.float_us(Work("channels-last", elements=elements), self.cold)
            if any(node is not None and self._is_blocked(node) for node in neighbours):
                us += self.costs.float_us(Work("blocked", elements=elements), self.cold)
        return us

    def _is_blocked(self, node: ir.Node) -> bool:
        """Whether a float node works on blocks of channels: a Conv, a pool, or what is part of one."""
        if node.op_type in self.costs.blocked:
            return True
        producer = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
        return producer is not None and producer.op_type in self.costs.blocked and self.kind(producer) is Kind.FLOAT
