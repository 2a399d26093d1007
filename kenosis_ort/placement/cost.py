"""Costs of a net in float and as planned, from a table of kernel costs, and the cheapest way to part it in two.

The time of a net is the sum over its nodes, each by the kernel that runs it, and over the borders between float and
integer: Q or DQ, and changes of layout beside them where pictures are concerned, since integer kernels keep channels
last and float Convs keep them in blocks. Float activations behind a float Conv are part of it.

Nodes are parted in two, where some cost more on one side and some pairs cost to be apart, by a minimum cut of a
directed graph from source to sink, found by a maximum flow (Dinic's algorithm).

Without measuring, a region is left float only where the gain is clear by these estimates. Three questions are asked.
Would the whole net be slower in integer than in float, as nets of microseconds may be, whose kernels cost more to call
than to run? Would it be faster with its first few heavy nodes in float, as mobile nets may be, which begin with the two
slowest shapes of the integer kernels? And would it be parted anywhere else, at the least cost of kernels and
conversions? An estimate is off by up to `CostTable.error`, so a whole net is only given up beyond that; two placements
of one net share part of the error, so less is asked there.

Where integer kernels are slower than float ones for many shapes (`CostTable.anywhere`), the cheapest parting of the
net is asked for instead, wherever its float regions lie, and whether integer pays at all is the estimate's to say.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Generic, NamedTuple, TypeVar

from kenosis_ort.graph.constants import HEAVY
from kenosis_ort.graph.view import FLOAT, GraphView, ir
from kenosis_ort.plan import EdgeRole, How, Kind, PlacementPlan
from kenosis_ort.targets.profile import CostTable, Work

T = TypeVar("T", bound=Hashable)
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

    def estimate(self, plan: PlacementPlan) -> CostEstimate:
        """The net as planned and in float; an empty plan stands for float."""
        planned = _Planned(self, plan)
        nodes = tuple(planned.cost_of(node) for node in self.view.nodes if str(node.name) in self.float_us)
        unknown = tuple(name for name, work in self.works.items() if work is None)
        return CostEstimate(nodes, planned.borders(), self.costs.run, unknown)

    def cheapest_in_float(self, plan: PlacementPlan, writes_float: Collection[str]) -> set[str]:
        """The integer nodes of a plan that had better be float, wherever they are: the sum of all is the least.

        Each node costs what its kernel does on its side, each value that is written on one side and read on the other a
        conversion. A minimum cut of the net finds the cheapest way to part it.

        Args:
            plan: The placement.
            writes_float: Operators whose integer kernels write float without a DQ.
        """
        view, planned = self.view, _Planned(self, plan)
        outside = ("outside", "")
        cut: MinCut[tuple[str, str]] = MinCut()
        cut.cost(outside, here=math.inf, there=0.0)
        # Kernels: here is integer, there is float.
        for node in view.nodes:
            name, kind = ("node", str(node.name)), planned.kind(node)
            in_integer, own = self.integer_us.get(name[1]), self.float_us.get(name[1])
            in_float = 0.0 if own is None or name[1] in self.fused else own
            producer = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
            before = None if producer is None else ("node", str(producer.name))
            if kind is Kind.ABSORBED and before is not None:
                cut.cost(name, here=0.0, there=in_float)
                cut.part(name, before, math.inf)
                cut.part(before, name, math.inf)
            elif kind in _INTEGER and in_integer is not None:
                cut.cost(name, here=in_integer, there=in_float)
                if own is not None and before is not None and not in_float:
                    cut.part(before, name, own)
            else:
                cut.cost(name, here=math.inf, there=0.0)
        # Conversions of what is written on one side and read on the other.
        values = [v for v in self.values() if v.dtype == FLOAT]
        consumers = {value: view.consumers(value) for value in values}
        outputs = {value for value in values if view.is_output(value)}
        to_float, to_integer = (planned.conversions(n, dict.fromkeys(values, ())) for n in ("dequantize", "quantize"))
        for value, us in to_float.items():
            read, producer = str(value.name), value.producer()
            maker = outside if producer is None else ("node", str(producer.name))
            free = producer is not None and producer.op_type in writes_float
            cut.part(maker, ("dequantized", read), 0.0 if free else us)
            cut.part(("quantized", read), maker, to_integer[value])
            readers = {("node", str(c.node.name)) for c in consumers[value]}
            for reader in (*readers, *([outside] if value in outputs else [])):
                cut.part(("dequantized", read), reader, math.inf)
                cut.part(reader, ("quantized", read), math.inf)
        return set(plan.integer_nodes()) - {name for what, name in cut.solve() if what == "node"}

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


class _Planned:
    """What the nodes and borders of a net cost under one plan.

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
        in_float = 0.0 if name in self.net.fused else self.net.float_us[name]
        second = self.net.shifted_us[name] if name in self._shifted else None
        in_integer = self.net.integer_us[name] if second is None else second
        if kind in _INTEGER and in_integer is not None:
            planned = in_integer
        elif kind is Kind.ABSORBED:
            planned = 0.0
        else:
            # A float activation behind an integer kernel cannot be one with it.
            alone = any(self.kind(producer) in _INTEGER for producer in _producers(node))
            planned = self.net.float_us[name] if alone else in_float
        return NodeCost(name, node.op_type, kind, in_float, in_integer, planned)

    def kind(self, node: ir.Node) -> Kind:
        """What the plan makes of a node."""
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
        blocked = [value for value in pictures if any(map(self._is_blocked, neighbours[value]))]
        sizes = {value: math.prod(shape) for value, shape in known.items()}
        found = dict.fromkeys(known, 0.0)
        for kind, values in ((name, list(known)), ("channels-last", pictures), ("blocked", blocked)):
            for value in values:
                found[value] += self.net.costs.float_us(Work(kind, elements=sizes[value]), self.net.cold)
        return found

    def _is_blocked(self, node: ir.Node | None) -> bool:
        """Whether a float node works on blocks of channels: a Conv, a pool, or what is part of one."""
        blocked = self.net.costs.blocked
        if node is None or node.op_type in blocked:
            return node is not None
        producer = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
        return producer is not None and producer.op_type in blocked and self.kind(producer) is Kind.FLOAT


