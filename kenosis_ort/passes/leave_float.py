"""Nodes left float until a budget holds; the search and its source: `kenosis_ort.accuracy.mixed_precision`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final

import onnx

from kenosis_ort.accuracy.metric import Budget
from kenosis_ort.accuracy.mixed_precision import MixedPlacement, search_mixed_precision
from kenosis_ort.passes.contract import Candidate, Context, Pass, Skipped, Statistics
from kenosis_ort.passes.settings import between
from kenosis_ort.passes.state import State, noted
from kenosis_ort.plan import PlacementPlan

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
