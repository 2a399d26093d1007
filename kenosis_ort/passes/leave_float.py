"""Nodes left float until an accuracy budget holds: the fewest and cheapest.

Greedy: tensors are ranked by what quantizing them alone costs at the outputs; of the sets of nodes that would make a
bad tensor float, the one with the most error removed for its price is taken, again and again. That orders the nodes.
How many of them are needed is found by bisection over real builds, scored on feeds that the ranking has not seen.

Tensors are ranked as `passes.gates` measures them.

One Conv left float alone still reads its quantized input and hands on a quantized output: only its weights gain. A bad
activation becomes float only where the node behind which it is quantized and all that read it are left float
together. What a set changes is asked of the planner, and read off the gates that vanish. What a node costs in float if
nobody says better: its multiply-accumulates, and a little for cheap operators.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple

import onnx

from kenosis_ort.accuracy.metric import OutputError, is_within
from kenosis_ort.errors import UnsupportedModelError
from kenosis_ort.graph.constants import LAYERS
from kenosis_ort.graph.view import GraphView
from kenosis_ort.passes.contract import Candidate, Context, Pass, Skipped, State, Statistics, noted
from kenosis_ort.passes.gates import GatedModel, GateKind, TensorSensitivity, errors_of, tensor_sensitivity
from kenosis_ort.passes.recipe import setting
from kenosis_ort.plan import Kind, PlacementPlan
from kenosis_ort.runtime.session import HERE, Executor

Replan = Callable[[Mapping[str, str]], PlacementPlan]
"""The plan that leaves further nodes float: node name to reason."""


_BY_ELEMENT = 16.0
"""Multiply-accumulates that take as long as one element of a cheap operator: such are bound by memory, not arithmetic.

At 4 bytes read and 4 written and 10 GB/s an element takes 0.8 ns, in which a float kernel does some 20 to 60 products.
"""


def multiply_accumulates(model: onnx.ModelProto) -> dict[str, float]:
    """The multiply-accumulates by sample of every node with constant weights, by node name.

    Args:
        model: A model with shape annotations. Symbolic dimensions count as 1. Not changed.
    """
    view = GraphView(model)
    found: dict[str, float] = {}
    for node in view.nodes:
        weight = node.inputs[1] if node.op_type in LAYERS and len(node.inputs) > 1 else None
        if weight is not None and view.is_constant(weight):
            found[str(node.name)] = float(view.multiply_accumulates(node))
    return found


def default_cost(model: onnx.ModelProto) -> dict[str, float]:
    """A price by node name: multiply-accumulates, and 16 for every element that another node writes."""
    view = GraphView(model)
    light = {str(node.name): _BY_ELEMENT * sum(view.elements(value) for value in node.outputs) for node in view.nodes}
    return {**light, **multiply_accumulates(model)}


def float_share(work: Mapping[str, float], nodes: set[str]) -> float:
    """The share of the work that some nodes do, 0..1."""
    total = sum(work.values())
    return sum(work.get(name, 0.0) for name in nodes) / total if total else 0.0


_LEAST_GAIN = 0.01  # share of all errors that a move has to remove, and a tensor has to make to be worth one
_PER_NODE = 0.002  # share of all prices added for every node of a move, so that few nodes are preferred
_MOST_STEPS = 48
_INTEGER = (Kind.INTEGER, Kind.PASS_THROUGH)


class FloatSet(NamedTuple):
    """A placement on the way of the search.

    Attributes:
        keep_float: Nodes named to be left float, with the reason.
        on: Gates that still quantize.
        floats: Nodes that run in float in the plan and not in the plan that the search began with, dearest first.
        price: Sum of their prices.
        share: Their share of the multiply-accumulates.
        loss: What the net built so loses, once it was measured.
    """

    keep_float: Mapping[str, str]
    on: frozenset[int]
    floats: tuple[str, ...]
    price: float
    share: float
    loss: float = math.nan


class Board:
    """Knows the graph, the prices and the planner.

    Args:
        model: The float model.
        plan: The plan that the search begins with.
        gated: The gated model of that plan.
        replan: Plans anew with further nodes left float.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        plan: PlacementPlan,
        gated: GatedModel,
        replan: Replan,
    ) -> None:
        self.gated = gated
        self.work = multiply_accumulates(model)
        self.cost = default_cost(model)
        self._replan = replan
        self._kinds = {n.node: n.kind for n in plan.nodes}
        self._producers = {name: node for node in model.graph.node for name in node.output}
        self._readers: dict[str, list[str]] = {}
        for d in plan.decisions:
            self._readers.setdefault(d.edge.value, []).append(d.edge.consumer)
        self._integer_before = {name for name, kind in self._kinds.items() if kind in _INTEGER}

    def state(self, keep_float: Mapping[str, str]) -> FloatSet:
        """Error and cost of the net with these nodes left float."""
        plan = self._replan(keep_float)
        left = {n.node for n in plan.nodes if n.kind is Kind.FLOAT and n.node in self._integer_before}
        return FloatSet(
            keep_float=dict(keep_float),
            on=self.gated.on_in(plan),
            floats=tuple(sorted(left, key=lambda name: (-self.cost.get(name, 0.0), name))),
            price=sum(self.cost.get(name, 0.0) for name in left),
            share=float_share(self.work, left),
        )

    def changes(self, unit: TensorSensitivity) -> list[frozenset[str]]:
        """The sets of nodes whose being float may make a tensor float, smallest first."""
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


