"""Where all consumers of a value saturate, what lies beyond need not eat its scale.

A SiLU, for example, maps everything below -8 to within 0.003 of 0, so an input range of [-106, 125] is better
quantized as [-8, 125]: half of the steps would be spent on values that all become 0. YOLOX-Nano's stem is such
a case. The bounds lose at most 0.003 in the function's value, those of HardSwish and HardSigmoid nothing. What
saturates a Concat saturates each of its parts: half of the range of a Conv whose Relu stands behind a Concat is lost
otherwise (ShuffleNet where the Concat is float: 24.7 dB for 23.7).

Some bounds depend on the data. A Softmax sees nothing of what lies far below the largest value of the row, so that a
mask of -1e9, the least float32 or minus infinity counts as a little below the rest; a MaxPool sees nothing of a padding
that is smaller than all data. `seen_as` tells calibration to take such values for what they are worth.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kenosis_ort.graph.view import CAPTURED, Consumer, GraphView, ir
from kenosis_ort.plan import PlacementPlan, RangeLimit

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
    "Relu": (0.0, None),
}
_FLOORED: dict[str, tuple[float, float]] = {  # default alpha; below -7 these are within 0.001 alpha of their floor
    "Elu": (1.0, -7.0),
    "Celu": (1.0, -7.0),
    "Selu": (1.67326, -7.0),
}
_SILU = {"QuickGelu": 1.702, "Swish": 1.0}  # default alpha
_SILU_LOW = -8.0
_LARGEST = 3.4e38
_FAR_BELOW = -1e4
SOFTMAX_DEPTH = 16.0
"""How far below the largest value of its row a Softmax input can lie and still count: e^-16 is 1e-7."""


def saturation_limits(view: GraphView, values: Iterable[ir.Value]) -> tuple[RangeLimit, ...]:
    """Returns, for each value all of whose consumers saturate, the bounds beyond which they see no difference."""
    found = []
    for value in values:
        bounds = _bounds_of(view, value)
        if bounds is not None and bounds != (None, None):
            found.append(RangeLimit(str(value.name), *bounds))
    return tuple(found)


def _bounds_of(view: GraphView, value: ir.Value) -> Bounds | None:
    """The widest bounds among a value's consumers, None where one of them sees all of it."""
    consumers = view.consumers(value)
    if not consumers or view.is_output(value):
        return None
    known = [bounds for bounds in (_bounds(view, value, consumer) for consumer in consumers) if bounds is not None]
    if len(known) != len(consumers):
        return None
    lows, highs = [low for low, _ in known], [high for _, high in known]
    low = None if any(x is None for x in lows) else min(x for x in lows if x is not None)
    high = None if any(x is None for x in highs) else max(x for x in highs if x is not None)
    return low, high


def _bounds(view: GraphView, value: ir.Value, consumer: Consumer) -> Bounds | None:
    node = consumer.node
    if consumer.index == CAPTURED:
        return None
    if node.op_type == "HardSigmoid":
        alpha, beta = view.attribute_float(node, "alpha", 0.2), view.attribute_float(node, "beta", 0.5)
        return (-beta / alpha, (1.0 - beta) / alpha) if alpha > 0 and 0 <= beta <= 1 else None
    if node.op_type in _SILU:
        alpha = view.attribute_float(node, "alpha", _SILU[node.op_type])
        return (_SILU_LOW / alpha, None) if alpha > 0 else None
    if node.op_type in _FLOORED:
        alpha, low = _FLOORED[node.op_type]
        alpha = view.attribute_float(node, "alpha", alpha)
        # Celu bends by x / alpha, the others scale by alpha.
        return ((low * alpha if node.op_type == "Celu" else low), None) if 0 < alpha <= 3 else None
    if node.op_type == "Clip":
        return _clip_bounds(view, node) if consumer.index == 0 else None
    if node.op_type == "Mul":
        return _gate_bounds(view, value, node)
    if node.op_type == "Add":
        return _shifted_bounds(view, node)
    if node.op_type == "Concat":  # what reads it saturates each of its parts
        return _bounds_of(view, node.outputs[0])
    return _SATURATES.get(node.op_type)


def _shifted_bounds(view: GraphView, node: ir.Node) -> Bounds | None:
    """The bounds of a value to which a constant is added in front of a Clip."""
    shift = _scalar_operand(view, node)
    consumer = view.sole_consumer(node.outputs[0])
    if shift is None or consumer is None or consumer.node.op_type != "Clip" or consumer.index != 0:
        return None
    bounds = _clip_bounds(view, consumer.node)
    if bounds is None:
        return None
    low, high = (None if bound is None else bound - shift for bound in bounds)
    return low, high


def _scalar_operand(view: GraphView, node: ir.Node) -> float | None:
    """The constant operand of one number, None if there is none."""
    constants = [v for v in node.inputs if v is not None and view.is_constant(v)]
    if len(constants) != 1 or view.array(constants[0]).size != 1:
        return None
    return float(view.array(constants[0]).reshape(-1)[0])


def _gate_bounds(view: GraphView, value: ir.Value, product: ir.Node) -> Bounds | None:
    """The bounds of ``x * gate(x)``, which vanishes where the gate does."""
    gates = [v.producer() for v in product.inputs if v is not None and v is not value]
    if len(gates) == 1 and gates[0] is not None and gates[0].op_type == "Clip":
        return _clipped_gate_bounds(view, value, gates[0])
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


