"""A read-only view of a model's main graph for planning: nodes, consumers, types, shapes, constants.

A value that an ``If``, ``Loop`` or ``Scan`` body reads from the outer graph counts as consumed by the node
that owns the body, so that a rule about single consumers never misses one.

``onnx_ir``, imported without sympy, which it needs only where symbolic dimensions are computed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.graph.outside import array_in, is_outside
from kenosis_ort.graph.walk import all_graphs, known_as

_DEFERRED = ("sympy", "onnx_ir._symbolic_shapes")  # the latter names sympy's functions when it is imported


class _Deferred(ModuleType):
    """A module that is imported when the first of its attributes is asked for."""

    def __getattr__(self, name: str) -> Any:
        self.step_aside()
        return getattr(importlib.import_module(self.__name__), name)

    def step_aside(self) -> None:
        """Lets later imports of the module get the real one."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]


@contextmanager
def _deferred(*names: str) -> Iterator[None]:
    """Modules that are imported within the context are loaded once they are used."""
    deferred = [_Deferred(name) for name in names if name not in sys.modules]
    sys.modules.update({module.__name__: module for module in deferred})
    try:
        yield
    finally:
        for module in deferred:
            module.step_aside()


with _deferred(*_DEFERRED):
    import onnx_ir as ir

__all__ = ["ir"]


CAPTURED = -1  # input index of a consumer that reads the value inside its body


@dataclass(frozen=True)
class Consumer:
    """A main-graph node that reads a value; ``index`` is the input position or `CAPTURED`."""

    node: ir.Node
    index: int


class GraphView:
    """Indexes one prepared model. All look-ups are constant time.

    Args:
        proto: A prepared model: unique node names, constants as initializers, shapes inferred. Not changed.
    """

    def __init__(self, proto: onnx.ModelProto) -> None:
        with _maps_untyped(proto):
            self.model = ir.from_proto(proto)
        graph = self.model.graph
        self.nodes: tuple[ir.Node, ...] = tuple(graph)
        for node in self.nodes:
            node.op_type = known_as(node.domain, node.op_type)
        self.inputs: tuple[ir.Value, ...] = tuple(v for v in graph.inputs if v.name not in graph.initializers)
        self.outputs: tuple[ir.Value, ...] = tuple(graph.outputs)
        self._by_name = {node.name: node for node in self.nodes if node.name}
        self._output_ids = {id(v) for v in graph.outputs}
        self._consumers: dict[int, list[Consumer]] = {}
        self._captured: dict[int, list[ir.Value]] = {}
        self._largest: dict[int, float] = {}
        self._constants = dict(graph.initializers)
        self._on_disk = {tensor.name: tensor for tensor in proto.graph.initializer if is_outside(tensor)}
        for node in self.nodes:
            for index, value in enumerate(node.inputs):
                if value is not None:
                    self._consumers.setdefault(id(value), []).append(Consumer(node, index))
            captured = list(_captured(node, graph))
            if captured:
                self._captured[id(node)] = captured
            for value in captured:
                self._consumers.setdefault(id(value), []).append(Consumer(node, CAPTURED))

    def node(self, name: str) -> ir.Node | None:
        return self._by_name.get(name)

    def constant(self, name: str) -> ir.Value | None:
        """The initializer of that name."""
        return self._constants.get(name)

    def opset(self, domain: str = "") -> int:
        """The imported version of an operator set, 0 if it is not imported."""
        imports = self.model.graph.opset_imports
        version = imports.get(domain)
        if version is None and domain == "":
            version = imports.get("ai.onnx")
        return int(version or 0)

    def consumers(self, value: ir.Value) -> list[Consumer]:
        """The main-graph consumers of a value (graph outputs are not among them)."""
        return self._consumers.get(id(value), [])

    def captured_by(self, node: ir.Node) -> list[ir.Value]:
        """The main-graph values that the bodies of a node read."""
        return self._captured.get(id(node), [])

    def is_output(self, value: ir.Value) -> bool:
        return id(value) in self._output_ids

    def sole_consumer(self, value: ir.Value) -> Consumer | None:
        """The only consumer, or None if there are several, none, a captured one, or a graph output."""
        found = self.consumers(value)
        if len(found) == 1 and found[0].index != CAPTURED and not self.is_output(value):
            return found[0]
        return None

    def is_constant(self, value: ir.Value | None) -> bool:
        return value is not None and value.producer() is None and value.const_value is not None

    def array(self, value: ir.Value) -> npt.NDArray[np.generic]:
        """The content of a constant value."""
        if value.const_value is None:
            raise ValueError(f"'{value.name}' is not a constant")
        if value.name in self._on_disk:
            return array_in(self._on_disk[value.name])
        return value.const_value.numpy()

    def largest(self, value: ir.Value) -> float:
        """The largest magnitude in a constant value, nan if it holds one; 0 if it is empty."""
        if id(value) not in self._largest:
            array = self.array(value)
            self._largest[id(value)] = max(abs(float(array.min())), abs(float(array.max()))) if array.size else 0.0
        return self._largest[id(value)]

    def is_float32(self, value: ir.Value) -> bool:
        return value.dtype == ir.DataType.FLOAT

    def is_row_bias(self, matmul: ir.Node, bias: ir.Value) -> bool:
        """Whether a constant added to a MatMul holds one value a column, so that it can become its bias."""
        weight = matmul.inputs[1]
        columns = None if weight is None else self.dims(weight)
        dims, rank = self.dims(bias), self.rank(matmul.outputs[0])
        if not columns or not dims or rank is None or rank < 2:
            return False
        if not self.is_constant(bias) or not self.is_float32(bias):
            return False
        return dims[-1] == columns[-1] and all(d == 1 for d in dims[:-1]) and len(dims) <= rank

    def shape_of_one(self, value: ir.Value | None) -> tuple[int, ...] | None:
        """A known shape, the first dimension (the batch) 1 where it has no number."""
        dims = None if value is None else self.dims(value)
        if dims is None:
            return None
        known = tuple(1 if size is None and index == 0 else size for index, size in enumerate(dims))
        return None if any(size is None for size in known) else tuple(size for size in known if size is not None)

    def rank(self, value: ir.Value) -> int | None:
        return None if value.shape is None else len(value.shape)

    def dims(self, value: ir.Value) -> tuple[int | None, ...] | None:
        """The shape with None for symbolic dimensions, or None if even the rank is unknown."""
        if value.shape is None:
            return None
        return tuple(d if isinstance(d, int) else None for d in value.shape)

    def attribute_int(self, node: ir.Node, name: str, default: int) -> int:
        attribute = node.attributes.get(name)
        return default if attribute is None else int(attribute.as_int())

    def attribute_float(self, node: ir.Node, name: str, default: float) -> float:
        attribute = node.attributes.get(name)
        return default if attribute is None else float(attribute.as_float())

    def attribute_str(self, node: ir.Node, name: str, default: str) -> str:
        attribute = node.attributes.get(name)
        return default if attribute is None else str(attribute.as_string())


