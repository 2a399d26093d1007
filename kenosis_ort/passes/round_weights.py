"""Weights rounded so that a layer's output changes least, not each weight.

The ``H`` of the search below comes from the float net's inputs, with the noise of the
quantized input on its diagonal; fitting to the quantized inputs themselves overfits by about 1 dB. ``H`` is not taken
about the mean, although bias correction takes up what is constant: that was worse by up to 1 dB.

The result is float weights that lie on the grid of the quantizer's own scales: it recomputes the same scales from
them and so the same integers. For that the weights that decide about a channel's scale stay where they are: the largest
one, and where kernels add pairs of products in int16 the pair of the largest sum. No other pair comes to sum to more.

For one output channel with real weights ``w`` and weights ``v`` on the grid, the output error over inputs ``x`` is
``(v - w)^T H (v - w)`` with ``H = E[x x^T]``: rounding to nearest minimizes the diagonal part only.

Source of the objective: Nagel et al., "Up or Down? Adaptive Rounding", ICML 2020; the search is `descend`.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper

from kenosis_ort.graph.outside import array_in, put_outside
from kenosis_ort.graph.product_pairs import PairOrder, can_clip, pair_order
from kenosis_ort.graph.view import GraphView
from kenosis_ort.passes.contract import Candidate, Context, Overlay, Pass, Skipped, State, Statistics
from kenosis_ort.passes.input_moments import Grid, descend, gather_moments, pass_on
from kenosis_ort.passes.layers import Float64, Layer, Weights, layers
from kenosis_ort.passes.recipe import setting
from kenosis_ort.runtime.session import HERE, Executor


class WeightGrid(NamedTuple):
    """The quantized weights of a layer.

    Attributes:
        integers: As they are stored, int8.
        scale: One number an output channel, or one for all, float64.
        input_scale: Scale of the data input, 0 where it is not known.
        order: In which a kernel that adds pairs in int16 reads them, None where none does.
    """

    integers: npt.NDArray[Any]
    scale: Float64
    input_scale: float
    order: PairOrder | None


def weight_grids(quantized: onnx.ModelProto) -> dict[str, WeightGrid]:
    """The symmetric int8 weights of a QDQ model by the name of the node that reads them."""
    arrays = {t.name: t for t in quantized.graph.initializer}
    dequantized = {str(node.output[0]): node for node in quantized.graph.node if node.op_type == "DequantizeLinear"}
    found = {}
    for node in quantized.graph.node:
        weight = dequantized.get(node.input[1]) if len(node.input) > 1 else None
        if weight is None or weight.input[0] not in arrays or weight.input[1] not in arrays:
            continue
        integers = array_in(arrays[weight.input[0]])
        zero = arrays.get(weight.input[2]) if len(weight.input) > 2 else None
        if integers.dtype != np.int8 or (zero is not None and array_in(zero).any()):
            continue
        source = dequantized.get(node.input[0])
        scale = arrays.get(source.input[1]) if source is not None else None
        step = float(array_in(scale).reshape(-1)[0]) if scale is not None else 0.0
        own = array_in(arrays[weight.input[1]]).reshape(-1).astype(np.float64)
        found[str(node.name)] = WeightGrid(integers, own, step, pair_order(node, integers.shape))
    return found


_log = logging.getLogger(__name__)

Feed = Mapping[str, Any]

_DAMPING = 0.01
_SWEEPS = 3
_WIDEST = 8192  # columns of a layer; its moments take 8 bytes times the square
_MOST_BYTES = 2**29  # of moments gathered in one pass


def learn_rounding(
    model: onnx.ModelProto,
    quantized: onnx.ModelProto,
    feeds: Sequence[Feed],
    *,
    nodes: Collection[str] | None = None,
    custom_op_libraries: Sequence[str] = (),
    executor: Executor = HERE,
) -> Overlay:
    """Moves the weights of integer layers to better points of their grid.

    Args:
        model: The float model that was quantized. Not changed.
        quantized: The quantized model, in QDQ form under the float model's node names. Not changed.
        feeds: Samples; 16 to 64 are enough.
        nodes: Names of the layers to round, None for all.
        custom_op_libraries: Shared libraries of custom operators to register.
        executor: Rounds the layers, whose moments are gathered here.

    Returns:
        Weights to quantize again with the same plan and ranges. Layers without symmetric int8 weights, with shared
        weights, of more than 8192 columns or with too few samples keep theirs.

    Raises:
        CalibrationError: The float model fails on a sample.
    """
    graph = GraphView(model)
    grids = weight_grids(quantized)
    todo = [
        layer
        for layer in layers(graph, nodes)
        if layer.name in grids and graph.is_read_once(layer.weight) and _width(layer) <= _WIDEST
    ]
    overlay: dict[str, dict[str, onnx.TensorProto]] = {}
    for group in _batches(todo):
        moments = gather_moments(model, group, feeds, custom_op_libraries=custom_op_libraries)
        known = [layer for layer in group if layer.name in moments]
        pieces = ((e.weights, graph.content(e.weight), grids[e.name], moments.pop(e.name)) for e in known)
        for layer, weights in zip(known, executor.map(_round_layer, pieces), strict=True):
            name = layer.weight.name or ""
            tensor = onnx.numpy_helper.from_array(np.ascontiguousarray(weights), name)
            overlay[layer.name] = {name: put_outside(tensor)}
    return overlay


_Unrounded = tuple[Weights, npt.NDArray[np.generic], WeightGrid, Float64]
"""A layer, its weights as stored, the grid to round to, and the moments of its input."""


def _round_layer(given: _Unrounded) -> npt.NDArray[np.float32]:
    """The rounded weights of a layer as they are stored."""
    layer, weights, grid, moments = given
    real, nearest = layer.canonical(weights), layer.canonical(grid.integers)
    per_row = np.broadcast_to(grid.scale, (layer.channels_out,)).astype(np.float64)
    steps = real / per_row[:, None, None]
    transposed = layer.operator == "ConvTranspose"
    targets = _as_rows(steps, layer, transposed)
    start = _as_rows(nearest, layer, transposed)
    noise, top = grid.input_scale**2 / 12.0, float(np.abs(nearest).max())
    weight = _as_rows(np.broadcast_to(per_row[:, None, None], steps.shape), layer, transposed)[:, :, 0] ** 2
    diagonal = np.einsum("gcc->gc", moments)
    diagonal += noise + _DAMPING * diagonal.mean(axis=1, keepdims=True) + np.finfo(np.float64).tiny
    result = _round(targets, start, moments, Grid(-top, top, neighbour=_neighbours(layer, grid)))
    before, after = (_error(found - targets, moments, weight) for found in (start, result))
    _log.debug("'%s': error %.3g for %.3g", layer.name, after, before)
    canonical = _from_rows(result if after < before else start, layer, transposed)
    return layer.stored(canonical * per_row[:, None, None])


def _neighbours(layer: Weights, grid: WeightGrid) -> npt.NDArray[np.intp] | None:
    """Column whose products a kernel adds to each column's, -1 for none; None where the grid lets pairs clip."""
    order = grid.order
    if order is None or can_clip(grid.integers, order).any():
        return None
    inputs, taps = layer.channels_in // layer.groups, layer.taps
    place = np.arange(inputs * taps).reshape(taps, inputs).T.reshape(-1)  # in the kernel's order, of each column
    column = np.argsort(place)
    neighbour = place ^ 1
    return np.where(neighbour < place.size, column[np.minimum(neighbour, place.size - 1)], -1)


