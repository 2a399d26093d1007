"""Pooling and reductions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from kenosis_ort.targets.ort_cpu.barriers import CHANNELS_LAST

from .qdq import MS, RELU_STEP, STEP, QdqGraph, build, compute_ops, largest_difference, op_types, optimized

POOL: dict[str, Any] = {"kernel_shape": [2, 2], "strides": [2, 2]}

_ATTRIBUTES: dict[str, dict[str, Any]] = {"Concat": {"axis": 1}, "MaxPool": POOL, "Resize": {"mode": "nearest"}}


def _further_inputs(g: QdqGraph, op_type: str, x: str) -> list[str]:
    """Returns the inputs behind the first one."""
    if op_type in ("Add", "Mul", "Concat", "Sub", "Div", "Sum", "Max", "Min"):
        return [x]
    if op_type == "Clip":
        return [g.const(0.0), g.const(2.0)]
    if op_type == "Pow":
        return [g.const(1.5)]
    if op_type == "PRelu":
        return [g.const(np.full((16, 1, 1), 0.3, np.float32))]
    if op_type == "Slice":
        return [g.ints(0), g.ints(8), g.ints(1)]
    if op_type == "Resize":
        return ["", g.floats(1, 1, 2, 2)]
    if op_type == "Pad":
        return [g.ints(0, 0, 1, 1, 0, 0, 1, 1)]
    return []


def _between_convs(op_type: str, **attributes: Any) -> list[str]:
    """Returns the optimized Conv -> Relu -> pool -> Conv with equal parameters in front of and behind the pool."""

    def make(g: QdqGraph) -> str:
        x = g.relu_q(g.op("Relu", g.conv(g.act_input())))
        return g.q(g.conv(g.relu_q(g.op(op_type, x, **attributes)), kernel=1))

    return op_types(build(make))


@pytest.mark.parametrize("opset", [13, pytest.param(22, marks=pytest.mark.since("1.28"))])
def test_rule_maxpool_opset12(opset: int) -> None:
    """MaxPool runs on bytes if the parameters in front and behind are equal."""
    same = build(lambda g: g.q(g.op("MaxPool", g.act_input(), **POOL)), opset=opset)
    other = build(lambda g: g.q(g.op("MaxPool", g.act_input(), **POOL), 6 / 255, 100), opset=opset)
    assert op_types(same) == ["QuantizeLinear", "MaxPool", "DequantizeLinear"]
    assert op_types(other).count("QuantizeLinear") == 2
    assert largest_difference(same) == 0


def test_rule_maxpool_opset12_older_float() -> None:
    """Below opset 12 MaxPool takes no bytes: float between DQ and Q."""
    model = build(lambda g: g.q(g.op("MaxPool", g.act_input(), **POOL)), opset=11)
    assert op_types(model).count("QuantizeLinear") == 2


def test_rule_maxpool_opset12_indices_float() -> None:
    """A MaxPool whose indices are an output stays float."""
    model = build(lambda g: g.q(g.ops("MaxPool", g.act_input(), count=2, **POOL)[0]))
    assert op_types(model) == ["QuantizeLinear", "DequantizeLinear", "MaxPool", "QuantizeLinear", "DequantizeLinear"]


def test_rule_maxpool_nhwc() -> None:
    """Behind a QLinearConv the pool runs in the Conv's channels-last layout: two Transposes in all."""
    ops = _between_convs("MaxPool", **POOL)
    assert [o for o in ops if o.startswith(("QLinear", "Nhwc"))] == ["QLinearConv", "NhwcMaxPool", "QLinearConv"]
    assert ops.count("Transpose") == 2


def _pool_behind(make: Callable[[QdqGraph, str], str]) -> list[str]:
    """Returns the optimized graph of an integer Conv, what ``make`` adds, and a MaxPool on bytes before a Conv."""

    def graph(g: QdqGraph) -> str:
        x = g.relu_q(g.op("Relu", g.conv(g.act_input())))
        return g.q(g.conv(g.relu_q(g.op("MaxPool", g.relu_q(make(g, x)), **POOL)), kernel=1))

    return op_types(build(graph, opset=20))


@pytest.mark.since("1.31")
@pytest.mark.parametrize("op_type", sorted(CHANNELS_LAST))
def test_rule_maxpool_channels_first_slow(op_type: str) -> None:
    """These hand the layout of a QLinearConv on to a MaxPool, which then has its fast kernel."""

    def make(g: QdqGraph, x: str) -> str:
        domain = MS if op_type == "QuickGelu" else ""
        return g.op(op_type, x, *_further_inputs(g, op_type, x), domain=domain, **_ATTRIBUTES.get(op_type, {}))

    if op_type == "Split":
        assert "NhwcMaxPool" in _pool_behind(lambda g, x: g.ops("Split", x, count=2, axis=1, num_outputs=2)[0])
    else:
        assert "NhwcMaxPool" in _pool_behind(make)


