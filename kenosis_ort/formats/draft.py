"""A graph that is being written anew, node by node: what readers of a format need to put several nodes for one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.helper
import onnx.numpy_helper

from kenosis_ort.graph.constants import drop_unread, replace_nodes
from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.walk import all_names, captured_names, reserve_name

Array = npt.NDArray[Any]


class Draft:
    """The main graph of a model on its way to another form.

    Args:
        model: A private model with Constant nodes made initializers; `finish` changes it.

    Attributes:
        nodes: The new nodes, in order.
        inputs: Names of the graph's inputs.
        outputs: Names of its outputs.
        makers: The nodes that the graph came with, by the values that they write.
        readers: The same by the values that they read, each once.
        pinned: Values whose names are known outside the main graph's nodes: outputs, and what bodies read.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.graph = model.graph
        self.nodes: list[onnx.NodeProto] = []
        self.inputs = {value.name for value in self.graph.input}
        self.outputs = {value.name for value in self.graph.output}
        self._tensors = {t.name: t for t in self.graph.initializer if t.name not in self.inputs}
        self._arrays: dict[str, Array] = {}
        self._taken = all_names(model)
        self.makers = {name: node for node in self.graph.node for name in node.output if name}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in self.graph.node:
            for name in dict.fromkeys(node.input):
                self.readers.setdefault(name, []).append(node)
        self.pinned = self.outputs.union(*(captured_names(node) for node in self.graph.node))
        values = (*self.graph.input, *self.graph.output, *self.graph.value_info)
        self.types = {value.name: value.type for value in values}

    def array(self, name: str) -> Array | None:
        """Array of a constant, None for any other value."""
        if name not in self._arrays:
            tensor = self._tensors.get(name)
            if tensor is None:
                return None
            self._arrays[name] = array_in(tensor)
        return self._arrays[name]

    def elem_type(self, name: str) -> int | None:
        """The ONNX element type of a constant, None for any other value."""
        tensor = self._tensors.get(name)
        return None if tensor is None else int(tensor.data_type)

    def is_constant(self, name: str) -> bool:
        """Whether a value is a constant of the main graph."""
        return name in self._tensors

    def fresh(self, base: str) -> str:
        """A name that nothing in the model has, and reserves it."""
        return reserve_name(base, self._taken)

    def constant(self, array: npt.ArrayLike, base: str, *, named: bool = False) -> str:
        """Stores a constant; returns its name.

        Args:
            array: The content.
            base: Its name, where that is free.
            named: The name is that of a value whose maker is gone; it is taken as it is.
        """
        name = base if named else self.fresh(base)
        tensor = onnx.numpy_helper.from_array(np.ascontiguousarray(array).reshape(np.shape(array)), name)
        self.graph.initializer.append(tensor)
        self._tensors[name] = tensor
        self._arrays.pop(name, None)
        return name

    def add(
        self, op_type: str, inputs: Sequence[str], base: str, *, output: str = "", domain: str = "", **attributes: Any
    ) -> str:
        """Adds a node of one output behind those there are; returns what it writes.

        Args:
            op_type: The operator.
            inputs: What it reads.
            base: What its name begins with.
            output: What it writes; a new value by default.
            domain: The operator's domain.
            attributes: Its attributes; those that are None are left out.
        """
        given = {name: value for name, value in attributes.items() if value is not None}
        name = self.fresh(f"{base}_{op_type}")
        value = output or self.fresh(f"{name}_output")
        self.nodes.append(onnx.helper.make_node(op_type, inputs, [value], name=name, domain=domain, **given))
        return value

    def rank(self, name: str) -> int | None:
        """The rank of a value as far as it is a constant or the graph declares it, else None."""
        found, known = self.array(name), self.types.get(name)
        if found is not None:
            return int(found.ndim)
        return len(known.tensor_type.shape.dim) if known is not None and known.tensor_type.HasField("shape") else None

    def bounds(self, clip: onnx.NodeProto, dtype: np.dtype[Any]) -> tuple[int, int]:
        """Constant ends of a Clip of integers, those of the type where it has none."""
        limits = np.iinfo(dtype)
        ends = [int(limits.min), int(limits.max)]
        for at, name in enumerate(clip.input[1:3]):
            found = self.array(name) if name else None
            if found is not None:
                ends[at] = int(found.reshape(-1)[0])
        return ends[0], ends[1]

    def finish(
        self, nodes: Iterable[onnx.NodeProto] | None = None, *, may_go: Callable[[onnx.NodeProto], bool] | None = None
    ) -> onnx.ModelProto:
        """Gives the graph its new nodes and drops constants that nothing reads; returns the model.

        Args:
            nodes: The nodes in order, `nodes` by default.
            may_go: Tells nodes that are dropped too where nothing reads what they write.
        """
        left = self.nodes if nodes is None else list(nodes)
        while may_go is not None:
            read = {name for node in left for name in node.input} | self.pinned
            remaining = [node for node in left if not may_go(node) or node.output[0] in read]
            if len(remaining) == len(left):
                break
            left = remaining
        replace_nodes(self.graph, left)
        drop_unread(self.graph)
        return self.model


def forget_types(graph: onnx.GraphProto, names: Collection[str]) -> None:
    """Removes what the graph declares of the types of values, in place."""
    holder = onnx.GraphProto()
    holder.value_info.extend(value for value in graph.value_info if value.name not in names)
    del graph.value_info[:]
    graph.value_info.MergeFrom(holder.value_info)
