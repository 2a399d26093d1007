"""BatchNormalization folded into the Conv, ConvTranspose, Gemm or MatMul in front of it.

In inference, with scale ``g``, shift ``b``, mean ``m`` and variance ``v`` per channel ``c``::

    BN(y)[c] = g[c] * (y[c] - m[c]) / sqrt(v[c] + epsilon) + b[c]
             = s[c] * y[c] + t[c]        with  s = g / sqrt(v + epsilon),  t = b - s * m

The node in front is affine in its weights: ``y[c] = x * W[c] + d[c]``. Hence::

    BN(y)[c] = x * (s[c] * W[c]) + (s[c] * d[c] + t[c])

that is, the same node with weights ``s * W`` and bias ``s * d + t``. The bias ``d`` may also be an ``Add`` of a
constant between the two. Gemm computes ``alpha * A * B + beta * C``: its weights become ``s * B``, its bias
``beta * s * C + t`` and ``beta`` 1. A MatMul has no bias: without an ``Add`` the BatchNormalization turns into one.

All arithmetic is float64 and rounded once, to the type of the weights. The channel of a BatchNormalization is
axis 1, for MatMul and Gemm the last axis, so these must be of rank 2.

Not folded: training mode, ``spatial=0``, parameters or weights that are not constant, an intermediate
value that another node, a body of control flow, the graph's outputs or the caller need, results that overflow.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import onnx
import onnx.numpy_helper

from kenosis_ort.graph.constants import LAYERS, GraphIndex
from kenosis_ort.graph.opset import RewriteResult
from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.walk import MAIN_DOMAINS, opset_of
from kenosis_ort.rewrite.rule import FloatArray

_log = logging.getLogger(__name__)


_INFERENCE_BY_DEFAULT = 7
"""Before this operator set BatchNormalization is in training mode unless it says ``is_test``."""


@dataclass(frozen=True)
class _Pattern:
    """``affine [-> add] -> norm``, with every intermediate value read by the next node only."""

    affine: onnx.NodeProto
    add: onnx.NodeProto | None
    norm: onnx.NodeProto
    weights: onnx.TensorProto


class _NotFoldableError(Exception):
    """Carries the reason why a BatchNormalization stays; never leaves this module."""


def fold_batch_norm(model: onnx.ModelProto, *, keep_values: Collection[str] = ()) -> RewriteResult:
    """Folds every BatchNormalization that follows a Conv, ConvTranspose, Gemm or MatMul, in place.

    The folded node keeps its name and takes over the output name of the BatchNormalization; its weights keep
    their names, but for weights shared with another node, which get a private copy.

    Args:
        model: The model to change, its types and shapes inferred (the rank of MatMul is read from them).
        keep_values: Values that must keep existing with their meaning.
    """
    norms = [n for n in model.graph.node if n.op_type == "BatchNormalization" and n.domain in MAIN_DOMAINS]
    if not norms or opset_of(model) < _INFERENCE_BY_DEFAULT:
        return RewriteResult()
    index = GraphIndex(model, keep_values)
    ranks = _ranks(model.graph)
    merged: dict[str, str] = {}
    left: list[str] = []
    folded = 0
    for norm in index.nodes:
        if norm.op_type != "BatchNormalization" or norm.domain not in MAIN_DOMAINS:
            continue
        try:
            pattern = _match(norm, index, ranks)
            weights, bias = _folded(pattern, index)
        except _NotFoldableError as reason:
            left.append(norm.name)
            _log.debug("BatchNormalization '%s' stays: %s", norm.name, reason)
            continue
        merged.update(_apply(pattern, index, weights, bias))
        folded += 1
    index.commit()
    notes = []
    if folded:
        notes.append(f"{folded} BatchNormalization nodes were folded into the weights in front of them.")
    if left:
        shown = ", ".join(f"'{name}'" for name in left[:3]) + (", ..." if len(left) > 3 else "")
        notes.append(f"{len(left)} BatchNormalization nodes stay: nothing in front of them can take them up ({shown}).")
    return RewriteResult(notes=tuple(notes), merged=merged)


def _match(norm: onnx.NodeProto, index: GraphIndex, ranks: dict[str, int]) -> _Pattern:
    attributes = {a.name: a for a in norm.attribute}
    if "training_mode" in attributes and attributes["training_mode"].i:
        raise _NotFoldableError("it is in training mode")
    if "spatial" in attributes and not attributes["spatial"].i:
        raise _NotFoldableError("it normalizes each element (spatial=0)")
    if any(norm.output[1:]):
        raise _NotFoldableError("its statistics are outputs")
    producer = _private_producer(norm.input[0], index)
    add = None
    if producer.op_type == "Add" and producer.domain in MAIN_DOMAINS:
        add = producer
        variable = [name for name in add.input if index.constant(name) is None]
        if len(variable) != 1:
            raise _NotFoldableError("the Add in front of it adds no constant")
        producer = _private_producer(variable[0], index)
    if producer.op_type not in LAYERS or producer.domain not in MAIN_DOMAINS:
        raise _NotFoldableError(f"it follows a {producer.op_type}")
    weights = index.constant(producer.input[1])
    if weights is None:
        raise _NotFoldableError(f"the weights of '{producer.name}' are not constant")
    if producer.op_type == "MatMul" and not _is_matrix_product(producer, norm, weights, ranks):
        raise _NotFoldableError(f"'{producer.name}' is not known to give a matrix")
    return _Pattern(producer, add, norm, weights)


def _private_producer(value: str, index: GraphIndex) -> onnx.NodeProto:
    producer = index.producers.get(value)
    if producer is None:
        raise _NotFoldableError("it follows no node")
    if not index.is_private(value):
        raise _NotFoldableError(f"'{value}' is needed elsewhere")
    return producer


def _is_matrix_product(
    matmul: onnx.NodeProto, norm: onnx.NodeProto, weights: onnx.TensorProto, ranks: dict[str, int]
) -> bool:
    known = [ranks[name] for name in (matmul.input[0], matmul.output[0], norm.output[0]) if name in ranks]
    return len(weights.dims) == 2 and bool(known) and known[0] == 2


def _folded(pattern: _Pattern, index: GraphIndex) -> tuple[onnx.TensorProto, onnx.TensorProto]:
    """The new weights and the new bias, in the type of the old weights."""
    affine, weights = pattern.affine, array_in(pattern.weights)
    scale, shift = _scale_and_shift(pattern.norm, index)
    factor = _weight_factor(affine, weights.shape, scale)
    rank = weights.ndim if affine.op_type in ("Conv", "ConvTranspose") else 2
    bias = np.zeros_like(scale)
    if affine.op_type != "MatMul" and len(affine.input) > 2 and affine.input[2]:
        per_channel_rank = 1 if affine.op_type != "Gemm" else 2
        bias = _per_channel(affine.input[2], index, len(scale), per_channel_rank) * _attribute(affine, "beta", 1.0)
    if pattern.add is not None:
        constant = next(name for name in pattern.add.input if index.constant(name) is not None)
        bias = bias + _per_channel(constant, index, len(scale), rank)
    with np.errstate(over="ignore", invalid="ignore"):
        new_weights = (weights.astype(np.float64) * factor).astype(weights.dtype)
        new_bias = (bias * scale + shift).astype(weights.dtype)
    for array in (new_weights, new_bias):
        if not np.isfinite(array.astype(np.float64)).all():
            raise _NotFoldableError("the folded weights are not finite")
    return onnx.numpy_helper.from_array(new_weights), onnx.numpy_helper.from_array(new_bias)


def _scale_and_shift(norm: onnx.NodeProto, index: GraphIndex) -> tuple[FloatArray, FloatArray]:
    tensors = [index.constant(name) for name in norm.input[1:5]]
    arrays = [array_in(t).astype(np.float64) for t in tensors if t is not None]
    if len(arrays) != 4:
        raise _NotFoldableError("its parameters are not constant")
    gamma, beta, mean, variance = arrays
    if any(a.shape != gamma.shape or a.ndim != 1 for a in arrays):
        raise _NotFoldableError("its parameters are not one number a channel")
    with np.errstate(invalid="ignore", divide="ignore"):
        scale = gamma / np.sqrt(variance + _attribute(norm, "epsilon", 1e-5))
        return scale, beta - scale * mean


def _weight_factor(affine: onnx.NodeProto, shape: tuple[int, ...], scale: FloatArray) -> FloatArray:
    """``scale`` in a shape that multiplies weights of ``shape`` along their output channels."""
    channels = len(scale)
    if affine.op_type == "ConvTranspose":
        groups = int(_attribute(affine, "group", 1))
        if shape[1] * groups != channels or shape[0] % groups:
            raise _NotFoldableError("the channel counts differ")
        per_input = np.repeat(scale.reshape(groups, shape[1]), shape[0] // groups, axis=0)
        return per_input.reshape(shape[0], shape[1], *([1] * (len(shape) - 2)))
    axis = 0 if affine.op_type == "Conv" or (affine.op_type == "Gemm" and _attribute(affine, "transB", 0)) else 1
    if shape[axis] != channels:
        raise _NotFoldableError("the channel counts differ")
    return scale.reshape([channels if at == axis else 1 for at in range(len(shape))])


def _per_channel(name: str, index: GraphIndex, channels: int, rank: int) -> FloatArray:
    """A constant addend as one number a channel (axis 1 of ``rank``, the only axis for rank 1)."""
    tensor = index.constant(name)
    if tensor is None:
        raise _NotFoldableError(f"the bias '{name}' is not constant")
    array = array_in(tensor).astype(np.float64)
    if array.ndim > rank:
        raise _NotFoldableError(f"the bias '{name}' is not one number a channel")
    shape = (1,) * (rank - array.ndim) + array.shape
    axis = min(1, rank - 1)
    if any(dim != 1 for at, dim in enumerate(shape) if at != axis) or shape[axis] not in (1, channels):
        raise _NotFoldableError(f"the bias '{name}' is not one number a channel")
    return np.broadcast_to(array.reshape(-1), (channels,))


def _apply(pattern: _Pattern, index: GraphIndex, weights: onnx.TensorProto, bias: onnx.TensorProto) -> dict[str, str]:
    """Performs the fold; returns the names of the nodes that are gone and of the node that took them up."""
    affine, add, norm = pattern.affine, pattern.add, pattern.norm
    base = affine.input[1]
    output = norm.output[0]
    index.store_constant(affine, 1, weights, f"{base}_folded")
    if affine.op_type == "MatMul" and add is None:
        for name in list(norm.input[1:]):
            index.release(norm, name)
        del norm.input[1:]
        del norm.attribute[:]
        norm.op_type = "Add"
        index.store_constant(norm, 1, bias, f"{base}_bias")
        return {}
    index.remove(norm)
    if affine.op_type == "MatMul" and add is not None:
        at = next(at for at, name in enumerate(add.input) if index.constant(name) is not None)
        index.store_constant(add, at, bias, f"{base}_bias")
        index.take_over_output(add, output)
        return {norm.name: affine.name}
    index.store_constant(affine, 2, bias, f"{base}_bias")
    for attribute in list(affine.attribute):
        if affine.op_type == "Gemm" and attribute.name == "beta":
            affine.attribute.remove(attribute)
    if add is not None:
        index.remove(add)
    index.take_over_output(affine, output)
    return {gone.name: affine.name for gone in (norm, add) if gone is not None}


def _attribute(node: onnx.NodeProto, name: str, default: float) -> float:
    for attribute in node.attribute:
        if attribute.name == name:
            return float(attribute.i if attribute.type == onnx.AttributeProto.INT else attribute.f)
    return default


def _ranks(graph: onnx.GraphProto) -> dict[str, int]:
    ranks = {}
    for value in (*graph.input, *graph.value_info, *graph.output):
        kind = value.type.tensor_type
        if value.type.HasField("tensor_type") and kind.HasField("shape"):
            ranks[value.name] = len(kind.shape.dim)
    return ranks
