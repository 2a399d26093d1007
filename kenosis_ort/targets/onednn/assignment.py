"""Which node of the plugin's graph executes a node of the model.

The plugin's nodes carry the names of the model's nodes that went into them, but not all: of ``x * Sigmoid(x)`` the name
of the Mul alone, of a Clip that vanished into the requantization none, of a Conv whose output is multiplied by a
constant that of the Mul. A node without a name is where its readers are, or else where its operands come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from kenosis_ort.graph.qdq import SourceGraph, SourceNode
from kenosis_ort.graph.tokens import token_of
from kenosis_ort.targets.onednn.runtime import Executed

HEAVY_LAYERS: Final[Mapping[str, tuple[str, ...]]] = {
    "Conv": ("Convolution",),
    "ConvTranspose": ("Deconvolution",),
    "Gemm": ("FullyConnected", "MatMul"),
    "MatMul": ("FullyConnected", "MatMul"),
}
_MOVES: Final = frozenset({"Identity", "Dropout", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Cast"})


class Assignment:
    """The assignment for one model.

    Args:
        graph: The model, its nodes named by tokens.
        plugin: What the plugin executes.
    """

    def __init__(self, graph: SourceGraph, plugin: Sequence[Executed]) -> None:
        self._graph = graph
        self._plugin = plugin
        self._of: dict[int, int] = {}  # index of the model's node to position of the plugin's
        self._named: set[int] = set()
        for position, executed in enumerate(plugin):
            for name in executed.names:
                token = token_of(name)
                if token is not None and token < len(graph.nodes):
                    self._claim(graph.nodes[token], position)
        for node in reversed(graph.nodes):
            self._settle(node, self._behind(node))
        for node in graph.nodes:
            self._settle(node, self._before(node))
        self.owner = self._owners()

    def executed(self, node: SourceNode) -> Executed | None:
        """Returns what executes a node, None if nothing does."""
        position = self._of.get(node.index)
        return None if position is None else self._plugin[position]

    def owner_of(self, node: SourceNode) -> SourceNode | None:
        """Returns the node that gives what executes a node its name: itself, or the heaviest or last one within."""
        position = self._of.get(node.index)
        return None if position is None else self.owner.get(position)

    def overhead(self) -> list[Executed]:
        """Returns what the plugin executes for no node of the model but Q and DQ: layout changes and conversions."""
        return [executed for position, executed in enumerate(self._plugin) if position not in self.owner]

    def _claim(self, node: SourceNode, position: int) -> None:
        known = self._of.get(node.index)
        layers = HEAVY_LAYERS.get(node.op_type, ())
        better = known is None or (self._plugin[position].layer in layers and self._plugin[known].layer not in layers)
        if better:
            self._of[node.index] = position
            self._named.add(node.index)

    def _settle(self, node: SourceNode, position: int | None) -> None:
        if position is None or node.index in self._of or not node.is_compute or node.graph:
            return
        layers = HEAVY_LAYERS.get(node.op_type)
        if layers is not None and self._plugin[position].layer not in layers:
            return
        if node.op_type not in _MOVES and not self._is_constant(node):
            self._of[node.index] = position

    def _behind(self, node: SourceNode) -> int | None:
        """Returns what executes all readers of a node, None if there is no such one."""
        readers = [r for v in node.proto.output if v for r in self._graph.consumers.get(v, ())]
        found = {self._of.get(r.index) for r in readers}
        return found.pop() if len(found) == 1 else None

    def _before(self, node: SourceNode) -> int | None:
        """Returns what executes the producer of a node's data."""
        for value in node.proto.input:
            maker = self._graph.producer.get(value)
            if maker is not None and maker.index in self._of:
                return self._of[maker.index]
        return None

    def _is_constant(self, node: SourceNode) -> bool:
        values = [v for v in node.proto.input if v]
        return all(self._graph.is_initializer(v) or self._graph.is_dq_constant(v) for v in values)

    def _owners(self) -> dict[int, SourceNode]:
        owners: dict[int, SourceNode] = {}
        for node in self._graph.nodes:
            position = self._of.get(node.index)
            if position is None or not node.is_compute:
                continue
            if position not in owners or self._rank(node, position) >= self._rank(owners[position], position):
                owners[position] = node
        return owners

    def _rank(self, node: SourceNode, position: int) -> tuple[bool, bool]:
        layer = self._plugin[position].layer
        return layer in HEAVY_LAYERS.get(node.op_type, ()), node.index in self._named
