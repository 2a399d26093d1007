"""Leaves the stem of mobile nets float where int8 would be slower and coarser.

An int8 Conv over the few channels of a picture and the depthwise Conv behind it are the two slowest shapes of the
integer kernels (16 to 60 and 12 to 44 GMAC/s against 300 to 450), and their values have the widest ranges of the
net. In float they cost nothing: MobileNetV1 2.52x for 2.31x of FP32 and 94 for 88 % agreement, YOLOX-Nano the same
speed and 0.35 for 0.12 mAP. Behind a stem that a dense Conv or a pool follows it would cost a lot (a residual net
1.2x for 2.4x), so there it stays integer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import onnx_ir as ir

from kenosis_ort.graph.view import CAPTURED, GraphView
from kenosis_ort.placement.eligibility import NodeClass
from kenosis_ort.targets.model import Role, Target

_RULE = "float-prefix"
_LOOK_THROUGH = (Role.ACTIVATION, Role.ISLAND, Role.UNARY, Role.BINARY)
_LONGEST = 8  # light nodes between stem and depthwise Conv


def leave_prefix_float(view: GraphView, target: Target, classes: Mapping[str, NodeClass]) -> dict[str, NodeClass]:
    """Returns the classes with the stem and the depthwise Conv behind it made float, where the rule holds.

    A net that has no further anchor is quantized as a whole: float all of it would gain nothing.
    """
    out = dict(classes)
    for node in view.nodes:
        stem = classes[str(node.name)]
        if stem.role is not Role.ANCHOR or not _is_stem(view, target, node, classes):
            continue
        depthwise = _sole_next_anchor(view, node, classes)
        if depthwise is None or not _is_depthwise(view, depthwise):
            continue
        for member in (node, depthwise):
            out[str(member.name)] = replace(
                out[str(member.name)],
                role=Role.FLOAT,
                rule=_RULE,
                reason="stem of a mobile net: few channels, then depthwise; int8 is slower and coarser there",
            )
    return out if any(c.role is Role.ANCHOR for c in out.values()) else dict(classes)


def _is_stem(view: GraphView, target: Target, node: ir.Node, classes: Mapping[str, NodeClass]) -> bool:
    """Tells whether a Conv reads few channels, with no anchor between it and the graph's input."""
    weight = node.inputs[1]
    dims = view.dims(weight) if node.op_type == "Conv" and weight is not None else None
    if dims is None or dims[1] is None or dims[1] > target.stem_channels or view.attribute_int(node, "group", 1) != 1:
        return False
    seen: set[int] = set()
    values = [node.inputs[0]]
    while values:
        value = values.pop()
        producer = value.producer() if value is not None else None
        if producer is None or id(producer) in seen:
            continue
        if classes[str(producer.name)].role is Role.ANCHOR or len(seen) > 32:
            return False
        seen.add(id(producer))
        values += list(producer.inputs)
    return True


def _sole_next_anchor(view: GraphView, stem: ir.Node, classes: Mapping[str, NodeClass]) -> ir.Node | None:
    """Returns the only anchor that reads the stem's output, through activations; None if there is any other reader."""
    found: ir.Node | None = None
    seen: set[int] = set()
    values = list(stem.outputs)
    while values:
        value = values.pop()
        if view.is_output(value):
            return None
        for consumer in view.consumers(value):
            c = classes[str(consumer.node.name)]
            if consumer.index == CAPTURED:
                return None
            if c.role is Role.ANCHOR:
                if found is not None and found is not consumer.node:
                    return None
                found = consumer.node
            elif c.role in _LOOK_THROUGH and len(c.node.outputs) == 1:
                if id(c.node) not in seen:
                    seen.add(id(c.node))
                    values += list(c.node.outputs)
            else:
                return None
            if len(seen) > _LONGEST:
                return None
    return found


def _is_depthwise(view: GraphView, node: ir.Node) -> bool:
    weight = node.inputs[1]
    dims = view.dims(weight) if node.op_type == "Conv" and weight is not None else None
    group = view.attribute_int(node, "group", 1)
    return dims is not None and group > 1 and dims[0] == group and dims[1] == 1
