"""Activations that are written as arithmetic, collapsed into one operator each.

Exporters differ in the order of operands and factors: ``0.5 * x * (1 + f)``, ``x * (0.5 + 0.5 * f)`` and
``(x + x * f) / 2`` are one polynomial in ``x`` and ``f``. So arithmetic is read as polynomials of values, and every way
to write one compares equal; a rule that compares polynomials need not list the orders.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kenosis_ort.graph.view import ir
from kenosis_ort.graph.walk import MICROSOFT
from kenosis_ort.rewrite.rule import Editor, NotCollapsibleError, operand, other_operand, rule

Polynomial = npt.NDArray[np.float64]
"""Coefficients by the powers of two variables, up to ``x ** 3 * f``: ``[1, 1]`` is that of ``x * f``."""

ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Pow", "Neg")

_TOLERANCE = 5e-6
_MOST_NODES = 16
_DEGREES = (4, 2)


class Expression:
    """Polynomials of values in the variables ``x`` and ``f``, and what was read to find them.

    Args:
        editor: The graph.
        x: The first variable.
        f: The second variable, None for none.
    """

    def __init__(self, editor: Editor, x: ir.Value, f: ir.Value | None = None) -> None:
        self._editor = editor
        self._variables = {variable: power for variable, power in ((x, (1, 0)), (f, (0, 1))) if variable is not None}
        self._known: dict[ir.Value, Polynomial | None] = {}
        self.nodes: list[ir.Node] = []
        self.constants: set[ir.Value] = set()

    def of(self, value: ir.Value | None) -> Polynomial | None:
        """The polynomial that a value is, None if it is none, or of too high a degree or too many nodes."""
        if value is None:
            return None
        if value in self._variables:
            return _polynomial({self._variables[value]: 1.0})
        if value not in self._known:
            self._known[value] = None
            self._known[value] = self._read(value)
        return self._known[value]

    def _read(self, value: ir.Value) -> Polynomial | None:
        number = self._editor.scalar(value)
        if number is not None:
            self.constants.add(value)
            return _polynomial({(0, 0): number})
        node = self._editor.producer(value, *ARITHMETIC)
        if node is None or len(self.nodes) >= _MOST_NODES:
            return None
        self.nodes.append(node)
        operands = [self.of(read) for read in node.inputs]
        known = [each for each in operands if each is not None]
        return None if len(known) < len(operands) else _APPLY[node.op_type](*known)


def same(left: Polynomial | None, right: Polynomial) -> bool:
    """Whether two polynomials agree to about six digits in every coefficient."""
    return left is not None and np.allclose(left, right, rtol=_TOLERANCE, atol=0.0)


def _polynomial(factors: Mapping[tuple[int, int], float]) -> Polynomial:
    """The polynomial of these coefficients by powers, others 0."""
    made = np.zeros(_DEGREES)
    for powers, factor in factors.items():
        made[powers] = factor
    return made


def _number(polynomial: Polynomial) -> float | None:
    """The number that a polynomial without variables is, None for another and for 0."""
    return float(polynomial[0, 0]) if np.count_nonzero(polynomial) == 1 and polynomial[0, 0] else None


def bases(editor: Editor, value: ir.Value) -> Sequence[ir.Value]:
    """The values that an arithmetic value may be a polynomial of, the nearest first, itself not included."""
    found: dict[ir.Value, None] = {}
    level = [value]
    while level and len(found) < _MOST_NODES:
        producers = [p for each in level if (p := editor.producer(each, *ARITHMETIC)) is not None]
        read = dict.fromkeys(v for p in producers for v in p.inputs if v is not None and editor.constant(v) is None)
        level = [each for each in read if each not in found]
        found.update(dict.fromkeys(level))
    return list(found)


def _mul(left: Polynomial, right: Polynomial) -> Polynomial | None:
    """The product, None where its degree is too high."""
    (rows, columns), total = _DEGREES, np.zeros((2 * _DEGREES[0] - 1, 2 * _DEGREES[1] - 1))
    for at, factor in np.ndenumerate(left):
        if factor:
            total[at[0] : at[0] + rows, at[1] : at[1] + columns] += factor * right
    return None if total[rows:].any() or total[:, columns:].any() else total[:rows, :columns]


def _div(left: Polynomial, right: Polynomial) -> Polynomial | None:
    divisor = _number(right)
    return None if divisor is None else left * (1.0 / divisor)


def _pow(base: Polynomial, exponent: Polynomial) -> Polynomial | None:
    times = _number(exponent)
    if times not in (1.0, 2.0, 3.0):
        return None
    result: Polynomial | None = base
    for _ in range(int(times or 1) - 1):
        result = None if result is None else _mul(result, base)
    return result


_APPLY: Final[dict[str, Callable[..., Polynomial | None]]] = {
    "Add": np.add, "Sub": np.subtract, "Mul": _mul, "Div": _div, "Pow": _pow, "Neg": np.negative
}  # fmt: skip


_SLOPE = math.sqrt(2.0 / math.pi)
_ARGUMENTS: Final[dict[str, Polynomial]] = {
    "Erf": _polynomial({(1, 0): math.sqrt(0.5)}),
    "Tanh": _polynomial({(1, 0): _SLOPE, (3, 0): _SLOPE * 0.044715}),
}
_OPERATORS: Final = {"Erf": "Gelu", "Tanh": "FastGelu"}
_GELU: Final = _polynomial({(1, 0): 0.5, (1, 1): 0.5})
_STANDARD_SINCE = 20
_GELU_STEPS = 4  # from f to the result: times a half, plus a half or one, times x, times a half


@rule(
    *_OPERATORS,
    did="GELU activations, written as arithmetic, became one node each",
    stays="GELU activations stay as arithmetic",
)
def collapse_gelu(editor: Editor, bend: ir.Node) -> None:
    """GELU, written as arithmetic around Erf or Tanh, collapsed into one operator.

    The Gaussian error linear unit and its approximation by a hyperbolic tangent are::

        Gelu(x)     = 0.5 * x * (1 + Erf(x / sqrt(2)))
        FastGelu(x) = 0.5 * x * (1 + Tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))

    Exporters write them in five to nine nodes, in several orders. With ``f`` for the value of Erf or Tanh, every order
    is the polynomial ``0.5 * x + 0.5 * x * f``, and the argument of ``f`` is ``x / sqrt(2)``, or ``b * x + b * k *
    x^3`` with ``b = sqrt(2 / pi)`` and ``k = 0.044715``. These are compared, to about six digits (in fewer than six
    digits a constant is another function: it would differ by more than 1e-5).

    Operator set 20 and later has both as ``Gelu``; before, ``Gelu`` and ``FastGelu`` of ``com.microsoft`` work in every
    operator set, as fast and to the last bit alike. The runtime makes the same collapse by itself in a float model, but
    not next to Q and DQ, where every reader has a DequantizeLinear of its own (Conv nets with Erf 2.4x of FP32 for
    1.9x, with Tanh 2.8x for 1.9x).

    Not collapsed: a type other than float32, an inner value that another node, a body of control flow, the graph's
    outputs or the caller need, a constant that adds dimensions, arithmetic behind Erf or Tanh that is not GELU's.
    """
    found = _argument(editor, bend)
    if found is None:
        return
    x, argument = found
    last, result = _result(editor, bend, x)
    inner = [node for node in dict.fromkeys((*argument.nodes, *result.nodes, bend)) if node is not last]
    editor.require_float32(x)
    editor.require_closed(inner, last)
    editor.require_no_growth(x, argument.constants | result.constants)
    if editor.opset() < _STANDARD_SINCE:
        editor.become(last, _OPERATORS[bend.op_type], [x], inner=inner, domain=MICROSOFT)
        return
    editor.become(last, "Gelu", [x], {"approximate": "tanh"} if bend.op_type == "Tanh" else {}, inner=inner)


def _argument(editor: Editor, bend: ir.Node) -> tuple[ir.Value, Expression] | None:
    """``x`` and what was read between it and Erf or Tanh, None if the argument is not GELU's."""
    value = operand(bend, 0)
    for x in bases(editor, value):
        expression = Expression(editor, x)
        if same(expression.of(value), _ARGUMENTS[bend.op_type]):
            return x, expression
    return None


