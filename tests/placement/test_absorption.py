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
    "producer", ["Gemm (x, w)", "MatMul (x, w)", "Add (x, x)", "Mul (x, x)", "Concat <axis = 0> (x, x)"]
)
def test_other_producers(producer: str) -> None:
    text = f"(float[2,4] x) => (y) <float[4,4] w> {{ c = {producer} y = Relu (c) }}"
    assert list(absorption(text).limits) == ["y"]


BODY = "() => (float[1,4,8,8] o) { o = Neg (c) }"


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (conv_then("y = Relu (c) z = Neg (c)", "y, z"), {}, "second consumer"),
        (conv_then(f"y = Relu (c) f = Cast <to = 9> (one) z = If (f) <then_branch = t {BODY}, else_branch = e {BODY}>",
                   "y, z"), {}, "second consumer"),
        (conv_then("y = Relu (c)", "y, c"), {}, "output of the graph"),
        (conv_then("y = Clip (c, one, six)"), {}, "leave out 0"),
        (conv_then("m = ReduceMax <keepdims = 0> (x) y = Clip (c, zero, m)"), {}, "computed at run time"),
        ("(float[1,3] x) => (y) { y = Relu (x) }", {}, "no requantization"),
        (conv_then("p = MaxPool <kernel_shape = [2,2]> (c) y = Relu (p)"), {}, "no requantization"),
        (conv_then("s = Sigmoid (c) y = Relu (s)"), {}, "no requantization"),
        (conv_then("y = Relu (c)"), {"nodes_to_exclude": frozenset({"Conv_c"})}, "no requantization"),
        (conv_then("y = Relu (c)"), {"activation_symmetric": True}, "symmetric"),
    ],
)  # fmt: skip
def test_refusals(text: str, options: dict[str, Any], said: str) -> None:
    found = absorption(text, BOUNDS, **options)
    assert found.limits == {}
    assert [said in reason for reason in found.refused.values()] == [True]


def test_the_largest_float_is_no_bound() -> None:
    """Exporters write a one-sided Clip with the largest float32 on the other side."""
    largest = {"a": np.float32(0), "b": np.finfo(np.float32).max}
    view = view_of(conv_then("y = Clip (c, a, b)"), largest)
    assert activation_bounds(view, view.nodes[-1]) == (0.0, None)
