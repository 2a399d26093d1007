"""Gathers what the report shows beyond the decisions: graph, histograms, signal per layer, time per operator."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import onnx

from kenosis_ort.bench.profile import profile_in_fresh_sessions
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import VerificationError
from kenosis_ort.graph.external_data import weight_bytes
from kenosis_ort.report.collect import profile_tensors, sketch_graph
from kenosis_ort.report.evidence import LayerSignal, OpTimes, ReportEvidence
from kenosis_ort.verify.layers import compare_layers

_log = logging.getLogger(__name__)

_LARGEST: Final = 1_900_000_000  # bytes; beyond, a model with other outputs does not fit into one message
_DEEPEST: Final = 4000  # nodes; the runtime's load time grows with the square of the depth
_COMPARED_FEEDS: Final = 2


def gather_evidence(
    float_model: onnx.ModelProto,
    quantized: onnx.ModelProto,
    *,
    table: CalibrationTable | None = None,
    feeds: Sequence[Mapping[str, Any]] = (),
    baseline: onnx.ModelProto | None = None,
    layers: bool = True,
    times: bool = True,
    threads: int = 1,
    runs: int = 10,
    budget_s: float = 10.0,
    custom_op_libraries: Sequence[str] = (),
) -> ReportEvidence:
    """Returns the evidence about one quantization. Without feeds it is what the models and the table hold.

    Args:
        float_model: The model that was quantized (prepared and rewritten), its weights in memory; not changed.
        quantized: What became of it; not changed.
        table: What calibration saw; histograms are shown where it keeps them.
        feeds: A few real samples.
        baseline: The float model as the caller gave it, to be timed in place of the prepared one.
        layers: Whether signal per layer is measured: both models run once a feed, for at most two feeds.
        times: Whether operators are timed: both models run a dozen times, in each of three sessions.
        threads: Threads of the sessions.
        runs: Timed runs of a session at most.
        budget_s: Seconds that the timed runs of both models may take together, give or take one of each.
        custom_op_libraries: Libraries with custom operators to register.
    """
    may_run = bool(feeds) and _can_run(float_model) and _can_run(quantized)
    found_layers: tuple[LayerSignal, ...] = ()
    found_times = None
    if layers and may_run:
        try:
            compared = compare_layers(
                float_model,
                quantized,
                feeds[:_COMPARED_FEEDS],
                custom_op_libraries=custom_op_libraries,
                threads=threads,
            )
            found_layers = tuple(LayerSignal(c.value, c.node, c.sqnr_db) for c in compared)
        except VerificationError as error:  # e.g. an operator that does not bear a second reader of its output
            _log.warning("signal per layer was not measured: %s", error.what)
    if times and may_run:
        before, after = (
            profile_in_fresh_sessions(
                model,
                feeds,
                threads=threads,
                runs=runs,
                budget_s=budget_s / 2,
                custom_op_libraries=custom_op_libraries,
            )
            for model in (float_model if baseline is None else baseline, quantized)
        )
        found_times = OpTimes(before, after, threads, runs)
    return ReportEvidence(
        graph=sketch_graph(float_model),
        tensors=profile_tensors(float_model, quantized, table),
        layers=found_layers,
        times=found_times,
    )


def _can_run(model: onnx.ModelProto) -> bool:
    return weight_bytes(model) < _LARGEST and len(model.graph.node) <= _DEEPEST
