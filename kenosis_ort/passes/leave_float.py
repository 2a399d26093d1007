"""Nodes left float until an accuracy budget holds: the fewest and cheapest.

Greedy: tensors are ranked by what quantizing them alone costs at the outputs; of the sets of nodes that would make a
bad tensor float, the one with the most error removed for its price is taken, again and again. That orders the nodes.
How many of them are needed is found by bisection over real builds, scored on feeds that the ranking has not seen.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final

import onnx

from kenosis_ort.accuracy.metric import OutputError, is_within
from kenosis_ort.errors import UnsupportedModelError
from kenosis_ort.passes import float_search
from kenosis_ort.passes.contract import Candidate, Context, Pass, Skipped, State, Statistics, noted
from kenosis_ort.passes.float_search import FloatSet
from kenosis_ort.passes.gates import GatedModel
from kenosis_ort.passes.recipe import setting
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.runtime.session import HERE, Executor

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
    replan: float_search.Replan,
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
        errors = float_search.errors_of(gated, feeds, error)
        units = float_search.tensor_sensitivity(gated.gates, errors, on=gated.on_in(plan), cutoff=_CUTOFF)
        board = float_search.Board(float_model, plan, gated, replan)
        # Bisect the path of moves; beyond the limit only to say what would be needed.
        path = float_search.greedy_path(board, units, board.state(keep_float), limit=max_float_share)
        best = trials.cheapest(path)
        if best is not None:
            return best, ""
        best = max(trials.made, key=lambda t: (-t.loss, -t.price))
        beyond = trials.cheapest(float_search.greedy_path(board, units, path[-1], limit=1.0))
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
