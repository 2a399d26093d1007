"""Activations as the runtime's convolutions lay them out, so that they need not be put in order to be looked at.

Kernels for pictures keep the channels in blocks: those of one block lie side by side at each place. Where such a value
leaves the graph, the runtime puts it in order first, a pass over memory that takes longer than some convolutions.
Extremes do not ask for order, extremes by channel and single elements can be had from either one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from kenosis_ort.graph.walk import read_names
from kenosis_ort.runtime.limits import fact_of_processor
from kenosis_ort.runtime.session import open_session

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]

_DOMAIN = "com.microsoft.nchwc"
_REORDER = "ReorderOutput"
_BLOCKS = (4, 8, 16, 32)
_LONG_ROW = 512  # elements that a channel has side by side
MOST_PLACES = 1 << 18
"""Elements of one array whose places are kept: 2 MiB."""


class Blocked(np.ndarray[Any, Any]):
    """An array of shape (images, channels / block, height, width, block), all of it in one piece."""


@lru_cache(maxsize=1)
def block_size() -> int:
    """Number of channels of a block on this processor; found out once, see `fact_of_processor`."""
    return fact_of_processor("block", _probed_block_size, lambda size: type(size) is int and size in _BLOCKS)


def _probed_block_size() -> int:
    reorder = helper.make_node("ReorderInput", ["x"], ["y"], domain=_DOMAIN)
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 4, 1, 1])
    graph = helper.make_graph([reorder], "block", [x], [onnx.ValueInfoProto(name="y")])
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid(_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=7)
    session = open_session(model, optimize=False)
    (y,) = session.run(None, {"x": np.zeros((1, 4, 1, 1), np.float32)})
    return int(y.shape[1])


def without_reorders(optimized: onnx.ModelProto, names: Collection[str]) -> dict[str, str]:
    """Has an optimized model return values in blocks that it would put in order first.

    Values whose channels do not fill their blocks are put in order as before: what fills up is no value.

    Args:
        optimized: As the runtime writes it; changed.
        names: Outputs that may come in blocks.

    Returns:
        By the name of an output, that of the one that takes its place; without those that stay.
    """
    graph = optimized.graph
    found = {}
    for node in graph.node:
        if node.op_type == _REORDER and node.domain == _DOMAIN and node.output[0] in names:
            attributes = {attribute.name: attribute.i for attribute in node.attribute}
            if not attributes.get("channels_last") and attributes.get("channels", 1) % block_size() == 0:
                found[node.output[0]] = node.input[0]
    if found:
        uses = Counter(name for node in graph.node for name in set(read_names(node)))
        rest = [n for n in graph.node if n.op_type != _REORDER or n.output[0] not in found or uses[n.output[0]]]
        outputs = dict.fromkeys(found.get(value.name, value.name) for value in graph.output)
        typed = {value.name: value for value in graph.output}
        returned = [typed.get(name) or onnx.ValueInfoProto(name=name) for name in outputs]
        del graph.node[:], graph.output[:]
        graph.node.extend(rest)
        graph.output.extend(returned)
    return found


def as_blocked(array: Array) -> Blocked:
    """Array that the runtime returned in blocks, in its logical shape and type."""
    images, channels, height, width = array.shape
    block = block_size()
    return array.reshape(images, channels // block, height, width, block).view(Blocked)


def in_order(array: Blocked) -> Array:
    """The elements in order, (images, channels, height, width)."""
    images, blocks, height, width, block = array.shape
    plain: Array = np.asarray(array).transpose(0, 1, 4, 2, 3).reshape(images, blocks * block, height, width)
    return plain


@lru_cache(maxsize=64)
def places(shape: tuple[int, ...], stride: int) -> npt.NDArray[np.intp]:
    """Positions in memory of every ``stride``-th element, in the order of memory.

    Args:
        shape: Of the array in blocks.
        stride: Counted in the order that the elements have without blocks.
    """
    images, blocks, height, width, block = shape
    area = height * width
    channel, place = np.divmod(np.arange(0, images * blocks * block * area, stride, dtype=np.intp), area)
    group, inside = np.divmod(channel, block)
    found = np.sort((group * area + place) * block + inside)
    found.flags.writeable = False
    return found


def pick(array: Array, stride: int) -> Array:
    """Every ``stride``-th element, in any order."""
    if isinstance(array, Blocked):
        picked: Array = np.asarray(array).take(places(array.shape, stride), mode="wrap")
        return picked
    return array.reshape(-1)[::stride]


def channel_ends(end: np.ufunc, array: Array, axis: int) -> Float64:
    """The least or largest value of each channel, NaN where there is one; in blocks they are of axis 1."""
    if isinstance(array, Blocked):  # line by line: of a channel no two elements lie side by side
        images, blocks, height, width, block = array.shape
        lines = np.asarray(array).reshape(images, blocks, height, width * block)
        line = end.reduce(lines, axis=(0, 2)).reshape(blocks, width, block)
        ends: Float64 = end.reduce(line, axis=1).reshape(-1).astype(np.float64)
        return ends
    behind = math.prod(array.shape[axis + 1 :])
    rows = array.reshape(math.prod(array.shape[:axis]), array.shape[axis], behind)
    if behind >= _LONG_ROW or len(rows) == 1:
        found = end.reduce(rows, axis=(0, 2))
    else:  # short rows one by one take ten times longer than samples one upon the other
        found = end.reduce(end.reduce(rows, axis=0), axis=1)
    wide: Float64 = found.astype(np.float64)
    return wide