def _result(editor: Editor, bend: ir.Node, x: ir.Value) -> tuple[ir.Node, Expression]:
    """The node behind Erf or Tanh that computes GELU, and what was read to find that it does."""
    value = bend.outputs[0]
    for _ in range(_GELU_STEPS):
        if not editor.readers(value):
            break
        editor.require_private(value)
        readers = editor.readers_of(value, *ARITHMETIC)
        if not readers:
            break
        expression = Expression(editor, x, bend.outputs[0])
        value = readers[0].outputs[0]
        if same(expression.of(value), _GELU):
            return readers[0], expression
    raise NotCollapsibleError(f"what follows its {bend.op_type} is not 0.5 * x * (1 + {bend.op_type})")


_HARD_SWISH_OPSET = 14
_ALPHA, _BETA = 1.0 / 6.0, 0.5
_HARD_SWISH_STEPS = 3  # behind the Clip: times x, divided by 6 in one or two nodes


class _Gate(NamedTuple):
    """``last`` computes ``HardSigmoid(x)``, times ``x`` if ``times_x``; ``inner`` are the nodes between."""

    x: ir.Value
    alpha: float
    beta: float
    times_x: bool
    last: ir.Node
    inner: tuple[ir.Node, ...]
    constants: frozenset[ir.Value]


