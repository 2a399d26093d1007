"""The record of the recipe's passes, and those before calibration: what changes weights and not what the net computes.

Equalization and SmoothQuant are exact in float, and by predicted noise they never lose. Prediction is not enough: it
sees neither the scales of the other values nor what samples beyond the few that were looked at do to a range (O-Net of
MTCNN 25.9 dB with predicted equalization, 38.4 without). So the whole net is quantized with and without, with ranges
from some samples, and evaluated on others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import onnx

from kenosis_ort.accuracy.biases import with_biases
from kenosis_ort.accuracy.channel_statistics import ChannelStatistics, channel_statistics
from kenosis_ort.accuracy.equalization import equalize, values_for_equalization
from kenosis_ort.accuracy.smooth_quant import smooth, values_for_smoothing
from kenosis_ort.calibration.collector import collect
from kenosis_ort.calibration.origin import WeightChange
from kenosis_ort.flow.course import Course
from kenosis_ort.flow.lay_out import Draft, Layout
from kenosis_ort.flow.request import Request
from kenosis_ort.flow.samples import KeepingReader, enough
from kenosis_ort.graph.prepare import PreparedModel
from kenosis_ort.passes.evaluator import LEAST_HELD_OUT, Evaluator, Feed, Score
from kenosis_ort.report.sections import PassOutcome

_log = logging.getLogger(__name__)

_FEEDS = 16
_ROWS = 64  # samples, where feeds are batches; and feeds, where they are so small that a layer sees few numbers of each
_SMALL = 4096  # numbers a feed


@dataclass
class Passes:
    """The passes of one quantization and what became of each.

    Attributes:
        request: What the caller wants.
        outcomes: One entry a pass that was tried.
        changes: The changes of weights that were kept, for the calibration cache.
        biases: Layers without a bias got one.
    """

    request: Request
    outcomes: list[PassOutcome] = field(default_factory=list)
    changes: list[WeightChange] = field(default_factory=list)
    biases: bool = False

    @property
    def change_weights(self) -> bool:
        """Whether `Adjustment` has anything to do."""
        recipe = self.request.recipe
        return recipe.equalize or recipe.smooth != "off"

    @property
    def change_results(self) -> bool:
        """Whether `Refinement` has anything to do."""
        recipe = self.request.recipe
        return recipe.bias_correction or recipe.mixed_precision or self.request.chooses_ranges

    def add(
        self,
        name: str,
        start: float,
        *,
        kept: bool,
        reason: str,
        before: float | None = None,
        after: float | None = None,
        measure: str = "",
    ) -> None:
        """Records what became of a pass."""
        seconds = time.perf_counter() - start
        self.outcomes.append(PassOutcome(name, kept, before, after, measure, reason, seconds))
        _log.info("%s: %s (%s), %.2f s", name, "kept" if kept else "undone", reason, seconds)


@dataclass(frozen=True)
class _Change:
    """What a pass makes of the weights: the model, how much was changed, and what to say."""

    model: onnx.ModelProto
    count: int
    notes: tuple[str, ...]
    statistics: Mapping[str, ChannelStatistics]


@dataclass
class Adjustment:
    """Weights changed so that fewer scales lose less, each change evaluated on the whole net.

    Attributes:
        course: What gathers on the way.
        passes: Records what became of each.
        draft: The prepared model.
        fit: Samples to take statistics and ranges from.
        evaluator: Knows other samples.
        known: Statistics by channel that are better than those of the samples, as made-up ones need them.
        score: Of the net as it stands; None until it is needed.
    """

    course: Course
    passes: Passes
    draft: Draft
    fit: Sequence[Feed]
    evaluator: Evaluator
    known: Mapping[str, ChannelStatistics]
    score: Score | None = None

    def run(self) -> PreparedModel:
        """Returns the prepared model with what is worth keeping."""
        recipe, prepared = self.passes.request.recipe, self.draft.workshop.prepared
        asked = bool(self.passes.request.extra_options.get("SmoothQuant"))
        touched: set[str] = set()
        if recipe.equalize:
            prepared = self._tried("Equalization", "equalize", prepared, lambda m: self._equalized(m, touched))
        if recipe.smooth != "off":
            done = touched if prepared is not self.draft.workshop.prepared else set()
            prepared = self._tried("SmoothQuant", "smooth", prepared, lambda m: self._smoothed(m, done), insist=asked)
        return prepared

    def _tried(
        self,
        what: str,
        name: str,
        prepared: PreparedModel,
        change: Callable[[onnx.ModelProto], _Change],
        *,
        insist: bool = False,
    ) -> PreparedModel:
        return self.course.attempt(what, lambda: self._evaluated(name, prepared, change, insist), prepared)

    def _evaluated(
        self, name: str, prepared: PreparedModel, change: Callable[[onnx.ModelProto], _Change], insist: bool
    ) -> PreparedModel:
        start = time.perf_counter()
        changed = change(prepared.proto)
        if not changed.count:
            self.passes.add(name, start, kept=False, reason="nothing to gain by prediction")
            return prepared
        candidate = PreparedModel(changed.model, (*prepared.notes, *changed.notes), prepared.nodes)
        made = WeightChange(name, {value: vars(found) for value, found in changed.statistics.items()})
        if insist:
            self.passes.add(name, start, kept=True, reason=f"{changed.count} layers, as asked")
            self.passes.changes.append(made)
            return candidate
        held_out = len(self.evaluator.feeds)
        if held_out < LEAST_HELD_OUT:
            self.passes.add(name, start, kept=False, reason=f"{held_out} held-out calibration samples are too few")
            return prepared
        before = self._score(prepared) if self.score is None else self.score
        after = self._score(candidate)
        kept = after.beats(before)
        fate = "the error falls" if kept else "the error does not fall clearly"
        reason = f"{changed.count} places; {fate} on {held_out} calibration samples that it was not fitted to"
        measure = self.evaluator.measure
        self.passes.add(name, start, kept=kept, reason=reason, before=before.error, after=after.error, measure=measure)
        self.score = after if kept else before
        if kept:
            self.passes.changes.append(made)
        return candidate if kept else prepared

    def _score(self, prepared: PreparedModel) -> Score:
        """Returns the error of the net quantized with plain ranges of the samples to fit to."""
        layout: Layout = self.draft.complete(prepared)
        table = collect(
            layout.workshop.prepared.proto,
            self.fit,
            tensors=layout.tensors,
            custom_op_libraries=self.passes.request.custom_op_libraries,
            seen_as=layout.workshop.seen_as(),
        )
        return self.evaluator.score(layout.workshop.quantize(table).quantized)

    def _equalized(self, model: onnx.ModelProto, touched: set[str]) -> _Change:
        nodes = set(self.draft.adjustable)
        values = values_for_equalization(model, nodes=nodes)
        touched.update(values)
        return _equalized(model, self.passes.request, nodes, {**self._peaks(model, values), **self.known})

    def _smoothed(self, model: onnx.ModelProto, equalized: set[str]) -> _Change:
        request, nodes = self.passes.request, set(self.draft.adjustable)
        values = values_for_smoothing(model, nodes=nodes, insert=request.inserts_smoothing)
        peaks = self._peaks(model, {value: axis for value, axis in values.items() if value not in equalized})
        return _smoothed(model, request, nodes, peaks)

    def _peaks(self, model: onnx.ModelProto, wanted: Mapping[str, int]) -> dict[str, ChannelStatistics]:
        if not wanted:
            return {}
        libraries = self.passes.request.custom_op_libraries
        return channel_statistics(model, self.fit, wanted, custom_op_libraries=libraries)


def _equalized(
    model: onnx.ModelProto, request: Request, nodes: set[str], statistics: Mapping[str, ChannelStatistics]
) -> _Change:
    found = equalize(model, peaks=statistics, nodes=nodes, per_channel=request.per_channel)
    return _Change(found.model, len(found.pairs), found.notes, statistics)


def _smoothed(
    model: onnx.ModelProto, request: Request, nodes: set[str], statistics: Mapping[str, ChannelStatistics]
) -> _Change:
    found = smooth(
        model,
        peaks=statistics,
        alpha="auto" if request.recipe.smooth == "off" else request.recipe.smooth,
        nodes=nodes,
        insert=request.inserts_smoothing,
        per_channel=request.per_channel,
    )
    return _Change(found.model, len(found.layers), found.notes, statistics)


_AGAIN: Final[Mapping[str, Callable[..., _Change]]] = {"equalize": _equalized, "smooth": _smoothed}


def adjusted_again(draft: Draft, passes: Passes, changes: Sequence[WeightChange]) -> PreparedModel:
    """Returns the draft's model with its weights changed as a calibration cache says."""
    prepared, nodes = draft.workshop.prepared, set(draft.adjustable)
    for change in changes:
        start = time.perf_counter()
        statistics = {value: ChannelStatistics(**fields) for value, fields in change.statistics.items()}
        made = _AGAIN[change.name](prepared.proto, passes.request, nodes, statistics)
        prepared = PreparedModel(made.model, (*prepared.notes, *made.notes), prepared.nodes)
        passes.changes.append(change)
        passes.add(change.name, start, kept=True, reason=f"{made.count} places, as the calibration cache says")
    return prepared


def adjusting_samples(data: KeepingReader) -> list[Feed]:
    """Returns the first few samples, those that weights are changed by."""
    first = data.peek(1)
    size = max((int(np.size(value)) for value in first[0].values()), default=0) if first else 0
    return enough(data.peek(_ROWS if size <= _SMALL else _FEEDS), rows=_ROWS, least=2)


def with_movable_biases(prepared: PreparedModel, draft: Draft) -> PreparedModel:
    """Returns the model with a bias of its own for each layer that bias correction may follow on."""
    model = with_biases(prepared.proto, nodes=set(draft.adjustable)).model
    return prepared if model is prepared.proto else PreparedModel(model, prepared.notes, prepared.nodes)
