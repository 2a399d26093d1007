"""The main graph of a model as `onnx_ir` has it: nodes, who reads what, types, shapes and constants.

A value that an ``If``, ``Loop`` or ``Scan`` body reads from the outer graph counts as consumed by the node that owns
the body, so that a rule about single consumers never misses one.

``onnx_ir`` is imported here without sympy, which it needs only where symbolic dimensions are computed.
"""

import importlib
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.walk import MAIN_DOMAINS, all_graphs, known_as

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


Bounds = tuple[float | None, float | None]
_LARGEST = 3.4e38
FLOAT = ir.DataType.FLOAT
CAPTURED = -1  # input index of a consumer that reads the value inside its body


@dataclass(frozen=True, slots=True)
class Consumer:
    """A main-graph node that reads a value; ``index`` is the input position or `CAPTURED`."""

    node: ir.Node
    index: int


def optional(node: ir.Node, position: int) -> ir.Value | None:
    """The input at a position, None where the node has none there."""
    return node.inputs[position] if position < len(node.inputs) else None


def required(node: ir.Node, position: int) -> ir.Value:
    """The input at a position where a valid node has one."""
    value = optional(node, position)
    if value is None:
        raise ValueError(f"node '{node.name}' lacks its input {position}")
    return value


def channel_axis(layer: ir.Node, rank: int = 2) -> int:
    """The axis of output channels of a layer's weights; their rank counts for MatMul alone."""
    if layer.op_type == "ConvTranspose":
        return 1
    return 0 if layer.op_type == "Conv" or layer.attributes.get_int("transB", 0) != 0 else rank - 1


def moved_by(node: ir.Node, inputs: Sequence[npt.NDArray[Any] | None]) -> list[npt.NDArray[Any]] | None:
    """Outputs of a node that moves numbers, for its inputs; None where one is missing, or shapes do not fit."""
    from onnx.reference import ReferenceEvaluator

    feed = dict(zip((value.name or "" for value in node.inputs if value is not None), inputs, strict=True))
    if any(array is None for array in feed.values()):
        return None
    try:
        return [np.asarray(found) for found in ReferenceEvaluator(ir.to_proto(node)).run(None, feed)]
    except (ValueError, IndexError, TypeError):  # the last for attributes of an older operator set
        return None


def further_outputs(node: ir.Node) -> list[ir.Value]:
    """The outputs behind the first one that have a name."""
    return [output for output in node.outputs[1:] if output.name]


