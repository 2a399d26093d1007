"""Weights in blocks: their kernels and their rounding.

Linear layers as ``com.microsoft.MatMulNBits``, embeddings as ``GatherBlockQuantized``: weights in blocks.

The kernel of linear layers quantizes the rows of its data by itself (``accuracy_level`` 4): no calibration is needed.
It reads a quarter of the bytes of float weights with 8 bits, an eighth with 4, which is what a batch of one row waits
for: 2.2x to 3.6x of FP32 at one row with 8 bits and up to 4.9x with 4, 1.0x to 1.9x at 128 rows, where the int8 forms
are faster. Source: ONNX Runtime contrib operator documentation; measured on ONNX Runtime 1.31.1.

Weights in blocks, rounded so that a layer's output changes least, not each weight.

As `kenosis_ort.passes.grid_search`, on grids whose steps differ from block to block. For one column ``w`` of a matrix
and a choice ``v`` on its grid, the output's squared error over inputs ``x`` is ``(v - w)^T H (v - w)`` with
``H = E[x x^T]``. Sources: Frantar et al., "GPTQ", ICLR 2023, rows in the order of their importance; then coordinate
descent, in turn with the steps of all blocks of a column, fitted to its integers by least squares. The first grid is
that of least error weighed by the diagonal of ``H``, which is what is important to protect (Lin et al., "AWQ", MLSys
2024).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort.graph.constants import GraphIndex, replace_nodes
from kenosis_ort.graph.outside import array_in, put_outside
from kenosis_ort.graph.walk import MAIN_DOMAINS
from kenosis_ort.passes.grid_search import Grid, descend, pass_on
from kenosis_ort.quantizer.linear_layers import CONTRIB, LinearLayer, Name, Parts, exchange_layers
from kenosis_ort.weights.blocks import (
    LEAST_BLOCK,
    BlockGrid,
    Float64,
    UInt8,
    as_stored,
    find_grid,
    nearest,
    pack,
    some_columns,
)

_DAMPING = 0.01
_SWEEPS = 2
_ROUNDS = 2  # of fitted steps and descent: the first one has three quarters of the gain, a third one next to nothing
_RIDGE = 1e-6


def round_in_blocks(
    matrix: Float64, bits: int, block: int, moments: Float64 | None, *, symmetric: bool = False
) -> tuple[Float64, BlockGrid]:
    """Integers for a matrix and the grid that they lie on.

    Args:
        matrix: Shape (K, N).
        bits: 4 or 8.
        block: Rows of a block.
        moments: Second moments of what it multiplies, shape (K, K); None rounds to nearest.
        symmetric: Zero points stand in the middle.
    """
    if moments is None:
        grid = find_grid(matrix, bits, block, symmetric=symmetric)
        return grid.nearest(matrix), grid
    if not np.trace(moments) > 0.0:  # nothing ever flows
        grid = find_grid(matrix, bits, block, symmetric=symmetric)
        return grid.nearest(matrix), grid
    hessian = moments + np.eye(len(moments)) * (_DAMPING * float(np.trace(moments)) / len(moments))
    grid = find_grid(matrix, bits, block, symmetric=symmetric, importance=np.diagonal(hessian))
    found = _search(matrix, None, hessian, grid)
    errors = _errors(matrix, found, hessian, grid)
    nearest = grid.nearest(matrix)
    plain = _errors(matrix, nearest, hessian, grid)
    found, errors = np.where(errors <= plain, found, nearest), np.minimum(errors, plain)
    for _ in range(_ROUNDS if bits < 8 else 0):
        fitted = replace(grid, scale=fitted_steps(matrix, found, hessian, grid))
        moved = _search(matrix, found, hessian, fitted)
        after = _errors(matrix, moved, hessian, fitted)
        better = after < errors
        if not better.any():
            break
        grid = replace(grid, scale=np.where(better, fitted.scale, grid.scale))
        found, errors = np.where(better, moved, found), np.where(better, after, errors)
    nearest = grid.nearest(matrix)  # of the fitted steps
    return np.where(errors <= _errors(matrix, nearest, hessian, grid), found, nearest), grid


def fitted_steps(matrix: Float64, integers: Float64, hessian: Float64, grid: BlockGrid) -> Float64:
    """The steps, (blocks, N), with which the integers of a column are closest to it in the layer's output.

    Args:
        matrix: Shape (K, N).
        integers: Shape (K, N).
        hessian: Shape (K, K), positive definite.
        grid: What the integers stand for so far; a column for which a step would not be positive keeps its own.
    """
    blocks = len(grid.scale)
    rows = [slice(b * grid.block, min((b + 1) * grid.block, len(matrix))) for b in range(blocks)]
    _, zero = grid.steps(slice(len(matrix)))
    counts = integers - zero
    left = hessian @ (matrix - grid.real(integers))
    right = np.stack([np.einsum("kn,kn->n", counts[r], left[r]) for r in rows], axis=-1)
    system = np.empty((matrix.shape[1], blocks, blocks))
    for b, own in enumerate(rows):
        product = hessian[:, own] @ counts[own]
        for c, other in enumerate(rows):
            system[:, c, b] = np.einsum("kn,kn->n", counts[other], product[other])
    diagonal = np.einsum("nbb->nb", system)
    diagonal += _RIDGE * diagonal.mean(axis=1, keepdims=True) + np.finfo(np.float64).tiny
    steps = as_stored(grid.scale + np.linalg.solve(system, right[..., None])[..., 0].T)
    usable = (steps > 0.0).all(axis=0) & np.isfinite(steps).all(axis=0)
    return np.where(usable, steps, grid.scale)


def relative_error(
    matrix: npt.NDArray[np.floating[Any]],
    integers: npt.NDArray[np.number[Any]],
    grid: BlockGrid,
    moments: Float64 | None,
) -> float:
    """The noise of a layer's output over its signal, as powers; by weights alone without moments."""
    noise = signal = 0.0
    for columns in some_columns(matrix.shape):
        real = matrix[:, columns].astype(np.float64)
        off = grid.of(columns).real(integers[:, columns].astype(np.float64)) - real
        for_noise, for_signal = (off, real) if moments is None else (moments @ off, moments @ real)
        noise += float(np.einsum("kn,kn->", for_noise, off))
        signal += float(np.einsum("kn,kn->", for_signal, real))
    return noise / max(signal, 1e-300)