def _captured(node: ir.Node, outer: ir.Graph) -> Iterator[ir.Value]:
    """Yields the values of ``outer`` that the bodies of ``node`` read, at any depth, each once."""
    seen: set[int] = set()
    bodies = [body for attribute in node.attributes.values() for body in _bodies(attribute)]
    while bodies:
        body = bodies.pop()
        reads = [v for inner in body for v in inner.inputs] + list(body.outputs)
        for value in reads:
            if value is not None and id(value) not in seen and _belongs_to(value, outer):
                seen.add(id(value))
                yield value
        bodies += [b for inner in body for attribute in inner.attributes.values() for b in _bodies(attribute)]


def _bodies(attribute: ir.Attr) -> list[ir.Graph]:
    if attribute.is_ref():
        return []
    if attribute.type == ir.AttributeType.GRAPH:
        return [attribute.as_graph()]
    if attribute.type == ir.AttributeType.GRAPHS:
        return list(attribute.as_graphs())
    return []


def _belongs_to(value: ir.Value, graph: ir.Graph) -> bool:
    producer = value.producer()
    if producer is not None:
        return producer.graph is graph
    return value.graph is graph


@contextmanager
def _maps_untyped(proto: onnx.ModelProto) -> Iterator[None]:
    """Takes the types of maps, which onnx_ir does not read, away for a while: copying the model would copy weights."""
    graphs = all_graphs(proto.graph)
    values = (value for graph in graphs for value in (*graph.input, *graph.output, *graph.value_info))
    typed = [(value, value.type) for value in values if _holds_map(value.type)]
    remaining = [(value, onnx.TypeProto.FromString(kind.SerializeToString())) for value, kind in typed]
    for value, _ in remaining:
        value.ClearField("type")
    try:
        yield
    finally:
        for value, kind in remaining:
            value.type.CopyFrom(kind)


def _holds_map(kind: onnx.TypeProto) -> bool:
    if kind.HasField("sequence_type"):
        return _holds_map(kind.sequence_type.elem_type)
    if kind.HasField("optional_type"):
        return _holds_map(kind.optional_type.elem_type)
    return bool(kind.HasField("map_type"))
