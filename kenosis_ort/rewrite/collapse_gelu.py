"""GELU, written as arithmetic around Erf or Tanh, collapsed into one operator.

The Gaussian error linear unit and its approximation by a hyperbolic tangent are::

    Gelu(x)     = 0.5 * x * (1 + Erf(x / sqrt(2)))
    FastGelu(x) = 0.5 * x * (1 + Tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))

Exporters write them in five to nine nodes, in several orders. With ``f`` for the value of Erf or Tanh, every order is
the polynomial ``0.5 * x + 0.5 * x * f``, and the argument of ``f`` is ``x / sqrt(2)``, or
``b * x + b * k * x^3`` with ``b = sqrt(2 / pi)`` and ``k = 0.044715``. These are compared, to about six digits (in
fewer than six digits a constant is another function: it would differ by more than 1e-5).

Operator set 20 and later has both as ``Gelu``; before, ``Gelu`` and ``FastGelu`` of ``com.microsoft`` work in every
operator set, as fast and to the last bit alike. The runtime makes the same collapse by itself in a
float model, but not next to Q and DQ, where every reader has a DequantizeLinear of its own (Conv nets with Erf 2.4x of
FP32 for 1.9x, with Tanh 2.8x for 1.9x).

Not collapsed: a type other than float32, an inner value that another node, a body of control flow, the graph's
outputs or the caller need, a constant that adds dimensions, arithmetic behind Erf or Tanh that is not GELU's.
"""

from __future__ import annotations

import math
from typing import Final

import onnx
import onnx.helper

from kenosis_ort.graph.walk import MICROSOFT, opset_of
from kenosis_ort.rewrite.editing import Editor
from kenosis_ort.rewrite.matching import Matcher, NotCollapsibleError
from kenosis_ort.rewrite.polynomial import ARITHMETIC, Expression, Polynomial, bases, same
from kenosis_ort.rewrite.rule import float_rule

_SLOPE = math.sqrt(2.0 / math.pi)
_ARGUMENTS: Final[dict[str, Polynomial]] = {
    "Erf": {(1, 0): math.sqrt(0.5)},
    "Tanh": {(1, 0): _SLOPE, (3, 0): _SLOPE * 0.044715},
}
_OPERATORS: Final = {"Erf": "Gelu", "Tanh": "FastGelu"}
_GELU: Final[Polynomial] = {(1, 0): 0.5, (1, 1): 0.5}
_STANDARD_SINCE = 20
_MOST_STEPS = 4  # from f to the result: times a half, plus a half or one, times x, times a half


@float_rule(
    *_OPERATORS,
    did="GELU activations, written as arithmetic, became one node each",
    stays="GELU activations stay as arithmetic",
)
def collapse_gelu(editor: Editor, bend: onnx.NodeProto) -> None:
    """Turns every GELU of the main graph that is written as arithmetic into Gelu or FastGelu, in place.

    The last node of the arithmetic keeps its name and becomes the operator.
    """
    argument = _argument(editor, bend)
    if argument is None:
        return
    _collapse(editor, bend, *argument)


def _argument(matcher: Matcher, bend: onnx.NodeProto) -> tuple[str, Expression] | None:
    """Returns ``x`` and what was read between it and Erf or Tanh, None if the argument is not GELU's."""
    for x in bases(matcher, bend.input[0]):
        expression = Expression(matcher, x)
        if same(expression.of(bend.input[0]), _ARGUMENTS[bend.op_type]):
            return x, expression
    return None


def _collapse(matcher: Matcher, bend: onnx.NodeProto, x: str, argument: Expression) -> None:
    last, result = _result(matcher, bend, x)
    inner = {**argument.nodes, **result.nodes, id(bend): bend}
    inner.pop(id(last), None)
    matcher.require_float32(x)
    matcher.require_closed(inner.values(), last)
    matcher.require_no_growth(x, argument.constants | result.constants)
    if opset_of(matcher.model) < _STANDARD_SINCE:
        matcher.collapse(list(inner.values()), last, _OPERATORS[bend.op_type], [x], domain=MICROSOFT)
        return
    matcher.collapse(list(inner.values()), last, "Gelu", [x])
    if bend.op_type == "Tanh":
        last.attribute.append(onnx.helper.make_attribute("approximate", "tanh"))


def _result(matcher: Matcher, bend: onnx.NodeProto, x: str) -> tuple[onnx.NodeProto, Expression]:
    """Returns the node behind Erf or Tanh that computes GELU, and what was read to find that it does."""
    value = bend.output[0]
    for _ in range(_MOST_STEPS):
        if not matcher.index.readers.get(value):
            break
        if not matcher.index.is_private(value):
            raise NotCollapsibleError(f"'{value}' is needed elsewhere")
        readers = matcher.readers(value, *ARITHMETIC)
        if not readers:
            break
        expression = Expression(matcher, x, bend.output[0])
        value = readers[0].output[0]
        if same(expression.of(value), _GELU):
            return readers[0], expression
    raise NotCollapsibleError(f"what follows its {bend.op_type} is not 0.5 * x * (1 + {bend.op_type})")
