"""The main graph of a model for planning: a read-only view of it, and the types and shapes of its values.

The view holds nodes, consumers, types, shapes and constants. A value that an ``If``, ``Loop`` or ``Scan`` body reads
from the outer graph counts as consumed by the node that owns the body, so that a rule about single consumers never
misses one.

``onnx_ir`` is imported here without sympy, which it needs only where symbolic dimensions are computed.

Types and shapes come from three sources in turn:

1. ONNX's own shape inference, on a copy of the model without its weights (a weight is replaced by an input of its
   type and shape), so that the 2 GiB limit never matters and nothing large is serialised.
2. The runtime: a session on that copy without optimization says what it inferred. It knows the operators of
   ``com.microsoft`` and of registered custom-op libraries.
3. onnxruntime's symbolic shape inference, where it is installed with its dependency and still something is missing.
   Only types and ranks are taken from it: it guesses dimensions (a Split by computed sizes counts as equal parts).

Each source only fills what the ones before left open. A source that fails is logged and passed over: shapes
help quantization, they are not a condition of it. Nothing is written to disk.
"""

import importlib
import importlib.util
import logging
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.helper
import onnx.shape_inference
import onnxruntime

from kenosis_ort.errors import VerificationError
from kenosis_ort.graph.outside import array_in, copy_without_weights, is_outside
from kenosis_ort.graph.walk import MAIN_DOMAINS, all_graphs, all_nodes, known_as
from kenosis_ort.runtime.session import TENSOR_TYPES, open_session

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
        self.model = read_model(proto)
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


def read_model(proto: onnx.ModelProto) -> ir.Model:
    """A model as `onnx_ir` has it; types of maps, which that does not read, are left out."""
    with _maps_untyped(proto):
        return ir.from_proto(proto)


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


_log = logging.getLogger(__name__)

_MOST_ELEMENTS = 1024
"""Tensors up to this size are kept for inference: shapes, axes, slice bounds."""

_FATAL = frozenset(
    {("", "EyeLike"), ("", "RegexFullMatch"), ("ai.onnx.ml", "DictVectorizer"), ("ai.onnx.ml", "LabelEncoder")}
)
"""Operators whose inference in onnx 1.23 reads the type of an input that has none, as behind a contrib operator."""

_HIDDEN = "kenosis_ort.hidden"

_SYMBOLIC_NODES = 2000
"""Symbolic inference takes milliseconds a node; larger graphs do without it."""


def infer_shapes(
    model: onnx.ModelProto, *, custom_op_libraries: Sequence[str] = (), thorough: bool = True
) -> str | None:
    """Completes ``value_info`` of the main graph, and outputs declared without a shape, in place.

    Args:
        model: The model to change. What its value_info says is kept where ONNX leaves a value open.
        custom_op_libraries: Libraries to register with the runtime; none is loaded unasked.
        thorough: Whether to ask the runtime and the symbolic inference about what ONNX leaves open.

    Returns:
        A note if values are left without type or rank, else None.
    """
    skeleton = _skeleton(model)
    inferred = _infer_onnx(skeleton)
    known = _known_values(inferred if inferred is not None else skeleton)
    _complete_outputs(model, inferred)
    missing = _missing(model, known)
    if missing and thorough:
        found = _infer_runtime(skeleton, missing, custom_op_libraries)
        _complete(known, found)
        missing = _missing(model, known)
    if missing and thorough and len(model.graph.node) <= _SYMBOLIC_NODES:
        _complete(known, _infer_symbolic(skeleton))
        missing = _missing(model, known)
    produced = {name for node in model.graph.node for name in node.output if name}
    produced -= {value.name for value in model.graph.output}
    del model.graph.value_info[:]
    model.graph.value_info.extend(v for name, v in known.items() if name in produced and _has_type(v))
    if not missing:
        return None
    shown = ", ".join(f"'{name}'" for name in missing[:3]) + (", ..." if len(missing) > 3 else "")
    return f"Shape inference left {len(missing)} values without type or rank: {shown}."


def _has_type(value: onnx.ValueInfoProto) -> bool:
    """Whether the entry says a type at all; the runtime refuses one that does not."""
    kind = value.type.WhichOneof("value")
    return kind is not None and (kind != "tensor_type" or value.type.tensor_type.elem_type != 0)


def drop_stale_value_info(model: onnx.ModelProto, changed: Collection[str] = ()) -> None:
    """Removes value_info of values that the main graph no longer has, or whose type has changed, in place."""
    graph = model.graph
    names = {name for node in graph.node for name in node.output}
    names.update(value.name for value in graph.input)
    names.difference_update(changed)
    remaining = onnx.GraphProto()
    remaining.value_info.extend(value for value in graph.value_info if value.name in names)
    del graph.value_info[:]
    graph.value_info.MergeFrom(remaining.value_info)


def value_types(model: onnx.ModelProto) -> dict[str, onnx.TypeProto]:
    """Types and shapes that ONNX infers for the values of the main graph and its bodies, weights included.

    Where bodies reuse a name, the first one found stands for all.
    """
    skeleton = _skeleton(model)
    inferred = _infer_onnx(skeleton)
    types: dict[str, onnx.TypeProto] = {}
    for graph in all_graphs((inferred if inferred is not None else skeleton).graph):
        for value in (*graph.input, *graph.value_info, *graph.output):
            types.setdefault(value.name, value.type)
        for tensor in graph.initializer:
            types.setdefault(tensor.name, onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims)))
    return types


def has_rank(value: onnx.ValueInfoProto | None) -> bool:
    """Whether a value's element type and rank are known; sequences and the like need only a type."""
    if value is None:
        return False
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        return kind is not None
    return bool(value.type.tensor_type.elem_type) and value.type.tensor_type.HasField("shape")


