"""What to leave float to get rid of a tensor's quantization: sets of nodes, and what each set really changes.

One Conv left float alone still reads its quantized input and hands on a quantized output: only its weights gain. A bad
activation becomes float only where the node behind which it is quantized and all that read it are left float
together. What a set changes is asked of the planner, and read off the gates that vanish.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx

from kenosis_ort.accuracy.gates import GatedModel, GateKind
from kenosis_ort.accuracy.price import float_share
from kenosis_ort.accuracy.sensitivity import Replan, TensorSensitivity
from kenosis_ort.plan import Kind, PlacementPlan

_LEAST_GAIN = 0.01  # share of all errors that a move has to remove, and a tensor has to make to be worth one
_PER_NODE = 0.002  # share of all prices added for every node of a move, so that few nodes are preferred
_MOST_STEPS = 48
_INTEGER = (Kind.INTEGER, Kind.PASS_THROUGH)


@dataclass(frozen=True)
class State:
    """A placement on the way of the search.

    Attributes:
        keep_float: Nodes named to be left float, with the reason.
        on: Gates that still quantize.
        floats: Nodes that run in float in the plan and not in the plan that the search began with.
        price: Sum of their prices.
        share: Their share of the multiply-accumulates.
    """

    keep_float: Mapping[str, str]
    on: frozenset[int]
    floats: frozenset[str]
    price: float
    share: float


class Board:
    """Knows the graph, the prices and the planner.

    Args:
        model: The float model.
        plan: The plan that the search begins with.
        gated: The gated model of that plan.
        replan: Plans anew with further nodes left float.
        cost: Price of leaving a node float, by name; missing ones are free.
        work: Multiply-accumulates by name.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        plan: PlacementPlan,
        gated: GatedModel,
        replan: Replan,
        *,
        cost: Mapping[str, float],
        work: Mapping[str, float],
    ) -> None:
        self.gated = gated
        self.work = work
        self.cost = cost
        self._replan = replan
        self._kinds = {n.node: n.kind for n in plan.nodes}
        self._producers = {name: node for node in model.graph.node for name in node.output}
        self._readers: dict[str, list[str]] = {}
        for d in plan.decisions:
            self._readers.setdefault(d.edge.value, []).append(d.edge.consumer)
        self._integer_before = {name for name, kind in self._kinds.items() if kind in _INTEGER}

    def state(self, keep_float: Mapping[str, str]) -> State:
        """Returns what becomes of the net with these nodes left float."""
        plan = self._replan(keep_float)
        left = {n.node for n in plan.nodes if n.kind is Kind.FLOAT and n.node in self._integer_before}
        return State(
            keep_float=dict(keep_float),
            on=self.gated.on_in(plan) & self.gated.everything,
            floats=frozenset(left),
            price=sum(self.cost.get(name, 0.0) for name in left),
            share=float_share(self.work, left),
        )

    def moves(self, unit: TensorSensitivity) -> list[frozenset[str]]:
        """Returns the sets of nodes whose being float may make a tensor float, smallest first."""
        if unit.kind is not GateKind.ACTIVATION:
            return [frozenset(n for n in unit.consumers if n in self._integer_before)]
        values = [self.gated.gates[i].value for i in sorted(unit.gates)]
        before = {name for value in values for name in self._before(value)}
        behind = {r for value in values for r in self._readers.get(value, ()) if self._kinds.get(r) is Kind.INTEGER}
        sets = [frozenset(before), frozenset(behind), frozenset(before | behind)]
        return [s for s in dict.fromkeys(sets) if s]

    def _before(self, value: str) -> Iterable[str]:
        """Yields the integer node behind which a value is quantized, looking through the activation it absorbs."""
        node = self._producers.get(value)
        while node is not None and self._kinds.get(node.name) is Kind.ABSORBED:
            makers = [self._producers[name] for name in node.input if name in self._producers]
            node = makers[0] if len(makers) == 1 else None
        if node is not None and self._kinds.get(node.name) is Kind.INTEGER:
            yield str(node.name)


def greedy_path(board: Board, units: Sequence[TensorSensitivity], start: State, *, limit: float) -> list[State]:
    """Returns placements, each with a move more than the one before: the most error removed for its price.

    A move's worth can only shrink while others are made, so it is looked at again only when it comes first (lazy
    greedy, Minoux 1978).

    Args:
        board: The net.
        units: Its tensors with their errors.
        start: Where to begin; the first of the result.
        limit: Largest share of the multiply-accumulates in float, 0..1.
    """
    total = sum(u.error for u in units)
    fee = _PER_NODE * sum(board.cost.values())
    path = [start]
    queue: list[_Move] = []
    for unit in units:
        if unit.exact and unit.error >= _LEAST_GAIN * total:
            for nodes in board.moves(unit):
                if not any(m.nodes == nodes for m in queue):
                    queue.append(_Move(nodes, _because(unit, total)))
    while queue and len(path) <= _MOST_STEPS:
        now = path[-1]
        queue.sort(key=lambda m: (-m.worth, m.price, sorted(m.nodes)))
        best = queue.pop(0)
        if best.nodes <= now.keep_float.keys():
            continue
        after = board.state({**dict.fromkeys(sorted(best.nodes), best.reason), **now.keep_float})
        gain = sum(u.error for u in units if u.gates & now.on and not u.gates & after.on)
        if gain < _LEAST_GAIN * total or after.share > limit:
            continue
        best.price = max(after.price - now.price, 0.0) + fee * len(best.nodes - now.keep_float.keys())
        worth = gain / best.price if best.price > 0 else float("inf")
        if worth < best.worth and queue and worth < queue[0].worth:
            best.worth = worth
            queue.append(best)
            continue
        path.append(after)
        for move in queue:  # what could not gain alone may gain beside this one
            move.worth = float("inf") if move.nodes & best.nodes else move.worth
    return path


@dataclass
class _Move:
    """Nodes to be left float together, with the worth that they had when last looked at."""

    nodes: frozenset[str]
    reason: str
    worth: float = float("inf")
    price: float = 0.0


def _because(unit: TensorSensitivity, total: float) -> str:
    what = "weights" if unit.kind is GateKind.WEIGHT else "tensor"
    return f"quantizing {what} '{unit.value}' alone makes {100 * unit.error / total:.2g} % of the summed output errors"
