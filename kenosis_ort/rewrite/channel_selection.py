"""Finds out whether operators that only move elements pick channels: ``y[n, c] = x[n, chosen[c]]``.

A channel shuffle is written as Reshape, Transpose and Reshape, often with a Split, Slice or Gather behind it. Instead
of knowing the spellings, the operators are applied to a picture whose elements are all different, and the result is
compared. A height, a width or a batch that is not known counts as a small number, each as another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.graph.walk import attribute, attribute_int
from kenosis_ort.rewrite.matching import NotCollapsibleError
from kenosis_ort.rewrite.rule import IntegerForm

Indices = npt.NDArray[np.int64]

SHAPE_OPS = ("Reshape", "Transpose", "Gather", "Slice", "Split", "Squeeze", "Unsqueeze")

_RANK = 4
_LONGEST = 6
_MOST_ELEMENTS = 1 << 23
_STAND_INS = (2, 0, 3, 5)  # for unknown dimensions of [N, C, H, W]; channels have to be known


@dataclass(frozen=True)
class Selection:
    """``value`` is ``source`` with only the channels ``chosen``, in this order.

    Attributes:
        chosen: For each channel of the value, the channel of the source.
        path: The nodes in between, from the source to the value.
    """

    source: str
    value: str
    chosen: Indices
    channels: int
    path: tuple[onnx.NodeProto, ...]

    @property
    def is_permutation(self) -> bool:
        """Whether every channel is chosen once."""
        return len(self.chosen) == self.channels and len(np.unique(self.chosen)) == self.channels


def find_selection(form: IntegerForm, value: str) -> Selection | None:
    """Channels that a value of four dimensions selects from the farthest value that it can be traced to, if any."""
    path: list[onnx.NodeProto] = []
    found = None
    at = value
    while len(path) < _LONGEST and (node := form.producer(at, *SHAPE_OPS)) is not None:
        path.insert(0, node)
        at = node.input[0]
        try:
            chosen = _chosen(form, at, value, path)
        except (NotCollapsibleError, ValueError, IndexError):  # numpy: a shape or an index that does not fit
            continue
        if chosen is not None:
            found = Selection(at, value, chosen, form.picture(at).channels or 0, tuple(path))
    return found


def _chosen(form: IntegerForm, source: str, value: str, path: Sequence[onnx.NodeProto]) -> Indices | None:
    form.picture(source)
    dims = form.dims(source)
    if dims is None or not dims[1]:
        return None
    shape = [stand_in if dim is None else dim for dim, stand_in in zip(dims, _STAND_INS, strict=True)]
    if np.prod(shape, dtype=np.float64) > _MOST_ELEMENTS:
        return None
    picture: Indices = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    moved = picture
    for node, after in zip(path, (*(n.input[0] for n in path[1:]), value), strict=True):
        moved = _apply(form, node, moved, list(node.output).index(after))
    if moved.ndim != _RANK or moved.shape[0] != shape[0] or moved.shape[2:] != tuple(shape[2:]):
        return None
    chosen: Indices = moved[0, :, 0, 0] // (shape[2] * shape[3])
    return chosen if np.array_equal(picture[:, chosen], moved) else None


def _apply(form: IntegerForm, node: onnx.NodeProto, x: Indices, output: int) -> Indices:
    if node.op_type == "Transpose":
        perm = attribute(node, "perm")
        turned: Indices = x.transpose(None if perm is None else list(perm.ints))
        return turned
    if node.op_type == "Reshape":
        return _reshape(x, _constant(form, node, 1), zero_is_empty=bool(attribute_int(node, "allowzero", 0)))
    if node.op_type == "Gather":
        picked: Indices = np.take(x, _constant(form, node, 1), axis=attribute_int(node, "axis", 0))
        return picked
    if node.op_type == "Slice":
        starts, ends = _constant(form, node, 1), _constant(form, node, 2)
        axes = _constant(form, node, 3) if _has(node, 3) else np.arange(len(starts))
        steps = _constant(form, node, 4) if _has(node, 4) else np.ones_like(starts)
        window = [slice(None)] * x.ndim
        for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
            window[axis] = slice(int(start), int(end), int(step))
        return x[tuple(window)]
    if node.op_type == "Split":
        axis = attribute_int(node, "axis", 0)
        count = len(node.output)
        given = _constant(form, node, 1) if _has(node, 1) else None
        if given is None and x.shape[axis] % count:
            raise NotCollapsibleError(f"'{node.name}' splits unevenly")
        sizes = given if given is not None else np.full(count, x.shape[axis] // count)
        parts: list[Indices] = np.split(x, np.cumsum(sizes)[:-1], axis=axis)
        return parts[output]
    sides = tuple(int(side) for side in _constant(form, node, 1))
    return x.squeeze(sides) if node.op_type == "Squeeze" else np.expand_dims(x, sides)


def _reshape(x: Indices, shape: npt.NDArray[np.generic], *, zero_is_empty: bool) -> Indices:
    wanted = [int(size) for size in shape.reshape(-1).tolist()]
    if zero_is_empty and 0 in wanted:
        raise NotCollapsibleError("it is empty")
    return x.reshape([x.shape[at] if size == 0 else size for at, size in enumerate(wanted)])


def _has(node: onnx.NodeProto, position: int) -> bool:
    return position < len(node.input) and bool(node.input[position])


def _constant(form: IntegerForm, node: onnx.NodeProto, position: int) -> Indices:
    array = form.array(node.input[position]) if _has(node, position) else None
    if array is None:
        raise NotCollapsibleError(f"'{node.name}' moves by what is computed")
    return array.astype(np.int64)