def _as_rows(canonical: Float64, layer: Weights, transposed: bool) -> Float64:
    """(groups, rows, columns): a row multiplies one row of the layer's input."""
    channels, inputs, taps = canonical.shape
    ordered = canonical.transpose(0, 2, 1) if transposed else canonical
    rows = channels // layer.groups * (taps if transposed else 1)
    return ordered.reshape(layer.groups, rows, inputs if transposed else inputs * taps)


def _from_rows(rows: Float64, layer: Weights, transposed: bool) -> Float64:
    if transposed:
        return np.asarray(rows.reshape(layer.channels_out, layer.taps, -1).transpose(0, 2, 1))
    return np.asarray(rows.reshape(layer.channels_out, -1, layer.taps))


def _error(difference: Float64, hessian: Float64, weight: Float64) -> float:
    return float((np.einsum("grc,grc->gr", difference @ hessian, difference) * weight).sum())


def _round(targets: Float64, start: Float64, hessian: Float64, grid: Grid) -> Float64:
    """Integers near ``targets`` with a small error; those that decide about scales stay as in ``start``.

    Arguments and result are (groups, rows, columns).
    """
    real, nearest = (np.ascontiguousarray(each.transpose(0, 2, 1)) for each in (targets, start))
    fixed = grid.fixed(nearest)
    passed = pass_on(real, nearest, fixed, hessian, grid)
    found = [descend(real, first, fixed, hessian, grid, _SWEEPS) for first in (passed, nearest)]
    errors = [np.einsum("gcr,gcr->gr", hessian @ (v - real), v - real)[:, None] for v in found]
    return np.asarray(np.where(errors[0] <= errors[1], found[0], found[1]).transpose(0, 2, 1))


def _width(layer: Weights) -> int:
    taps = 1 if layer.operator == "ConvTranspose" else layer.taps
    return layer.channels_in // layer.groups * taps


def _batches(todo: Sequence[Layer]) -> list[list[Layer]]:
    """Cuts the list of layers so that the moments of each part fit the byte budget."""
    batches: list[list[Layer]] = []
    batch_bytes = 0
    for layer in todo:
        size = 8 * layer.groups * _width(layer) ** 2
        if not batches or batch_bytes + size > _MOST_BYTES:
            batches.append([])
            batch_bytes = 0
        batches[-1].append(layer)
        batch_bytes += size
    return batches


@dataclass(frozen=True)
class LearnedRounding(Pass):
    """Rounded weights with biases corrected for them, beside nearest rounding with its own corrected biases.

    Attributes:
        rounding: Weights to the nearest grid point, or to the one that keeps the layer's output (``learned``).
    """

    name: ClassVar[str] = "rounding"
    title: ClassVar[str] = "Learned rounding"
    off: ClassVar[tuple[str, ...]] = ("nearest",)

    rounding: Literal["nearest", "learned"] = setting("rounding")

    def apply(self, state: State, statistics: Statistics, context: Context) -> Candidate | Skipped:
        base = state.prepared.proto
        nodes = set(state.built.plan.integer_nodes())
        nearest = context.with_corrections(state, {}).built.quantized
        rounded = learn_rounding(
            base,
            nearest,
            context.fit,
            nodes=nodes,
            custom_op_libraries=context.custom_op_libraries,
            executor=context.executor,
        )
        changed = context.with_corrections(state, rounded)
        return Candidate(context.after("bias_correction", changed))
