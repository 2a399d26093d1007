"""Where all consumers of a value saturate, what lies beyond need not eat its scale.

A SiLU, for example, maps everything below -8 to within 0.003 of 0, so an input range of [-106, 125] is better
quantized as [-8, 125]: half of the steps would be spent on values that all become 0. YOLOX-Nano's stem is such
a case. The bounds lose at most 0.003 in the function's value, those of HardSwish and HardSigmoid nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from kenosis_ort.graph.view import CAPTURED, Consumer, GraphView
from kenosis_ort.plan import RangeLimit

Bounds = tuple[float | None, float | None]

_SATURATES: dict[str, Bounds] = {
    "Sigmoid": (-8.0, 8.0),
    "Tanh": (-4.0, 4.0),
    "Erf": (-3.0, 3.0),
    "HardSwish": (-3.0, None),
    "Gelu": (-4.5, None),
    "FastGelu": (-4.5, None),
    "Mish": (-9.0, None),
    "Softplus": (-8.0, None),
    "Swish": (-8.0, None),
    "Relu": (0.0, None),
}
_SILU_LOW = -8.0


def saturation_limits(view: GraphView, values: Iterable[ir.Value]) -> tuple[RangeLimit, ...]:
    """Returns, for each value all of whose consumers saturate, the bounds beyond which they see no difference."""
    found = []
    for value in values:
        consumers = view.consumers(value)
        if not consumers or view.is_output(value):
            continue
        bounds = [_bounds(view, value, c) for c in consumers]
        known = [b for b in bounds if b is not None]
        if len(known) != len(bounds):
            continue
        lows, highs = [low for low, _ in known], [high for _, high in known]
        low = None if any(x is None for x in lows) else min(x for x in lows if x is not None)
        high = None if any(x is None for x in highs) else max(x for x in highs if x is not None)
        if low is not None or high is not None:
            found.append(RangeLimit(str(value.name), low, high))
    return tuple(found)


def _bounds(view: GraphView, value: ir.Value, consumer: Consumer) -> Bounds | None:
    node = consumer.node
    if consumer.index == CAPTURED:
        return None
    if node.op_type == "HardSigmoid":
        alpha, beta = view.attribute_float(node, "alpha", 0.2), view.attribute_float(node, "beta", 0.5)
        return (-beta / alpha, (1.0 - beta) / alpha) if alpha > 0 and 0 <= beta <= 1 else None
    if node.op_type == "QuickGelu":
        alpha = view.attribute_float(node, "alpha", 1.702)
        return (_SILU_LOW / alpha, None) if alpha > 0 else None
    if node.op_type == "Mul":
        return _gate_bounds(value, node)
    return _SATURATES.get(node.op_type)


def _gate_bounds(value: ir.Value, product: ir.Node) -> Bounds | None:
    """Returns the bounds of ``x * gate(x)``, which vanishes where the gate does."""
    gates = [v.producer() for v in product.inputs if v is not None and v is not value]
    if len(gates) != 1 or gates[0] is None or not gates[0].inputs or gates[0].inputs[0] is not value:
        return None
    if gates[0].op_type == "Sigmoid":
        return _SILU_LOW, None
    if gates[0].op_type == "HardSigmoid":
        alpha = gates[0].attributes.get("alpha")
        beta = gates[0].attributes.get("beta")
        a = 0.2 if alpha is None else float(alpha.as_float())
        b = 0.5 if beta is None else float(beta.as_float())
        return (-b / a, None) if a > 0 and b >= 0 else None
    return None
