"""Layout operators behind the DQ of a constant, performed on the constant's integers.

QKeras' weights pass a Transpose behind their quantizer, as do those of channels-last operators. The runtime takes a
weight for its integer kernels only where DQ of an initializer is what the kernel's operator reads.

QONNX' operators on channels-last data, written as ONNX's own between two Transposes.

``Conv``, ``MaxPool`` and ``BatchNormalization`` of the domain ``qonnx.custom_op.channels_last`` read and write values
of shape (N, ..., C); Conv's weights are (O, ..., I). All else about them is as in ONNX. When it loads the model the
runtime moves the Transposes together and drops those that cancel out.
Source: what the `qonnx` package 1.0.0 executes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.errors import UnsupportedModelError
from kenosis_ort.formats.draft import Draft
from kenosis_ort.formats.from_qdq import is_dequantize
from kenosis_ort.formats.qonnx_nodes import CHANNELS_LAST, drop_imports, label
from kenosis_ort.formats.tensors import annotate, declared_datatypes
from kenosis_ort.graph.constants import LAYOUT
from kenosis_ort.graph.walk import MAIN_DOMAINS, attribute, attribute_int


def fold_layouts(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its quantized constants laid out as their readers want them.

    Args:
        model: A private model in the canonical spelling, its nodes in order; it is changed.
    """
    draft = Draft(model)
    constants: dict[str, onnx.NodeProto] = {}  # what a DQ of a constant writes -> the DQ
    declared = declared_datatypes(model.graph)
    for node in model.graph.node:
        source = constants.get(node.input[0]) if node.input else None
        if is_dequantize(node) and draft.is_constant(node.input[0]) and not attribute_int(node, "block_size", 0):
            constants[node.output[0]] = node
        elif source is not None and node.op_type in LAYOUT and node.domain in MAIN_DOMAINS:
            moved = _laid_out(node, source, draft)
            if moved is not None:
                node = _dequantize(node, source, *moved, draft)
                constants[node.output[0]] = node
                if source.input[0] in declared:
                    declared[node.input[0]] = declared[source.input[0]]
                    annotate(model.graph, node.input[0], declared[source.input[0]])
        draft.nodes.append(node)
    return draft.finish(may_go=lambda node: node.output[0] in constants)


def _laid_out(node: onnx.NodeProto, source: onnx.NodeProto, draft: Draft) -> tuple[npt.NDArray[Any], int | None] | None:
    """The integers as the layout operator leaves them, and their channel axis; None where that is not known."""
    integers, scale = draft.array(source.input[0]), draft.array(source.input[1])
    if integers is None or scale is None:
        return None
    axis = None if scale.ndim == 0 else attribute_int(source, "axis", 1) % max(integers.ndim, 1)
    if node.op_type == "Identity":
        return integers, axis
    if node.op_type == "Transpose":
        given = attribute(node, "perm")
        perm = list(given.ints) if given is not None else list(range(integers.ndim))[::-1]
        if sorted(perm) != list(range(integers.ndim)):
            return None
        return integers.transpose(perm), None if axis is None else perm.index(axis)
    shape = _shape(node, integers.shape, draft)
    if shape is None:
        return None
    if axis is not None:
        ahead = math.prod(integers.shape[:axis])
        found = [at for at, size in enumerate(shape) if size == integers.shape[axis] and math.prod(shape[:at]) == ahead]
        if not found:
            return None
        axis = found[0]
    return integers.reshape(shape), axis


