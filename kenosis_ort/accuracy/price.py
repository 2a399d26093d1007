"""What a node costs in float if nobody says better: its multiply-accumulates, and a little for cheap operators."""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx

from kenosis_ort.graph.onnx_ir import ir
from kenosis_ort.graph.operators import LAYERS
from kenosis_ort.graph.view import GraphView

_BY_ELEMENT = 16.0
"""Multiply-accumulates that take as long as one element of a cheap operator: such are bound by memory, not arithmetic.

At 4 bytes read and 4 written and 10 GB/s an element takes 0.8 ns, in which a float kernel does some 20 to 60 products.
"""


def multiply_accumulates(model: onnx.ModelProto) -> dict[str, float]:
    """Returns the multiply-accumulates by sample of every node with constant weights, by node name.

    Args:
        model: A model with shape annotations. Symbolic dimensions count as 1. Not changed.
    """
    view = GraphView(model)
    found: dict[str, float] = {}
    for node in view.nodes:
        weight = node.inputs[1] if node.op_type in LAYERS and len(node.inputs) > 1 else None
        if weight is not None and view.is_constant(weight):
            found[str(node.name)] = float(_work(view, node, weight))
    return found


def default_cost(model: onnx.ModelProto) -> dict[str, float]:
    """Returns a price by node name: multiply-accumulates, and 16 for every element that another node writes."""
    view = GraphView(model)
    light = {str(node.name): _BY_ELEMENT * sum(_elements(view, value) for value in node.outputs) for node in view.nodes}
    return {**light, **multiply_accumulates(model)}


def float_share(work: Mapping[str, float], nodes: set[str]) -> float:
    """Returns the share of the work that some nodes do, 0..1."""
    total = sum(work.values())
    return sum(work.get(name, 0.0) for name in nodes) / total if total else 0.0


def _work(view: GraphView, node: ir.Node, weight: ir.Value) -> int:
    weights = _elements(view, weight)
    if node.op_type == "ConvTranspose":  # every input element meets every weight of its channel
        data = node.inputs[0]
        dims = view.dims(data) if data is not None else None
        return weights * math.prod(d or 1 for d in dims[2:]) if dims else weights
    dims = view.dims(node.outputs[0])
    if not dims:
        return weights
    return weights * math.prod(d or 1 for d in (dims[2:] if node.op_type == "Conv" else dims[:-1]))


def _elements(view: GraphView, value: ir.Value) -> int:
    dims = view.dims(value)
    return 0 if dims is None else math.prod(1 if d is None else d for d in dims)
