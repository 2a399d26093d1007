"""How many bits each quantized value gets: the caller's word by node, written into the plan's decisions.

Weights have the bits of the node that reads them, activations those of the node that computes them. What enters the
graph has 8, as in the paper's model zoo, and so have constant operands and tensors of which the caller dictates the
parameters. Values that share their parameters share their bits, the most that any of them asks for.
Source: Pappalardo et al., "QONNX", 2022, table III.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from kenosis_ort.graph.view import GraphView, ir
from kenosis_ort.plan import Decision, EdgeRole, How, PlacementPlan

BYTE = 8
_PASS_THROUGH = frozenset(
    {
        *("Cast", "DepthToSpace", "Dropout", "Expand", "Flatten", "Gather", "Identity", "Pad", "Reshape", "Slice"),
        *("SpaceToDepth", "Squeeze", "Tile", "Transpose", "Unsqueeze"),
    }
)


@dataclass(frozen=True)
class Widths:
    """Bits of weights and activations, 2 to 8.

    Attributes:
        weights: Of all weights that ``by_node`` does not speak about.
        activations: Of all values that nodes compute, likewise.
        by_node: (weights, activations) by node; None leaves one of them at the general word.
    """

    weights: int = BYTE
    activations: int = BYTE
    by_node: Mapping[str, tuple[int | None, int | None]] = field(default_factory=dict)

    @property
    def are_bytes(self) -> bool:
        """Everything has 8 bits."""
        given = [bits for pair in self.by_node.values() for bits in pair if bits is not None]
        return all(bits == BYTE for bits in (self.weights, self.activations, *given))

    def of_weights(self, node: str) -> int:
        """The bits of the weights that a node reads."""
        given = self.by_node.get(node, (None, None))[0]
        return self.weights if given is None else given

    def of_output(self, node: str) -> int:
        """The bits of what a node computes."""
        given = self.by_node.get(node, (None, None))[1]
        return self.activations if given is None else given


def with_widths(plan: PlacementPlan, view: GraphView, widths: Widths, explicit: Collection[str] = ()) -> PlacementPlan:
    """The plan with the bits of every quantized edge.

    Args:
        plan: The plan.
        view: Its model.
        widths: What the caller wants.
        explicit: Names of tensors whose parameters are the caller's own.
    """
    if widths.are_bytes:
        return plan
    makers = {value.name: node for node in view.nodes for value in node.outputs}
    shared: dict[str, int] = {}
    weights: dict[str, int] = {}
    for d in plan.decisions:
        value = d.edge.value
        if d.role is EdgeRole.WEIGHT:
            bits = BYTE if value in explicit else widths.of_weights(d.edge.consumer)
            weights[value] = max(bits, weights.get(value, 0))
        elif _is_quantized(d):
            maker = makers.get(value)
            bits = BYTE if maker is None or value in explicit else _of_output(maker, widths)
            root = d.provider or value
            shared[root] = max(bits, shared.get(root, 0))

    def bits_of(d: Decision) -> int:
        if d.role is EdgeRole.WEIGHT:
            return weights[d.edge.value]
        return shared.get(d.provider or d.edge.value, BYTE) if _is_quantized(d) else BYTE

    return replace(plan, decisions=tuple(replace(d, bits=bits_of(d)) for d in plan.decisions))


def _of_output(node: ir.Node, widths: Widths) -> int:
    """The bits of what a node computes.

    An activation function has those of the node in front where nothing is said of itself; what only moves a value has
    the value's.
    """
    passes_through, name = node.op_type in _PASS_THROUGH, str(node.name)
    if (passes_through or node.op_type in ("Relu", "Clip")) and name not in widths.by_node:
        source = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
        if source is not None:
            return _of_output(source, widths)
        return BYTE if passes_through else widths.of_output(name)
    return widths.of_output(name)


def _is_quantized(decision: Decision) -> bool:
    return decision.role is not EdgeRole.BIAS and decision.how in (How.OWN, How.SHARED, How.DEQUANTIZED)
