"""Edits that add nodes and constants beside those of `Matcher`: a node becomes another, new ones go around it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import onnx
import onnx.helper
import onnx.numpy_helper

from kenosis_ort.graph.constants import replace_nodes
from kenosis_ort.graph.names import reserve_name
from kenosis_ort.graph.prepare import RewriteResult
from kenosis_ort.rewrite.matching import Matcher

Attribute = int | float | Sequence[int]


class Editor(Matcher):
    """One rule's view of a model to which it adds nodes.

    Args:
        model: The model to change, its nodes named, its types and shapes inferred.
        keep_values: Values that must keep existing with their meaning.
    """

    def __init__(self, model: onnx.ModelProto, keep_values: Collection[str]) -> None:
        super().__init__(model, keep_values)
        self._taken = {node.name for node in self.index.nodes}
        self._before: dict[str, list[onnx.NodeProto]] = {}
        self._behind: dict[str, list[onnx.NodeProto]] = {}

    def add_constant(self, array: npt.NDArray[np.generic], base: str) -> str:
        """Stores a new constant; returns its name."""
        name = self.index.fresh_name(base)
        self.index.graph.initializer.append(onnx.numpy_helper.from_array(np.ascontiguousarray(array), name))
        self.index.constants[name] = self.index.graph.initializer[-1]
        return name

    def become(
        self,
        node: onnx.NodeProto,
        op_type: str,
        inputs: Sequence[str],
        attributes: Mapping[str, Attribute] | None = None,
        *,
        inner: Collection[onnx.NodeProto] = (),
    ) -> None:
        """Turns a node into another operator in its place, under its name and with its output; ``inner`` goes."""
        self.collapse(inner, node, op_type, inputs)
        node.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in (attributes or {}).items())

    def insert_before(
        self, node: onnx.NodeProto, op_type: str, inputs: Sequence[str], *, output: str = "", **attributes: Attribute
    ) -> str:
        """Puts a new node in front of a node, which does not read it yet; returns the value that it writes.

        Args:
            node: The node; of several new ones in front of it, the last is the nearest.
            op_type: The operator, of the default domain.
            inputs: What it reads.
            output: What it writes; a new value by default.
            attributes: Its attributes.
        """
        new = self._new(node, op_type, inputs, output or self.index.fresh_name(f"{node.name}_{op_type}_output"))
        new.attribute.extend(onnx.helper.make_attribute(name, number) for name, number in attributes.items())
        self._before.setdefault(node.name, []).append(new)
        return str(new.output[0])

    def insert_split(self, node: onnx.NodeProto, value: str, count: int) -> list[str]:
        """Puts a Split of a value's last dimension into equal parts in front of a node; returns the parts."""
        first = self.insert_before(node, "Split", [value], axis=-1, num_outputs=count)
        split = self.index.producers[first]
        for _ in range(count - 1):
            split.output.append(self.index.fresh_name(f"{split.name}_output"))
            self.index.producers[split.output[-1]] = split
        return list(split.output)

    def insert_behind(self, node: onnx.NodeProto, op_type: str, operand: str) -> None:
        """Gives the output of a node to a new node of two operands, which reads what the node computes now."""
        output = node.output[0]
        value = self.index.fresh_name(f"{node.name}_output")
        new = onnx.helper.make_node(op_type, [value, operand], [output], name=self.node_name(f"{node.name}_{op_type}"))
        node.output[0] = value
        self.index.producers[value] = node
        self.index.producers[output] = new
        self.index.readers[value] = [new]
        self.index.readers.setdefault(operand, []).append(new)
        self._behind.setdefault(node.name, []).append(new)

    def take_output(self, node: onnx.NodeProto) -> tuple[str, str]:
        """Makes a node write a new value; returns that and the one it wrote, which another node has to write now."""
        output, value = node.output[0], self.index.fresh_name(f"{node.name}_output")
        node.output[0] = value
        self.index.producers.pop(output)
        self.index.producers[value] = node
        return value, output

    def append_behind(self, node: onnx.NodeProto, op_type: str, inputs: Sequence[str], *, output: str = "") -> str:
        """Puts a new node behind a node and those already put there; returns the value that it writes."""
        new = self._new(node, op_type, inputs, output or self.index.fresh_name(f"{node.name}_{op_type}_output"))
        self._behind.setdefault(node.name, []).append(new)
        return str(new.output[0])

    def _new(self, node: onnx.NodeProto, op_type: str, inputs: Sequence[str], output: str) -> onnx.NodeProto:
        """Returns a new node, known to the index and called after another one."""
        new = onnx.helper.make_node(op_type, inputs, [output], name=self.node_name(f"{node.name}_{op_type}"))
        for name in inputs:
            self.index.readers.setdefault(name, []).append(new)
        self.index.producers[output] = new
        return new

    def drop_unread(self, values: Collection[str], survivor: onnx.NodeProto) -> None:
        """Removes the nodes of which nothing is read any more, from some values upwards.

        Args:
            values: Where to begin.
            survivor: The node that does their work now.
        """
        waiting = list(values)
        while waiting:
            node = self.index.producers.get(waiting.pop())
            if node is None or node.name in self.merged or not any(node is own for own in self.index.nodes):
                continue
            if any(self.index.readers.get(value) or self.index.is_pinned(value) for value in node.output if value):
                continue
            waiting += [name for name in node.input if name]
            self.index.remove(node)
            self.merged[node.name] = survivor.name

    def node_name(self, base: str) -> str:
        """Returns a node name that the model does not use yet, and reserves it."""
        return reserve_name(base, self._taken)

    def finish(self, did: str, stays: str) -> RewriteResult:
        """Commits the edits and returns the result, see `Matcher.finish`."""
        result = super().finish(did, stays)
        if self._before or self._behind:
            ordered: list[onnx.NodeProto] = []
            for node in self.model.graph.node:
                ordered += [*self._before.get(node.name, ()), node, *self._behind.get(node.name, ())]
            replace_nodes(self.model.graph, ordered)
        return result