@pytest.mark.parametrize("op_type", ["LRN", "InstanceNormalization", "AveragePool"])
def test_rule_maxpool_channels_first_slow_behind_others(op_type: str) -> None:
    """Behind these the pool has the slow kernel."""

    def make(g: QdqGraph, x: str) -> str:
        if op_type == "LRN":
            return g.op("LRN", x, size=3)
        if op_type == "AveragePool":
            return g.op("Max", g.op("AveragePool", x, kernel_shape=[3, 3], pads=[1] * 4))
        return g.op(op_type, x, g.const(np.ones(16, np.float32)), g.const(np.zeros(16, np.float32)))

    ops = _pool_behind(make)
    assert "MaxPool" in ops
    assert "NhwcMaxPool" not in ops


def test_rule_hoist_q_over_maxpool() -> None:
    """Q behind a float MaxPool is hoisted above it: a slow MaxPool on NCHW bytes. A single-input Max in front of
    the Q prevents it."""
    hoisted = build(lambda g: g.q(g.op("MaxPool", g.input(), **POOL)))
    behind_conv = build(lambda g: g.q(g.op("MaxPool", g.conv(g.input(), weight="float"), **POOL)))
    barrier = build(lambda g: g.q(g.op("Max", g.op("MaxPool", g.input(), **POOL))))
    two_readers = build(lambda g: [g.q(m := g.op("MaxPool", g.input(), **POOL)), g.op("Neg", m)])
    assert op_types(hoisted) == ["QuantizeLinear", "MaxPool", "DequantizeLinear"]
    assert [o for o in op_types(behind_conv) if "Reorder" not in o] == [
        "Conv",
        "QuantizeLinear",
        "MaxPool",
        "DequantizeLinear",
    ]
    for kept in (barrier, two_readers):
        ops = op_types(kept)
        assert ops.index("MaxPool") < ops.index("QuantizeLinear")


def test_rule_push_dq_under_maxpool() -> None:
    """DQ in front of a MaxPool with a float consumer is pushed below it; a single-input Max prevents that too."""
    pushed = build(lambda g: g.op("Exp", g.op("MaxPool", g.act_input(), **POOL)))
    barrier = build(lambda g: g.op("Exp", g.op("MaxPool", g.op("Max", g.act_input()), **POOL)))
    assert op_types(pushed) == ["QuantizeLinear", "MaxPool", "DequantizeLinear", "Exp"]
    ops = op_types(barrier)
    assert ops.index("DequantizeLinear") < ops.index("MaxPool")


@pytest.mark.parametrize("scale", [STEP, 6 / 255])
@pytest.mark.parametrize("attributes", [{}, {"pads": [1] * 4}, {"pads": [1] * 4, "count_include_pad": 1}])
def test_rule_average_pool(scale: float, attributes: dict[str, Any]) -> None:
    """An integer kernel whatever the parameters; it may differ from the float pool by one step."""
    model = build(lambda g: g.q(g.op("AveragePool", g.act_input(), kernel_shape=[3, 3], **attributes), scale, 100))
    assert compute_ops(model) == ["QLinearAveragePool"]
    assert largest_difference(model) <= scale * 1.01


def test_rule_average_pool_float_output() -> None:
    assert compute_ops(build(lambda g: g.op("AveragePool", g.act_input(), **POOL))) == ["AveragePool"]


@pytest.mark.parametrize("dilations", [[1, 1], [2, 2]])
def test_rule_average_pool_dilations_unloadable(dilations: list[int]) -> None:
    """The attribute `dilations` of opset 19, even with its default value, makes the runtime refuse the model when
    the pool stands between DQ and Q. It must not be quantized, or the attribute be dropped."""
    model = build(lambda g: g.q(g.op("AveragePool", g.act_input(), **POOL, dilations=dilations)), opset=19)
    floating = build(lambda g: g.op("AveragePool", g.act_input(), **POOL, dilations=dilations), opset=19)
    with pytest.raises(Exception, match="QLinearAveragePool") as caught:
        optimized(model)
    assert type(caught.value).__module__.startswith(ort.__name__)
    assert compute_ops(floating) == ["AveragePool"]


@pytest.mark.parametrize("scale", [STEP, RELU_STEP])
def test_rule_global_average_pool(scale: float) -> None:
    model = build(lambda g: g.q(g.op("GlobalAveragePool", g.act_input()), scale))
    assert compute_ops(model) == ["QLinearGlobalAveragePool"]
    assert largest_difference(model) <= scale * 1.01
    assert _between_convs("GlobalAveragePool").count("Transpose") == 2


@pytest.mark.parametrize("op_type", ["ReduceMean", "ReduceSum", "ReduceL2"])
@pytest.mark.parametrize("opset", [13, 18])
def test_rule_reduce_mean_float(op_type: str, opset: int) -> None:
    def make(g: QdqGraph) -> str:
        x = g.act_input()
        as_input = opset >= 18 or op_type == "ReduceSum"
        return g.q(g.op(op_type, x, g.ints(2, 3)) if as_input else g.op(op_type, x, axes=[2, 3]))

    assert compute_ops(build(make, opset=opset)) == [op_type]


@pytest.mark.parametrize("op_type", ["GlobalMaxPool", "LpPool"])
def test_rule_other_pools_float(op_type: str) -> None:
    attributes: dict[str, Any] = {"kernel_shape": [2, 2]} if op_type == "LpPool" else {}
    assert compute_ops(build(lambda g: g.q(g.op(op_type, g.act_input(), **attributes)))) == [op_type]
