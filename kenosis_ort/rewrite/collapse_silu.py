"""SiLU, written as Sigmoid and Mul, collapsed into one operator.

``QuickGelu`` of ``com.microsoft`` is, by its definition::

    QuickGelu(x; alpha) = x * Sigmoid(alpha * x)

so ``x * Sigmoid(x)`` is ``QuickGelu(x; 1)`` and ``x * Sigmoid(alpha * x)`` is ``QuickGelu(x; alpha)``; a division
``x / c`` in front of the Sigmoid is ``alpha = 1 / c``. The runtime makes the same collapse by itself in a float
model, and computes it by the same kernels: the results are equal bit for bit. Next to Q and DQ it does not see
the pattern any more, since every reader gets a DequantizeLinear of its own.

What it is worth depends on the place. Between an integer and a float node, one operator takes half the time of a float
Sigmoid and Mul. Between two integer nodes, it replaces two integer kernels, with a rounding to 8 bits between
them, by one float kernel between DQ and Q: a Conv net ran at 2.92x of FP32 for 2.66x on a Zen 5 processor, and at
2.5x for 2.7x on a Sapphire Rapids, where float is slower against integer tables. So callers may name the nodes.

Not collapsed: a type other than float32, an ``alpha`` that is not one constant number, an inner value that another
node, a body of control flow, the graph's outputs or the caller need.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx

from kenosis_ort.graph.opset import RewriteResult
from kenosis_ort.graph.walk import MICROSOFT
from kenosis_ort.rewrite.matching import Matcher, NotCollapsibleError, other_operand


def collapse_silu(
    model: onnx.ModelProto, *, keep_values: Collection[str] = (), nodes: Collection[str] | None = None
) -> RewriteResult:
    """Turns every ``x * Sigmoid(alpha * x)`` of the main graph into QuickGelu, in place.

    The node that computed the product keeps its name and becomes the QuickGelu.

    Args:
        model: The model to change, its types and shapes inferred.
        keep_values: Values that must keep existing with their meaning.
        nodes: Names of the products that may change; None for all of them.
    """
    if not any(node.op_type == "Sigmoid" for node in model.graph.node):
        return RewriteResult()
    matcher = Matcher(model, keep_values)
    for gate in matcher.nodes("Sigmoid"):
        for product in matcher.readers(gate.output[0], "Mul"):
            x = other_operand(product, gate.output[0])
            if x is None or not (nodes is None or product.name in nodes) or not (inner := _gate(matcher, gate, x)):
                continue
            try:
                _collapse(matcher, inner, product, x)
            except NotCollapsibleError as reason:
                matcher.refuse(product, reason)
    return matcher.finish(
        "SiLU activations, written as Sigmoid and Mul, became one QuickGelu each",
        "SiLU activations stay as Sigmoid and Mul",
    )


def _gate(matcher: Matcher, gate: onnx.NodeProto, x: str) -> tuple[onnx.NodeProto, ...]:
    """The nodes that compute a gate of ``x`` by itself, none where it is another value's gate."""
    if gate.input[0] == x:
        return (gate,)
    scaling = matcher.producer(gate.input[0], "Mul", "Div")
    if scaling is None or other_operand(scaling, x) is None or (scaling.op_type == "Div" and scaling.input[0] != x):
        return ()
    return scaling, gate


def _collapse(matcher: Matcher, inner: tuple[onnx.NodeProto, ...], product: onnx.NodeProto, x: str) -> None:
    matcher.require_float32(x)
    alpha = 1.0
    if len(inner) > 1:
        factor = other_operand(inner[0], x) or ""
        number = matcher.scalar(factor)
        if number is None or number == 0.0:
            raise NotCollapsibleError(f"the factor '{factor}' in the Sigmoid is not one constant number")
        alpha = number if inner[0].op_type == "Mul" else 1.0 / number
        matcher.require_no_growth(x, [factor])
    matcher.require_closed(inner, product)
    matcher.collapse(inner, product, "QuickGelu", [x], domain=MICROSOFT, attributes={"alpha": alpha})