@rule(
    "Clip",
    "HardSigmoid",
    did="hard sigmoid and hard swish activations, written as several nodes, became one node each",
    stays="hard sigmoid or hard swish activations stay as several nodes",
)
def collapse_hard_swish(editor: Editor, node: ir.Node) -> None:
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
    last = _collapse_clip(editor, node) if node.op_type == "Clip" else node
    if last is not None and last.op_type == "HardSigmoid" and editor.opset() >= _HARD_SWISH_OPSET:
        _collapse_product(editor, last)


def _collapse_clip(editor: Editor, clip: ir.Node) -> ir.Node | None:
    """Collapses the gate that a Clip is part of; returns its last node, None where there is no gate."""
    high = _height(editor, clip)
    if high is None:
        return None
    found = [gate for x in bases(editor, operand(clip, 0)) for gate in _gates(editor, clip, x, high)]
    # A product with x says what x is. Without one, x is the value farthest back: the fewest nodes are left.
    found = [gate for gate in found if gate.times_x] + [gate for gate in found[::-1] if not gate.times_x]
    reasons = []
    for gate in found:
        try:
            editor.require_float32(gate.x)
            editor.require_closed(gate.inner, gate.last)
            editor.require_no_growth(gate.x, gate.constants)
        except NotCollapsibleError as reason:
            reasons.append(reason)
            continue
        _write_gate(editor, clip, gate)
        return gate.last
    if reasons:
        raise reasons[0]
    return None


def _height(editor: Editor, clip: ir.Node) -> float | None:
    """``h`` of a Clip to ``[0, h]``, None for any other."""
    if len(clip.inputs) != 3 or editor.scalar(clip.inputs[1]) != 0.0:
        return None
    high = editor.scalar(clip.inputs[2])
    return high if high is not None and high > 0.0 else None


def _gates(editor: Editor, clip: ir.Node, x: ir.Value, high: float) -> list[_Gate]:
    """The hard sigmoid and the hard swish of ``x`` that the Clip is part of, if it is."""
    argument = Expression(editor, x)
    line = argument.of(clip.inputs[0])
    if line is None or np.count_nonzero(line) != 2 or line[1, 0] <= 0.0 or line[0, 0] <= 0.0:
        return []
    slope, shift = float(line[1, 0]), float(line[0, 0])
    alpha, beta = slope / high, shift / high
    constants = frozenset(argument.constants)
    found = []
    if math.isclose(high, 1.0, rel_tol=_TOLERANCE):
        found.append(_Gate(x, alpha, beta, False, clip, tuple(argument.nodes), constants))
    value = clip.outputs[0]
    for _ in range(_HARD_SWISH_STEPS):
        readers = editor.readers_of(value, *ARITHMETIC)
        if len(readers) != 1:
            break
        behind = Expression(editor, x, clip.outputs[0])
        value = readers[0].outputs[0]
        polynomial = behind.of(value)
        times_x = same(polynomial, _polynomial({(1, 1): 1.0 / high}))
        if times_x or same(polynomial, _polynomial({(0, 1): 1.0 / high})):
            nodes = dict.fromkeys((*argument.nodes, *behind.nodes, clip))
            inner = tuple(node for node in nodes if node is not readers[0])
            found.append(_Gate(x, alpha, beta, times_x, readers[0], inner, constants | behind.constants))
    return found


def _write_gate(editor: Editor, clip: ir.Node, gate: _Gate) -> None:
    attributes = {"alpha": gate.alpha, "beta": gate.beta}
    if not gate.times_x:
        editor.become(gate.last, "HardSigmoid", [gate.x], attributes, inner=gate.inner)
    elif editor.opset() >= _HARD_SWISH_OPSET and _is_hard_swish(gate.alpha, gate.beta):
        editor.become(gate.last, "HardSwish", [gate.x], inner=gate.inner)
    else:
        inner = [node for node in gate.inner if node is not clip]
        editor.rewrite(clip, "HardSigmoid", [gate.x], attributes)
        editor.become(gate.last, "Mul", [gate.x, clip.outputs[0]], inner=inner)


