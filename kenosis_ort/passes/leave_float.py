"""Nodes left float until a budget holds; the search and its source: `kenosis_ort.passes.leave_float`.

Leaves the fewest and cheapest nodes float until an accuracy budget holds.

Greedy: tensors are ranked by what quantizing them alone costs at the outputs; of the sets of nodes that would make a
bad tensor float, the one with the most error removed for its price is taken, again and again. That orders the nodes.
How many of them are needed is found by bisection over real builds, scored on feeds that the ranking has not seen.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final

import onnx

from kenosis_ort.accuracy.metric import Budget, OutputError
from kenosis_ort.errors import CalibrationError, UnsupportedModelError
from kenosis_ort.passes.contract import Candidate, Context, Pass, Skipped, State, Statistics, between, noted
from kenosis_ort.passes.float_search import (
    Board,
    FloatSet,
    Replan,
    SensitivityProbe,
    default_cost,
    float_share,
    greedy_path,
    multiply_accumulates,
    tensor_sensitivity,
)
from kenosis_ort.passes.gates import GatedModel
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.runtime.session import HERE, Executor

_log = logging.getLogger(__name__)

Builder = Callable[[Mapping[str, str]], tuple[onnx.ModelProto, PlacementPlan]]
"""Quantizes with further nodes left float (node name to reason); returns the model and its plan."""
Loss = Callable[[onnx.ModelProto], float]
"""Loss of a quantized model against the float model on samples that no ranking has seen."""

_CUTOFF = 0.03  # tensors that cost less than this share of the error are not looked for one by one


@dataclass(frozen=True)
class LeftFloat:
    """One node that the search left float.

    Attributes:
        node: Its name.
        op_type: Its operator.
        price: What it costs, in the unit of the prices.
        share: Its share of the net's multiply-accumulates, 0..1.
        reason: Why, in one sentence.
    """

    node: str
    op_type: str
    price: float
    share: float
    reason: str


@dataclass(frozen=True)
class MixedPlacement:
    """Result of the search: the cheapest placement that keeps the budget, or the best within the limits.

    Attributes:
        left_float: The nodes that run in float now and did not before, dearest first.
        keep_float: Node name to reason, for the builder: gives the same result again.
        loss_before: What the quantized model that the search began with loses against the float model.
        loss: What it loses now.
        budget: The budget.
        met: Whether it holds.
        float_share: Share of the multiply-accumulates that the search moved to float, 0..1.
        reachable: Where the budget does not hold: what would be needed, or what is the best there is.
        quantized: The model.
        plan: Its plan.
        builds: Number of models built.
        sets: Number of sets of tensors measured.
    """

    left_float: tuple[LeftFloat, ...]
    keep_float: Mapping[str, str]
    loss_before: float
    loss: float
    budget: Budget
    met: bool
    float_share: float
    reachable: str | None = None
    quantized: onnx.ModelProto = field(default_factory=onnx.ModelProto, compare=False, repr=False)
    plan: PlacementPlan = field(default_factory=lambda: PlacementPlan(""), compare=False, repr=False)
    builds: int = 0
    sets: int = 0

    def __str__(self) -> str:
        state = "holds" if self.met else "does not hold"
        head = (
            f"budget {self.budget} {state}: loss {self.loss:.3g} (before {self.loss_before:.3g}), "
            f"{len(self.left_float)} nodes with {100 * self.float_share:.2g} % of the multiply-accumulates left float"
        )
        lines = [head]
        lines += [f"  {n.op_type} '{n.node}', {100 * n.share:.2g} %: {n.reason}" for n in self.left_float]
        return "\n".join([*lines, self.reachable] if self.reachable else lines)


@dataclass(frozen=True)
class _Trial:
    """A placement that was built and measured. Its model is not kept: of large nets there would be too many."""

    state: FloatSet
    loss: float


def search_mixed_precision(
    float_model: onnx.ModelProto,
    build: Builder,
    *,
    feeds: Sequence[Mapping[str, Any]],
    loss: Loss,
    error: OutputError | None = None,
    budget: Budget | None = None,
    cost: Mapping[str, float] | None = None,
    max_float_share: float = 0.05,
    replan: Replan | None = None,
    keep_float: Mapping[str, str] | None = None,
    threads: int = 1,
    custom_op_libraries: Sequence[str] = (),
    executor: Executor = HERE,
) -> MixedPlacement:
    """Searches the nodes to leave float.

    Args:
        float_model: The float model that ``build`` quantizes. Not changed.
        build: Quantizes with given nodes left float. It has to see to it that they are float in the runtime's graph.
        feeds: Calibration feeds for the ranking; a handful of single samples is enough.
        loss: What the budget is about, measured on samples apart from ``feeds``.
        error: The error at the outputs, for the ranking; None measures each output by its kind.
        budget: What may be lost; half a percent by default.
        cost: Price of a node in float, by name; multiply-accumulates by default.
        max_float_share: Largest share of the multiply-accumulates that may be moved to float, 0..1.
        replan: As ``build`` but without quantizing; much faster. None uses ``build``.
        keep_float: Nodes to leave float from the start.
        threads: Threads of the sessions.
        custom_op_libraries: Libraries with custom operators to register.
        executor: Runs the model whose tensors are ranked.

    Raises:
        CalibrationError: There are no feeds.
        OptionError: The budget is no number, or the caller's metric is at fault.
        VerificationError: The runtime refuses a model.
    """
    if not feeds:
        raise CalibrationError(
            "mixed precision needs calibration feeds to rank tensors on", fix="give at least two calibration samples"
        )
    allowed = budget or Budget()
    trials = _Trials(build, loss, allowed)
    start = dict(keep_float or {})
    first = trials.trial(FloatSet(start, frozenset(), frozenset(), 0.0, 0.0))
    if trials.hold(first):
        return _Summary(float_model, trials, first, {}).result(first)
    price = dict(cost) if cost is not None else default_cost(float_model)
    work = multiply_accumulates(float_model)
    summary = _Summary(float_model, trials, first, price)
    quantized, plan = trials.model(first)
    libraries = custom_op_libraries
    with GatedModel(float_model, quantized, threads=threads, custom_op_libraries=libraries, executor=executor) as gated:
        del quantized
        probe = SensitivityProbe(gated, feeds, error=error)
        units = tensor_sensitivity(probe, on=gated.on_in(plan), cutoff=_CUTOFF)
        board = Board(float_model, plan, gated, replan or (lambda keep: build(keep)[1]), cost=price, work=work)
        summary.sets = probe.runs
        path = greedy_path(board, units, board.state(start), limit=max_float_share)
        best = _cheapest(path, trials)
        if best is not None:
            return summary.result(best)
        best = max(trials.made, key=lambda t: (-t.loss, -t.state.price))
        path = greedy_path(board, units, path[-1], limit=1.0)
        beyond = _cheapest(path, trials)
    return summary.result(best, reachable=_reachable(best, beyond, trials, max_float_share))


def _cheapest(path: Sequence[FloatSet], trials: _Trials) -> _Trial | None:
    """The first placement of a path that keeps the budget, found by bisection; None if the last does not."""
    low, high = 0, len(path) - 1
    last = trials.trial(path[high])
    if not trials.hold(last):
        return None
    found = last
    while high - low > 1:
        middle = (low + high) // 2
        trial = trials.trial(path[middle])
        if trials.hold(trial):
            found, high = trial, middle
        else:
            low = middle
    return found


class _Trials:
    """Builds and measures placements, each once."""

    def __init__(self, build: Builder, loss: Loss, budget: Budget) -> None:
        self._build = build
        self._loss = loss
        self.budget = budget
        self.made: list[_Trial] = []
        self.builds = 0
        self._latest: tuple[_Trial, onnx.ModelProto, PlacementPlan] | None = None

    def hold(self, trial: _Trial) -> bool:
        """Whether a placement keeps the budget."""
        return self.budget.holds(trial.loss)

    def trial(self, state: FloatSet) -> _Trial:
        """A placement with its loss; one that cannot be built, where the first could, loses everything.

        What is left float may move another Q to a tensor whose range was not collected.
        """
        for known in self.made:
            if known.state.keep_float.keys() == state.keep_float.keys():
                return known
        self.builds += 1
        try:
            made = self._build(state.keep_float)
        except UnsupportedModelError as error:
            if not self.made:
                raise
            _log.info("a placement cannot be built: %s", error)
            self.made.append(_Trial(state, math.inf))
            return self.made[-1]
        self.made.append(_Trial(state, self._loss(made[0])))
        self._latest = (self.made[-1], *made)
        return self.made[-1]

    def model(self, trial: _Trial) -> tuple[onnx.ModelProto, PlacementPlan]:
        """The model and plan of a trial, built again unless it was the latest."""
        if self._latest is None or self._latest[0] is not trial:
            self._latest = (trial, *self._build(trial.state.keep_float))
            self.builds += 1
        return self._latest[1], self._latest[2]


class _Summary:
    """Facts that all results share."""

    def __init__(self, model: onnx.ModelProto, trials: _Trials, first: _Trial, cost: Mapping[str, float]) -> None:
        self._op_types = {node.name: node.op_type for node in model.graph.node}
        self._work = multiply_accumulates(model)
        self._trials = trials
        self._first = first
        self._cost = cost
        self.sets = 0

    def result(self, best: _Trial, reachable: str | None = None) -> MixedPlacement:
        named = best.state.keep_float
        quantized, plan = self._trials.model(best)
        left = [
            LeftFloat(
                node=name,
                op_type=self._op_types.get(name, ""),
                price=self._cost.get(name, 0.0),
                share=float_share(self._work, {name}),
                reason=named.get(name, "what it reads or what reads it is float"),
            )
            for name in best.state.floats
        ]
        found = MixedPlacement(
            left_float=tuple(sorted(left, key=lambda n: (-n.price, n.node))),
            keep_float=named,
            loss_before=self._first.loss,
            loss=best.loss,
            budget=self._trials.budget,
            met=self._trials.hold(best),
            float_share=best.state.share,
            reachable=reachable,
            quantized=quantized,
            plan=plan,
            builds=self._trials.builds,
            sets=self.sets,
        )
        _log.info("%s", found)
        return found


def _reachable(best: _Trial, beyond: _Trial | None, trials: _Trials, limit: float) -> str:
    """Advice: the budget that can be met, or the best result that was found."""
    text = f"With at most {100 * limit:g} % of the multiply-accumulates in float the loss is {best.loss:.3g}"
    if beyond is not None:
        nodes = ", ".join(f"'{name}'" for name in sorted(beyond.state.floats - best.state.floats)[:_SHOWN])
        return f"{text}; the budget holds with {100 * beyond.state.share:.3g} % in float, among them {nodes}."
    top = min(trials.made, key=lambda t: t.loss)
    return f"{text}; the least found is {top.loss:.3g} with {100 * top.state.share:.3g} % in float."


_RANKING_FEEDS: Final = 2
_SHOWN: Final = 6


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

    mixed_precision: bool = False
    accuracy_budget: float = between(0, 1, default=0.005)
    max_float_share: float = between(0, 1, default=0.05)

    @property
    def wanted(self) -> bool:
        return self.mixed_precision

    def apply(self, state: State, statistics: Statistics, context: Context) -> Candidate | Skipped:
        build = state.built

        def make(keep: Mapping[str, str]) -> tuple[onnx.ModelProto, PlacementPlan]:
            made = context.prove(build.float_model, build.table, keep)  # its repair may leave a neighbour float too
            return made.quantized, made.plan

        found = search_mixed_precision(
            state.prepared.proto,
            make,
            feeds=context.fit[:_RANKING_FEEDS],
            loss=partial(context.evaluator.loss, budget=self.accuracy_budget),
            error=context.evaluator.output_error,
            budget=Budget(self.accuracy_budget),
            max_float_share=self.max_float_share,
            replan=lambda keep: context.plan(build.float_model, build.table, keep),
            keep_float=build.keep_float,
            custom_op_libraries=context.custom_op_libraries,
            executor=context.executor,
        )
        notes = _notes(found)
        if not found.left_float:
            return Skipped("the budget holds without" if found.met else "; ".join(notes), notes)
        left = context.with_placement(state, keep_float=found.keep_float)
        return Candidate(noted(left, notes), "; ".join(notes), decided=True)


def _notes(found: MixedPlacement) -> tuple[str, ...]:
    notes = []
    if found.left_float:
        names = ", ".join(f"'{node.node}'" for node in found.left_float[:_SHOWN])
        more = f" and {len(found.left_float) - _SHOWN} more" if len(found.left_float) > _SHOWN else ""
        share = 100 * found.float_share
        notes.append(f"Left float for accuracy: {names}{more} ({share:.1f} % of the multiply-accumulates).")
    if not found.met:
        notes.append(f"The accuracy budget of {found.budget} does not hold: {found.reachable or 'no more to gain'}.")
    return tuple(notes)