class GraphView:
    """Look-ups in the main graph of a prepared model.

    Args:
        proto: The model: unique node names, constants as initializers, shapes inferred. Not changed.

    Attributes:
        proto: The model.
        graph: Its main graph.
        nodes: Its nodes, in order, their operators by the names of `known_as`.
        keep_values: Names of values that must keep existing with their meaning while the graph is edited.
    """

    def __init__(self, proto: onnx.ModelProto) -> None:
        self.proto = proto
        self.keep_values: frozenset[str] = frozenset()
        self.reopen()

    def reopen(self) -> None:
        """Reads the protobuf, whose tensors are referred to and not copied."""
        self.graph = read_model(self.proto).graph
        self.nodes = list(self.graph)
        self._tensors = {tensor.name: tensor for tensor in self.proto.graph.initializer}
        self._owners: dict[ir.Graph, ir.Node] = {}
        for node in self.nodes:
            if node.domain not in MAIN_DOMAINS:
                node.op_type = known_as(node.domain, node.op_type)
            self._owners.update(dict.fromkeys(_bodies_in(node), node))
        self._by_name: dict[str, ir.Node] = {}
        self._largest: dict[ir.Value, float] = {}

    # -- nodes and who reads what -------------------------------------------------------------------------------

    @property
    def inputs(self) -> tuple[ir.Value, ...]:
        """The inputs that have no default."""
        return tuple(value for value in self.graph.inputs if value.name not in self.graph.initializers)

    def node(self, name: str) -> ir.Node | None:
        """The node of a name."""
        if not self._by_name:
            self._by_name = {node.name: node for node in self.nodes if node.name}
        return self._by_name.get(name)

    def opset(self) -> int:
        """The imported version of the main operator set, 0 if it is not imported."""
        imports = self.graph.opset_imports
        return int(imports.get("", imports.get("ai.onnx", 0)))

    def readers(self, value: ir.Value | None) -> list[ir.Node]:
        """The main graph's nodes that read a value, each as often as it does."""
        return [] if value is None else [node for node, _ in value.uses() if node.graph is self.graph]

    def consumers(self, value: ir.Value) -> list[Consumer]:
        """The main-graph consumers of a value (graph outputs are not among them), owners of bodies once each."""
        found = dict[Consumer, None]()
        for node, index in value.uses():
            if node.graph is not self.graph:
                assert isinstance(node.graph, ir.Graph)
                node, index = self._owners[node.graph], CAPTURED
            found[Consumer(node, index)] = None
        return list(found)

    def sole_consumer(self, value: ir.Value) -> Consumer | None:
        """The only consumer, or None if there are several, none, a captured one, or a graph output."""
        found = self.consumers(value)
        if len(found) == 1 and found[0].index != CAPTURED and not self.is_output(value):
            return found[0]
        return None

    def has_body(self, node: ir.Node) -> bool:
        """Whether the node carries bodies of control flow."""
        return bool(self._owners) and node in self._owners.values()

    def captured_by(self, node: ir.Node) -> list[ir.Value]:
        """The main-graph values that the bodies of a node read."""
        if not self._owners:
            return []
        read = (value for body in _bodies_in(node) for inner in body for value in inner.inputs if value is not None)
        return [value for value in dict.fromkeys(read) if (value.producer() or value).graph is self.graph]

    def is_captured(self, value: ir.Value) -> bool:
        """Whether a body of control flow reads the value."""
        return bool(self._owners) and any(node.graph is not self.graph for node, _ in value.uses())

    def is_output(self, value: ir.Value) -> bool:
        """Whether the value is an output of the main graph."""
        return value.is_graph_output() and (not self._owners or any(value is out for out in self.graph.outputs))

    def is_private(self, value: ir.Value) -> bool:
        """Whether exactly one node of the main graph reads the value and nothing else depends on it."""
        return len(self.readers(value)) == 1 and not self.is_pinned(value)

    def is_pinned(self, value: ir.Value) -> bool:
        """Whether the value's name and meaning are needed outside the main graph's nodes, or by the caller."""
        return value.name in self.keep_values or value.is_graph_output() or self.is_captured(value)

    # -- constants ----------------------------------------------------------------------------------------------

    def is_constant(self, value: ir.Value | None) -> bool:
        """Whether a value is an initializer."""
        return value is not None and value.producer() is None and value.const_value is not None

    def constant(self, value: ir.Value | None) -> onnx.TensorProto | None:
        """The initializer that a value is unless callers can override it."""
        if value is None or not value.is_initializer() or value.is_graph_input():
            return None
        return self._tensors.get(value.name or "")

    def is_read_once(self, constant: ir.Value) -> bool:
        """Whether one input of one node of the main graph reads a constant, and nothing else needs it."""
        return len(constant.uses()) == len(self.readers(constant)) == 1 and not constant.is_graph_output()

    def array(self, value: ir.Value | None) -> npt.NDArray[np.generic] | None:
        """The content of a constant, None if the value is not constant."""
        tensor = self.constant(value)
        return None if tensor is None else array_in(tensor)

    def content(self, constant: ir.Value) -> npt.NDArray[np.generic]:
        """The content of a value that is known to be constant."""
        return array_in(self._tensors[constant.name or ""])

    def largest(self, value: ir.Value) -> float:
        """The largest magnitude in a constant value, nan if it holds one; 0 if it is empty."""
        if value not in self._largest:
            array = self.content(value)
            self._largest[value] = max(abs(float(array.min())), abs(float(array.max()))) if array.size else 0.0
        return self._largest[value]

    def activation_bounds(self, node: ir.Node) -> Bounds | None:
        """The (low, high) bounds of a Relu or Clip, None for a missing one; None if not constant."""
        if node.op_type == "Relu":
            return 0.0, None
        given = [v for v in node.inputs[1:3] if v is not None]
        return self.clip_ends(node) if all(map(self.is_constant, given)) else None

    def clip_ends(self, node: ir.Node) -> Bounds:
        """The constant bounds of a Clip, None for one that is missing, computed, or the largest float."""

        def end(position: int, attribute: str) -> float | None:
            value = node.inputs[position] if position < len(node.inputs) else None
            if value is None:
                bound = node.attributes.get_float(attribute, _LARGEST)
            else:
                bound = float(self.content(value).reshape(-1)[0]) if self.is_constant(value) else _LARGEST
            return None if abs(bound) >= _LARGEST else bound

        return end(1, "min"), end(2, "max")

    # -- types and shapes ---------------------------------------------------------------------------------------

    def rank(self, value: ir.Value | None) -> int | None:
        """The rank of a value, None if it is not known."""
        return None if value is None or value.shape is None else len(value.shape)

    def dims(self, value: ir.Value | None) -> tuple[int | None, ...] | None:
        """The shape of a value with None for dimensions that are not known, None without a rank."""
        if value is None or value.shape is None:
            return None
        return tuple(size if isinstance(size, int) else None for size in value.shape)

    def shape_of_one(self, value: ir.Value | None) -> tuple[int, ...] | None:
        """A known shape, the first dimension (the batch) 1 where it has no number."""
        dims = self.dims(value)
        if dims is None:
            return None
        known = [1 if size is None and index == 0 else size for index, size in enumerate(dims)]
        return None if None in known else tuple(size for size in known if size is not None)

    def elements(self, value: ir.Value) -> int:
        """The number of elements of a value, dimensions without a number counted as 1; 0 if the rank is not known."""
        dims = self.dims(value)
        return 0 if dims is None else math.prod(1 if size is None else size for size in dims)

    def multiply_accumulates(self, node: ir.Node) -> int:
        """The multiply-accumulates by sample of a node with weights, dimensions without a number counted as 1."""
        data, weight = node.inputs[:2]
        # every element that ConvTranspose reads, or Conv writes, meets every weight of its channel
        times = self.dims(data if node.op_type == "ConvTranspose" else node.outputs[0]) or ()
        times = times[2:] if node.op_type in ("Conv", "ConvTranspose") else times[:-1]
        return 0 if weight is None else self.elements(weight) * math.prod(size or 1 for size in times)

    def is_row_bias(self, matmul: ir.Node, bias: ir.Value) -> bool:
        """Whether a constant added to a MatMul holds one value a column, so that it can become its bias."""
        columns = self.dims(matmul.inputs[1])
        dims, rank = self.dims(bias), self.rank(matmul.outputs[0])
        if not columns or not dims or rank is None or rank < 2 or not self.is_constant(bias) or bias.dtype != FLOAT:
            return False
        return dims[-1] == columns[-1] and all(d == 1 for d in dims[:-1]) and len(dims) <= rank