def _collapse_product(editor: Editor, gate: ir.Node) -> None:
    """Merges a HardSigmoid with the Mul behind it, if that is a hard swish."""
    x = operand(gate, 0)
    for mul in editor.readers_of(gate.outputs[0], "Mul"):
        if other_operand(mul, gate.outputs[0]) is not x:
            continue
        try:
            alpha, beta = gate.attributes.get_float("alpha", 0.2), gate.attributes.get_float("beta", 0.5)
            if not _is_hard_swish(alpha, beta):
                raise NotCollapsibleError(f"alpha {alpha:.6g} and beta {beta:.6g} are not those of HardSwish")
            editor.require_float32(x)
            editor.require_closed([gate], mul)
            editor.become(mul, "HardSwish", [x], inner=[gate])
        except NotCollapsibleError as reason:
            editor.refuse(mul, reason)


def _is_hard_swish(alpha: float, beta: float) -> bool:
    return math.isclose(alpha, _ALPHA, rel_tol=_TOLERANCE) and math.isclose(beta, _BETA, rel_tol=_TOLERANCE)


@rule(
    "Mul",
    did="SiLU activations, written as Sigmoid and Mul, became one QuickGelu each",
    stays="SiLU activations stay as Sigmoid and Mul",
)
def collapse_silu(editor: Editor, product: ir.Node) -> None:
    """SiLU, written as Sigmoid and Mul, collapsed into one operator.

    ``QuickGelu`` of ``com.microsoft`` is, by its definition::

        QuickGelu(x; alpha) = x * Sigmoid(alpha * x)

    so ``x * Sigmoid(x)`` is ``QuickGelu(x; 1)`` and ``x * Sigmoid(alpha * x)`` is ``QuickGelu(x; alpha)``; a division
    ``x / c`` in front of the Sigmoid is ``alpha = 1 / c``. The runtime makes the same collapse by itself in a float
    model, and computes it by the same kernels: the results are equal bit for bit. Next to Q and DQ it does not see
    the pattern any more, since every reader gets a DequantizeLinear of its own.

    What it is worth depends on the place. Between an integer and a float node, one operator takes half the time of a
    float Sigmoid and Mul. Between two integer nodes, it replaces two integer kernels, with a rounding to 8 bits between
    them, by one float kernel between DQ and Q: a Conv net ran at 2.92x of FP32 for 2.66x on a Zen 5 processor, and at
    2.5x for 2.7x on a Sapphire Rapids, where float is slower against integer tables. So callers may name the nodes.

    Not collapsed: a type other than float32, an ``alpha`` that is not one constant number, an inner value that another
    node, a body of control flow, the graph's outputs or the caller need.
    """
    for value in product.inputs:
        gate, x = editor.producer(value, "Sigmoid"), other_operand(product, value)
        inner = () if gate is None or x is None else _silu_gate(editor, gate, x)
        if inner and x is not None:
            alpha = _silu_factor(editor, inner[0], x) if len(inner) > 1 else 1.0
            editor.require_float32(x)
            editor.require_closed(inner, product)
            editor.become(product, "QuickGelu", [x], {"alpha": alpha}, inner=inner, domain=MICROSOFT)
            return


def _silu_gate(editor: Editor, gate: ir.Node, x: ir.Value) -> tuple[ir.Node, ...]:
    """The nodes that compute a gate of ``x`` by itself, none where it is another value's gate."""
    if gate.inputs[0] is x:
        return (gate,)
    scaling = editor.producer(gate.inputs[0], "Mul", "Div")
    if (
        scaling is None
        or other_operand(scaling, x) is None
        or (scaling.op_type == "Div" and scaling.inputs[0] is not x)
    ):
        return ()
    return scaling, gate


def _silu_factor(editor: Editor, scaling: ir.Node, x: ir.Value) -> float:
    """``alpha`` of a Sigmoid, by the node in front of it."""
    factor = other_operand(scaling, x)
    number = editor.scalar(factor)
    if factor is None or number is None or number == 0.0:
        raise NotCollapsibleError(
            f"the factor '{factor.name if factor else ''}' in the Sigmoid is not one constant number"
        )
    editor.require_no_growth(x, [factor])
    return number if scaling.op_type == "Mul" else 1.0 / number
