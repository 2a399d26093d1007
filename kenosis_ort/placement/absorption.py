"""Which Relu or Clip vanishes into the requantization of the node before it (stage 5 of the Kenosis paper).

Deferring Q past an activation pays only where the runtime really absorbs it: Relu where the zero point is the
least quantized value, Clip where the quantized range lies inside its bounds. Past any other activation it makes
the Conv float and slower than FP32 (0.72x), so those keep a Q on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from kenosis_ort.graph.view import GraphView
from kenosis_ort.placement.constraints import Constraints
from kenosis_ort.placement.eligibility import NodeClass
from kenosis_ort.plan import RangeLimit
from kenosis_ort.targets.model import Role, Target

_PRODUCERS = (Role.ANCHOR, Role.BINARY, Role.CONCAT)


@dataclass
class Absorption:
    """Absorbable pairs of producer and activation.

    Attributes:
        by_producer: Producer name to activation node.
        by_activation: Activation name to producer node.
        limits: Output value of the activation to the bounds its quantization range must keep.
        refused: Activation name to the reason why it cannot vanish.
    """

    by_producer: dict[str, ir.Node] = field(default_factory=dict)
    by_activation: dict[str, ir.Node] = field(default_factory=dict)
    limits: dict[str, RangeLimit] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def partner(self, activation: ir.Node) -> ir.Node | None:
        """Returns the producer that a Relu or Clip may vanish into."""
        return self.by_activation.get(str(activation.name))


def find_absorbable(
    view: GraphView, target: Target, constraints: Constraints, classes: Mapping[str, NodeClass]
) -> Absorption:
    """Returns every activation that may vanish, with the range limits that make it so."""
    found = Absorption()
    for node in view.nodes:
        c = classes[str(node.name)]
        if node.op_type not in target.absorbs or c.role is not Role.ACTIVATION:
            continue
        name = str(node.name)
        producer = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
        if producer is None or classes[str(producer.name)].role not in _PRODUCERS:
            found.refused[name] = "what feeds it has no requantization to vanish into"
            continue
        value = producer.outputs[0]
        if view.sole_consumer(value) is None or node.inputs[0] is not value:
            found.refused[name] = f"'{value.name}' has a second consumer, or is an output of the graph"
            continue
        bounds = activation_bounds(view, node)
        if bounds is None:
            found.refused[name] = "its bounds are computed at run time"
            continue
        low, high = bounds
        if (low is not None and low > 0.0) or (high is not None and high < 0.0):
            found.refused[name] = f"its bounds [{low}, {high}] leave out 0"
            continue
        out = str(node.outputs[0].name)
        refused = _refused_by_caller(constraints, str(value.name), out, low, high)
        if refused is not None:
            found.refused[name] = refused
            continue
        found.by_producer[str(producer.name)] = node
        found.by_activation[name] = producer
        found.limits[out] = RangeLimit(out, low, high)
    return found


def _refused_by_caller(
    constraints: Constraints, value: str, out: str, low: float | None, high: float | None
) -> str | None:
    """Returns why an activation stays although the runtime would absorb it, None where the caller has nothing against.

    Args:
        constraints: The caller's words.
        value: What the activation reads.
        out: What it writes.
        low: Its lower bound.
        high: Its upper bound.
    """
    options, overrides = constraints.options, constraints.overrides
    own = constraints.provider(out)
    if value in constraints.values:
        return f"'{value}' has parameters of the caller's own (TensorQuantOverrides)"
    if out in constraints.free:
        return f"'{out}' carries no Q (OpTypesToExcludeOutputQuantization)"
    if own is not None and not overrides.absorb(own, low, high):
        return f"the caller's own parameters of '{own}' do not absorb it (TensorQuantOverrides)"
    if own is None and options.activation_symmetric:
        return "symmetric activations cannot absorb it"
    if None not in (low, high) and (high or 0.0) - (low or 0.0) < options.least_range:
        return "its bounds are closer than the caller's MinimumRealRange"
    return None


def activation_bounds(view: GraphView, node: ir.Node) -> tuple[float | None, float | None] | None:
    """Returns the (low, high) bounds of a Relu or Clip, None for a missing one; None if not constant."""
    if node.op_type == "Relu":
        return 0.0, None
    bounds: list[float | None] = []
    for position, attribute in ((1, "min"), (2, "max")):
        value = node.inputs[position] if position < len(node.inputs) else None
        if value is not None:
            if not view.is_constant(value):
                return None
            bounds.append(float(view.array(value).reshape(-1)[0]))
        elif attribute in node.attributes:
            bounds.append(float(node.attributes[attribute].as_float()))
        else:
            bounds.append(None)
    low, high = (None if b is not None and abs(b) >= 3.4e38 else b for b in bounds)
    return low, high