def _producers(node: ir.Node) -> list[ir.Node]:
    return [p for value in node.inputs if value is not None and (p := value.producer()) is not None]


_LONGEST: Final = 3
_ROUNDS: Final = 3
_WORTH_IT: Final = 1.03
"""Nets that are estimated to gain less stay float."""
_PREFIX_GAIN: Final = 1.12
"""Estimated prefixes of up to 1.08x were slower when measured, by up to 10 %."""
_LEAST_PREFIX: Final = (1 - 1 / _PREFIX_GAIN) / 2
"""Share of the time below which a prefix cannot gain that much, with as much again for the nodes around it."""

Replan = Callable[[Mapping[str, str]], PlacementPlan]


@dataclass(frozen=True)
class Regions:
    """What to leave in float.

    Attributes:
        plan: The placement with these regions.
        cost: Its estimate.
        all_integer: The estimate of the placement that was asked about.
        keep_float: Node names with the reason.
        whole_net: Float is clearly faster as a whole; then ``plan`` is the one asked about.
        reason: For the report; empty where nothing is left in float.
    """

    plan: PlacementPlan
    cost: CostEstimate
    all_integer: CostEstimate
    keep_float: Mapping[str, str] = field(default_factory=dict)
    whole_net: bool = False
    reason: str = ""


def choose_regions(
    view: GraphView, plan: PlacementPlan, costs: CostTable, replan: Replan, writes_float: Collection[str] = ()
) -> Regions:
    """The regions to leave in float.

    Args:
        view: The prepared model.
        plan: Its placement.
        costs: The runtime's table.
        replan: Returns the placement with some nodes (name to reason) in float.
        writes_float: Operators whose integer kernels write float without a DQ.

    Returns:
        The regions; none where shapes are not known, or no gain is clear.
    """
    net = NetCosts(view, costs)
    base = net.estimate(plan)
    whole = Regions(plan, base, base)
    if base.unknown or not plan.integer_nodes():
        return whole
    parted = _parted(net, whole, replan, writes_float)
    if costs.anywhere:
        if parted.plan.integer_nodes() and parted.cost.speed >= _WORTH_IT:
            return parted
        reason = f"int8 would be {parted.cost.speed:.2f}x of float{_in_us(base.float_us, costs)}"
        return replace(parted if parted.plan.integer_nodes() else whole, whole_net=True, reason=reason)
    best, integer = whole, set(plan.integer_nodes())
    heavy = [node.node for node in plan.nodes if node.op_type in HEAVY and node.node in integer]
    for length in range(1, min(_LONGEST, len(heavy) - 1) + 1):
        names = heavy[:length]
        there = sum(cost.planned_us for cost in base.nodes if cost.node in names)
        if there < _LEAST_PREFIX * base.planned_us:
            continue
        first = f"the first {length} of {len(heavy)} heavy nodes{_in_us(there, costs)}"
        reason = f"float is estimated to be faster for {first}"
        keep = dict.fromkeys(names, reason)
        changed = replan(keep)
        cost = net.estimate(changed)
        if cost.planned_us * _PREFIX_GAIN < best.cost.planned_us:
            best = Regions(changed, cost, base, keep, reason=_compared(reason, cost, base, costs))
    gains = parted.cost.planned_us * _PREFIX_GAIN < best.cost.planned_us
    if gains and parted.keep_float and parted.plan.integer_nodes():
        best = parted
    if best.cost.speed * costs.error < 1:
        reason = f"int8 is estimated at {best.cost.speed:.2f}x of float{_in_us(base.float_us, costs)}"
        return replace(whole, whole_net=True, reason=reason)
    return best


def _parted(net: NetCosts, best: Regions, replan: Replan, writes_float: Collection[str]) -> Regions:
    """The cheapest parting of a net, found from the last one until none is cheaper."""
    base = best.all_integer
    for _ in range(_ROUNDS):
        slower = net.cheapest_in_float(best.plan, writes_float)
        if not slower:
            break
        reason = "float is estimated to be faster there, with the conversions around it"
        keep = {**best.keep_float, **dict.fromkeys(sorted(slower), reason)}
        changed = replan(keep)
        cost = net.estimate(changed)
        if cost.planned_us >= best.cost.planned_us:
            break
        count = sum(base.by_node[name].op_type in HEAVY for name in keep)
        reason = _compared(f"{count} heavy nodes stay float", cost, base, net.costs)
        best = Regions(changed, cost, base, keep, reason=reason)
    return best


def _compared(reason: str, cost: CostEstimate, base: CostEstimate, costs: CostTable) -> str:
    if not costs.shows_times:
        return f"{reason}: {cost.planned_us / base.planned_us:.2f}x of the time"
    return f"{reason}: {cost.planned_us:.0f} us for {base.planned_us:.0f} us"


def _in_us(us: float, costs: CostTable) -> str:
    return f" ({us:.0f} us)" if costs.shows_times else ""
