"""Gathers for the report what the float model, the quantized one and the calibration table hold.

Which range each tensor of the float model has in the quantized one, read off its Q and DQ nodes.
"""

import math
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

from kenosis_ort.accuracy.outputs import decibels
from kenosis_ort.accuracy.value_grids import ValueGrid, read_grids
from kenosis_ort.calibration.statistics import TensorStatistics
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.graph.outside import array_in, is_outside, tensor_bytes
from kenosis_ort.graph.shapes import value_types
from kenosis_ort.graph.walk import MAIN_DOMAINS, read_names
from kenosis_ort.report.evidence import Bars, GraphSketch, ReportEvidence, SketchNode, TensorProfile

BINS: Final = 48
_SAMPLED: Final = 1 << 20  # elements of a weight that go into its histogram at most
_LARGEST: Final = 1 << 30  # bytes of a weight that is still looked into
_WEIGHT_INPUTS: Final = 2  # a constant in these positions counts as weight; behind them are biases and steering inputs


def gather_evidence(
    float_model: onnx.ModelProto, quantized: onnx.ModelProto, table: CalibrationTable | None = None
) -> ReportEvidence:
    """The evidence about one quantization that the models and the table hold; nothing is run.

    Args:
        float_model: The model that was quantized (prepared and rewritten), its weights in memory; not changed.
        quantized: What became of it; not changed.
        table: What calibration saw; histograms are shown where it keeps them.
    """
    return ReportEvidence(sketch_graph(float_model), profile_tensors(float_model, quantized, table))


def sketch_graph(model: onnx.ModelProto) -> GraphSketch:
    """The main graph of a model for a picture: nodes, edges and shapes, no constants.

    What a node's bodies read counts as read by the node.

    Args:
        model: A model with unique node names; not changed.
    """
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    inputs = tuple(value.name for value in graph.input if value.name not in constants)
    known = {*inputs, *(name for node in graph.node for name in node.output if name)}
    types = value_types(model)
    nodes = []
    for node in graph.node:
        read = dict.fromkeys(name for name in read_names(node) if name in known)
        written = tuple(name for name in node.output if name)
        shape = _shape(types.get(written[0])) if written else ""
        weights = [constants[n] for n in node.input[1:_WEIGHT_INPUTS] if n in constants and len(constants[n].dims) > 1]
        weight = "x".join(map(str, weights[0].dims)) if weights else ""
        operator = node.op_type if node.domain in MAIN_DOMAINS else f"{node.domain}.{node.op_type}"
        nodes.append(SketchNode(node.name, operator, tuple(read), written, shape, weight))
    return GraphSketch(tuple(nodes), inputs, tuple(value.name for value in graph.output))


def profile_tensors(
    float_model: onnx.ModelProto, quantized: onnx.ModelProto, table: CalibrationTable | None = None
) -> tuple[TensorProfile, ...]:
    """The ranges and histograms of the quantized tensors, activations first, each in graph order.

    Args:
        float_model: The model that was quantized, its weights in memory; not changed.
        quantized: What became of it, with its weights in memory; not changed.
        table: What calibration saw; None for weights only.
    """
    grids = read_grids(float_model, quantized)
    seen = {} if table is None else table.tensors
    profiles = [_activation(name, statistics, grids.get(name)) for name, statistics in seen.items()]
    profiles += [_weight(tensor, grids[tensor.name]) for tensor in _weights(float_model) if tensor.name in grids]
    return tuple(profiles)


def _activation(name: str, statistics: TensorStatistics, grid: ValueGrid | None) -> TensorProfile:
    chosen, bits, _ = (None, 0, False) if grid is None else grid.facts
    bars = None
    if statistics.histogram is not None:
        edges = _edges(statistics.low, statistics.high, chosen)
        if edges is not None:
            bars = _bars(edges, statistics.histogram.rebin(edges))
    return TensorProfile(name, "activation", statistics.low, statistics.high, chosen, bits=bits, bars=bars)


def _weight(tensor: TensorProto, grid: ValueGrid) -> TensorProfile:
    values = array_in(tensor)
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    chosen, bits, pairs_fit = grid.facts
    edges = _edges(low, high, chosen)
    bars = None
    if edges is not None and values.size:
        flat = values.ravel()
        sampled = flat[:: -(-flat.size // _SAMPLED)].astype(np.float64)
        span = float(edges[0]), float(edges[-1])  # of bins of equal width numpy need not sort what it counts
        bars = _bars(edges, np.histogram(sampled, BINS, span)[0])
    rounding = grid.rounding(values)
    return TensorProfile(
        name=tensor.name,
        kind="weight",
        low=low,
        high=high,
        chosen=chosen,
        scales=int(grid.scale.size),
        bits=bits,
        pairs_fit=pairs_fit,
        sqnr_db=None if rounding is None else decibels(*rounding),
        bars=bars,
    )


def _edges(low: float, high: float, chosen: tuple[float, float] | None) -> npt.NDArray[np.float64] | None:
    """The edges of bins over all that was seen and all that can be represented; None without any width."""
    if chosen is not None:
        low, high = min(low, chosen[0]), max(high, chosen[1])
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        return None
    edges: npt.NDArray[np.float64] = np.linspace(low, high, BINS + 1)
    return edges if bool(np.all(np.diff(edges) > 0)) else None


def _bars(edges: npt.NDArray[np.float64], counts: npt.NDArray[Any]) -> Bars:
    return Bars(float(edges[0]), float(edges[-1]), tuple(int(count) for count in counts))


def _weights(model: onnx.ModelProto) -> Iterator[TensorProto]:
    """Yields the float32 constants that are some node's weight, in the order they are read."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        for name in node.input[:_WEIGHT_INPUTS]:
            tensor = constants.pop(name, None)
            if (
                tensor is not None
                and tensor.data_type == TensorProto.FLOAT
                and (tensor.data_location != TensorProto.EXTERNAL or is_outside(tensor))
                and (tensor_bytes(tensor) or 0) <= _LARGEST
            ):
                yield tensor


def _shape(type_: onnx.TypeProto | None) -> str:
    if type_ is None or not type_.tensor_type.HasField("shape"):
        return ""
    dims = type_.tensor_type.shape.dim
    return "x".join(str(d.dim_value) if d.HasField("dim_value") else d.dim_param or "?" for d in dims) or "scalar"