def _errors(matrix: Float64, integers: Float64, hessian: Float64, grid: BlockGrid) -> Float64:
    off = grid.real(integers) - matrix
    return np.asarray(np.einsum("kn,kn->n", hessian @ off, off))


def _search(matrix: Float64, start: Float64 | None, hessian: Float64, grid: BlockGrid) -> Float64:
    """Integers of a small error by coordinate descent, from GPTQ's where there are none to start from."""
    scale, zero = grid.steps(slice(len(matrix)))
    points = Grid(0, grid.top, scale[None], zero[None])
    real, moments = matrix[None], hessian[None]
    free = np.zeros(real.shape, np.bool_)
    first = pass_on(real, np.zeros_like(real), free, moments, points) if start is None else start[None]
    return np.asarray(descend(real, first, free, moments, points, _SWEEPS)[0])


INT8_PRODUCTS: Final = 4
"""Level of accuracy at which the kernel multiplies in 8 bits, and so is fastest."""

Choose = Callable[[LinearLayer], "tuple[Float64 | UInt8, BlockGrid] | None"]
"""Integers and grid of a layer's matrix, shape (K, N); None to leave it float."""


def weight_only(proto: onnx.ModelProto) -> onnx.ModelProto | None:
    """A copy of a model with 8-bit weights in its linear layers, rounded to nearest; None if it has none.

    Whether the installed runtime loads the result is for the caller to see.

    Args:
        proto: A prepared float model. Not changed.
    """
    return with_block_weights(proto, lambda layer: nearest(layer.matrix, 8, 128))


def with_block_weights(
    proto: onnx.ModelProto, choose: Choose, *, accuracy_level: int = INT8_PRODUCTS
) -> onnx.ModelProto | None:
    """A copy of a model with weights in blocks, None if it has no linear layers.

    Args:
        proto: A prepared float model. Not changed.
        choose: Called for each layer, in graph order; for layers that share a matrix once.
        accuracy_level: Of the kernel: 4 multiplies in 8 bits, 0 and 1 in float.
    """
    made: dict[tuple[str, bool], _Stored | None] = {}

    def make(layer: LinearLayer, name: Name) -> Parts | None:
        parts = Parts()
        if layer.weight not in made:
            chosen = choose(layer)
            made[layer.weight] = None if chosen is None else _store(*chosen, layer.constant.name, name)
            stored = made[layer.weight]
            parts.constants.extend([] if stored is None else stored.constants)
        stored = made[layer.weight]
        if stored is None:
            return None
        product = layer.output if layer.bias is None else name(f"{layer.output}_product")
        rows, columns = stored.shape
        parts.nodes.append(
            helper.make_node(
                "MatMulNBits",
                [layer.data, *stored.names],
                [product],
                name=layer.node.name,
                domain=CONTRIB,
                K=rows,
                N=columns,
                bits=stored.bits,
                block_size=stored.block,
                accuracy_level=accuracy_level,
            )
        )
        if layer.bias is not None:
            bias = name(f"{layer.output}_bias")
            parts.constants.append(numpy_helper.from_array(layer.bias, bias))
            added = layer.last.name if layer.last is not layer.node else f"{layer.node.name}_bias"
            parts.nodes.append(helper.make_node("Add", [product, bias], [layer.output], name=added))
        return parts

    return exchange_layers(proto, make)