@dataclass(frozen=True)
class PreparedModel:
    """A model ready for calibration and placement.

    Attributes:
        proto: The model.
        notes: What was done, in sentences, in order.
        nodes: For each name that a node of the original model had and that is now gone or no longer alone:
            the names of the nodes that do its work now (none where it was only a constant).
        view: The graph that the model was written from, where there was one.
    """

    proto: onnx.ModelProto
    notes: tuple[str, ...] = ()
    nodes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    view: GraphView | None = field(default=None, repr=False, compare=False)

    @cached_property
    def graph(self) -> GraphView:
        """The main graph, read once; who changes it works on a `LiveGraph` of its own."""
        known = self.view
        return known if known is not None and known.proto is self.proto else GraphView(self.proto)


def read_model(proto: onnx.ModelProto) -> ir.Model:
    """A model as `onnx_ir` has it; types of maps, which that does not read, are left out."""
    with _maps_untyped(proto):
        return ir.from_proto(proto)


def _bodies_in(node: ir.Node) -> list[ir.Graph]:
    """The bodies of a node, and those nested in them."""
    found = [body for attribute in node.attributes.values() for body in _bodies(attribute)]
    for body in found:
        attributes = (attribute for inner in body for attribute in inner.attributes.values())
        found += [nested for attribute in attributes for nested in _bodies(attribute)]
    return found


def _bodies(attribute: ir.Attr) -> list[ir.Graph]:
    if attribute.is_ref():
        return []
    if attribute.type == ir.AttributeType.GRAPH:
        return [attribute.as_graph()]
    if attribute.type == ir.AttributeType.GRAPHS:
        return list(attribute.as_graphs())
    return []


@contextmanager
def _maps_untyped(proto: onnx.ModelProto) -> Iterator[None]:
    """Takes the types of maps, which onnx_ir does not read, away for a while: copying the model would copy weights."""
    graphs = all_graphs(proto.graph)
    values = (value for graph in graphs for value in (*graph.input, *graph.output, *graph.value_info))
    typed = [(value, value.type) for value in values if holds_map(value.type)]
    remaining = [(value, onnx.TypeProto.FromString(kind.SerializeToString())) for value, kind in typed]
    for value, _ in remaining:
        value.ClearField("type")
    try:
        yield
    finally:
        for value, kind in remaining:
            value.type.CopyFrom(kind)


def holds_map(kind: onnx.TypeProto) -> bool:
    """Whether a type is of a map or made of maps."""
    which = kind.WhichOneof("value")
    return which == "map_type" or (
        which in ("sequence_type", "optional_type") and holds_map(getattr(kind, which).elem_type)
    )
