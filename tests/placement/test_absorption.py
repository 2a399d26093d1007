"""Which Relu and Clip may vanish, with what bounds, and why the others may not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kenosis_ort.options import PlacementOptions
from kenosis_ort.placement.absorption import Absorption, activation_bounds
from kenosis_ort.placement.constraints import constrain
from kenosis_ort.placement.eligibility import classify
from kenosis_ort.plan import RangeLimit
from kenosis_ort.targets.ort_cpu import ORT_CPU
from tests.placement.build import view_of


def absorption(text: str, weights: dict[str, Any] | None = None, **options: Any) -> Absorption:
    view = view_of(text, weights)
    wishes = constrain(view, ORT_CPU, PlacementOptions(**options))
    return Absorption(view, ORT_CPU, wishes, classify(view, ORT_CPU, wishes, {}))


def conv_then(behind: str, outputs: str = "y") -> str:
    return f"net (float[1,3,8,8] x) => ({outputs}) <float[4,3,1,1] w> {{ c = Conv (x, w)\n {behind} }}"


BOUNDS = {"zero": np.float32(0), "six": np.float32(6), "one": np.float32(1), "low": np.float32(-1)}


def test_relu_behind_conv() -> None:
    found = absorption(conv_then("y = Relu (c)"))
    assert found.limits == {"y": RangeLimit("y", 0.0, None)}
    assert found.by_producer["Conv_c"].name == "Relu_y"
    assert found.by_activation["Relu_y"].name == "Conv_c"
    assert found.refused == {}


@pytest.mark.parametrize(
    ("clip", "low", "high"),
    [("zero, six", 0.0, 6.0), ("zero", 0.0, None), (", six", None, 6.0), ("low, one", -1.0, 1.0)],
)
def test_clip_behind_conv(clip: str, low: float | None, high: float | None) -> None:
    found = absorption(conv_then(f"y = Clip (c, {clip})"), BOUNDS)
    assert found.limits == {"y": RangeLimit("y", low, high)}


@pytest.mark.parametrize(
    "producer",
    ["c = Gemm (x, w)", "c = MatMul (x, w)", "c = Add (x, x)", "c = Mul (x, x)", "c = Concat <axis = 0> (x, x)"],
)
def test_other_producers(producer: str) -> None:
    text = f"net (float[2,4] x) => (y) <float[4,4] w> {{ {producer}\n y = Relu (c) }}"
    assert list(absorption(text).limits) == ["y"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (conv_then("y = Relu (c)\n z = Neg (c)", "y, z"), "second consumer"),
        (conv_then("y = Relu (c)", "y, c"), "output of the graph"),
        (conv_then("y = Clip (c, one, six)"), "leave out 0"),
        (conv_then("m = ReduceMax <keepdims = 0> (x)\n y = Clip (c, zero, m)"), "computed at run time"),
        ("net (float[1,3] x) => (y) { y = Relu (x) }", "no requantization"),
        (conv_then("p = MaxPool <kernel_shape = [2,2]> (c)\n y = Relu (p)"), "no requantization"),
        (conv_then("s = Sigmoid (c)\n y = Relu (s)"), "no requantization"),
    ],
)
def test_refusals(text: str, said: str) -> None:
    found = absorption(text, BOUNDS)
    assert found.limits == {}
    assert [said in reason for reason in found.refused.values()] == [True]


def test_a_body_that_reads_the_conv_is_a_second_consumer() -> None:
    branch = "() => (float[1,4,8,8] {0}) {{ {0} = {1} (c) }}"
    both = f"then_branch = t {branch.format('a', 'Neg')}, else_branch = e {branch.format('b', 'Tanh')}"
    text = f"""net (float[1,3,8,8] x, bool f) => (y, z) <float[4,3,1,1] w> {{
      c = Conv (x, w)
      y = Relu (c)
      z = If (f) <{both}>
    }}"""
    assert "second consumer" in absorption(text).refused["Relu_y"]


def test_symmetric_activations_absorb_nothing() -> None:
    found = absorption(conv_then("y = Relu (c)"), activation_symmetric=True)
    assert "symmetric" in found.refused["Relu_y"]


def test_an_excluded_producer_has_no_requantization() -> None:
    found = absorption(conv_then("y = Relu (c)"), nodes_to_exclude=frozenset({"Conv_c"}))
    assert "no requantization" in found.refused["Relu_y"]


def test_the_largest_float_is_no_bound() -> None:
    """Exporters write a one-sided Clip with the largest float32 on the other side."""
    largest = {"a": np.float32(0), "b": np.finfo(np.float32).max}
    view = view_of(conv_then("y = Clip (c, a, b)"), largest)
    node = view.node("Clip_y")
    assert node is not None
    assert activation_bounds(view, node) == (0.0, None)
