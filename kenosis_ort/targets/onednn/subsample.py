"""Pointwise Convs with strides as a subsampling that all of them share, and Convs without.

``Conv(x; 1x1, strides s) = Conv(MaxPool(x; 1x1, strides s); 1x1)``: both read every s-th position of each channel and
nothing else. OpenVINO does the same to a float model, where all readers of a value are such Convs, but behind the
DequantizeLinear, and then runs the Convs in float. Done before quantization the MaxPool moves bytes and the Convs are
integer (ResNet-50 with strides in its pointwise Convs: 6 of 53 Convs float, 3.9x for 2.7x).
"""

from __future__ import annotations

from collections.abc import Collection

import onnx
from onnx import helper

from kenosis_ort.graph.constants import replace_nodes
from kenosis_ort.graph.index import GraphIndex
from kenosis_ort.graph.names import reserve_name
from kenosis_ort.graph.prepare import RewriteResult


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
            held = index.fresh_name(f"{value}_subsampled")
            for reader in readers:
                reader.input[0] = held
                next(a for a in reader.attribute if a.name == "strides").ints[:] = [1] * len(step)
            name = reserve_name(f"{readers[0].name}_subsampled", names)
            pool = helper.make_node("MaxPool", [value], [held], name=name, kernel_shape=[1] * len(step), strides=step)
            ordered.append(pool)
    count = len(ordered) - len(index.nodes)
    if not count:
        return RewriteResult()
    replace_nodes(model.graph, ordered)
    return RewriteResult((f"{count} values are subsampled before the pointwise Convs that stride over them.",))


def _strides(node: onnx.NodeProto, value: str) -> tuple[int, ...]:
    """Returns the strides of a pointwise Conv over a value, empty for another node and for one without strides."""
    found = {a.name: a for a in node.attribute}
    if node.op_type != "Conv" or list(node.input).count(value) != 1 or node.input[0] != value:
        return ()
    kernel, strides = found.get("kernel_shape"), found.get("strides")
    if kernel is None or strides is None or any(k != 1 for k in kernel.ints) or all(s == 1 for s in strides.ints):
        return ()
    padded = "pads" in found and any(found["pads"].ints)
    automatic = found["auto_pad"].s not in (b"", b"NOTSET", b"VALID") if "auto_pad" in found else False
    return () if padded or automatic else tuple(strides.ints)
