"""All that touches private parts of ``onnxruntime.quantization``, in one place.

Stock looks names up by scanning lists, rebuilds its consumer index on every call and removes by deep comparison,
which makes it quadratic (a Conv+Relu chain of 4000 nodes takes two minutes). `IndexedONNXModel` answers the same
questions from dictionaries. It is put in place of stock's class while `linear_time` is active; if stock's modules
do not look as expected, nothing is patched and the result is the same, only slower.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Collection, Iterable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import onnx
from onnxruntime.quantization import base_quantizer, onnx_model, qdq_quantizer, quant_utils
from onnxruntime.quantization.onnx_model import ONNXModel
from onnxruntime.quantization.operators import conv as conv_op
from onnxruntime.quantization.operators import gemm as gemm_op
from onnxruntime.quantization.operators import matmul as matmul_op

from kenosis_ort.graph.walk import captured_names, subgraphs

_log = logging.getLogger(__name__)
_patch_lock = threading.RLock()
_LOOKUP_MODULES: tuple[ModuleType, ...] = (base_quantizer, onnx_model, qdq_quantizer, conv_op, gemm_op, matmul_op)


class Initializers:
    """The initializers of a graph by name, in order; what `IndexedONNXModel.initializer` returns."""

    def __init__(self, items: Iterable[onnx.TensorProto]) -> None:
        self.by_name: dict[str, onnx.TensorProto] = {}
        for item in items:
            self.by_name.setdefault(item.name, item)

    def __iter__(self) -> Iterator[onnx.TensorProto]:
        return iter(list(self.by_name.values()))

    def __len__(self) -> int:
        return len(self.by_name)


class _Nodes:
    """The nodes of a graph by what they read, write and capture."""

    def __init__(self, nodes: Iterable[onnx.NodeProto]) -> None:
        self.consumers: dict[str, list[onnx.NodeProto]] = {}
        self.producers: dict[str, list[onnx.NodeProto]] = {}
        self.captures: dict[str, list[onnx.NodeProto]] = {}
        for node in nodes:
            self.add(node)

    def add(self, node: onnx.NodeProto) -> None:
        """Adds a node."""
        for name in node.input:
            if name:
                self.consumers.setdefault(name, []).append(node)
        for name in node.output:
            if name:
                self.producers.setdefault(name, []).append(node)
        for name in captured_names(node):
            self.captures.setdefault(name, []).append(node)


class IndexedONNXModel(ONNXModel):  # type: ignore[misc]
    """Stock's ``ONNXModel`` with constant-time look-ups.

    Nodes live in the graph as in stock. Initializers live in an ordered dictionary until `flush` writes them
    back, because a protobuf list can neither find nor drop an element cheaply.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        super().__init__(model)
        self._initializers = Initializers(model.graph.initializer)
        self._initializers_dirty = False
        self._nodes: _Nodes | None = None

    @property
    def _index(self) -> _Nodes:
        if self._nodes is None:
            self._nodes = _Nodes(self.model.graph.node)
        return self._nodes

    # -- initializers ---------------------------------------------------------------------------------------------

    def initializer(self) -> Initializers:
        return self._initializers

    def initializer_extend(self, inits: Collection[onnx.TensorProto]) -> None:
        if len(inits) == 0:
            raise ValueError("no initializers given")
        for init in inits:
            self._put(init)

    def add_initializer(self, tensor: onnx.TensorProto) -> None:
        if tensor.name not in self._initializers.by_name:
            self._put(tensor)

    def _put(self, tensor: onnx.TensorProto) -> None:
        self._check_init(tensor)
        self._initializers.by_name[tensor.name] = tensor
        self._initializers_dirty = True

    def get_initializer(self, name: str) -> onnx.TensorProto | None:
        return self._initializers.by_name.get(name)

    def constant(self, name: str) -> onnx.TensorProto:
        """An initializer that must exist."""
        return self._initializers.by_name[name]

    def get_initializer_name_set(self) -> set[str]:
        return set(self._initializers.by_name)

    def remove_initializer(self, tensor: onnx.TensorProto) -> None:
        self.remove_initializers([tensor])

    def remove_initializers(self, init_to_remove: Iterable[onnx.TensorProto]) -> None:
        names = {tensor.name for tensor in init_to_remove} & self._initializers.by_name.keys()
        for name in names:
            del self._initializers.by_name[name]
        if names:
            self._initializers_dirty = True
            _keep(self.model.graph.input, lambda value: value.name not in names)

    def flush(self) -> None:
        """Writes the initializers back to the graph; those that stay in their order are not copied."""
        if not self._initializers_dirty:
            return
        field = self.model.graph.initializer
        wanted, held = list(self._initializers.by_name.values()), list(field)
        staying: set[int] = set()
        for position, tensor in enumerate(held):
            if len(staying) < len(wanted) and tensor is wanted[len(staying)]:
                staying.add(position)
        field.extend(wanted[len(staying) :])
        for position in reversed(range(len(held))):
            if position not in staying:
                del field[position]
        self._initializers = Initializers(field)
        self._initializers_dirty = False

    # -- nodes ------------------------------------------------------------------------------------------------------

    def add_node(self, node: onnx.NodeProto) -> None:
        index, nodes = self._index, self.model.graph.node
        nodes.append(self._check_node(node))
        index.add(nodes[-1])

    def add_nodes(self, nodes_to_add: Iterable[onnx.NodeProto]) -> None:
        for node in nodes_to_add:
            self.add_node(node)

    def remove_nodes(self, nodes_to_remove: Iterable[onnx.NodeProto]) -> None:
        doomed = {node.SerializeToString(deterministic=True) for node in nodes_to_remove}
        if doomed:
            _keep(self.model.graph.node, lambda node: node.SerializeToString(deterministic=True) not in doomed)
            self._nodes = None

    def remove_node(self, node: onnx.NodeProto) -> None:
        self.remove_nodes([node])

    def input_name_to_nodes(self) -> dict[str, list[onnx.NodeProto]]:
        """The consumers by value name; a value that a body captures counts the node that owns the body."""
        if not self._index.captures:
            return self._index.consumers
        merged = {name: list(nodes) for name, nodes in self._index.consumers.items()}
        for name, nodes in self._index.captures.items():
            merged.setdefault(name, []).extend(nodes)
        return merged

    def output_name_to_node(self) -> dict[str, onnx.NodeProto]:
        return {name: nodes[-1] for name, nodes in self._index.producers.items() if nodes}

    def replace_input_of_all_nodes(self, old_input_name: str, new_input_name: str) -> None:
        self._rename_inputs(old_input_name, new_input_name, None)

    def replace_input_of_nodes(self, old_input_name: str, new_input_name: str, node_names_set: set[str]) -> None:
        self._rename_inputs(old_input_name, new_input_name, node_names_set)

    def _rename_inputs(self, old: str, new: str, names: set[str] | None) -> None:
        if old == new:
            return
        stay: list[onnx.NodeProto] = []
        move: list[onnx.NodeProto] = []
        for node in self._index.consumers.get(old, []):
            (move if names is None or node.name in names else stay).append(node)
        for node in move:
            self.replace_node_input(node, old, new)
        self._set(self._index.consumers, old, stay)
        if move:
            self._index.consumers.setdefault(new, []).extend(move)

    def rename_edge(self, node: onnx.NodeProto, index: int, new: str) -> None:
        """Makes one input of one node read another value."""
        consumers, old = self._index.consumers, node.input[index]
        node.input[index] = new
        found = consumers.get(old, [])
        for position, consumer in enumerate(found):
            if consumer is node or consumer.name == node.name:
                del found[position]
                break
        consumers.setdefault(new, []).append(node)

    def replace_output_of_all_nodes(self, old_output_name: str, new_output_name: str) -> None:
        nodes = self._index.producers.get(old_output_name, [])
        for node in nodes:
            self.replace_node_output(node, old_output_name, new_output_name)
        self._set(self._index.producers, old_output_name, [])
        if nodes:
            self._index.producers.setdefault(new_output_name, []).extend(nodes)

    @staticmethod
    def _set(index: dict[str, list[onnx.NodeProto]], name: str, nodes: list[onnx.NodeProto]) -> None:
        if nodes:
            index[name] = nodes
        else:
            index.pop(name, None)

    def producer_of(self, name: str) -> onnx.NodeProto | None:
        """The node of the main graph that writes a value."""
        nodes = self._index.producers.get(name)
        return nodes[-1] if nodes else None

    # -- whole-graph steps ------------------------------------------------------------------------------------------

    def clean_initializers(self) -> tuple[onnx.GraphProto, set[str]]:
        """Drops initializers that nothing reads, in the main graph and in bodies."""
        wanted = _reads(self.model.graph)
        known = self._initializers.by_name
        self.remove_initializers([tensor for name, tensor in known.items() if name not in wanted])
        self.flush()
        return self.model.graph, wanted - known.keys() - {value.name for value in self.model.graph.input}

    def topological_sort(self) -> None:
        """Sorts nodes as stock does, and knows that a body's owner depends on what the body captures."""
        self.flush()
        nodes, captures = list(self.model.graph.node), self._index.captures
        waiting: dict[str, list[int]] = {}
        missing = []
        order: list[int] = []
        for position, node in enumerate(nodes):
            names = [name for name in node.input if name]
            names += captured_names(node) if captures else ()
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

        for name in sorted({*self._initializers.by_name, *(value.name for value in self.model.graph.input)}):
            arrive(name)
        start = 0
        while start < len(order):
            for output in nodes[order[start]].output:
                arrive(output)
            start += 1
        if len(order) != len(nodes):
            stuck = next(i for i in range(len(nodes)) if missing[i] > 0)
            raise ValueError(f"the graph is not a DAG, or node '{nodes[stuck].name}' reads a value that nothing writes")
        self.model.graph.ClearField("node")
        self.model.graph.node.extend(nodes[position] for position in order)
        self._nodes = None