@dataclass(frozen=True)
class _Stored:
    names: tuple[str, ...]
    bits: int
    block: int
    shape: tuple[int, int]
    constants: list[TensorProto] = field(default_factory=list)


def _store(integers: Float64 | UInt8, grid: BlockGrid, base: str, name: Name) -> _Stored:
    packed, scales, zeros = pack(integers, grid)
    arrays: dict[str, npt.NDArray[np.generic]] = {"packed": packed, "scales": scales}
    if (grid.zero != (grid.top + 1) // 2).any():  # which the kernel supposes where none are given
        arrays["zero_points"] = zeros
    names = {what: name(f"{base}_{what}") for what in arrays}
    constants = [put_outside(numpy_helper.from_array(array, names[what])) for what, array in arrays.items()]
    shape = integers.shape[0], integers.shape[1]
    return _Stored(tuple(names.values()), grid.bits, grid.block, shape, constants)


def with_block_embeddings(
    proto: onnx.ModelProto, bits: int, block: int, excluded: Collection[str] = ()
) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """A copy of a model whose look-ups of rows read them in blocks, and the names of those nodes.

    Args:
        proto: A prepared float model. Not changed.
        bits: 4 or 8.
        block: Numbers of a block; the width of a row has to hold a whole number of them.
        excluded: Names of nodes that stay as they are.
    """
    index = GraphIndex.of_copy(proto)
    nodes, constants, changed = [], list[TensorProto](), list[str]()
    for node in index.nodes:
        table = None if node.name in excluded else _table(index, node, block)
        if table is None:
            nodes.append(node)
            continue
        turned, grid = nearest(table.T, bits, block, symmetric=False)
        integers, base = np.ascontiguousarray(turned.T), node.input[0]
        zeros = np.ascontiguousarray(grid.zero.T.astype(np.uint8))
        scales = np.ascontiguousarray(grid.scale.T.astype(np.float32))
        names = [index.fresh_name(f"{base}_{what}") for what in ("packed", "scales", "zero_points")]
        constants.append(put_outside(_packed_tensor(integers, bits, names[0])))
        constants.append(put_outside(numpy_helper.from_array(scales, names[1])))
        constants.append(_packed_tensor(zeros, bits, names[2]))
        nodes.append(
            helper.make_node(
                "GatherBlockQuantized",
                [names[0], node.input[1], *names[1:]],
                list(node.output),
                name=node.name,
                domain=CONTRIB,
                gather_axis=0,
                quantize_axis=1,
                block_size=block,
            )
        )
        if bits == 8:
            nodes[-1].attribute.append(helper.make_attribute("bits", 8))
        index.remove(node)
        changed.append(node.name)
    model = index.commit()
    if changed:
        replace_nodes(model.graph, nodes)
        model.graph.initializer.extend(constants)
        if not any(entry.domain == CONTRIB for entry in model.opset_import):
            model.opset_import.add(domain=CONTRIB, version=1)
    return model, tuple(changed)


def embeddings_for_blocks(proto: onnx.ModelProto, block: int) -> tuple[str, ...]:
    """The names of a prepared model's nodes that `with_block_embeddings` would change, in graph order."""
    index = GraphIndex(proto)
    return tuple(node.name for node in index.nodes if _table(index, node, block) is not None)


def _table(index: GraphIndex, node: onnx.NodeProto, block: int) -> npt.NDArray[np.float32] | None:
    """The rows that a node looks up, if they can be stored in blocks."""
    axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
    if node.op_type != "Gather" or node.domain not in MAIN_DOMAINS or axis != 0:
        return None
    tensor = index.constant(node.input[0])
    if tensor is None or tensor.data_type != TensorProto.FLOAT or len(tensor.dims) != 2:
        return None
    if tensor.dims[1] % block or tensor.dims[0] < LEAST_BLOCK or index.readers.get(node.input[0]) != [node]:
        return None
    table = array_in(tensor)
    return table if np.isfinite(table).all() else None


def _packed_tensor(array: npt.NDArray[np.uint8], bits: int, name: str) -> TensorProto:
    if bits == 8:
        return numpy_helper.from_array(np.ascontiguousarray(array), name)
    flat = np.pad(array.reshape(-1), (0, array.size % 2))
    packed = (flat[0::2] | (flat[1::2] << 4)).astype(np.uint8)
    return helper.make_tensor(name, TensorProto.UINT4, array.shape, packed.tobytes(), raw=True)
