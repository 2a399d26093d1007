"""Nodes that copy their input: Identity, Dropout in inference, Cast to the type that a value has, Concat of one value.

``y = Identity(x)``, ``y = Dropout(x)`` without ``training_mode``, a Cast to its own type, and Concat, Sum, Max, Min and
Mean of ``x`` alone compute ``y = x``. Readers of ``y`` read ``x`` instead. Where ``y`` is a graph output its name must
stay: then the producer of ``x`` writes ``y`` directly, if nothing else needs ``x``.

Exported decoders put an empty cache in front of each cache they get, and what the exporter leaves of it is a Concat
that copies it: a ninth of a token's time in int8 (4 layers 768 wide, 128 positions, one thread).

Left alone: an Identity between a graph input or a constant and a graph output, values that a body of control
flow or the caller names, a Dropout whose mask is used or whose training mode is not constantly false.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx
import onnx.numpy_helper

from kenosis_ort.graph.constants import GraphIndex
from kenosis_ort.graph.opset import RewriteResult
from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.walk import MAIN_DOMAINS, attribute_int

_ALONE = ("Concat", "Sum", "Max", "Min", "Mean")  # of one input
_COPIES = ("Identity", "Dropout", "Cast", *_ALONE)


def drop_identity(model: onnx.ModelProto, *, keep_values: Collection[str] = ()) -> RewriteResult:
    """Removes Identity, inference Dropout, idle Cast and lone Concat nodes of the main graph, in place.

    Args:
        model: The model to change, of operator set 7 or later, its types inferred.
        keep_values: Values that must keep existing with their meaning.
    """
    if not any(node.op_type in _COPIES for node in model.graph.node):
        return RewriteResult()
    index = GraphIndex(model, keep_values)
    graph, merged = model.graph, dict[str, str]()
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.value_info, *graph.output)}
    for node in index.nodes:
        if node.op_type not in _COPIES or node.domain not in MAIN_DOMAINS:
            continue
        copies = _keeps_type(node, types) if node.op_type == "Cast" else _copies(node, index)
        if copies and _bypass(node, index):
            merged[node.name] = ""
    index.commit()
    notes = (
        (f"{len(merged)} nodes that only copy their input (Identity, Dropout, Cast, Concat) were removed.",)
        if merged
        else ()
    )
    return RewriteResult(notes=notes, merged=merged)


def _keeps_type(cast: onnx.NodeProto, types: Mapping[str, int]) -> bool:
    known = types.get(cast.input[0], 0)
    return known != 0 and known == attribute_int(cast, "to", 0)


def _copies(node: onnx.NodeProto, index: GraphIndex) -> bool:
    if node.op_type == "Identity":
        return True
    if node.op_type in _ALONE:
        return len(node.input) == 1
    if any(node.output[1:]):
        return False
    if len(node.input) < 3 or not node.input[2]:
        return True
    mode = index.constant(node.input[2])
    return mode is not None and not array_in(mode).any()


def _bypass(node: onnx.NodeProto, index: GraphIndex) -> bool:
    """Takes the node out of the way if names allow; returns whether it did."""
    source, target = node.input[0], node.output[0]
    if not index.is_pinned(target):
        index.remove(node)
        index.redirect(target, source)
        return True
    producer = index.producers.get(source)
    if producer is None or not index.is_private(source):
        return False
    index.remove(node)
    index.take_over_output(producer, target, position=list(producer.output).index(source))
    return True
