"""Rules that change one kind of node: a function that changes one node, made into one that changes all.

The function gets a view of the model and a node, and returns, or raises `NotCollapsibleError` before it has changed
anything, if the node stays. What it becomes keeps its name and its docstring.

What the rules share that pay only in an integer neighbourhood: the candidates, and how windows move.

These rules make the float model no faster, often slower. So each takes the names of its candidates from the caller,
who knows from a placement plan which nodes lie between integer kernels, and touches no other node.

Finds out whether operators that only move elements pick channels: ``y[n, c] = x[n, chosen[c]]``.

A channel shuffle is written as Reshape, Transpose and Reshape, often with a Split, Slice or Gather behind it. Instead
of knowing the spellings, the operators are applied to a picture whose elements are all different, and the result is
compared. A height, a width or a batch that is not known counts as a small number, each as another one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.graph.opset import RewriteResult
from kenosis_ort.graph.walk import MAIN_DOMAINS, attribute, attribute_int, opset_of
from kenosis_ort.rewrite.matching import Editor, NotCollapsibleError

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


View = TypeVar("View", bound=Editor)
Rewrite = Callable[..., RewriteResult]


def float_rule(
    *op_types: str, did: str, stays: str, least_opset: int = 0
) -> Callable[[Callable[[Editor, onnx.NodeProto], None]], Rewrite]:
    """Makes ``(model, *, keep_values=())`` of a function, for all nodes of the main graph of these operators.

    The model's types and shapes have to be inferred; values of the names in ``keep_values`` keep their meaning.

    Args:
        op_types: The operators.
        did: What became of nodes, behind their number.
        stays: The same of those that stay.
        least_opset: Operator set below which nothing is done.
    """

    def decorate(change: Callable[[Editor, onnx.NodeProto], None]) -> Rewrite:
        def rewrite(model: onnx.ModelProto, *, keep_values: Collection[str] = ()) -> RewriteResult:
            if opset_of(model) < least_opset or not any(node.op_type in op_types for node in model.graph.node):
                return RewriteResult()
            editor = Editor(model, keep_values)
            for node in editor.nodes(*op_types):
                _attempt(change, editor, node)
            return editor.finish(did, stays)

        return _named_after(change, rewrite)

    return decorate


def integer_rule(
    *op_types: str, did: str, stays: str
) -> Callable[[Callable[[IntegerForm, onnx.NodeProto], None]], Rewrite]:
    """Makes ``(model, *, nodes, keep_values=())`` of a function, for the nodes of these operators named in ``nodes``.

    The model's nodes have to be named; the rest is as with `float_rule`.
    """

    def decorate(change: Callable[[IntegerForm, onnx.NodeProto], None]) -> Rewrite:
        def rewrite(
            model: onnx.ModelProto, *, nodes: Collection[str], keep_values: Collection[str] = ()
        ) -> RewriteResult:
            if not has_candidate(model, nodes, *op_types):
                return RewriteResult()
            form = IntegerForm(model, nodes, keep_values)
            for node in form.candidates(*op_types):
                _attempt(change, form, node)
            return form.finish(did, stays)

        return _named_after(change, rewrite)

    return decorate


def _attempt(change: Callable[[View, onnx.NodeProto], None], view: View, node: onnx.NodeProto) -> None:
    try:
        change(view, node)
    except NotCollapsibleError as reason:
        view.refuse(node, reason)


def _named_after(change: Callable[..., None], rewrite: Rewrite) -> Rewrite:
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(rewrite, name, getattr(change, name))
    return rewrite


FloatArray = npt.NDArray[np.float64]

PADDED: Final = "_padded"
"""Stands behind the names of values and weights that a rewrite gives another shape."""
_PICTURE_RANK = 4


class Picture(NamedTuple):
    """The shape of a value ``[N, C, H, W]``; None where it is not known before a run."""

    channels: int | None
    height: int | None
    width: int | None


class Axis(NamedTuple):
    """Window of a Conv or pool along one axis: its extent, step and the zeros put before and behind."""

    kernel: int
    stride: int
    dilation: int
    begin: int
    end: int

    @property
    def extent(self) -> int:
        """Number of elements that the window spans."""
        return (self.kernel - 1) * self.dilation + 1


class IntegerForm(Editor):
    """One rule's view of a model and of its candidates.

    Args:
        model: The model to change, its nodes named, its types and shapes inferred.
        nodes: Names of the nodes that may change.
        keep_values: Values that must keep existing with their meaning.
    """

    def __init__(self, model: onnx.ModelProto, nodes: Collection[str], keep_values: Collection[str]) -> None:
        super().__init__(model, keep_values)
        self.named = frozenset(nodes)

    def candidates(self, *op_types: str) -> list[onnx.NodeProto]:
        """The named nodes of these operators, in order."""
        return [node for node in self.nodes(*op_types) if node.name in self.named]

    def picture(self, value: str) -> Picture:
        """The shape of a float32 value of four dimensions.

        Raises:
            NotCollapsibleError: Its type or rank is another one, or not known.
        """
        self.require_float32(value)
        dims = self.dims(value)
        if dims is None:
            raise NotCollapsibleError(f"the rank of '{value}' is not known")
        if len(dims) != _PICTURE_RANK:
            raise NotCollapsibleError(f"'{value}' has {len(dims)} dimensions, not {_PICTURE_RANK}")
        if 0 in dims[1:]:
            raise NotCollapsibleError(f"'{value}' is empty")
        return Picture(*dims[1:])


def has_candidate(model: onnx.ModelProto, nodes: Collection[str], *op_types: str) -> bool:
    """Whether a node of these operators is named; cheap where a rule has nothing to do."""
    named = frozenset(nodes)
    return any(n.op_type in op_types and n.name in named and n.domain in MAIN_DOMAINS for n in model.graph.node)


def window_axes(node: onnx.NodeProto, kernel: Sequence[int], picture: Picture) -> tuple[Axis, Axis]:
    """Window of a Conv or pool along height and width, with ``auto_pad`` resolved.

    With ``SAME_UPPER`` and ``SAME_LOWER`` an axis of length ``L`` gives ``ceil(L / stride)`` windows; the zeros that
    this takes are split in halves, an odd one goes behind (upper) or before (lower).

    Raises:
        NotCollapsibleError: The padding depends on a height or width that is not known, or is negative.
    """
    strides, dilations, pads = (_integers(node, name) for name in ("strides", "dilations", "pads"))
    found = attribute(node, "auto_pad")
    mode = found.s.decode() if found is not None else "NOTSET"
    axes = []
    for at in range(2):
        stride, dilation = (given[at] if given else 1 for given in (strides, dilations))
        axis = Axis(kernel[at], stride, dilation, 0, 0)
        if mode in ("SAME_UPPER", "SAME_LOWER"):
            length = picture[1 + at]
            if length is None:
                raise NotCollapsibleError(f"its padding ({mode}) depends on a height or width that is not known")
            total = (-(-length // stride) - 1) * stride + axis.extent - length
            begin = (total + (mode == "SAME_LOWER")) // 2
            axis = axis._replace(begin=begin, end=total - begin)
        elif mode == "NOTSET" and pads:
            axis = axis._replace(begin=pads[at], end=pads[at + 2])
        elif mode not in ("NOTSET", "VALID"):
            raise NotCollapsibleError(f"its auto_pad is '{mode}'")
        if min(axis.begin, axis.end, axis.begin + axis.end) < 0:  # of SAME too: operators disagree on what it means
            raise NotCollapsibleError("its padding is negative")
        axes.append(axis)
    return axes[0], axes[1]


def window_attributes(height: Axis, width: Axis) -> dict[str, Sequence[int]]:
    """The attributes of a Conv with these windows."""
    attributes: dict[str, Sequence[int]] = {"kernel_shape": (height.kernel, width.kernel)}
    if (height.stride, width.stride) != (1, 1):
        attributes["strides"] = (height.stride, width.stride)
    if (height.dilation, width.dilation) != (1, 1):
        attributes["dilations"] = (height.dilation, width.dilation)
    if any((height.begin, width.begin, height.end, width.end)):
        attributes["pads"] = (height.begin, width.begin, height.end, width.end)
    return attributes


def _integers(node: onnx.NodeProto, name: str) -> list[int]:
    found = attribute(node, name)
    return [] if found is None else list(found.ints)
