"""Activations held apart from the kernel before them, where that kernel is slow at them.

oneDNN's kernels for matrix tiles (AMX) compute an exponential in the epilogue a vector at a time, each waiting for the
one before; a pass of its own takes two thirds of the time, and works on the float sum just as exactly (3 Convs of 64
channels with SiLU: 4.6x of float32, for 3.2x in the kernel and 4.0x with Q in between). ``Max(x, least number) = x`` is
no operation that those kernels take in, and costs the pass behind it nothing. Float sums that no longer fit the
processor's second cache would cost more than that; there the kernel keeps its activation.

The plan is that of one epilogue all the same: Q stands behind the activation alone. Processors without tiles compute
the epilogue at full speed, and nothing is held apart there.

Pointwise Convs with strides as a subsampling that all of them share, and Convs without.

``Conv(x; 1x1, strides s) = Conv(MaxPool(x; 1x1, strides s); 1x1)``: both read every s-th position of each channel and
nothing else. OpenVINO does the same to a float model, where all readers of a value are such Convs, but behind the
DequantizeLinear, and then runs the Convs in float. Done before quantization the MaxPool moves bytes and the Convs are
integer (ResNet-50 with strides in its pointwise Convs: 6 of 53 Convs float, 3.9x for 2.7x).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

import numpy as np
import onnx
from onnx import helper, numpy_helper

from kenosis_ort.graph.constants import replace_nodes
from kenosis_ort.graph.index import GraphIndex
from kenosis_ort.graph.prepare import RewriteResult
from kenosis_ort.graph.walk import reserve_name
from kenosis_ort.targets.machine import has_matrix_tiles

SLOW_IN_KERNEL: Final = frozenset({"Sigmoid", "Tanh", "Gelu", "Elu", "Mish"})
"""Activations with an exponential in them."""
_MOST_ELEMENTS: Final = 3 << 17
"""Of a sum that is written as float32: 1.5 MB. Beyond it a pass of its own was slower than the kernel."""


def hold_apart(model: onnx.ModelProto, *, nodes: Collection[str], keep_values: Collection[str] = ()) -> RewriteResult:
    """Puts Max with the least number between each named Conv and an activation with an exponential, in place.

    Args:
        model: The model to change, its nodes named, its types and shapes inferred.
        nodes: Names of the nodes that may change.
        keep_values: Values that must keep existing with their meaning; all of them do.
    """
    if not has_matrix_tiles():
        return RewriteResult()
    index = GraphIndex(model, keep_values)
    names = {node.name for node in index.nodes}
    sizes = {info.name: _elements(info) for info in model.graph.value_info}
    least = ""
    ordered: list[onnx.NodeProto] = []
    for node in index.nodes:
        ordered.append(node)
        readers = index.readers.get(node.output[0], []) if node.output else []
        slow = any(reader.op_type in SLOW_IN_KERNEL for reader in readers)
        if node.op_type != "Conv" or node.name not in nodes or not slow or index.is_pinned(node.output[0]):
            continue
        if not 0 < sizes.get(node.output[0], 0) <= _MOST_ELEMENTS:
            continue
        if not least:
            least = index.fresh_name("least_number")
            array = np.array(np.finfo(np.float32).min, np.float32)
            model.graph.initializer.append(numpy_helper.from_array(array, least))
        value, apart = node.output[0], index.fresh_name(f"{node.output[0]}_apart")
        name = reserve_name(f"{node.name}_apart", names)
        for reader in readers:
            for position, read in enumerate(reader.input):
                reader.input[position] = apart if read == value else read
        ordered.append(helper.make_node("Max", [value, least], [apart], name=name))
    count = len(ordered) - len(index.nodes)
    if not count:
        return RewriteResult()
    replace_nodes(model.graph, ordered)
    return RewriteResult((f"{count} activations with an exponential are held apart from the kernel before them.",))


def _elements(info: onnx.ValueInfoProto) -> int:
    """Number of elements of a value by image, 0 where that is not known before a run."""
    dims = info.type.tensor_type.shape.dim
    known = [d.dim_value for d in dims[1:] if d.HasField("dim_value")]
    return math.prod(known) if dims and len(known) == len(dims) - 1 else 0


def share_subsampling(
    model: onnx.ModelProto, *, nodes: Collection[str], keep_values: Collection[str] = ()
) -> RewriteResult:
    """Puts one MaxPool of 1x1 in front of pointwise Convs of the same strides that alone read a value, in place.

    Args:
        model: The model to change, its nodes named, its types and shapes inferred.
        nodes: Names of the nodes that may change.
        keep_values: Values that must keep existing with their meaning; all of them do.
    """
    index = GraphIndex(model, keep_values)
    names = {node.name for node in index.nodes}
    ordered: list[onnx.NodeProto] = []
    for node in index.nodes:
        ordered.append(node)
        for value in node.output:
            readers = index.readers.get(value, [])
            strides = {_strides(reader, value) if reader.name in nodes else () for reader in readers}
            step = next(iter(strides)) if len(strides) == 1 else ()
            if not step or index.is_pinned(value):
                continue
            apart = index.fresh_name(f"{value}_subsampled")
            for reader in readers:
                reader.input[0] = apart
                next(a for a in reader.attribute if a.name == "strides").ints[:] = [1] * len(step)
            name = reserve_name(f"{readers[0].name}_subsampled", names)
            pool = helper.make_node("MaxPool", [value], [apart], name=name, kernel_shape=[1] * len(step), strides=step)
            ordered.append(pool)
    count = len(ordered) - len(index.nodes)
    if not count:
        return RewriteResult()
    replace_nodes(model.graph, ordered)
    return RewriteResult((f"{count} values are subsampled before the pointwise Convs that stride over them.",))


def _strides(node: onnx.NodeProto, value: str) -> tuple[int, ...]:
    """The strides of a pointwise Conv over a value, empty for another node and for one without strides."""
    found = {a.name: a for a in node.attribute}
    if node.op_type != "Conv" or list(node.input).count(value) != 1 or node.input[0] != value:
        return ()
    kernel, strides = found.get("kernel_shape"), found.get("strides")
    if kernel is None or strides is None or any(k != 1 for k in kernel.ints) or all(s == 1 for s in strides.ints):
        return ()
    padded = "pads" in found and any(found["pads"].ints)
    automatic = found["auto_pad"].s not in (b"", b"NOTSET", b"VALID") if "auto_pad" in found else False
    return () if padded or automatic else tuple(strides.ints)
