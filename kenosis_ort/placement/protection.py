"""Stage 6: keeps what is not picture, sound or text out of int8.

Flood-fill from secondary inputs (scale factors, image shapes, masks, states) and from everything shape-like:
a node all of whose data derives from them stays float, and so does the node where it meets the main data, which
is where the flood stops. Source: Kenosis paper, stage 6, "Non-vision tensor protection".
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kenosis_ort.errors import OptionError, did_you_mean
from kenosis_ort.graph.onnx_ir import ir
from kenosis_ort.graph.view import CAPTURED, GraphView

_SECONDARY_NAME = re.compile(
    r"scale_?factor|im_?shape|image_?shape|im_?info|im_?scale|orig_?(target_)?size|mask|token_type|position|segment"
    r"|(^|[_./])(sr|h0|c0|hx|cx)$|sample_?rate|(^|[_./])len(gth)?s?$|_lengths?$|state|hidden|cache|past|mems",
    re.IGNORECASE,
)
_SHAPE_SOURCES = frozenset({"Shape", "Size", "NonZero", "ConstantOfShape", "EyeLike", "Range"})
# Inputs that steer an operator rather than feed it: what is computed for them alone stays float.
_STEERING = {
    "Resize": (1, 2, 3),
    "Upsample": (1,),
    "Pad": (1, 2, 3),
    "Clip": (1, 2),
    "Reshape": (1,),
    "Slice": (1, 2, 3, 4),
    "Expand": (1,),
    "Tile": (1,),
    "Range": (0, 1, 2),
    "TopK": (1,),
    "OneHot": (0, 1, 2),
    "RoiAlign": (1, 2),
    "GridSample": (1,),
    "NonMaxSuppression": (0, 1, 2, 3, 4),
    "Dropout": (1, 2),
    "Gather": (1,),
    "GatherElements": (1,),
    "GatherND": (1,),
    "ScatterND": (1,),
    "ScatterElements": (1,),
    "Squeeze": (1,),
    "Unsqueeze": (1,),
    "Split": (1,),
    "Where": (0,),
    "ReduceMean": (1,),
    "ReduceMax": (1,),
    "ReduceMin": (1,),
    "ReduceSum": (1,),
    "CumSum": (1,),
    "Trilu": (1,),
    "If": (0,),
    "Loop": (0, 1),
}


def secondary_inputs(view: GraphView, primary: Sequence[str] | None) -> dict[str, str]:
    """Returns the graph inputs that do not carry the data proper, name to reason.

    Args:
        view: The prepared model.
        primary: The caller's own list of primary inputs; None to tell by name and shape.

    Raises:
        OptionError: ``primary`` names an input that does not exist.
    """
    names = [str(v.name) for v in view.inputs]
    if primary is not None:
        for name in primary:
            if name not in names:
                raise OptionError(
                    f"primary_inputs names '{name}', which is no input of the model.{did_you_mean(name, names)}",
                    where="primary_inputs",
                    fix=f"inputs are {names}",
                )
        return {n: "not among the caller's primary_inputs" for n in names if n not in primary}
    found = {n: f"'{n}' is named like a secondary input" for n in names if _SECONDARY_NAME.search(n)}
    ranks = [view.rank(v) or 0 for v in view.inputs if str(v.name) not in found]
    highest = max(ranks, default=0)
    if highest >= 3:
        for v in view.inputs:
            dims = view.dims(v)
            small = dims is not None and len(dims) <= 2 and all(d is None or d <= 8 for d in dims[1:])
            if str(v.name) not in found and small:
                found[str(v.name)] = f"'{v.name}' is a small vector beside the {highest}-dimensional data"
    return found if len(found) < len(names) else {}


def protect(view: GraphView, primary: Sequence[str] | None) -> dict[str, str]:
    """Returns the nodes that must stay float because of where their data comes from, node name to reason."""
    protected: dict[str, str] = {}
    origin: dict[int, str] = {}  # id of a protected value to why
    by_name = secondary_inputs(view, primary)
    for value in view.inputs:
        if str(value.name) in by_name:
            origin[id(value)] = by_name[str(value.name)]
    for node in view.nodes:
        if node.op_type in _SHAPE_SOURCES:
            why = f"derives from a shape (by {node.op_type})"
        else:
            data = fed_by(view, node)
            tainted = [v for v in data if id(v) in origin]
            if not tainted:
                continue
            why = origin[id(tainted[0])]
            if len(tainted) < len(data):
                protected[str(node.name)] = f"mixes main data with a protected tensor: {why}"
                continue
        protected[str(node.name)] = why
        for out in node.outputs:
            origin[id(out)] = why
    _protect_steering(view, protected)
    return protected


def _protect_steering(view: GraphView, protected: dict[str, str]) -> None:
    steering: set[int] = set()
    for node in reversed(view.nodes):
        for out in node.outputs:
            uses = view.consumers(out)
            if (
                uses
                and not view.is_output(out)
                and all(
                    c.index in _STEERING.get(c.node.op_type, ())
                    or (c.index != CAPTURED and _all_steer(c.node, steering))
                    for c in uses
                )
            ):
                steering.add(id(out))
        if node.outputs and _all_steer(node, steering):
            protected.setdefault(str(node.name), "computes a shape, a bound or an index, not data")


def _all_steer(node: ir.Node, steering: set[int]) -> bool:
    return bool(node.outputs) and all(id(v) in steering for v in node.outputs)


def fed_by(view: GraphView, node: ir.Node) -> list[ir.Value]:
    """Returns the non-constant values that feed (rather than steer) a node, those that its bodies read included."""
    steering = _STEERING.get(node.op_type, ())
    fed = [v for i, v in enumerate(node.inputs) if v is not None and i not in steering]
    return [v for v in (*fed, *view.captured_by(node)) if not view.is_constant(v)]
