"""An index over a ModelProto's main graph for rewrites in linear time: who makes a value, who reads it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx
import onnx.numpy_helper

from kenosis_ort.graph.constants import replace_nodes
from kenosis_ort.graph.outside import copy_without_weights, put_outside
from kenosis_ort.graph.walk import all_graphs, captured_names, reserve_name


class GraphIndex:
    """Producers, readers and constants of a main graph, kept up to date through its own edits.

    Edits to nodes are made in place. New content of constants, and the removal of nodes, reach the graph when `commit`
    is called, after which the index is not to be used any more: protobuf frees nothing that is overwritten, so that a
    weight changed twice in place would be held three times.

    Args:
        model: The model to index and edit.
        keep_values: Values that must keep existing with their meaning.

    Attributes:
        model: The model; of a copy made by `of_copy`, complete only behind `commit`.
    """

    @classmethod
    def of_copy(cls, model: onnx.ModelProto, keep_values: Collection[str] = ()) -> GraphIndex:
        """The index of a copy of a model; constants are copied once, by `commit`, as they are then."""
        index = cls(copy_without_weights(model, lambda _: True), keep_values, constants=model.graph.initializer)
        index._whole = False
        return index

    def __init__(
        self,
        model: onnx.ModelProto,
        keep_values: Collection[str] = (),
        *,
        constants: Sequence[onnx.TensorProto] | None = None,
    ) -> None:
        self.model = model
        self.graph = model.graph
        self._stored = {t.name: t for t in (self.graph.initializer if constants is None else constants)}
        self._whole = True
        self.nodes = list(self.graph.node)  # also keeps the wrappers alive, which makes their identity meaningful
        self.inputs = {value.name for value in self.graph.input}
        self.outputs = {value.name for value in self.graph.output}
        self.captured = {name for node in self.nodes for name in captured_names(node)}
        self.keep_values = frozenset(keep_values)
        self.constants = {name: t for name, t in self._stored.items() if name not in self.inputs}
        self.producers: dict[str, onnx.NodeProto] = {}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        self._names = self.inputs | self.outputs | self.captured | self._stored.keys()
        for graph in all_graphs(self.graph):  # a body may use a name of its own
            self._names.update(name for node in graph.node for name in node.output)
        for node in self.nodes:
            for name in node.output:
                self.producers[name] = node
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        self._changed: dict[str, None] = {}
        self._removed: set[int] = set()
        self._released: set[str] = set()

    def is_private(self, value: str) -> bool:
        """Whether exactly one node of the main graph reads the value and nothing else depends on it."""
        return len(self.readers.get(value, ())) == 1 and not self.is_pinned(value)

    def is_pinned(self, value: str) -> bool:
        """Whether the value's name and meaning are needed outside the main graph's nodes."""
        return value in self.outputs or value in self.captured or value in self.keep_values

    def constant(self, value: str) -> onnx.TensorProto | None:
        """The initializer of that name unless callers can override it."""
        return self.constants.get(value)

    def fresh_name(self, base: str) -> str:
        """A value name that the model does not use yet, and reserves it."""
        return reserve_name(base, self._names)

    def store_constant(self, node: onnx.NodeProto, position: int, tensor: onnx.TensorProto, base: str) -> None:
        """Makes ``tensor`` the node's constant input at ``position``.

        A constant that only this input reads is replaced, under its own name where its shape stays: tools that compare
        a quantized model with the float one pair weights by name. One that others read as well is left to them, and
        the node gets a private one named after ``base``, as does one of another shape.
        """
        old = node.input[position] if position < len(node.input) else ""
        private = old in self.constants and self.readers.get(old) == [node] and not self.is_pinned_constant(old)
        if private and list(self.constants[old].dims) == list(tensor.dims):
            self.replace_constant(old, tensor)
            return
        self.replace_constant(self.fresh_name(base), tensor)
        while len(node.input) <= position:
            node.input.append("")
        if old:
            self.release(node, old)
        node.input[position] = tensor.name
        self.readers.setdefault(tensor.name, []).append(node)

    def replace_constant(self, name: str, tensor: onnx.TensorProto) -> None:
        """Makes ``tensor``, which is not to be used elsewhere, the constant of that name, new or not."""
        tensor.name = name
        self.constants[name] = put_outside(tensor)
        self._changed[name] = None

    def is_pinned_constant(self, value: str) -> bool:
        """Whether a constant's content is needed outside the main graph's nodes."""
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

    def commit(self) -> onnx.ModelProto:
        """Brings the graph up to date, without constants that lost their last reader; returns the model."""
        if self._removed:
            replace_nodes(self.graph, [node for node in self.nodes if id(node) not in self._removed])
        unused = {name for name in self._released if not self.readers.get(name) and not self.is_pinned_constant(name)}
        if self._whole:
            self._change_constants(unused)
        else:
            self._fill_constants(unused)
        return self.model

    def _change_constants(self, unused: Collection[str]) -> None:
        for at in range(len(self.graph.initializer) - 1, -1, -1) if unused else ():
            if self.graph.initializer[at].name in unused:
                del self.graph.initializer[at]
        for name in self._changed:
            if name in unused:
                continue
            tensor = self._stored[name] if name in self._stored else self.graph.initializer.add()
            tensor.CopyFrom(self.constants[name])

    def _fill_constants(self, unused: Collection[str]) -> None:
        stored, constants = self._stored, self.constants
        self._stored, self.constants = {}, {}  # what was replaced is let go one by one
        for name in [*stored, *(name for name in self._changed if name not in stored)]:
            tensor = constants.pop(name, None)
            if name not in unused:
                self.graph.initializer.add().CopyFrom(stored[name] if tensor is None else tensor)