def _shape(node: onnx.NodeProto, before: tuple[int, ...], draft: Draft) -> tuple[int, ...] | None:
    """The shape that Reshape, Flatten, Squeeze or Unsqueeze gives a value."""
    if node.op_type == "Flatten":
        axis = attribute_int(node, "axis", 1)
        axis += len(before) if axis < 0 else 0
        return math.prod(before[:axis]), math.prod(before[axis:])
    numbers = draft.array(node.input[1]) if len(node.input) > 1 and node.input[1] else None
    declared = None if numbers is None else [int(n) for n in numbers.reshape(-1)]
    if node.op_type == "Reshape":
        return None if declared is None or attribute_int(node, "allowzero", 0) else _reshaped(declared, before)
    if node.op_type == "Squeeze":
        axes = range(len(before)) if declared is None else [a % max(len(before), 1) for a in declared]
        return tuple(size for at, size in enumerate(before) if not (at in axes and size == 1))
    if declared is None:
        return None
    rank = len(before) + len(declared)
    axes = [a % rank for a in declared]
    rest = iter(before)
    return tuple(1 if at in axes else next(rest) for at in range(rank))


def _reshaped(declared: Sequence[int], before: tuple[int, ...]) -> tuple[int, ...] | None:
    if any(n == 0 and at >= len(before) for at, n in enumerate(declared)) or declared.count(-1) > 1:
        return None
    sizes = [before[at] if n == 0 else n for at, n in enumerate(declared)]
    known = math.prod(n for n in sizes if n != -1)
    total = math.prod(before)
    if -1 in sizes:
        if known <= 0 or total % known:
            return None
        sizes[sizes.index(-1)] = total // known
    return tuple(sizes) if math.prod(sizes) == total and min(sizes, default=1) >= 0 else None


def _dequantize(
    node: onnx.NodeProto, source: onnx.NodeProto, integers: npt.NDArray[Any], axis: int | None, draft: Draft
) -> onnx.NodeProto:
    name = draft.constant(np.ascontiguousarray(integers), f"{source.input[0]}_{node.op_type.lower()}")
    new = onnx.helper.make_node("DequantizeLinear", [name, *source.input[1:]], [node.output[0]], name=node.name)
    if axis is not None:
        new.attribute.append(onnx.helper.make_attribute("axis", axis))
    return new


_OPERATORS = frozenset({"Conv", "MaxPool", "BatchNormalization"})


def to_channels_first(model: onnx.ModelProto) -> None:
    """Puts ONNX's operators and Transposes in the place of the channels-last ones, in place.

    Nothing but Python looks at the model here.

    Raises:
        UnsupportedModelError: Another operator of the domain, or the rank of its data is not known.
    """
    if not any(node.domain == CHANNELS_LAST for node in model.graph.node):
        return
    draft = Draft(model)
    for node in model.graph.node:
        if node.domain != CHANNELS_LAST:
            draft.nodes.append(node)
            continue
        if node.op_type not in _OPERATORS or len(node.output) != 1 or not node.input:
            raise UnsupportedModelError(
                f"The channels-last operator has no counterpart in other formats (known are "
                f"{', '.join(sorted(_OPERATORS))}, with one output).",
                where=label(node),
            )
        _write(node, _rank(node, draft), draft)
    draft.finish()
    drop_imports(model, (CHANNELS_LAST,))


def _write(node: onnx.NodeProto, rank: int, draft: Draft) -> None:
    base = node.name or node.output[0]
    first, last = [0, rank - 1, *range(1, rank - 1)], [0, *range(2, rank), 1]
    new = onnx.NodeProto()
    new.CopyFrom(node)
    new.domain = ""
    for at in range(2 if node.op_type == "Conv" else 1):
        new.input[at] = draft.add("Transpose", [node.input[at]], base, perm=first)
    new.output[0] = draft.fresh(f"{base}_channels_first")
    draft.nodes.append(new)
    draft.add("Transpose", [new.output[0]], base, output=node.output[0], perm=last)


def _rank(node: onnx.NodeProto, draft: Draft) -> int:
    kernel = attribute(node, "kernel_shape")
    if kernel is not None and kernel.ints:
        return len(kernel.ints) + 2
    for name in (node.input[0], node.output[0]):
        rank = draft.rank(name)
        if rank is not None and rank > 1:
            return rank
    raise UnsupportedModelError(
        "The rank of the data of a channels-last operator is not known.",
        where=label(node),
        fix="declare the shapes of the values, as qonnx' InferShapes does, or give kernel_shape",
    )