def _skeleton(model: onnx.ModelProto) -> onnx.ModelProto:
    def large(tensor: onnx.TensorProto) -> bool:
        return bool(math.prod(tensor.dims) > _MOST_ELEMENTS)

    skeleton = copy_without_weights(model, large)
    listed = {value.name for value in skeleton.graph.input}
    skeleton.graph.input.extend(
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        for tensor in model.graph.initializer
        if large(tensor) and tensor.name not in listed
    )
    return skeleton


def _without_fatal(skeleton: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the nodes hidden of which ONNX's inference dies where their input has no type."""
    if not any(_is_fatal(node) for node in all_nodes(skeleton)):
        return skeleton
    hidden = onnx.ModelProto()
    hidden.CopyFrom(skeleton)
    for node in all_nodes(hidden):
        if _is_fatal(node):
            node.domain = _HIDDEN
    hidden.opset_import.add(domain=_HIDDEN, version=1)
    return hidden


def _is_fatal(node: onnx.NodeProto) -> bool:
    return ("" if node.domain in MAIN_DOMAINS else node.domain, node.op_type) in _FATAL


def _infer_onnx(skeleton: onnx.ModelProto) -> onnx.ModelProto | None:
    """Infers from the graph alone; what the model declares counts only where that leaves a value open.

    The runtime goes by what it infers too, and a declaration may be wrong. The skeleton loses those not needed.
    """
    declared = onnx.GraphProto()
    declared.value_info.extend(skeleton.graph.value_info)
    del skeleton.graph.value_info[:]
    inferred = _run_onnx(skeleton)
    found = {} if inferred is None else _known_values(inferred)
    needed = [value for value in declared.value_info if not has_rank(found.get(value.name))]
    if not needed:
        return inferred
    skeleton.graph.value_info.extend(needed)
    return _run_onnx(skeleton) or inferred


def _run_onnx(skeleton: onnx.ModelProto, *, data_prop: bool = True) -> onnx.ModelProto | None:
    try:
        return onnx.shape_inference.infer_shapes(_without_fatal(skeleton), data_prop=data_prop)
    except Exception as error:  # the binding lets any C++ exception through
        _log.debug("onnx shape inference (data_prop=%s) failed: %s", data_prop, error)
    if data_prop:
        return _run_onnx(skeleton, data_prop=False)
    _log.info("ONNX shape inference failed on this model; the other sources are used")
    return None


def _infer_runtime(
    skeleton: onnx.ModelProto, missing: Iterable[str], custom_op_libraries: Sequence[str]
) -> list[onnx.ValueInfoProto]:
    """Asks the runtime about values by making them outputs, since it tells types of outputs only."""
    try:
        found = open_session(
            skeleton, optimize=False, custom_op_libraries=custom_op_libraries, further=missing
        ).get_outputs()
    except VerificationError as error:
        _log.info("the runtime could not infer shapes: %s", error.what)
        return []
    return [
        # An empty shape stands for a scalar and for an unknown rank alike: it says nothing.
        onnx.helper.make_tensor_value_info(value.name, TENSOR_TYPES[value.type], list(value.shape) or None)
        for value in found
        if value.type in TENSOR_TYPES
    ]


@cache
def _symbolic_inference() -> Any:
    """The runtime's module for it, loaded by itself: the package that it stands in imports torch."""
    file = Path(onnxruntime.__file__).parent / "tools" / "symbolic_shape_infer.py"
    spec = importlib.util.spec_from_file_location(f"{__package__}.symbolic_shape_infer", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _infer_symbolic(skeleton: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    try:
        # Its one-call form leaves a file in the working folder where it does not get through.
        inference = _symbolic_inference().SymbolicShapeInference(2**31 - 1, False, False, 0)
        inference._preprocess(skeleton)  # noqa: SLF001
        while inference.run_:
            inference._infer_impl()  # noqa: SLF001
        values = list(inference.out_mp_.graph.value_info)
    except Exception as error:  # third-party code on arbitrary graphs: asserts, KeyErrors, sympy errors, ImportError
        _log.info("symbolic shape inference failed: %s", error)
        return []
    for value in values:
        for dim in value.type.tensor_type.shape.dim:
            dim.Clear()
    return values


def _known_values(model: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    return {value.name: value for value in model.graph.value_info}


def _complete(known: dict[str, onnx.ValueInfoProto], found: Iterable[onnx.ValueInfoProto]) -> None:
    for value in found:
        present = known.get(value.name)
        if not has_rank(present) and (has_rank(value) or present is None):
            known[value.name] = value


def _complete_outputs(model: onnx.ModelProto, inferred: onnx.ModelProto | None) -> None:
    """Fills in types of graph outputs that were declared without type or rank."""
    known = [] if inferred is None else [*inferred.graph.input, *inferred.graph.output]
    found = {value.name: value for value in known if has_rank(value)}
    for tensor in model.graph.initializer:
        info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        found.setdefault(tensor.name, info)
    named = {d.dim_param for v in model.graph.input for d in v.type.tensor_type.shape.dim} | {""}
    for value in model.graph.output:
        if not has_rank(value) and has_rank(found.get(value.name)):
            value.type.CopyFrom(found[value.name].type)
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param not in named:  # inference makes up names, the interface has those of the model
                    dim.Clear()


def _missing(model: onnx.ModelProto, known: dict[str, onnx.ValueInfoProto]) -> list[str]:
    declared = {value.name for value in model.graph.output}
    return [
        name
        for node in model.graph.node
        for name in node.output
        if name and name not in declared and not has_rank(known.get(name))
    ]