def greedy_path(board: Board, units: Sequence[TensorSensitivity], start: FloatSet, *, limit: float) -> list[FloatSet]:
    """Placements, each with a move more than the one before: the most error removed for its price.

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
            for nodes in board.changes(unit):
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


_log = logging.getLogger(__name__)

Builder = Callable[[Mapping[str, str]], tuple[onnx.ModelProto, PlacementPlan]]
"""Quantizes with further nodes left float (node name to reason); returns the model and its plan."""
Loss = Callable[[onnx.ModelProto], float]
"""Loss of a quantized model against the float model on samples that no ranking has seen."""

_CUTOFF: Final = 0.03  # tensors that cost less than this share of the error are not looked for one by one
_RANKING_FEEDS: Final = 2
_SHOWN: Final = 6


def search_mixed_precision(
    float_model: onnx.ModelProto,
    build: Builder,
    *,
    feeds: Sequence[Mapping[str, Any]],
    loss: Loss,
    error: OutputError,
    budget: float,
    max_float_share: float,
    replan: Replan,
    keep_float: Mapping[str, str],
    custom_op_libraries: Sequence[str] = (),
    executor: Executor = HERE,
) -> tuple[FloatSet, str]:
    """Searches the nodes to leave float.

    Args:
        float_model: The float model that ``build`` quantizes. Not changed.
        build: Quantizes with given nodes left float. It has to see to it that they are float in the runtime's graph.
        feeds: Calibration feeds for the ranking; a handful of single samples is enough.
        loss: What the budget is about, measured on samples apart from ``feeds``.
        error: The error at the outputs, for the ranking.
        budget: What may be lost, in the unit of `loss`.
        max_float_share: Largest share of the multiply-accumulates that may be moved to float, 0..1.
        replan: As ``build`` but without quantizing; much faster.
        keep_float: Nodes to leave float from the start.
        custom_op_libraries: Libraries with custom operators to register.
        executor: Runs the model whose tensors are ranked.

    Returns:
        The cheapest placement that keeps the budget, or the best within the limits; and for that what would be needed,
        or what is the best there is, else "".

    Raises:
        OptionError: The caller's metric is at fault.
        VerificationError: The runtime refuses a model.
    """
    quantized, plan = build(keep_float)
    trials = _Trials(build, loss, budget)
    first = trials.add(FloatSet(keep_float, frozenset(), (), 0.0, 0.0), quantized)
    if is_within(first.loss, budget):
        return first, ""
    # Rank the tensors on the gated model.
    with GatedModel(float_model, quantized, custom_op_libraries=custom_op_libraries, executor=executor) as gated:
        del quantized
        errors = errors_of(gated, feeds, error)
        board = Board(float_model, plan, gated, replan)
        # Bisect the path of moves; what is left beside the worst tensors is ranked anew without them, while that helps.
        path, best, least = [board.state(keep_float)], None, math.inf
        while best is None and trials.made[-1].loss < least:
            least = trials.made[-1].loss
            units = tensor_sensitivity(gated.gates, errors, on=path[-1].on, cutoff=_CUTOFF)
            path = greedy_path(board, units, path[-1], limit=max_float_share)
            best = trials.cheapest(path)
        if best is not None:
            return best, ""
        best = max(trials.made, key=lambda t: (-t.loss, -t.price))
        beyond = trials.cheapest(greedy_path(board, units, path[-1], limit=1.0))
    return best, trials.reachable(best, beyond, max_float_share)


class _Trials:
    """Builds and measures placements, each once. No model is kept: of large nets there would be too many."""

    def __init__(self, build: Builder, loss: Loss, budget: float) -> None:
        self._build, self._loss, self._budget = build, loss, budget
        self.made: list[FloatSet] = []

    def add(self, state: FloatSet, quantized: onnx.ModelProto | None) -> FloatSet:
        """Measures a placement; one that could not be built loses everything."""
        self.made.append(state._replace(loss=math.inf if quantized is None else self._loss(quantized)))
        return self.made[-1]

    def cheapest(self, path: Sequence[FloatSet]) -> FloatSet | None:
        """The first placement of a path that keeps the budget, found by bisection; None if the last does not."""
        low, high = 0, len(path) - 1
        found = self._trial(path[high])
        if not is_within(found.loss, self._budget):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            trial = self._trial(path[middle])
            if is_within(trial.loss, self._budget):
                found, high = trial, middle
            else:
                low = middle
        return found

    def _trial(self, state: FloatSet) -> FloatSet:
        for known in self.made:
            if known.keep_float.keys() == state.keep_float.keys():
                return known
        try:
            return self.add(state, self._build(state.keep_float)[0])
        except UnsupportedModelError as error:  # what is left float may move a Q to a tensor without a range
            _log.info("a placement cannot be built: %s", error)
            return self.add(state, None)

    def reachable(self, best: FloatSet, beyond: FloatSet | None, limit: float) -> str:
        """Advice: the budget that can be met, or the best result that was found."""
        text = f"With at most {100 * limit:g} % of the multiply-accumulates in float the loss is {best.loss:.3g}"
        if beyond is not None:
            nodes = ", ".join(f"'{name}'" for name in sorted({*beyond.floats} - {*best.floats})[:_SHOWN])
            return f"{text}; the budget holds with {100 * beyond.share:.3g} % in float, among them {nodes}"
        top = min(self.made, key=lambda t: t.loss)
        return f"{text}; the least found is {top.loss:.3g} with {100 * top.share:.3g} % in float"


@dataclass(frozen=True)
class MixedPrecision(Pass):
    """The cheapest nodes left float with which the budget holds.

    Attributes:
        mixed_precision: Nodes are left float until ``accuracy_budget`` holds.
        accuracy_budget: Loss allowed on held-out data in what is measured: 0.005 is half a percent of agreement with
            the float model, or half a point of the caller's metric.
        max_float_share: Share of the multiply-accumulates that may be left float, 0 to 1.
    """

    name: ClassVar[str] = "mixed_precision"
    title: ClassVar[str] = "Mixed precision"

    mixed_precision: bool = setting("mixed_precision")
    accuracy_budget: float = setting("accuracy_budget")
    max_float_share: float = setting("max_float_share")

    def apply(self, state: State, statistics: Statistics, context: Context) -> Candidate | Skipped:
        build = state.built

        def make(keep: Mapping[str, str]) -> tuple[onnx.ModelProto, PlacementPlan]:
            made = context.prove(build.table, keep, build.corrections)  # its repair may leave a neighbour float too
            return made.quantized, made.plan

        found, reachable = search_mixed_precision(
            state.prepared.proto,
            make,
            feeds=context.fit[:_RANKING_FEEDS],
            loss=partial(context.evaluator.loss, budget=self.accuracy_budget),
            error=context.evaluator.output_error,
            budget=self.accuracy_budget,
            max_float_share=self.max_float_share,
            replan=lambda keep: context.plan(build.table, keep),
            keep_float=build.keep_float,
            custom_op_libraries=context.custom_op_libraries,
            executor=context.executor,
        )
        notes = _notes(found, self.accuracy_budget, reachable)
        if not found.floats:
            return Skipped("; ".join(notes) or "the budget holds without", notes)
        left = context.with_placement(state, keep_float=found.keep_float)
        return Candidate(noted(left, notes), "; ".join(notes), decided=True)


def _notes(found: FloatSet, budget: float, reachable: str) -> tuple[str, ...]:
    notes, floats = [], found.floats
    if floats:
        names = ", ".join(f"'{name}'" for name in floats[:_SHOWN])
        more = f" and {len(floats) - _SHOWN} more" if len(floats) > _SHOWN else ""
        notes.append(f"Left float for accuracy: {names}{more} ({100 * found.share:.1f} % of the multiply-accumulates).")
    if reachable:
        notes.append(f"The accuracy budget of {budget:g} does not hold: {reachable}.")
    return tuple(notes)
