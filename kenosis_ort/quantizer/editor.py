"""Editing of a quantized model: names, parameters, Q and DQ.

What performing a plan needs of stock's quantizer: names, initializers, nodes, and Q and DQ of the caller's kind.

Names for the dequantized form of values that the float model does not have.

``onnxruntime.quantization.qdq_loss_debug`` takes ``X_DequantizeLinear_Output`` for the counterpart of the float model's
``X``, and fails where there is no ``X``: a value that a rewrite made.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnxruntime.quantization.quant_utils import DEQUANT_OUTPUT_SUFFIX

from kenosis_ort.graph.constants import drop_unread, replace_nodes
from kenosis_ort.graph.walk import all_graphs, all_names, captured_names, reserve_name

_SUFFIX: Final = "_dequantized"


def name_made_values(quantized: onnx.ModelProto, original: onnx.ModelProto) -> None:
    """Renames in place what dequantizes values and weights that ``original`` does not have."""
    known = _names(original.graph)
    taken = _names(quantized.graph)
    new: dict[str, str] = {}
    for node in quantized.graph.node:
        name = node.output[0] if node.op_type == "DequantizeLinear" else ""
        base = name.removesuffix(DEQUANT_OUTPUT_SUFFIX)
        if base != name and base not in known:
            new[name] = node.output[0] = reserve_name(f"{base}{_SUFFIX}", taken)
    if not new:
        return
    for graph in all_graphs(quantized.graph):
        for node in graph.node:
            for index, name in enumerate(node.input):
                if name in new:
                    node.input[index] = new[name]


def _names(graph: onnx.GraphProto) -> set[str]:
    """The names of all values of a graph and its bodies."""
    names: set[str] = set()
    for inner in all_graphs(graph):
        names.update(value.name for value in (*inner.input, *inner.output, *inner.initializer))
        names.update(name for node in inner.node for name in node.output)
    return names


Array = np.ndarray[Any, Any]

_FIELDS: Final[dict[int, str]] = {
    TensorProto.FLOAT: "float_data",
    TensorProto.INT8: "int32_data",
    TensorProto.UINT8: "int32_data",
    TensorProto.INT16: "int32_data",
    TensorProto.UINT16: "int32_data",
    TensorProto.INT32: "int32_data",
}
"""Where lists of the usual numbers are stored: they are many, and `onnx.helper.make_tensor` asks much of each."""


class QdqEditor:
    """Edits the model of one quantizer.

    Args:
        quantizer: Stock's quantizer.

    Attributes:
        graph: The main graph. New nodes and initializers go behind those there are.
        nodes: The nodes of the float model by name.
        makers: The nodes of the float model by the values that they write.
        constants: Initializers by name.
        fresh: Reserves a name, with a number behind it where the model has that name already.
    """

    def __init__(self, quantizer: Any) -> None:
        self.quantizer = quantizer
        self.graph: onnx.GraphProto = quantizer.model.model.graph
        self.nodes: dict[str, onnx.NodeProto] = {node.name: node for node in self.graph.node}
        self.makers = {name: node for node in self.graph.node for name in node.output if name}
        self.constants: dict[str, onnx.TensorProto] = {t.name: t for t in self.graph.initializer}
        self.fresh: Callable[[str], str] = partial(reserve_name, taken=all_names(quantizer.model.model))
        self._bounds: dict[str, str] = {}
        self._removed: set[str] = set()

    def constant(self, name: str) -> onnx.TensorProto:
        """An initializer with its content."""
        found: onnx.TensorProto | None = self.quantizer.weights.get(name)
        return self.constants[name] if found is None else found

    def add_constant(self, tensor: onnx.TensorProto) -> None:
        """Adds an initializer."""
        self.graph.initializer.append(tensor)
        self.constants[tensor.name] = self.graph.initializer[-1]

    def add_list(self, name: str, array: Array, elem_type: int | None = None) -> None:
        """Adds an initializer stored as a list of numbers, as stock stores scales and zero points."""
        self.add_constant(listed(name, array, elem_type))

    def read(self, node: str, index: int, value: str) -> None:
        """Makes an input of a node of the float model read a value."""
        self.nodes[node].input[index] = value

    def rename_output(self, value: str, new: str) -> None:
        """Gives a value of the float model another name where it is written, not where it is read."""
        node = self.makers.get(value)
        if node is not None:
            node.output[list(node.output).index(value)] = new
            self.makers[new] = self.makers.pop(value)

    def remove(self, node: onnx.NodeProto) -> None:
        """Takes a node of the float model out, when all is done."""
        self._removed.add(node.name)

    def finish(self) -> None:
        """Takes out what was removed and what nothing reads any more."""
        if self._removed:
            replace_nodes(self.graph, [node for node in self.graph.node if node.name not in self._removed])
        drop_unread(self.graph)
        for tensor in self.graph.initializer:
            if tensor.name in self.quantizer.weights:  # a node that stays float reads it too
                tensor.CopyFrom(self.quantizer.weights[tensor.name])

    def add_quantize(
        self, real: str, integers: str, name: str, grid: tuple[str, str], **attributes: int | None
    ) -> None:
        """Adds Q; ``grid`` names scale and zero point."""
        self._add("QuantizeLinear", real, integers, name, grid, attributes)

    def add_dequantize(
        self, integers: str, real: str, name: str, grid: tuple[str, str], **attributes: int | None
    ) -> None:
        """Adds DQ; ``grid`` names scale and zero point."""
        self._add("DequantizeLinear", integers, real, name, grid, attributes)

    def add_clip(self, integers: str, clipped: str, name: str, bounds: tuple[int, int], *, signed: bool) -> None:
        """Adds a Clip of bytes."""
        dtype = np.dtype(np.int8 if signed else np.uint8)
        ends = []
        for bound in bounds:
            end = f"{dtype.name}_{bound}".replace("-", "minus_")
            if end not in self._bounds:
                self._bounds[end] = self.fresh(end)
                self.add_list(self._bounds[end], np.asarray(bound, dtype))
            ends.append(self._bounds[end])
        self.graph.node.append(helper.make_node("Clip", [integers, *ends], [clipped], name=name))

    def _add(
        self, kind: str, source: str, result: str, name: str, grid: tuple[str, str], attributes: dict[str, int | None]
    ) -> None:
        given: dict[str, Any] = {key: value for key, value in attributes.items() if value is not None}
        domain = self.quantizer.qdq_op_domain
        node = onnx.NodeProto(op_type=kind, input=(source, *grid), output=(result,), name=name, domain=domain)
        node.attribute.extend(helper.make_attribute(key, given[key]) for key in sorted(given))
        self.graph.node.append(node)


def listed(name: str, array: Array, elem_type: int | None = None) -> onnx.TensorProto:
    """A tensor that holds a list of numbers, as `onnx.helper.make_tensor` makes it."""
    kind = helper.np_dtype_to_tensor_dtype(array.dtype) if elem_type is None else elem_type
    field = _FIELDS.get(kind)
    if field is None:
        return helper.make_tensor(name, kind, array.shape, array.ravel().tolist())
    return onnx.TensorProto(data_type=kind, name=name, dims=array.shape, **{field: array.ravel().tolist()})


def sort_nodes_as_stock(graph: onnx.GraphProto) -> None:
    """Puts nodes in the order of stock's ``topological_sort``, which does not know what bodies read.

    Raises:
        ValueError: The graph has a cycle, or a node reads a value that nothing writes.
    """
    nodes = list(graph.node)
    waiting: dict[str, list[int]] = {}
    missing = []
    order: list[int] = []
    for position, node in enumerate(nodes):
        names = [*(name for name in node.input if name), *captured_names(node)]
        missing.append(len(names))
        if not names:
            order.append(position)
        for name in names:
            waiting.setdefault(name, []).append(position)

    def arrive(name: str) -> None:
        for position in waiting.get(name, ()):
            missing[position] -= 1
            if missing[position] == 0:
                order.append(position)

    for name in sorted({value.name for value in (*graph.initializer, *graph.input)}):
        arrive(name)
    for position in order:  # which grows
        for output in nodes[position].output:
            arrive(output)
    if len(order) != len(nodes):
        stuck = next(i for i in range(len(nodes)) if missing[i] > 0)
        raise ValueError(f"the graph is not a DAG, or node '{nodes[stuck].name}' reads a value that nothing writes")
    replace_nodes(graph, [nodes[position] for position in order])
