"""SmoothQuant, evaluated on the whole net; the algebra and its source: `kenosis_ort.accuracy.smooth_quant`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Literal

import onnx

from kenosis_ort.accuracy.smooth_quant import Smoothed, scaled_by_smoothing, smooth, values_for_smoothing
from kenosis_ort.passes.contract import (
    Candidate,
    Context,
    Skipped,
    State,
    Statistics,
    WeightPass,
    between,
    changed_weights,
)

_WORTH: Final = 0.8  # of the error is left with a Mul at run time: 1 dB, without which none is put in


@dataclass(frozen=True)
class SmoothQuant(WeightPass):
    """Outlier channels of a linear layer's input move into its weights.

    Attributes:
        smooth: SmoothQuant's alpha, 0 to 1, or ``auto``, where each layer's is chosen by predicted noise, none among
            the candidates; ``off`` for no smoothing.
    """

    name: ClassVar[str] = "smooth"
    title: ClassVar[str] = "SmoothQuant"

    smooth: float | Literal["auto", "off"] = between(0, 1, default="auto")

    @property
    def wanted(self) -> bool:
        return self.smooth != "off"

    def points(self, state: State, context: Context) -> Mapping[str, int]:
        nodes = set(context.nodes)
        found = values_for_smoothing(state.prepared.proto, nodes=nodes, insert=self._inserts(context))
        return {value: axis for value, axis in found.items() if value not in state.rescaled}

    def scaled(self, model: onnx.ModelProto, *, nodes: Collection[str], insert: bool) -> Mapping[str, int]:
        return scaled_by_smoothing(model, nodes=nodes, insert=insert or None)

    def apply(self, state: State, statistics: Statistics, context: Context) -> Candidate | Skipped:
        insert = self._inserts(context)
        found = self._smoothed(state, statistics, context, insert=insert)
        if not found.layers:
            return Skipped("nothing to gain by prediction")
        changed = _changed(state, found)
        if found.inserted and insert is None:
            folded = self._smoothed(state, statistics, context, insert=False)
            without = _changed(state, folded)
            errors = [context.evaluator.score(context.build_of(each).quantized).error for each in (changed, without)]
            if not errors[0] < _WORTH * errors[1]:
                if not folded.layers:
                    return Skipped("what there is to gain takes a Mul at run time, and is less than 1 dB")
                found, changed = folded, without
        return Candidate(changed, f"{len(found.layers)} places")

    def _inserts(self, context: Context) -> bool | None:
        """Whether Muls are put in: as the caller says, else where they pay, between nodes in float."""
        if context.inserts_scales:
            return True
        return None if context.mixes and self.name not in context.forced else False

    def _smoothed(self, state: State, statistics: Statistics, context: Context, *, insert: bool | None) -> Smoothed:
        return smooth(
            state.prepared.proto,
            peaks=statistics,
            alpha="auto" if self.smooth == "off" else self.smooth,
            nodes=set(context.nodes),
            insert=insert,
            per_channel=context.per_channel,
        )


def _changed(state: State, found: Smoothed) -> State:
    return replace(
        state,
        prepared=changed_weights(state.prepared, found.model, found.notes),
        rescaled={**state.rescaled, **found.rescaled},
    )
