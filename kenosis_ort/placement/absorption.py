"""What a kernel takes in behind its sum (stage 5 of the Kenosis paper), and where all consumers of a value saturate.

Deferring Q past an activation pays only where the runtime really takes it in. Two kinds of runtimes are told apart by
the target's table. Some drop a Relu or Clip whose clipping the requantization does as well, under a condition on the
quantized range (`Target.clamps`). Others compute a whole epilogue in the kernel: any activation, ``x * f(x)``, products
and sums with constants, or the sum with a shortcut, one behind the other.

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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kenosis_ort.graph.view import CAPTURED, FLOAT, Bounds, Consumer, GraphView, ir
from kenosis_ort.placement.constraints import Constraints
from kenosis_ort.plan import PlacementPlan, RangeLimit
from kenosis_ort.targets.vocabulary import NodeClass, Role

_PRODUCERS = (Role.ANCHOR, Role.BINARY, Role.CONCAT)
_BY_TABLE = "unsupported-op"  # the rule of an operator that the table has no rule for


class Absorption:
    """Nodes that kernels take in behind their sums.

    Args:
        constraints: The caller's wishes about a model on a target.
        classes: What each node could become.

    Attributes:
        by_producer: Name of the node whose kernel it is to the last node that it takes in.
        by_activation: Name of each node that is taken in to the node whose kernel it is.
        limits: Output value of an activation to the bounds its quantization range must keep.
        shortcuts: Name of an Add that is taken in to the other value that it adds.
        refused: Activation name to the reason why it cannot vanish.
    """

    def __init__(self, constraints: Constraints, classes: Mapping[str, NodeClass]) -> None:
        self.constraints, self.classes = constraints, classes
        self.view, self.target = constraints.view, constraints.target
        self.by_producer: dict[str, ir.Node] = {}
        self.by_activation: dict[str, ir.Node] = {}
        self.limits: dict[str, RangeLimit] = {}
        self.shortcuts: dict[str, ir.Value] = {}
        for node in self.view.nodes:
            role = classes[str(node.name)].role
            produces = role in _PRODUCERS and not (self.target.whole and role is Role.CONCAT)
            if produces and str(node.name) not in self.by_activation:
                self._follow(node)
        activations = [node for node in self.view.nodes if classes[str(node.name)].role is Role.ACTIVATION]
        left = [node for node in activations if str(node.name) not in self.by_activation]
        self.refused: dict[str, str] = {str(node.name): self._why_not(node) for node in left}

    def _follow(self, producer: ir.Node) -> None:
        """Takes in what stands behind a node, as far as its kernel goes."""
        value = producer.outputs[0]
        for _ in range(self.target.longest_epilogue):
            step = self._step(producer, value)
            if not step:
                return
            last = step[-1]
            self.limits.pop(str(value.name), None)
            value = last.outputs[0]
            self.by_producer[str(producer.name)] = last
            self.by_activation.update({str(node.name): producer for node in step})
            if last.op_type in self.target.clamps:
                low, high = self.view.activation_bounds(last) or (None, None)
                self.limits[str(value.name)] = RangeLimit(str(value.name), low, high)
                return  # it vanishes into the Q right behind it

    def _why_not(self, node: ir.Node) -> str:
        """Reason why no kernel takes an activation in."""
        value = node.inputs[0] if node.inputs else None
        producer = None if value is None else value.producer()
        if producer is None or self.classes[str(producer.name)].role not in _PRODUCERS:
            return "what feeds it has no requantization to vanish into"
        return self._refusal(node, producer.outputs[0]) or "the kernel before it takes in no more"

    def _step(self, producer: ir.Node, value: ir.Value) -> tuple[ir.Node, ...]:
        """The nodes that do the next operation behind a value, empty where the kernel ends."""
        if str(value.name) in self.constraints.values:
            return ()  # the caller wants Q on it
        consumer = self.view.sole_consumer(value)
        is_copy = self.classes[str(producer.name)].role is Role.CONCAT
        if consumer is None:
            return () if is_copy else self._gate(value)
        node = consumer.node
        if str(node.name) in self.by_activation or (is_copy and node.op_type not in self.target.clamps):
            return ()  # another kernel has it already, or this one computes nothing
        if node.op_type in self.target.absorbs:
            is_step = consumer.index == 0 and self._is_free(node) and self._refusal(node, value) is None
            return (node,) if is_step else ()
        others = [v for v in node.inputs if v is not None and v is not value]
        if len(others) != 1 or not self._is_free(node):
            return ()
        if others[0].is_initializer():
            return (node,) if node.op_type in self.target.constant_steps else ()
        if self.target.residual != "shortcut" or not self._adds_shortcut(producer, node, others[0]):
            return ()
        self.shortcuts[str(node.name)] = others[0]
        return (node,)

    def _gate(self, value: ir.Value) -> tuple[ir.Node, ...]:
        """F and the product of ``x * f(x)``, empty where that is not what reads a value."""
        consumers = self.view.consumers(value)
        if len(consumers) != 2 or self.view.is_output(value):
            return ()
        for gate, product in (consumers, consumers[::-1]):
            if gate.node.op_type not in self.target.gates or product.node.op_type != "Mul" or gate.index != 0:
                continue
            behind = self.view.sole_consumer(gate.node.outputs[0])
            joined = behind is not None and behind.node is product.node
            if joined and self._is_free(gate.node) and self._is_free(product.node):
                return gate.node, product.node
        return ()

    def _adds_shortcut(self, producer: ir.Node, node: ir.Node, other: ir.Value) -> bool:
        """Whether a node adds a value from elsewhere, of the same shape, to what an anchor computes."""
        dims, anchor = self.view.dims(other), self.classes[str(producer.name)].role is Role.ANCHOR
        same = dims is not None and dims == self.view.dims(node.outputs[0])
        return node.op_type == "Add" and anchor and same and other.dtype == FLOAT

    def _is_free(self, node: ir.Node) -> bool:
        """Whether the table alone decides about a node: neither the caller nor protection keeps it float."""
        c, rule = self.classes[str(node.name)], self.target.rule(node.op_type)
        by_table = c.rule == (_BY_TABLE if rule is None else rule.id) or c.rule == "constant-operand"
        out = str(node.outputs[0].name)
        inner = self.constraints.provider(out) is None or node.op_type in self.target.clamps
        return by_table and inner and node.outputs[0].dtype == FLOAT

    def _refusal(self, node: ir.Node, value: ir.Value) -> str | None:
        """Reason why an activation that the table lists is not taken in, None if it may be."""
        view = self.view
        if view.sole_consumer(value) is None or node.inputs[0] is not value:
            return f"'{value.name}' has a second consumer, or is an output of the graph"
        if any(v is not None and not v.is_initializer() for v in node.inputs[1:]):
            return "its bounds are computed at run time"
        if node.op_type not in self.target.clamps:
            return None
        low, high = view.activation_bounds(node) or (None, None)
        if (low is not None and low > 0.0) or (high is not None and high < 0.0):
            return f"its bounds [{low}, {high}] leave out 0"
        if self.target.whole and self._is_on_wider_grid(node, (low, high)):
            return "it shares its grid, through a Concat, with values of other bounds"
        return self._refused_by_caller(str(value.name), str(node.outputs[0].name), low, high)

    def _refused_by_caller(self, value: str, out: str, low: float | None, high: float | None) -> str | None:
        """Reason why an activation between two values stays although the runtime would absorb it."""
        constraints, options = self.constraints, self.constraints.options
        own = constraints.provider(out)
        if value in constraints.values:
            return f"'{value}' has parameters of the caller's own (TensorQuantOverrides)"
        if out in constraints.free:
            return f"'{out}' carries no Q (OpTypesToExcludeOutputQuantization)"
        if own is not None and not constraints.overrides.absorb(own, low, high):
            return f"the caller's own parameters of '{own}' do not absorb it (TensorQuantOverrides)"
        if own is None and options.activation_symmetric:
            return "symmetric activations cannot absorb it"
        if None not in (low, high) and (high or 0.0) - (low or 0.0) < options.least_range:
            return "its bounds are closer than the caller's MinimumRealRange"
        return None

    def _is_on_wider_grid(self, node: ir.Node, bounds: Bounds) -> bool:
        """Whether a Concat puts what an activation writes on one grid with values of other bounds."""
        view, joined = self.view, False
        stack, seen = [node.outputs[0]], {node.outputs[0]}
        made: list[ir.Node | None] = []
        while stack:
            value = stack.pop()
            producer = value.producer()
            movers = [] if producer is None else [producer]
            movers += [c.node for c in view.consumers(value) if c.index != CAPTURED]
            for mover in movers:
                role = self.classes[str(mover.name)].role
                if role not in (Role.PASS_THROUGH, Role.CONCAT):
                    continue
                joined = joined or role is Role.CONCAT
                ends = [v for v in (*self.classes[str(mover.name)].data, *mover.outputs) if v not in seen]
                seen.update(ends)
                stack += ends
            if producer is None:
                made.append(None)
            elif self.classes[str(producer.name)].role not in (Role.PASS_THROUGH, Role.CONCAT):
                made.append(producer)
        return joined and any(
            n is None or n.op_type not in self.target.clamps or view.activation_bounds(n) != bounds for n in made
        )


_SATURATES: dict[str, Bounds] = {
    "Sigmoid": (-8.0, 8.0), "Tanh": (-4.0, 4.0), "Erf": (-3.0, 3.0), "HardSwish": (-3.0, None), "Gelu": (-4.5, None),
    "FastGelu": (-4.5, None), "Mish": (-9.0, None), "Softplus": (-8.0, None), "Relu": (0.0, None),
}  # fmt: skip
_FLOORED = {"Elu": 1.0, "Celu": 1.0, "Selu": 1.67326}  # default alpha
_FLOOR = -7.0  # below it these are within 0.001 alpha of their floor
_SILU = {"QuickGelu": 1.702, "Swish": 1.0}  # default alpha
_SILU_LOW = -8.0
_FAR_BELOW = -1e4
SOFTMAX_DEPTH = 16.0
"""How far below the largest value of its row a Softmax input can lie and still count: e^-16 is 1e-7."""


def saturation_limits(view: GraphView, values: Iterable[ir.Value]) -> tuple[RangeLimit, ...]:
    """Bounds beyond which no consumer sees a difference, of each value all of whose consumers saturate."""
    known = ((value, _bounds_of(view, value)) for value in values)
    return tuple(RangeLimit(str(v.name), *bounds) for v, bounds in known if bounds and bounds != (None, None))


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
    if node.op_type == "HardSigmoid":
        alpha, beta = node.attributes.get_float("alpha", 0.2), node.attributes.get_float("beta", 0.5)
        return (-beta / alpha, (1.0 - beta) / alpha) if alpha > 0 and 0 <= beta <= 1 else None
    if node.op_type in _SILU:
        alpha = node.attributes.get_float("alpha", _SILU[node.op_type])
        return (_SILU_LOW / alpha, None) if alpha > 0 else None
    if node.op_type in _FLOORED:
        alpha = node.attributes.get_float("alpha", _FLOORED[node.op_type])
        # Celu bends by x / alpha, the others scale by alpha.
        return ((_FLOOR * alpha if node.op_type == "Celu" else _FLOOR), None) if 0 < alpha <= 3 else None
    if node.op_type == "Clip":
        return _clip_bounds(view, node) if consumer.index == 0 else None
    if node.op_type == "Mul":
        return _gate_bounds(view, value, node)
    if node.op_type == "Add":
        return _shifted_bounds(view, node)
    if node.op_type == "Concat":  # what reads it saturates each of its parts
        return _bounds_of(view, node.outputs[0])
    return _SATURATES.get(node.op_type)


def _clip_bounds(view: GraphView, node: ir.Node) -> Bounds:
    """The bounds beyond which a Clip sees no difference."""
    low, high = view.clip_ends(node)
    return (None, None) if low is not None and high is not None and low > high else (low, high)


def _shifted_bounds(view: GraphView, node: ir.Node) -> Bounds | None:
    """The bounds of a value to which a constant is added in front of a Clip."""
    shift = _scalar_operand(view, node)
    consumer = view.sole_consumer(node.outputs[0])
    if shift is None or consumer is None or consumer.node.op_type != "Clip" or consumer.index != 0:
        return None
    low, high = (None if bound is None else bound - shift for bound in _clip_bounds(view, consumer.node))
    return low, high


def _scalar_operand(view: GraphView, node: ir.Node) -> float | None:
    """The constant operand of one number, None if there is none."""
    constants = [v for v in node.inputs if v is not None and v.is_initializer()]
    if len(constants) != 1 or view.content(constants[0]).size != 1:
        return None
    return float(view.content(constants[0]).reshape(-1)[0])


def _gate_bounds(view: GraphView, value: ir.Value, product: ir.Node) -> Bounds | None:
    """The bounds of ``x * gate(x)``, which vanishes where the gate does."""
    gates = [v.producer() for v in product.inputs if v is not None and v is not value]
    gate = gates[0] if len(gates) == 1 else None
    read = gate.inputs[0] if gate is not None and gate.inputs else None
    if gate is None or read is None:
        return None
    if gate.op_type == "Clip":  # x * Clip(x + k; 0, h) vanishes below -k
        moved = read.producer()
        if moved is None or moved.op_type != "Add" or not any(v is value for v in moved.inputs):
            return None
        shift = _scalar_operand(view, moved)
        return (-shift, None) if shift is not None and _clip_bounds(view, gate)[0] == 0.0 else None
    if read is value and gate.op_type == "Sigmoid":
        return _SILU_LOW, None
    if read is value and gate.op_type == "HardSigmoid":
        alpha, beta = gate.attributes.get_float("alpha", 0.2), gate.attributes.get_float("beta", 0.5)
        return (-beta / alpha, None) if alpha > 0 and beta >= 0 else None
    return None


@dataclass(frozen=True)
class SeenAs:
    """View of a value that its consumers have: a function of the array of one sample for calibration.

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
    """Views by value name, of the values of whose range consumers see a part only.

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
        return (node.attributes.get_int("axis", -1),)
    rank, axis = view.rank(value), node.attributes.get_int("axis", 1)
    return () if rank is None else tuple(range(axis % rank, rank))


def _filling(view: GraphView, value: ir.Value) -> float | None:
    """The constant that a Pad fills with, None if it is none or larger than data could be."""
    node = value.producer()
    if node is None or node.op_type != "Pad" or node.attributes.get_string("mode", "constant") != "constant":
        return None
    constant = node.inputs[2] if len(node.inputs) > 2 else None
    if constant is None or not constant.is_initializer():
        return None
    filling = float(view.content(constant).reshape(-1)[0])
    return filling if filling <= _FAR_BELOW else None
