"""Hard sigmoid and hard swish, written as Clip and arithmetic, collapsed into their operators.

With ``HardSigmoid(x; alpha, beta) = max(0, min(1, alpha * x + beta))`` and ``a, k > 0``::

    k * Clip(a * x + b, 0, h) = Clip(k * a * x + k * b, 0, k * h)
                              = HardSigmoid(x; k * a, k * b)                        where  k * h = 1

so ``Clip(x + 3, 0, 6) / 6`` is ``HardSigmoid(x; 1/6, 1/2)``. Its product with ``x`` is, from operator set 14 on, by
definition::

    HardSwish(x) = x * HardSigmoid(x; 1/6, 1/2)

The factor ``k`` may stand before or behind the product with ``x``. Below operator set 14, and where ``alpha`` and
``beta`` are others, ``x * HardSigmoid(x; alpha, beta)`` is written. In a float model nothing changes (the runtime
computes HardSwish as HardSigmoid and Mul); next to integer kernels every float operator costs a DequantizeLinear
and a QuantizeLinear, and one operator costs them once (Conv nets with Clip and Div: 2.6x of FP32 for 2.3x).

Not collapsed: a type other than float32, bounds that are computed, an inner value that another node, a body of
control flow, the graph's outputs or the caller need, a constant that adds dimensions. ``Clip(a * x + b, 0, h)``
without the factor ``1 / h`` behind it is no hard sigmoid.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import onnx
import onnx.helper

from kenosis_ort.graph.attributes import attribute_float
from kenosis_ort.graph.prepare import RewriteResult
from kenosis_ort.graph.walk import opset_of
from kenosis_ort.rewrite.matching import Matcher, NotCollapsibleError, other_operand
from kenosis_ort.rewrite.polynomial import ARITHMETIC, Expression, bases, same

_HARD_SWISH_OPSET = 14
_ALPHA, _BETA = 1.0 / 6.0, 0.5
_TOLERANCE = 5e-6
_MOST_STEPS = 3  # behind the Clip: times x, divided by 6 in one or two nodes


@dataclass(frozen=True)
class _Gate:
    """``last`` computes ``HardSigmoid(x)``, times ``x`` if ``times_x``; ``inner`` are the nodes between."""

    x: str
    alpha: float
    beta: float
    times_x: bool
    last: onnx.NodeProto
    inner: tuple[onnx.NodeProto, ...]
    constants: frozenset[str]


def collapse_hard_swish(model: onnx.ModelProto, *, keep_values: Collection[str] = ()) -> RewriteResult:
    """Turns hard sigmoids and hard swishes of the main graph into HardSigmoid and HardSwish, in place.

    The last node of the pattern keeps its name and becomes the operator.

    Args:
        model: The model to change, of operator set 11 or later, its types and shapes inferred.
        keep_values: Values that must keep existing with their meaning.
    """
    if not any(node.op_type in ("Clip", "HardSigmoid") for node in model.graph.node):
        return RewriteResult()
    matcher = Matcher(model, keep_values)
    hard_swish = opset_of(model) >= _HARD_SWISH_OPSET
    for clip in matcher.nodes("Clip"):
        _collapse_clip(matcher, clip, hard_swish)
    for gate in matcher.nodes("HardSigmoid") if hard_swish else ():
        _collapse_product(matcher, gate)
    return matcher.finish(
        "hard sigmoid and hard swish activations, written as several nodes, became one node each",
        "hard sigmoid or hard swish activations stay as several nodes",
    )


# -- Clip and arithmetic ------------------------------------------------------------------------------------------


def _collapse_clip(matcher: Matcher, clip: onnx.NodeProto, hard_swish: bool) -> None:
    high = _height(matcher, clip)
    if high is None:
        return
    found = [gate for x in bases(matcher, clip.input[0]) for gate in _gates(matcher, clip, x, high)]
    # A product with x says what x is. Without one, x is the value farthest back: the fewest nodes are left.
    found = [gate for gate in found if gate.times_x] + [gate for gate in found[::-1] if not gate.times_x]
    reasons = []
    for gate in found:
        reason = _obstacle(matcher, gate)
        if reason is None:
            _apply(matcher, clip, gate, hard_swish)
            return
        reasons.append(reason)
    if reasons:
        matcher.refuse(clip, reasons[0])


def _height(matcher: Matcher, clip: onnx.NodeProto) -> float | None:
    """Returns ``h`` of a Clip to ``[0, h]``, None for any other."""
    if len(clip.input) != 3 or matcher.scalar(clip.input[1]) != 0.0:
        return None
    high = matcher.scalar(clip.input[2])
    return high if high is not None and high > 0.0 else None


def _gates(matcher: Matcher, clip: onnx.NodeProto, x: str, high: float) -> list[_Gate]:
    """Returns the hard sigmoid and the hard swish of ``x`` that the Clip is part of, if it is."""
    argument = Expression(matcher, x)
    line = argument.of(clip.input[0])
    slope, shift = (line or {}).get((1, 0), 0.0), (line or {}).get((0, 0), 0.0)
    if line is None or line.keys() != {(1, 0), (0, 0)} or slope <= 0.0 or shift <= 0.0:
        return []
    alpha, beta = slope / high, shift / high
    constants = frozenset(argument.constants)
    found = []
    if math.isclose(high, 1.0, rel_tol=_TOLERANCE):
        found.append(_Gate(x, alpha, beta, False, clip, tuple(argument.nodes.values()), constants))
    value = clip.output[0]
    for _ in range(_MOST_STEPS):
        readers = matcher.readers(value, *ARITHMETIC)
        if len(readers) != 1:
            break
        behind = Expression(matcher, x, clip.output[0])
        value = readers[0].output[0]
        polynomial = behind.of(value)
        times_x = same(polynomial, {(1, 1): 1.0 / high})
        if times_x or same(polynomial, {(0, 1): 1.0 / high}):
            nodes = {**argument.nodes, **behind.nodes, id(clip): clip}
            nodes.pop(id(readers[0]))
            inner = tuple(nodes.values())
            found.append(_Gate(x, alpha, beta, times_x, readers[0], inner, constants | behind.constants))
    return found


def _obstacle(matcher: Matcher, gate: _Gate) -> NotCollapsibleError | None:
    """Returns why the nodes of a gate cannot be collapsed."""
    try:
        matcher.require_float32(gate.x)
        matcher.require_closed(gate.inner, gate.last)
        matcher.require_no_growth(gate.x, gate.constants)
    except NotCollapsibleError as reason:
        return reason
    return None


def _apply(matcher: Matcher, clip: onnx.NodeProto, gate: _Gate, hard_swish: bool) -> None:
    attributes = {"alpha": gate.alpha, "beta": gate.beta}
    if not gate.times_x:
        matcher.collapse(gate.inner, gate.last, "HardSigmoid", [gate.x], attributes=attributes)
    elif hard_swish and _is_hard_swish(gate.alpha, gate.beta):
        matcher.collapse(gate.inner, gate.last, "HardSwish", [gate.x])
    else:
        inner = [node for node in gate.inner if node is not clip]
        matcher.rewrite(clip, "HardSigmoid", [gate.x], attributes=attributes)
        matcher.collapse(inner, gate.last, "Mul", [gate.x, clip.output[0]])


# -- HardSigmoid and Mul ------------------------------------------------------------------------------------------


def _collapse_product(matcher: Matcher, gate: onnx.NodeProto) -> None:
    """Merges a HardSigmoid with the Mul behind it, if that is a hard swish."""
    x = gate.input[0]
    for product in matcher.readers(gate.output[0], "Mul"):
        if other_operand(product, gate.output[0]) != x:
            continue
        try:
            alpha, beta = attribute_float(gate, "alpha", 0.2), attribute_float(gate, "beta", 0.5)
            if not _is_hard_swish(alpha, beta):
                raise NotCollapsibleError(f"alpha {alpha:.6g} and beta {beta:.6g} are not those of HardSwish")
            matcher.require_float32(x)
            matcher.require_closed([gate], product)
            matcher.collapse([gate], product, "HardSwish", [x])
        except NotCollapsibleError as reason:
            matcher.refuse(product, reason)


def _is_hard_swish(alpha: float, beta: float) -> bool:
    return math.isclose(alpha, _ALPHA, rel_tol=_TOLERANCE) and math.isclose(beta, _BETA, rel_tol=_TOLERANCE)
