"""Bounds beyond which every consumer of a value sees no difference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kenosis_ort.placement.saturation import saturation_limits
from kenosis_ort.plan import RangeLimit
from tests.placement.build import view_of
from tests.planning import parse


def limits(
    behind: str, outputs: str = "float[1,4,8,8] y", opset: int = 17, weights: dict[str, Any] | None = None
) -> list[RangeLimit]:
    text = f"net (float[1,3,8,8] x) => ({outputs}) <float[4,3,1,1] w> {{ c = Conv (x, w)\n {behind} }}"
    view = view_of(parse(text, weights, opset=opset))
    return list(saturation_limits(view, view.nodes[0].outputs))


@pytest.mark.parametrize(
    ("behind", "low", "high"),
    [
        ("y = Sigmoid (c)", -8.0, 8.0),
        ("y = Tanh (c)", -4.0, 4.0),
        ("y = HardSwish (c)", -3.0, None),
        ("y = HardSigmoid (c)", -2.5, 2.5),
        ("y = HardSigmoid <alpha = 0.1666667, beta = 0.5> (c)", -3.0, 3.0),
        ("y = Relu (c)", 0.0, None),
        ("y = Softplus (c)", -8.0, None),
        ("s = Sigmoid (c)\n y = Mul (c, s)", -8.0, None),
        ("y = com.microsoft.QuickGelu <alpha = 1.0> (c)", -8.0, None),
        ("y = com.microsoft.QuickGelu (c)", -8.0 / 1.702, None),
        ("s = Sigmoid (c)\n y = Mul (s, c)", -8.0, None),
        ("s = HardSigmoid <alpha = 0.1666667, beta = 0.5> (c)\n y = Mul (c, s)", -3.0, None),
    ],
)
def test_each_function(behind: str, low: float | None, high: float | None) -> None:
    (limit,) = limits(behind)
    assert limit.value == "c"
    assert limit.low == (None if low is None else pytest.approx(low, rel=1e-5))
    assert limit.high == (None if high is None else pytest.approx(high, rel=1e-5))


def test_several_consumers_take_the_wider_bound_on_each_side() -> None:
    assert limits("y = Sigmoid (c)\n z = Tanh (c)", "y, z") == [RangeLimit("c", -8.0, 8.0)]
    assert limits("y = Sigmoid (c)\n z = HardSwish (c)", "y, z") == [RangeLimit("c", -8.0, None)]


@pytest.mark.parametrize(
    ("behind", "outputs"),
    [
        ("y = Sigmoid (c)\n z = Neg (c)", "y, z"),
        ("y = Sigmoid (c)", "y, c"),
        ("y = Neg (c)", "y"),
        ("s = Sigmoid (x)\n r = ReduceMean (s)\n y = Mul (c, r)", "y"),
        ("s = Tanh (c)\n y = Mul (c, s)", "y"),
        ("y = HardSigmoid <alpha = -0.2> (c)", "y"),
    ],
)
def test_no_bound_where_a_consumer_sees_the_difference(behind: str, outputs: str) -> None:
    assert limits(behind, outputs) == []


def test_a_body_that_reads_the_value_sees_the_difference() -> None:
    branch = """then_branch = t () => (float[1,4,8,8] a) { a = Neg (c) },
                else_branch = e () => (float[1,4,8,8] b) { b = Abs (c) }"""
    text = f"""net (float[1,3,8,8] x, bool f) => (y, z) <float[4,3,1,1] w> {{
      c = Conv (x, w)
      y = Sigmoid (c)
      z = If (f) <{branch}>
    }}"""
    view = view_of(text)
    assert saturation_limits(view, view.nodes[0].outputs) == ()


@pytest.mark.parametrize(
    ("op", "bounds"),
    [("Sigmoid", (-8, 8)), ("Tanh", (-4, 4)), ("HardSwish", (-3, None)), ("Softplus", (-8, None)), ("Relu", (0, None))],
)
def test_what_the_bounds_cost(op: str, bounds: tuple[float | None, float | None]) -> None:
    """At most 0.003 of the function's value."""
    functions = {
        "Sigmoid": lambda v: 1 / (1 + np.exp(-v)),
        "Tanh": np.tanh,
        "HardSwish": lambda v: v * np.clip(v / 6 + 0.5, 0, 1),
        "Softplus": lambda v: np.log1p(np.exp(v)),
        "Relu": lambda v: np.maximum(v, 0),
    }
    v = np.linspace(-100, 100, 2001)
    low, high = bounds
    cut = np.clip(v, low, high)
    assert np.abs(functions[op](v) - functions[op](cut)).max() <= 0.003
