"""Small arithmetic expressions of a graph, read as polynomials, so that every way to write one compares equal.

``0.5 * x * (1 + f)``, ``x * (0.5 + 0.5 * f)`` and ``(x + x * f) / 2`` are one polynomial in ``x`` and ``f``. Exporters
differ in the order of operands and factors; a rule that compares polynomials need not list the orders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Final

import onnx

from kenosis_ort.rewrite.matching import Matcher

Polynomial = dict[tuple[int, int], float]
"""Coefficients by the powers of two variables: ``{(1, 0): 0.5, (1, 1): 0.5}`` is ``0.5 * x + 0.5 * x * f``."""

ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Pow", "Neg")

_MOST_NODES = 16
_DEGREES = (3, 1)
_TOLERANCE = 5e-6  # relative: constants are written with six digits or more


class Expression:
    """Polynomials of values in the variables ``x`` and ``f``, and what was read to find them.

    Args:
        matcher: The graph.
        x: Name of the first variable.
        f: Name of the second variable, "" for none.
    """

    def __init__(self, matcher: Matcher, x: str, f: str = "") -> None:
        self._matcher = matcher
        self._variables = {name: power for name, power in ((x, (1, 0)), (f, (0, 1))) if name}
        self._known: dict[str, Polynomial | None] = {}
        self.nodes: dict[int, onnx.NodeProto] = {}
        self.constants: set[str] = set()

    def of(self, value: str) -> Polynomial | None:
        """Returns the polynomial that a value is, None if it is none, or of too high a degree or too many nodes."""
        if value in self._variables:
            return {self._variables[value]: 1.0}
        if value not in self._known:
            self._known[value] = None
            self._known[value] = self._read(value)
        return self._known[value]

    def _read(self, value: str) -> Polynomial | None:
        number = self._matcher.scalar(value)
        if number is not None:
            self.constants.add(value)
            return {(0, 0): number}
        node = self._matcher.producer(value, *ARITHMETIC)
        if node is None or len(self.nodes) >= _MOST_NODES:
            return None
        self.nodes[id(node)] = node
        operands = [self.of(name) for name in node.input]
        known = [operand for operand in operands if operand is not None]
        return None if len(known) < len(operands) else _APPLY[node.op_type](*known)


def same(left: Polynomial | None, right: Polynomial) -> bool:
    """Tells whether two polynomials agree to about six digits in every coefficient."""
    if left is None or left.keys() != right.keys():
        return False
    return all(math.isclose(left[powers], right[powers], rel_tol=_TOLERANCE) for powers in left)


def bases(matcher: Matcher, value: str) -> Sequence[str]:
    """Returns the values that an arithmetic value may be a polynomial of, the nearest first, itself not included."""
    found: dict[str, None] = {}
    level = [value]
    while level and len(found) < _MOST_NODES:
        producers = [p for name in level if (p := matcher.producer(name, *ARITHMETIC)) is not None]
        names = dict.fromkeys(n for p in producers for n in p.input if n and matcher.index.constant(n) is None)
        level = [name for name in names if name not in found]
        found.update(dict.fromkeys(level))
    return list(found)


def _add(left: Polynomial, right: Polynomial) -> Polynomial | None:
    total = dict(left)
    for powers, factor in right.items():
        total[powers] = total.get(powers, 0.0) + factor
    return {powers: factor for powers, factor in total.items() if factor}


def _neg(operand: Polynomial) -> Polynomial | None:
    return {powers: -factor for powers, factor in operand.items()}


def _sub(left: Polynomial, right: Polynomial) -> Polynomial | None:
    return _add(left, {powers: -factor for powers, factor in right.items()})


def _mul(left: Polynomial, right: Polynomial) -> Polynomial | None:
    total: Polynomial = {}
    for ((a, b), p), ((c, d), q) in product(left.items(), right.items()):
        powers = (a + c, b + d)
        if powers[0] > _DEGREES[0] or powers[1] > _DEGREES[1]:
            return None
        total[powers] = total.get(powers, 0.0) + p * q
    return {powers: factor for powers, factor in total.items() if factor and math.isfinite(factor)}


def _div(left: Polynomial, right: Polynomial) -> Polynomial | None:
    divisor = right.get((0, 0), 0.0)
    return _mul(left, {(0, 0): 1.0 / divisor}) if divisor and len(right) == 1 else None


def _pow(base: Polynomial, exponent: Polynomial) -> Polynomial | None:
    times = exponent.get((0, 0), 0.0)
    if len(exponent) != 1 or times not in (1.0, 2.0, 3.0):
        return None
    result: Polynomial | None = base
    for _ in range(int(times) - 1):
        result = None if result is None else _mul(result, base)
    return result


_APPLY: Final[dict[str, Callable[..., Polynomial | None]]] = {
    "Add": _add,
    "Sub": _sub,
    "Mul": _mul,
    "Div": _div,
    "Pow": _pow,
    "Neg": _neg,
}
