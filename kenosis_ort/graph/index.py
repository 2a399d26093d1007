"""An index over a ModelProto's main graph for rewrites in linear time: who makes a value, who reads it."""

from __future__ import annotations

from collections.abc import Collection

import onnx
import onnx.numpy_helper

from kenosis_ort.graph.constants import replace_nodes
from kenosis_ort.graph.names import reserve_name
from kenosis_ort.graph.walk import captured_names


class GraphIndex:
    """Producers, readers and constants of a main graph, kept up to date through its own edits.

    Edits to nodes are made in place; removed nodes leave the graph when `commit` is called, after which the
    index is not to be used any more.

    Args:
        model: The model to index and edit.
        keep_values: Values that must keep existing with their meaning.
    """

    def __init__(self, model: onnx.ModelProto, keep_values: Collection[str] = ()) -> None:
        self.graph = model.graph
        self.nodes = list(self.graph.node)  # also keeps the wrappers alive, which makes their identity meaningful
        self.inputs = {value.name for value in self.graph.input}
        self.outputs = {value.name for value in self.graph.output}
        self.captured = captured_names(self.graph)
        self.kept = frozenset(keep_values)
        self.constants = {t.name: t for t in self.graph.initializer if t.name not in self.inputs}
        self.producers: dict[str, onnx.NodeProto] = {}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        self._names = self.inputs | self.outputs | self.captured | {t.name for t in self.graph.initializer}
        for node in self.nodes:
            self._names.update(node.output)
            for name in node.output:
                self.producers[name] = node
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        self._removed: set[int] = set()
        self._released: set[str] = set()

    def is_private(self, value: str) -> bool:
        """Returns whether exactly one node of the main graph reads the value and nothing else depends on it."""
        return len(self.readers.get(value, ())) == 1 and not self.is_pinned(value)

    def is_pinned(self, value: str) -> bool:
        """Returns whether the value's name and meaning are needed outside the main graph's nodes."""
        return value in self.outputs or value in self.captured or value in self.kept

    def constant(self, value: str) -> onnx.TensorProto | None:
        """Returns the initializer of that name unless callers can override it."""
        return self.constants.get(value)

    def fresh_name(self, base: str) -> str:
        """Returns a value name that the model does not use yet, and reserves it."""
        return reserve_name(base, self._names)

    def store_constant(self, node: onnx.NodeProto, position: int, tensor: onnx.TensorProto, base: str) -> None:
        """Makes ``tensor`` the node's constant input at ``position``.

        A constant that only this input reads is replaced under its own name; one that others read as well is
        left to them, and the node gets a private one named after ``base``.
        """
        old = node.input[position] if position < len(node.input) else ""
        if old and old in self.constants and self.readers.get(old) == [node] and not self.is_pinned_constant(old):
            tensor.name = old
            self.constants[old].CopyFrom(tensor)
            return
        tensor.name = self.fresh_name(base)
        self.constants[tensor.name] = self.graph.initializer.add()
        self.constants[tensor.name].CopyFrom(tensor)
        while len(node.input) <= position:
            node.input.append("")
        if old:
            self.release(node, old)
        node.input[position] = tensor.name
        self.readers.setdefault(tensor.name, []).append(node)

    def is_pinned_constant(self, value: str) -> bool:
        """Returns whether a constant's content is needed outside the main graph's nodes."""
        return value in self.outputs or value in self.captured

    def release(self, node: onnx.NodeProto, value: str) -> None:
        """Records that one input of ``node`` no longer reads ``value``."""
        readers = self.readers[value]
        for at, reader in enumerate(readers):
            if reader is node:
                del readers[at]
                break
        if not readers and value in self.constants:
            self._released.add(value)

    def remove(self, node: onnx.NodeProto) -> None:
        """Removes a node; its outputs must have been taken over by another node."""
        self._removed.add(id(node))
        for value in node.input:
            if value:
                self.release(node, value)

    def redirect(self, old: str, new: str) -> None:
        """Makes every node that reads ``old`` read ``new`` instead."""
        for reader in self.readers.pop(old, ()):
            for at, name in enumerate(reader.input):
                if name == old:
                    reader.input[at] = new
            self.readers.setdefault(new, []).append(reader)

    def take_over_output(self, node: onnx.NodeProto, output: str, *, position: int = 0) -> None:
        """Makes ``output`` an output of ``node`` in the place of its present one."""
        self.producers.pop(node.output[position], None)
        self.readers.pop(node.output[position], None)
        node.output[position] = output
        self.producers[output] = node

    def commit(self) -> None:
        """Takes removed nodes, and constants that lost their last reader, out of the graph."""
        if self._removed:
            replace_nodes(self.graph, [node for node in self.nodes if id(node) not in self._removed])
        unused = {name for name in self._released if not self.readers.get(name) and not self.is_pinned_constant(name)}
        for at in range(len(self.graph.initializer) - 1, -1, -1) if unused else ():
            if self.graph.initializer[at].name in unused:
                del self.graph.initializer[at]
