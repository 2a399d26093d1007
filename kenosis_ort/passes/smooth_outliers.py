"""SmoothQuant, evaluated on the whole net; the algebra and its source: `kenosis_ort.accuracy.smooth_quant`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import onnx

from kenosis_ort.accuracy.smooth_quant import scaled_by_smoothing, smooth, values_for_smoothing
from kenosis_ort.passes.contract import Candidate, Context, Skipped, Statistics, WeightPass, changed_weights
from kenosis_ort.passes.settings import between
from kenosis_ort.passes.state import State


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
        nodes, insert = set(context.nodes), context.inserts_scales
        found = values_for_smoothing(state.prepared.proto, nodes=nodes, insert=insert)
        return {value: axis for value, axis in found.items() if value not in state.rescaled}

    def scaled(self, model: onnx.ModelProto, *, nodes: Collection[str], insert: bool) -> Mapping[str, int]:
        return scaled_by_smoothing(model, nodes=nodes, insert=insert)

    def apply(self, state: State, statistics: Statistics, context: Context) -> Candidate | Skipped:
        prepared = state.prepared
        found = smooth(
            prepared.proto,
            peaks=statistics,
            alpha="auto" if self.smooth == "off" else self.smooth,
            nodes=set(context.nodes),
            insert=context.inserts_scales,
            per_channel=context.per_channel,
        )
        if not found.layers:
            return Skipped("nothing to gain by prediction")
        changed = replace(
            state,
            prepared=changed_weights(prepared, found.model, found.notes),
            rescaled={**state.rescaled, **found.rescaled},
        )
        return Candidate(changed, f"{len(found.layers)} places")
