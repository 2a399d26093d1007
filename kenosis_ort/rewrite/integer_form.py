"""What the rules share that pay only in an integer neighbourhood: the candidates, and how windows move.

These rules make the float model no faster, often slower. So each takes the names of its candidates from the caller,
who knows from a placement plan which nodes lie between integer kernels, and touches no other node.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.graph.attributes import attribute
from kenosis_ort.graph.walk import MAIN_DOMAINS
from kenosis_ort.rewrite.editing import Editor
from kenosis_ort.rewrite.matching import NotCollapsibleError

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
    """How a window moves along one axis: its extent, step and the zeros put before and behind."""

    kernel: int
    stride: int
    dilation: int
    begin: int
    end: int

    @property
    def extent(self) -> int:
        """How many elements the window spans."""
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
        """Returns the named nodes of these operators, in order."""
        return [node for node in self.nodes(*op_types) if node.name in self.named]

    def picture(self, value: str) -> Picture:
        """Returns the shape of a float32 value of four dimensions.

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
    """Returns whether a node of these operators is named; cheap where a rule has nothing to do."""
    named = frozenset(nodes)
    return any(n.op_type in op_types and n.name in named and n.domain in MAIN_DOMAINS for n in model.graph.node)


def window_axes(node: onnx.NodeProto, kernel: Sequence[int], picture: Picture) -> tuple[Axis, Axis]:
    """Returns how the window of a Conv or pool moves along height and width, with ``auto_pad`` worked out.

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
    """Returns the attributes of a Conv with these windows."""
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