def _keep(repeated: Any, wanted: Any) -> None:
    remaining = [item for item in repeated if wanted(item)]
    if len(remaining) != len(repeated):
        del repeated[:]
        repeated.extend(remaining)


def _reads(graph: onnx.GraphProto) -> set[str]:
    """The names that a graph and its bodies read, but those its nodes write; cleans the bodies."""
    wanted = {name for node in graph.node for name in node.input if name}
    wanted.update(value.name for value in graph.output if value.name)
    for node in graph.node:
        for body in subgraphs(node):
            wanted |= _clean(body)
    return wanted.difference(name for node in graph.node for name in node.output)


def _clean(graph: onnx.GraphProto) -> set[str]:
    """Drops unread initializers of a body and of those in it; returns the names it reads from outside."""
    wanted = _reads(graph)
    unread = {init.name for init in graph.initializer if init.name not in wanted}
    wanted.difference_update(init.name for init in graph.initializer)
    if unread:
        _keep(graph.initializer, lambda init: init.name not in unread)
        _keep(graph.input, lambda value: value.name not in unread)
    return wanted - {value.name for value in graph.input}


def _find_by_name(item_name: str, item_list: Any) -> Any:
    if isinstance(item_list, Initializers):
        return item_list.by_name.get(item_name)
    return quant_utils.find_by_name(item_name, item_list)


