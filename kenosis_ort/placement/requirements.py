"""The predicates behind `Requirement`: each returns why a node misses it, None if it meets it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from kenosis_ort.graph.grid import exact_grid
from kenosis_ort.graph.view import GraphView, ir
from kenosis_ort.placement.absorption import activation_bounds
from kenosis_ort.targets.model import Requirement


def unmet(view: GraphView, node: ir.Node, requirement: Requirement) -> str | None:
    """Returns why a node misses a requirement, None if it meets it."""
    return _PREDICATES[requirement](view, node)


def _constant_weight(view: GraphView, node: ir.Node) -> str | None:
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    if weight is None or not view.is_constant(weight):
        return "its second operand is not a constant weight"
    if not view.is_float32(weight):
        return f"its weight '{weight.name}' is {weight.dtype}, not float32"
    dims = view.dims(weight)
    if not dims or 0 in dims:
        return f"its weight '{weight.name}' is empty or a scalar"
    if not math.isfinite(view.largest(weight)):
        return f"its weight '{weight.name}' holds NaN or infinity"
    return None


def _constant_or_no_bias(view: GraphView, node: ir.Node) -> str | None:
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is None:
        return None
    if not view.is_constant(bias):
        return f"its bias '{bias.name}' is not a constant"
    channels = _out_channels(view, node)
    rows = (1, channels) if node.op_type == "Gemm" else None
    if view.dims(bias) not in ((channels,), rows):
        return f"its bias '{bias.name}' is not a vector of one value a channel"
    if not math.isfinite(view.largest(bias)):
        return f"its bias '{bias.name}' holds NaN or infinity"
    return None


def _out_channels(view: GraphView, node: ir.Node) -> int | None:
    weight = node.inputs[1]
    dims = view.dims(weight) if weight is not None else None
    if not dims:
        return None
    if node.op_type == "ConvTranspose":
        return None if len(dims) < 2 or dims[1] is None else dims[1] * view.attribute_int(node, "group", 1)
    first = node.op_type == "Conv" or view.attribute_int(node, "transB", 0)
    return dims[0] if first else dims[-1]


def _unit_alpha(view: GraphView, node: ir.Node) -> str | None:
    if view.attribute_float(node, "alpha", 1.0) != 1.0:
        return "alpha is not 1: the runtime would run it in float"
    return None


def _no_trans_a(view: GraphView, node: ir.Node) -> str | None:
    return "its first operand is transposed" if view.attribute_int(node, "transA", 0) else None


def _weight_rank_2(view: GraphView, node: ir.Node) -> str | None:
    weight = node.inputs[1]
    return "its weight is not a matrix" if weight is None or view.rank(weight) != 2 else None


def _resize_nearest(view: GraphView, node: ir.Node) -> str | None:
    mode = view.attribute_str(node, "mode", "nearest")
    return f"{mode} interpolation runs in float" if mode != "nearest" else None


def _one_output(view: GraphView, node: ir.Node) -> str | None:
    used = [v for v in node.outputs[1:] if v.name and (view.consumers(v) or view.is_output(v))]
    return f"its further output '{used[0].name}' is used" if used else None


def _whole_pool(view: GraphView, node: ir.Node) -> str | None:
    if "dilations" in node.attributes:
        return "with dilations the integer pool does not load"
    dims = view.dims(node.outputs[0])
    if dims is None or len(dims) < 3 or any(d != 1 for d in dims[2:]):
        return "a pool over parts of the picture is no faster in integer"
    return None


def _scalar_constant(view: GraphView, node: ir.Node) -> str | None:
    for value in node.inputs:
        if value is not None and view.is_constant(value) and view.array(value).size != 1:
            return f"its constant operand '{value.name}' holds several values, which one scale would blur"
    return None


def _exact_constant(view: GraphView, node: ir.Node) -> str | None:
    for value in node.inputs:
        if value is not None and view.is_constant(value) and exact_grid(view.array(value)) is None:
            return f"its constant operand '{value.name}' holds several values, which 8 bits would blur"
    return None


def _no_constant(view: GraphView, node: ir.Node) -> str | None:
    found = next((v for v in node.inputs if v is not None and view.is_constant(v)), None)
    return None if found is None else f"its operand '{found.name}' is constant"


def _clip_at_zero(view: GraphView, node: ir.Node) -> str | None:
    low, high = activation_bounds(view, node) or (None, None)
    return None if low == 0.0 and (high is None or high > 0.0) else "its bounds are not 0 and a positive constant"


_PREDICATES: Final[dict[Requirement, Callable[[GraphView, ir.Node], str | None]]] = {
    Requirement.CONSTANT_WEIGHT: _constant_weight,
    Requirement.CONSTANT_OR_NO_BIAS: _constant_or_no_bias,
    Requirement.UNIT_ALPHA: _unit_alpha,
    Requirement.NO_TRANS_A: _no_trans_a,
    Requirement.WEIGHT_RANK_2: _weight_rank_2,
    Requirement.RESIZE_NEAREST: _resize_nearest,
    Requirement.ONE_OUTPUT: _one_output,
    Requirement.WHOLE_POOL: _whole_pool,
    Requirement.SCALAR_CONSTANT: _scalar_constant,
    Requirement.EXACT_CONSTANT: _exact_constant,
    Requirement.NO_CONSTANT: _no_constant,
    Requirement.CLIP_AT_ZERO: _clip_at_zero,
}
