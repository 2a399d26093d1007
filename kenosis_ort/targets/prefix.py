"""Leaves the stem of mobile nets float where int8 would be slower and coarser.

An int8 Conv over the few channels of a picture and the depthwise Conv behind it are the two slowest shapes of the
integer kernels (16 to 60 and 12 to 44 GMAC/s against 300 to 450), and their values have the widest ranges of the
net. In float they cost nothing: MobileNetV1 2.52x for 2.31x of FP32 and 94 for 88 % agreement, YOLOX-Nano the same
speed and 0.35 for 0.12 mAP. Behind a stem that a dense Conv or a pool follows it would cost a lot (a residual net
1.2x for 2.4x), so there it stays integer.

The 1x1 Conv behind the depthwise one joins them where it does not widen: then its output, which is quantized instead,
is no larger, and the layout changes where there is least to move (MobileNetV2 0.93 of the time, MobileNetV3 0.91 and
1.9 dB). Where the stem's output is also added to what comes out of that Conv, either all three are float or none.

These times are of ONNX Runtime's CPU kernels. Another runtime that leaves the same nodes float may do so for the
accuracy alone, and says what it pays.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kenosis_ort.graph.view import CAPTURED, GraphView, ir
from kenosis_ort.targets.vocabulary import NodeClass, Role

_RULE = "float-prefix"
_REASON = "stem of a mobile net: few channels, then depthwise; int8 is slower and coarser there"
_LOOK_THROUGH = (Role.ACTIVATION, Role.ISLAND, Role.UNARY, Role.BINARY)
_STEM_CHANNELS = 12  # a Conv that reads more is no stem
_LONGEST = 8  # light nodes between stem and depthwise Conv


def leave_prefix_float(
    view: GraphView, classes: Mapping[str, NodeClass], *, reason: str = _REASON
) -> dict[str, NodeClass]:
    """The classes with the stem and the depthwise Conv behind it made float, where the rule holds.

    A net that has no further anchor is quantized as a whole: float all of it would gain nothing.

    Args:
        view: The model.
        classes: By node name.
        reason: Why, in one sentence, for the plan.
    """
    stems = [n for n in view.nodes if classes[str(n.name)].role is Role.ANCHOR and _is_stem(view, n, classes)]
    for longest in (3, 2):  # Convs; fewer where nothing else would be left to run in integer
        out = dict(classes)
        for member in (m for stem in stems for m in _block(view, stem, classes, longest)):
            out[str(member.name)] = replace(out[str(member.name)], role=Role.FLOAT, rule=_RULE, reason=reason)
        if any(c.role is Role.ANCHOR for c in out.values()):
            return out
    return dict(classes)


def _is_stem(view: GraphView, node: ir.Node, classes: Mapping[str, NodeClass]) -> bool:
    """Whether a Conv reads few channels, with no anchor between it and the graph's input."""
    dims, group = _weight(view, node)
    if len(dims) < 2 or dims[1] is None or dims[1] > _STEM_CHANNELS or group != 1:
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


def _block(view: GraphView, stem: ir.Node, classes: Mapping[str, NodeClass], longest: int) -> tuple[ir.Node, ...]:
    """The stem, the depthwise Conv behind it and perhaps a projection; empty if the rule does not hold."""
    anchors, joins = _reach(view, stem, classes)
    if len(anchors) != 1 or not _is_depthwise(view, anchors[0]):
        return ()
    further, others = _reach(view, anchors[0], classes)
    projects = longest >= 3 and not others and len(further) == 1 and _is_projection(view, further[0])
    members = (stem, anchors[0], *(further if projects else ()))
    out = {id(c.node) for c in view.consumers(further[0].outputs[0])} if projects else set()
    return () if joins and out != {id(node) for node in joins} else members


def _reach(view: GraphView, start: ir.Node, classes: Mapping[str, NodeClass]) -> tuple[list[ir.Node], list[ir.Node]]:
    """The anchors that read a node's output through light nodes, and sums of it with something else.

    Neither where others than anchors and light nodes do.
    """
    anchors: list[ir.Node] = []
    seen: set[int] = set()
    reached: set[int] = set()
    sums: dict[int, ir.Node] = {}
    values = list(start.outputs)
    while values:
        value = values.pop()
        reached.add(id(value))
        if view.is_output(value):
            return [], []
        for consumer in view.consumers(value):
            node = consumer.node
            c = classes[str(node.name)]
            is_light = c.role in _LOOK_THROUGH and len(node.outputs) == 1
            if consumer.index == CAPTURED or not (c.role is Role.ANCHOR or is_light) or len(seen) > _LONGEST:
                return [], []
            if id(node) in seen:
                continue
            if c.role is Role.ANCHOR:
                seen.add(id(node))
                anchors.append(node)
            elif node.op_type == "Add" and any(id(v) not in reached for v in c.data):
                sums[id(node)] = node
            else:
                seen.add(id(node))
                sums.pop(id(node), None)
                values += list(node.outputs)
    return anchors, list(sums.values())


def _is_projection(view: GraphView, node: ir.Node) -> bool:
    """Whether a node is a 1x1 Conv without groups that makes no more channels than it reads."""
    dims, group = _weight(view, node)
    if len(dims) < 3 or None in dims or group != 1:
        return False
    outputs, inputs, *window = (d or 0 for d in dims)
    return outputs <= inputs and all(d == 1 for d in window)


def _is_depthwise(view: GraphView, node: ir.Node) -> bool:
    dims, group = _weight(view, node)
    return len(dims) > 1 and group > 1 and dims[0] == group and dims[1] == 1


def _weight(view: GraphView, node: ir.Node) -> tuple[Sequence[int | None], int]:
    """Shape of a Conv's weight, empty where it is not known or the node no Conv, and the Conv's groups."""
    weight = node.inputs[1] if node.op_type == "Conv" else None
    dims = None if weight is None else view.dims(weight)
    return dims or (), node.attributes.get_int("group", 1)