@contextlib.contextmanager
def _four_bit_types() -> Iterator[None]:
    """Gives runtimes before 1.24 the 4-bit types that they look for in a module which newer onnx does not have."""
    tables = (
        quant_utils.ONNX_TYPE_TO_NP_TYPE,
        quant_utils.ONNX_INT_TYPE_RANGE,
        quant_utils.ONNX_INT_TYPE_SYMMETRIC_RANGE,
        quant_utils.ONNX_INT_TYPE_REDUCED_RANGE,
    )
    types, *ranges = tables
    remaining = [dict(table) for table in tables]
    for elem_type, dtype in ((onnx.TensorProto.INT4, np.int8), (onnx.TensorProto.UINT4, np.uint8)):
        if types.get(elem_type, dtype) is None:
            types[elem_type] = np.dtype(dtype)
            for table in ranges:
                if elem_type in table:
                    table[elem_type] = tuple(bound.astype(dtype) for bound in table[elem_type])
    try:
        yield
    finally:
        for table, before in zip(tables, remaining, strict=True):
            table.update(before)


@contextlib.contextmanager
def linear_time() -> Iterator[None]:
    """Puts the indexed model and look-up in place of stock's, for the duration of a ``with`` block."""
    with _patch_lock, _four_bit_types():
        known = all(getattr(m, "find_by_name", None) is quant_utils.find_by_name for m in _LOOKUP_MODULES)
        if not known or getattr(base_quantizer, "ONNXModel", None) is not ONNXModel:
            _log.warning("onnxruntime.quantization looks different from what was expected; quantizing will be slow")
            yield
            return
        for module in _LOOKUP_MODULES:
            module.find_by_name = _find_by_name  # type: ignore[attr-defined]
        base_quantizer.ONNXModel = IndexedONNXModel
        try:
            yield
        finally:
            for module in _LOOKUP_MODULES:
                module.find_by_name = quant_utils.find_by_name  # type: ignore[attr-defined]
            base_quantizer.ONNXModel = ONNXModel