def _clipped_gate_bounds(view: GraphView, value: ir.Value, gate: ir.Node) -> Bounds | None:
    """The bounds of ``x * Clip(x + k; 0, h)``, which vanishes below ``-k``."""
    moved = gate.inputs[0].producer() if gate.inputs and gate.inputs[0] is not None else None
    if moved is None or moved.op_type != "Add" or not any(v is value for v in moved.inputs):
        return None
    shift, bounds = _scalar_operand(view, moved), _clip_bounds(view, gate)
    return (-shift, None) if shift is not None and bounds is not None and bounds[0] == 0.0 else None


def _clip_bounds(view: GraphView, node: ir.Node) -> Bounds | None:
    """The constant bounds of a Clip, None if it has none."""
    found: list[float | None] = []
    for position, attribute in ((1, "min"), (2, "max")):
        value = node.inputs[position] if position < len(node.inputs) else None
        if value is not None and not view.is_constant(value):
            found.append(None)
        elif value is not None:
            found.append(float(view.array(value).reshape(-1)[0]))
        else:
            found.append(float(node.attributes[attribute].as_float()) if attribute in node.attributes else None)
    low, high = (None if bound is None or abs(bound) >= _LARGEST else bound for bound in found)
    return (
        None if (low is None and high is None) or (low is not None and high is not None and low > high) else (low, high)
    )


@dataclass(frozen=True)
class SeenAs:
    """What a value's consumers make of it: a function of the array of one sample for calibration.

    Attributes:
        low: Smaller values count as this one; None without.
        high: Larger values count as this one; None without.
        axes: Values more than `SOFTMAX_DEPTH` below the largest along these axes count as that far below; empty
            without.
        filling: Values up to this one count as the smallest of the others; None without.
    """

    low: float | None = None
    high: float | None = None
    axes: tuple[int, ...] = ()
    filling: float | None = None

    def __call__(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if not array.size:
            return array
        if self.filling is not None:
            rest = array[array > self.filling]
            array = np.maximum(array, rest.min() if rest.size else array.dtype.type(0.0))
        if self.axes:
            array = np.maximum(array, array.max(axis=self.axes, keepdims=True) - array.dtype.type(SOFTMAX_DEPTH))
        if self.low is not None or self.high is not None:
            array = np.clip(array, self.low, self.high)
        return array


def values_of_own_scale(view: GraphView, plan: PlacementPlan) -> list[ir.Value]:
    """The activations whose scale a plan gives to no other value; a MaxPool's output is no other value."""
    by_name = {str(v.name): v for v in (*view.inputs, *(out for node in view.nodes for out in node.outputs)) if v.name}
    shared: set[str] = set()
    own = []
    for name, decision in plan.quantized_values():
        producer = by_name[name].producer() if name in by_name else None
        if decision.provider is None:
            own.append(name)
        elif producer is None or producer.op_type != "MaxPool" or producer.inputs[0] is not by_name[decision.provider]:
            shared.add(decision.provider)
    return [by_name[name] for name in own if name in by_name and name not in shared]


def seen_as(
    view: GraphView, values: Iterable[ir.Value], limits: Iterable[RangeLimit] | None = None
) -> dict[str, SeenAs]:
    """Returns, for each value some of whose range no consumer sees, what calibration is to take it for.

    Args:
        view: The model.
        values: Values to calibrate, e.g. those of `values_of_own_scale`: one that shares its scale with values of other
            consumers must not be among them.
        limits: Bounds that a planner found; None to find them.
    """
    values = list(values)
    names = {str(value.name) for value in values}
    known = saturation_limits(view, values) if limits is None else limits
    found = {limit.value: SeenAs(limit.low, limit.high) for limit in known if limit.value in names}
    for value in values:
        consumers = view.consumers(value)
        if not consumers or view.is_output(value) or str(value.name) in found:
            continue
        axes = {_softmax_axes(view, value, c) for c in consumers}
        filling = _filling(view, value)
        if len(axes) == 1 and () not in axes:
            found[str(value.name)] = SeenAs(axes=axes.pop())
        elif filling is not None and all(c.node.op_type == "MaxPool" for c in consumers):
            found[str(value.name)] = SeenAs(filling=filling)
    return found


def _softmax_axes(view: GraphView, value: ir.Value, consumer: Consumer) -> tuple[int, ...]:
    """The axes over which a consumer takes the Softmax, empty if it does not; looks through Reshape."""
    node = consumer.node
    if consumer.index == CAPTURED:
        return ()
    if node.op_type == "Reshape" and consumer.index == 0:
        behind = view.sole_consumer(node.outputs[0])
        before, after = view.dims(value), view.dims(node.outputs[0])
        if behind is None or not before or not after or before[-1] is None or before[-1] != after[-1]:
            return ()
        axes = _softmax_axes(view, node.outputs[0], behind)
        return (-1,) if axes in ((-1,), (len(after) - 1,)) else ()
    if node.op_type != "Softmax":
        return ()
    if view.opset() >= 13:
        return (view.attribute_int(node, "axis", -1),)
    rank, axis = view.rank(value), view.attribute_int(node, "axis", 1)
    return () if rank is None else tuple(range(axis % rank, rank))


def _filling(view: GraphView, value: ir.Value) -> float | None:
    """The constant that a Pad fills with, None if it is none or larger than data could be."""
    node = value.producer()
    if node is None or node.op_type != "Pad" or view.attribute_str(node, "mode", "constant") != "constant":
        return None
    constant = node.inputs[2] if len(node.inputs) > 2 else None
    if constant is None or not view.is_constant(constant):
        return None
    filling = float(view.array(constant).reshape(-1)[0])
    return filling if filling <= _FAR_BELOW else None
