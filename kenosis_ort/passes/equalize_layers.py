"""Cross-layer equalization, evaluated on the whole net.

It is exact in float, and by predicted noise it never loses. Prediction is not enough: it sees neither the scales of the
other values nor what samples beyond the few that were looked at do to a range (O-Net of MTCNN 25.9 dB with predicted
equalization, 38.4 without). The algebra and its source: `kenosis_ort.accuracy.equalization`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import onnx

from kenosis_ort.accuracy.equalization import equalize, scaled_by_equalization, values_for_equalization
from kenosis_ort.passes.contract import Candidate, Context, Skipped, Statistics, WeightPass, changed_weights
from kenosis_ort.passes.state import State


@dataclass(frozen=True)
class Equalization(WeightPass):
    """Channels of neighbouring layers are scaled so that one scale for all of them loses less.

    Attributes:
        equalize: Cross-layer equalization of channels.
    """

    name: ClassVar[str] = "equalize"
    title: ClassVar[str] = "Equalization"

    equalize: bool = True

    @property
    def wanted(self) -> bool:
        return self.equalize

    def points(self, state: State, context: Context) -> Mapping[str, int]:
        return values_for_equalization(state.prepared.proto, nodes=set(context.nodes))

    def scaled(self, model: onnx.ModelProto, *, nodes: Collection[str], insert: bool) -> Mapping[str, int]:
        return scaled_by_equalization(model, nodes=nodes)

    def apply(self, state: State, statistics: Statistics, context: Context) -> Candidate | Skipped:
        peaks = {**statistics, **context.known}
        prepared = state.prepared
        found = equalize(prepared.proto, peaks=peaks, nodes=set(context.nodes), per_channel=context.per_channel)
        if not found.pairs:
            return Skipped("nothing to gain by prediction")
        changed = replace(
            state,
            prepared=changed_weights(prepared, found.model, found.notes),
            rescaled={**state.rescaled, **found.rescaled},
        )
        return Candidate(changed, f"{len(found.pairs)} places")
