"""Linear layers that read rows brought to one size; algebra and source: `kenosis_ort.accuracy.row_scales`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import numpy as np

from kenosis_ort.accuracy.row_scales import RowNoise, row_noise, with_row_scales
from kenosis_ort.calibration.channels import Rescaling
from kenosis_ort.passes.contract import Candidate, Context, Skipped, Statistics, WeightPass, changed_weights
from kenosis_ort.passes.evaluator import Score
from kenosis_ort.passes.smooth_outliers import SmoothQuant
from kenosis_ort.passes.state import State

_FEEDS: Final = 8  # rows are many in each
_GAIN: Final = 2.0  # 3 dB of a layer's own noise
_NOISE: Final = 1e-4  # of a row's signal, below which one range is good enough
_WORTH: Final = 0.8  # of the error is left: 1 dB, without which nothing is done
_MORE: Final = 0.5  # of the error is left with twice the layers, each of which takes a tenth longer


@dataclass(frozen=True)
class RowScales(WeightPass):
    """Rows of a linear layer's input, tokens as a rule, are brought to one size where one range cannot serve all.

    It comes before equalization and SmoothQuant: these would spend channels on what is a matter of few tokens. What is
    a matter of channels, whose rows differ in size too, is left to SmoothQuant, which costs no time.

    Attributes:
        row_scales: Layers whose rows differ much in size get the size of each row at run time.
    """

    name: ClassVar[str] = "row_scales"
    title: ClassVar[str] = "Scaling of rows"

    row_scales: bool = True

    @property
    def wanted(self) -> bool:
        return self.row_scales

    def points(self, state: State, context: Context) -> Mapping[str, int]:
        return SmoothQuant().points(state, context) if SmoothQuant.name in context.active else {}

    def apply(self, state: State, statistics: Statistics, context: Context) -> Candidate | Skipped:
        if not context.mixes:
            return Skipped("the runtime takes no float node between integer ones")
        found = [
            each
            for each in row_noise(
                state.prepared.proto,
                context.fit[:_FEEDS],
                nodes=context.nodes,
                custom_op_libraries=context.custom_op_libraries,
            )
            if each.static > max(_GAIN * each.by_row, _NOISE)
        ]
        if not found:
            return Skipped("one range serves all rows")
        found.sort(key=lambda each: -each.gain)
        before = _score(state, context)
        tried = _tried(state, found, context)
        first = tried[0][0]
        if not (first.beats(before) and first.error < _WORTH * before.error):
            return Skipped(f"the error does not fall by 1 dB with {len(found)} values scaled by row")
        smoothed = SmoothQuant().apply(state, statistics, context) if statistics else None
        if isinstance(smoothed, Candidate) and not first.error < _WORTH * _score(smoothed.state, context).error:
            return Skipped("the outliers are channels: smoothing them leaves no more of the error, and costs no time")
        _, changed, count = tried[-1]
        return Candidate(changed, f"{_layers(found[:count])} layers behind {count} values", decided=True)


def _tried(state: State, found: Sequence[RowNoise], context: Context) -> list[tuple[Score, State, int]]:
    """Returns what comes of all values, of the half with the most to gain, and so on, as long as that will do."""
    tried: list[tuple[Score, State, int]] = []
    count = len(found)
    while count:
        changed = _scaled(state, found[:count], context)
        score = _score(changed, context)
        if tried and _MORE * score.error > min(other.error for other, _, _ in tried):
            break
        tried.append((score, changed, count))
        count //= 2
    return tried


def _score(state: State, context: Context) -> Score:
    return context.evaluator.score(context.build_of(state).quantized)


def _scaled(state: State, found: Sequence[RowNoise], context: Context) -> State:
    """Returns the state with some values scaled by row; all others stay what they were."""
    made = with_row_scales(state.prepared.proto, [each.value for each in found], nodes=context.nodes)
    note = (
        f"Rows brought to one size at run time in front of {_layers(found)} linear layers: one range does not serve "
        "tokens that differ so much."
    )
    new = {value: Rescaling(-1, np.ones(channels)) for value, channels in made.values.items()}
    return replace(
        state,
        prepared=changed_weights(state.prepared, made.model, (note,)),
        rescaled={**state.rescaled, **new},
    )


def _layers(found: Sequence[RowNoise]) -> int:
    return sum(len(each.layers) for each in found)
