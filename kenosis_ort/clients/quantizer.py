"""Stock's ``QDQQuantizer`` with a plan of its own: for code that calibrates and builds the quantizer itself.

Values that nobody calibrated get ranges from those of their neighbours: rewrites put Reshape, Transpose, Pad and the
like where the model had none, and calibrators of other code observe only what their own quantizer asks for. Such
operators move values or pick among them, so that their ranges follow: exactly where all values pass, else as a range
that holds the true one.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnx
from onnxruntime.quantization.calibrate import TensorsData

from kenosis_ort.calibration.table import CalibrationTable, TensorStatistics
from kenosis_ort.checks import several
from kenosis_ort.errors import KenosisError, VerificationError, warn_caller
from kenosis_ort.flow.builder import Builder, for_integers
from kenosis_ort.flow.file_checks import check_biases
from kenosis_ort.flow.fit import fitted
from kenosis_ort.flow.request import Request
from kenosis_ort.flow.resolve import resolve
from kenosis_ort.flow.speed import float_regions
from kenosis_ort.graph.constants import Is, having
from kenosis_ort.graph.outside import copy_model
from kenosis_ort.graph.structure import check_structure
from kenosis_ort.graph.view import GraphView, ir, optional
from kenosis_ort.graph.walk import MAIN_DOMAINS
from kenosis_ort.option_types import EXTRA_OPTION_CHECKS
from kenosis_ort.options import Stages
from kenosis_ort.passes.contract import Build
from kenosis_ort.plan import How
from kenosis_ort.quantizer.fusion_aware import FusionAwareQDQQuantizer, ModelWithBodies, name_made_values
from kenosis_ort.rewrite.rule import PADDED
from kenosis_ort.targets.proof import FusionReport

Range = tuple[float, float]
_Ranges = dict[str, Range]

_BYTE_OPS: Final = having(Is.MOVE)
"""Operators whose output holds exactly the values of their first input."""
_PICKS: Final = having(Is.PICK) - having(Is.REDUCTION)
"""Operators whose outputs stay within the values of their first input."""


def with_derived(view: GraphView, known: Mapping[str, Range]) -> _Ranges:
    """The known ranges and those that follow from them.

    Args:
        view: The model, nodes in topological order.
        known: (low, high) by value name.
    """
    found = dict(known)
    for name in (str(value.name) for node in view.nodes for value in node.outputs):
        if name.endswith(PADDED) and name.removesuffix(PADDED) in known:
            found.setdefault(name, known[name.removesuffix(PADDED)])
    for node in view.nodes:
        _forward(view, node, found)
    for node in reversed(view.nodes):
        written, read = str(node.outputs[0].name), optional(node, 0)
        if node.op_type in _BYTE_OPS and written in found and read is not None and not view.is_constant(read):
            found.setdefault(str(read.name), found[written])
    return found


def _forward(view: GraphView, node: ir.Node, found: _Ranges) -> None:
    first, outputs = optional(node, 0), [value.name for value in node.outputs if value.name]
    if node.domain not in MAIN_DOMAINS or first is None or all(name in found for name in outputs):
        return
    ends = found.get(str(first.name))
    if node.op_type == "Concat":
        ends = _union([_range_of(view, value, found) for value in node.inputs])
    elif node.op_type == "Pad":
        filling = optional(node, 2)
        ends = _union([ends, (0.0, 0.0) if filling is None else _range_of(view, filling, found)])
    elif node.op_type in ("Relu", "Clip") and ends is not None:
        low, high = view.activation_bounds(node) or (None, None)  # where a limit is computed all may be left
        least, most = (max(end, end if low is None else low) for end in ends)
        ends = min(least, least if high is None else high), min(most, most if high is None else high)
    elif node.op_type not in _BYTE_OPS | _PICKS:
        ends = None
    if ends is not None:
        found.update({name: ends for name in outputs if name not in found})


def _range_of(view: GraphView, value: ir.Value | None, found: _Ranges) -> Range | None:
    array = view.array(value)
    if array is None:
        return None if value is None else found.get(str(value.name))
    return (float(array.min()), float(array.max())) if array.size and array.dtype.kind == "f" else None


def _union(ranges: Sequence[Range | None]) -> Range | None:
    known = [r for r in ranges if r is not None]
    if len(known) < len(ranges) or not known:
        return None
    return min(low for low, _ in known), max(high for _, high in known)


_log = logging.getLogger(__name__)

_NO_RANGE: Final = "no calibrated range for '{}'"


class QDQQuantizer(FusionAwareQDQQuantizer):
    """Places Q/DQ where the runtime fuses them; in place of ``onnxruntime.quantization.QDQQuantizer``.

    Everything the caller gives is honoured; where Q/DQ goes is planned from it and from the ranges. The model may come
    as it was exported: batch normalizations are folded, patterns joined and weights laid out for the integer kernels
    on the way. Where no plan can be made, and whatever fails on the way, the result is stock's, with a
    ``KenosisWarning`` that says why. No data is at hand here: recipes, the speed promise and the comparison with the
    float model need `quantize_static`.

    Args:
        model: The float model, its weights in memory. Not changed.
        per_channel: Weight scales by output channel.
        reduce_range: 7-bit weights.
        weight_qType: ``QuantType`` of weights.
        activation_qType: ``QuantType`` of activations.
        tensors_range: Ranges by tensor name, from any calibrator's ``compute_data()``.
        nodes_to_quantize: Names of the only nodes to quantize; empty for all.
        nodes_to_exclude: Names of nodes that stay float.
        op_types_to_quantize: Operator types to quantize.
        extra_options: Stock's ``extra_options``.

    Attributes:
        model: Stock's ``ONNXModel``, with ``save_model_to_file``; the quantized model after `quantize_model`.
        plan: The placement that was performed; None where it is stock's.
        fusion: Which kernel runs each node of the result; None where the placement is stock's.
        notes: What was done to the model, in sentences.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        per_channel: bool,
        reduce_range: bool,
        weight_qType: Any,  # noqa: N803 - stock's name
        activation_qType: Any,  # noqa: N803 - stock's name
        tensors_range: TensorsData | None,
        nodes_to_quantize: Sequence[str],
        nodes_to_exclude: Sequence[str],
        op_types_to_quantize: Sequence[str],
        extra_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            copy_model(model),
            per_channel,
            reduce_range,
            weight_qType,
            activation_qType,
            _copied(tensors_range),
            nodes_to_quantize,
            nodes_to_exclude,
            op_types_to_quantize,
            dict(extra_options or {}),
            stages=Stages.none(),
        )
        self._known = {} if tensors_range is None else _finite_ranges(tensors_range)
        self.fusion: FusionReport | None = None
        self.notes: tuple[str, ...] = ()

    def quantize_model(self) -> onnx.ModelProto:
        """Quantizes and returns the model, which is ``self.model.model`` too."""
        build = self._planned()
        if build is None:
            quantized = super().quantize_model()
        else:
            quantized, self.plan, self.fusion = build.quantized, build.plan, build.fusion
            self.notes = (*self.notes, *build.notes)
        self.model = ModelWithBodies(quantized)
        return quantized

    def _planned(self) -> Build | None:
        """The model quantized by a plan; None where stock's placement has to do."""
        if not self._known or not self.op_types_to_quantize:
            return None
        try:
            build, why = self._build(self._request())
        except KenosisError as error:
            build, why = None, str(error)
        except Exception as error:  # whatever fails here must not fail the caller, whose way out is stock's placement
            _log.debug("planning failed", exc_info=True)
            build, why = None, f"planning failed: {error!r}. Fix: please report this, with the model if you can"
        if build is None:
            warn_caller(f"Q/DQ is placed as stock does: {why}")
        return build

    def _request(self) -> Request:
        extra = {key: value for key, value in self.extra_options.items() if key in EXTRA_OPTION_CHECKS}
        return resolve(
            {
                "model_output": "model.onnx",  # named in messages alone
                "op_types_to_quantize": several("op_types_to_quantize", self.op_types_to_quantize),
                "per_channel": bool(self.per_channel),
                "reduce_range": bool(self.reduce_range),
                "activation_type": self.activation_qType,
                "weight_type": self.weight_qType,
                "nodes_to_quantize": several("nodes_to_quantize", self.nodes_to_quantize or ()),
                "nodes_to_exclude": several("nodes_to_exclude", self.nodes_to_exclude or ()),
                "extra_options": extra,
                "recipe": "plain",
                "promise": False,
                "evidence": "none",
            }
        )

    def _build(self, request: Request) -> tuple[Build | None, str]:
        """The build, or None and why there is none."""
        proto = self.model.model
        check_structure(proto, "the given ModelProto")
        best: tuple[Builder, CalibrationTable, dict[str, str]] | None = None
        for asked in (request, request.unrewritten):
            builder = for_integers(proto, fitted(proto, asked))
            if builder.request.stock_reason is not None:
                return None, builder.request.stock_reason
            ranges = with_derived(builder.prepared.graph, self._known)
            keep_float = _without_unknown(builder, ranges)
            if best is None or _integer_nodes(builder, keep_float) > _integer_nodes(best[0], best[2]):
                best = builder, _table(ranges), keep_float
            if not keep_float:
                break
        assert best is not None
        builder, table, keep_float = best
        slow, note = float_regions(builder, builder.planned(keep_float))
        self.notes = (*builder.prepared.notes, *([note] if note else ()))
        build = builder.build(table, {**slow, **keep_float})
        if not build.is_quantized or not build.plan:
            return None, "nothing is left to quantize by the plan"
        try:
            check_biases(build.quantized, builder.request)
        except VerificationError as error:
            return None, str(error)
        name_made_values(build.quantized, proto)
        return build, ""


