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
from kenosis_ort.plan import Decision, How, PlacementPlan, Role

BYTE = 8
_MOVES = frozenset(
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
        said = [bits for pair in self.by_node.values() for bits in pair if bits is not None]
        return all(bits == BYTE for bits in (self.weights, self.activations, *said))

    def of_weights(self, node: str) -> int:
        """Returns the bits of the weights that a node reads."""
        said = self.by_node.get(node, (None, None))[0]
        return self.weights if said is None else said

    def of_output(self, node: str) -> int:
        """Returns the bits of what a node computes."""
        said = self.by_node.get(node, (None, None))[1]
        return self.activations if said is None else said


def with_widths(plan: PlacementPlan, view: GraphView, widths: Widths, dictated: Collection[str] = ()) -> PlacementPlan:
    """Returns the plan with the bits of every quantized edge.

    Args:
        plan: The plan.
        view: Its model.
        widths: What the caller wants.
        dictated: Names of tensors whose parameters are the caller's own.
    """
    if widths.are_bytes:
        return plan
    makers = {value.name: node for node in view.nodes for value in node.outputs}
    shared: dict[str, int] = {}
    weights: dict[str, int] = {}
    for d in plan.decisions:
        value = d.edge.value
        if d.role is Role.WEIGHT:
            bits = BYTE if value in dictated else widths.of_weights(d.edge.consumer)
            weights[value] = max(bits, weights.get(value, 0))
        elif _is_quantized(d):
            maker = makers.get(value)
            bits = BYTE if maker is None or value in dictated else _of_output(maker, widths)
            root = d.provider or value
            shared[root] = max(bits, shared.get(root, 0))

    def bits_of(d: Decision) -> int:
        if d.role is Role.WEIGHT:
            return weights[d.edge.value]
        return shared.get(d.provider or d.edge.value, BYTE) if _is_quantized(d) else BYTE

    return replace(plan, decisions=tuple(replace(d, bits=bits_of(d)) for d in plan.decisions))


def _of_output(node: ir.Node, widths: Widths) -> int:
    """Returns the bits of what a node computes.

    An activation function has those of the node in front where nothing is said of itself; what only moves a value has
    the value's.
    """
    moves, name = node.op_type in _MOVES, str(node.name)
    if (moves or node.op_type in ("Relu", "Clip")) and name not in widths.by_node:
        source = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
        if source is not None:
            return _of_output(source, widths)
        return BYTE if moves else widths.of_output(name)
    return widths.of_output(name)


def _is_quantized(decision: Decision) -> bool:
    return decision.role is not Role.BIAS and decision.how in (How.OWN, How.SHARED, How.DEQUANTIZED)
