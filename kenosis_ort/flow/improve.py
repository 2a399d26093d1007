"""The recipe's passes, and those before calibration: weights change, what the float model computes does not."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import onnx

from kenosis_ort.accuracy.biases import with_biases
from kenosis_ort.accuracy.channel_statistics import ChannelStatistics, channel_statistics
from kenosis_ort.accuracy.equalization import equalize, values_for_equalization
from kenosis_ort.accuracy.smooth_quant import smooth, values_for_smoothing
from kenosis_ort.errors import CalibrationError
from kenosis_ort.flow.judge import Feed
from kenosis_ort.flow.request import Request
from kenosis_ort.graph.prepare import PreparedModel
from kenosis_ort.report.sections import PassOutcome

_log = logging.getLogger(__name__)

EQUALIZATION_FEEDS = 16
EQUALIZATION_ROWS = 64  # samples, where feeds are batches


@dataclass
class Passes:
    """The passes of one quantization and what became of each.

    Attributes:
        request: What the caller wants.
        outcomes: One entry a pass that was tried.
    """

    request: Request
    outcomes: list[PassOutcome] = field(default_factory=list)

    @property
    def change_weights(self) -> bool:
        """Whether `before_planning` has anything to do."""
        recipe = self.request.recipe
        return recipe.equalize or recipe.bias_correction or recipe.smooth != "off"

    @property
    def change_results(self) -> bool:
        """Whether `Refinement` has anything to do."""
        recipe = self.request.recipe
        return recipe.bias_correction or recipe.mixed_precision or self.request.chooses_ranges

    def before_planning(
        self,
        prepared: PreparedModel,
        feeds: Sequence[Feed],
        touched: Collection[str],
        *,
        known: Mapping[str, ChannelStatistics],
        add_biases: bool,
    ) -> PreparedModel:
        """Returns the float model equalized and smoothed, with biases that bias correction can move.

        Args:
            prepared: The prepared model.
            feeds: A few samples; without any, only what needs no data is done.
            touched: Names of the nodes that will run in integer.
            add_biases: Whether bias correction may follow, so that every layer needs a bias of its own.
            known: Statistics by channel that are better than those of the feeds, as made-up ones need them.
        """
        recipe, model, notes = self.request.recipe, prepared.proto, prepared.notes
        if feeds and (recipe.equalize or recipe.smooth != "off"):
            inserts = self.request.inserts_smoothing
            between = values_for_equalization(model, nodes=touched) if recipe.equalize else {}
            before = values_for_smoothing(model, nodes=touched, insert=inserts) if recipe.smooth != "off" else {}
            wanted = {**between, **before}
            peaks = self._peaks(model, feeds, wanted) if wanted else None
            if peaks is not None and recipe.equalize:
                start = time.perf_counter()
                equalized = equalize(
                    model, peaks={**peaks, **known}, nodes=touched, per_channel=self.request.per_channel
                )
                model, notes = equalized.model, (*notes, *equalized.notes)
                self._add_exact("equalize", start, len(equalized.pairs), "pairs of layers")
            if peaks is not None and recipe.smooth != "off":
                start = time.perf_counter()
                untouched = {value: found for value, found in peaks.items() if value not in between}
                smoothed = smooth(
                    model,
                    peaks=untouched,
                    alpha=recipe.smooth,
                    nodes=touched,
                    insert=inserts,
                    per_channel=self.request.per_channel,
                )
                model, notes = smoothed.model, (*notes, *smoothed.notes)
                self._add_exact("smooth", start, len(smoothed.layers), "values")
        if recipe.bias_correction and add_biases:
            model = with_biases(model, nodes=touched).model
        return prepared if model is prepared.proto else PreparedModel(model, notes, prepared.nodes)

    def _add_exact(self, name: str, start: float, count: int, what: str) -> None:
        reason = f"{count} {what}, each by predicted noise" if count else "nothing to gain by prediction"
        self.add(name, start, kept=bool(count), reason=reason)

    def _peaks(
        self, model: onnx.ModelProto, feeds: Sequence[Feed], wanted: Mapping[str, int]
    ) -> dict[str, ChannelStatistics] | None:
        """Returns statistics by channel; None for bad data, which calibration is about to report with its place."""
        try:
            return channel_statistics(model, feeds, wanted, custom_op_libraries=self.request.custom_op_libraries)
        except CalibrationError as error:
            _log.info("no equalization: %s", error)
            return None

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