def _copied(ranges: TensorsData | None) -> TensorsData | None:
    """A copy where there is one to make: stock's constructor writes ranges behind Relu and Clip over others."""
    if isinstance(ranges, TensorsData):
        return TensorsData(ranges.calibration_method, dict(ranges.items()))
    return dict(ranges) if isinstance(ranges, dict) else ranges


def _finite_ranges(data: TensorsData) -> dict[str, Range]:
    """(low, high) by tensor name; those by channel as one, those that are not finite left out."""
    found = {}
    for name, entry in data.items():
        low, high = (np.asarray(end, np.float64).reshape(-1) for end in entry.range_value)
        if low.size and high.size and math.isfinite(low.min()) and math.isfinite(high.max()):
            found[name] = (float(low.min()), float(high.max()))
    return found


def _table(ranges: Mapping[str, Range]) -> CalibrationTable:
    return CalibrationTable(
        {name: TensorStatistics(low, high, 0, "float32", fixed=(low, high)) for name, (low, high) in ranges.items()}
    )


def _integer_nodes(builder: Builder, keep_float: Mapping[str, str]) -> int:
    return len(builder.planned(keep_float).integer_nodes())


def _without_unknown(builder: Builder, ranges: Mapping[str, Range]) -> dict[str, str]:
    """The nodes to leave float for want of a range, with the reason."""
    proto = builder.prepared.proto
    producers = {name: node.name for node in proto.graph.node for name in node.output}
    keep: dict[str, str] = {}
    plan, known = builder.plan, -1
    while plan and len(keep) > known:
        known = len(keep)
        for value in (v for v in builder.observed(plan) if v not in ranges):
            readers = [d.edge.consumer for d in plan.by_value[value] if d.how is not How.FLOAT]
            fresh = [n for n in (*readers, producers.get(value, "")) if n and n not in keep]
            keep.update(dict.fromkeys(fresh, _NO_RANGE.format(value)))
        plan = builder.planned(keep)
    return keep
