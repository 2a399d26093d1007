"""What a kernel takes in behind its sum, so that no Q stands between (stage 5 of the Kenosis paper).

Deferring Q past an activation pays only where the runtime really takes it in. Two kinds of runtimes are told apart by
the target's table. Some drop a Relu or Clip whose clipping the requantization does as well, under a condition on the
quantized range (`Target.clamps`). Others compute a whole epilogue in the kernel: any activation, ``x * f(x)``, products
and sums with constants, or the sum with a shortcut, one behind the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kenosis_ort.graph.view import CAPTURED, GraphView, ir
from kenosis_ort.placement.constraints import Constraints
from kenosis_ort.plan import RangeLimit
from kenosis_ort.targets.model import NodeClass, Role, Target

_PRODUCERS = (Role.ANCHOR, Role.BINARY, Role.CONCAT)
_BY_TABLE = "unsupported-op"  # the rule of an operator that the table has no rule for


@dataclass
class Absorption:
    """What kernels may take in.

    Attributes:
        by_producer: Name of the node whose kernel it is to the last node that it takes in.
        by_activation: Name of each node that is taken in to the node whose kernel it is.
        limits: Output value of an activation to the bounds its quantization range must keep.
        shortcuts: Name of an Add that is taken in to the other value that it adds.
        refused: Activation name to the reason why it cannot vanish.
    """

    by_producer: dict[str, ir.Node] = field(default_factory=dict)
    by_activation: dict[str, ir.Node] = field(default_factory=dict)
    limits: dict[str, RangeLimit] = field(default_factory=dict)
    shortcuts: dict[str, ir.Value] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def partner(self, node: ir.Node) -> ir.Node | None:
        """The node whose kernel may take a node in."""
        return self.by_activation.get(str(node.name))

    def is_shortcut(self, node: ir.Node, value: ir.Value) -> bool:
        """Whether a node that is taken in adds a value from outside its kernel."""
        return self.shortcuts.get(str(node.name)) is value


def find_absorbable(
    view: GraphView, target: Target, constraints: Constraints, classes: Mapping[str, NodeClass]
) -> Absorption:
    """Everything that kernels may take in, with the range limits that make it so."""
    finder = _Finder(view, target, constraints, classes)
    for node in view.nodes:
        role = classes[str(node.name)].role
        produces = role in _PRODUCERS and not (target.whole and role is Role.CONCAT)
        if produces and str(node.name) not in finder.found.by_activation:
            finder.follow(node)
    for node in view.nodes:
        if classes[str(node.name)].role is Role.ACTIVATION and str(node.name) not in finder.found.by_activation:
            finder.found.refused[str(node.name)] = finder.why_not(node)
    return finder.found


class _Finder:
    """Follows the values behind kernels.

    Args:
        view: The prepared model.
        target: The runtime's table.
        constraints: The caller's wishes.
        classes: What each node could become.
    """

    def __init__(
        self, view: GraphView, target: Target, constraints: Constraints, classes: Mapping[str, NodeClass]
    ) -> None:
        self.view, self.target, self.constraints, self.classes = view, target, constraints, classes
        self.found = Absorption()

    def follow(self, producer: ir.Node) -> None:
        """Takes in what stands behind a node, as far as its kernel goes."""
        found, value = self.found, producer.outputs[0]
        for _ in range(self.target.longest_epilogue):
            step = self._step(producer, value)
            if not step:
                return
            last = step[-1]
            found.limits.pop(str(value.name), None)
            value = last.outputs[0]
            found.by_producer[str(producer.name)] = last
            found.by_activation.update({str(node.name): producer for node in step})
            if last.op_type in self.target.clamps:
                low, high = activation_bounds(self.view, last) or (None, None)
                found.limits[str(value.name)] = RangeLimit(str(value.name), low, high)
                return  # it vanishes into the Q right behind it

    def why_not(self, node: ir.Node) -> str:
        """Reason why no kernel takes an activation in."""
        value = node.inputs[0] if node.inputs else None
        producer = None if value is None else value.producer()
        if producer is None or self.classes[str(producer.name)].role not in _PRODUCERS:
            return "what feeds it has no requantization to vanish into"
        return self._refusal(node, producer.outputs[0]) or "the kernel before it takes in no more"

    # -- steps ----------------------------------------------------------------------------------------------------

    def _step(self, producer: ir.Node, value: ir.Value) -> tuple[ir.Node, ...]:
        """The nodes that do the next operation behind a value, empty where the kernel ends."""
        if str(value.name) in self.constraints.values:
            return ()  # the caller wants Q on it
        consumer = self.view.sole_consumer(value)
        moves_bytes = self.classes[str(producer.name)].role is Role.CONCAT
        if consumer is None:
            return () if moves_bytes else self._gate(value)
        node = consumer.node
        if str(node.name) in self.found.by_activation or (moves_bytes and node.op_type not in self.target.clamps):
            return ()  # another kernel has it already, or this one computes nothing
        if node.op_type in self.target.absorbs:
            is_step = consumer.index == 0 and self._is_free(node) and self._refusal(node, value) is None
            return (node,) if is_step else ()
        others = [v for v in node.inputs if v is not value]
        constant = len(node.inputs) == 2 and all(self.view.is_constant(v) for v in others)
        if node.op_type in self.target.constant_steps and constant and self._is_free(node):
            return (node,)
        if self.target.residual == "shortcut" and self._adds_shortcut(producer, node, value):
            self.found.shortcuts[str(node.name)] = next(v for v in others if v is not None)
            return (node,)
        return ()

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

    def _adds_shortcut(self, producer: ir.Node, node: ir.Node, value: ir.Value) -> bool:
        """Whether a node adds a value from elsewhere, of the same shape, to what an anchor computes."""
        other = next((v for v in node.inputs if v is not value), None)
        if node.op_type != "Add" or other is None or self.view.is_constant(other) or not self._is_free(node):
            return False
        anchor = self.classes[str(producer.name)].role is Role.ANCHOR
        dims = self.view.dims(other)
        same = dims is not None and dims == self.view.dims(node.outputs[0])
        return anchor and same and self.view.is_float32(other)

    def _is_free(self, node: ir.Node) -> bool:
        """Whether the table alone decides about a node: neither the caller nor protection keeps it float."""
        c, rule = self.classes[str(node.name)], self.target.rule(node.op_type)
        by_table = c.rule == (_BY_TABLE if rule is None else rule.id) or c.rule == "constant-operand"
        out = str(node.outputs[0].name)
        inner = self.constraints.provider(out) is None or node.op_type in self.target.clamps
        return by_table and inner and self.view.is_float32(node.outputs[0])

    def _refusal(self, node: ir.Node, value: ir.Value) -> str | None:
        """Reason why an activation that the table lists is not taken in, None if it may be."""
        view = self.view
        if view.sole_consumer(value) is None or node.inputs[0] is not value:
            return f"'{value.name}' has a second consumer, or is an output of the graph"
        if any(v is not None and not view.is_constant(v) for v in node.inputs[1:]):
            return "its bounds are computed at run time"
        if node.op_type not in self.target.clamps:
            return None
        low, high = activation_bounds(view, node) or (None, None)
        if (low is not None and low > 0.0) or (high is not None and high < 0.0):
            return f"its bounds [{low}, {high}] leave out 0"
        if self.target.whole and self._is_on_wider_grid(node, (low, high)):
            return "it shares its grid, through a Concat, with values of other bounds"
        return _refused_by_caller(self.constraints, str(value.name), str(node.outputs[0].name), low, high)

    def _is_on_wider_grid(self, node: ir.Node, bounds: tuple[float | None, float | None]) -> bool:
        """Whether a Concat puts what an activation writes on one grid with values of other bounds."""
        view, joined = self.view, False
        stack, seen = [node.outputs[0]], {id(node.outputs[0])}
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
                ends = [v for v in (*self.classes[str(mover.name)].data, *mover.outputs) if id(v) not in seen]
                seen.update(map(id, ends))
                stack += ends
            if producer is None:
                made.append(None)
            elif self.classes[str(producer.name)].role not in (Role.PASS_THROUGH, Role.CONCAT):
                made.append(producer)
        return joined and any(
            n is None or n.op_type not in self.target.clamps or activation_bounds(view, n) != bounds for n in made
        )


def _refused_by_caller(
    constraints: Constraints, value: str, out: str, low: float | None, high: float | None
) -> str | None:
    """Reason why an activation stays although the runtime would absorb it, None where the caller has nothing against.

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
    """The (low, high) bounds of a Relu or Clip, None for a missing one; None if not constant."""
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
