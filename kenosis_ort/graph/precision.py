"""Models in float16, bfloat16 or double, computed in float32 inside.

The runtime's integer kernels lie between float32 values, and on a CPU float32 is the type that everything runs in. So a
model whose layers compute in another floating type gets the same graph in float32: stored tensors, attributes and the
declared types of values change, the operators stay. Its inputs and outputs keep names, types and shapes, by a Cast each
at the edges. Casts between the two types inside become Identity. A type in which no layer computes stays as it is, as
double does where a float32 model works out indices with it.

Nodes that need the very type keep it between Casts of their own: custom operators, what turns numbers into text, and
operators that know no float32. A model is left alone where that is not possible: such nodes inside bodies, and inputs
or outputs that are no tensors. Functions and sparse constants are gone by then (`graph.canonical`).
"""

import logging
from collections.abc import Collection, Iterator, Mapping

import numpy as np
import onnx

from kenosis_ort.graph import walk
from kenosis_ort.graph.constants import Is, having, replace_nodes
from kenosis_ort.graph.outside import array_in, copy_without_weights

_log = logging.getLogger(__name__)

FLOAT = onnx.TensorProto.FLOAT
_OTHERS = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE)
_LAYERS = having(Is.LAYER) - having(Is.INTEGER)
_OPEN_DOMAINS = frozenset({*walk.MAIN_DOMAINS, "com.microsoft", "ai.onnx.ml"})
"""Domains whose operators take float32 wherever they take another floating type, but for `_BOUND`."""

_BOUND = frozenset({"BitCast", "GemmaRotaryEmbedding"})
_TYPE_ATTRIBUTES = frozenset(
    {"to", "dtype", "output_datatype", "output_dtype", "precision", "softmax_precision", "stash_type"}
)
_LARGEST = float(np.finfo(np.float32).max)


class _NotConvertibleError(Exception):
    """Carries the reason why a model keeps its type; never leaves this module."""


def compute_in_float32(model: onnx.ModelProto) -> tuple[onnx.ModelProto | None, str | None]:
    """The model computed in float32 where its layers compute in another floating type.

    Args:
        model: The model, canonical, its types inferred; not changed.

    Returns:
        The converted model, None where nothing is to be done or it cannot be; a note, None where nothing is to be done.
    """
    if not any(_mentions(model)):
        return None, None
    types = _element_types(model)
    read = {types.get(name, 0) for node in walk.all_nodes(model) if node.op_type in _LAYERS for name in node.input[:2]}
    converted = read.intersection(_OTHERS)  # in which layers compute
    if not converted:
        return None, None
    names = ", ".join(sorted(onnx.TensorProto.DataType.Name(t).lower() for t in converted))
    try:
        return _Conversion(model, converted, types).run(), f"The model computes in {names}; inside it is float32 now."
    except _NotConvertibleError as reason:
        _log.info("not converted to float32: %s", reason)
        return None, f"The model computes in {names} and stays so: {reason}."


def _mentions(model: onnx.ModelProto) -> Iterator[bool]:
    """Yields for tensors, declared values and attributes whether they are of another floating type."""
    for graph in walk.all_graphs(model.graph):
        yield from (tensor.data_type in _OTHERS for tensor in graph.initializer)
        for value in (*graph.input, *graph.output):
            yield any(t.elem_type in _OTHERS for t in _tensor_types(value.type))
    for node in walk.all_nodes(model):
        for attribute in node.attribute:
            yield attribute.name in _TYPE_ATTRIBUTES and attribute.i in _OTHERS
            yield attribute.HasField("t") and attribute.t.data_type in _OTHERS


def _tensor_types(kind: onnx.TypeProto) -> Iterator[onnx.TypeProto.Tensor | onnx.TypeProto.SparseTensor]:
    """Yields the tensor type within a type, if there is one."""
    match kind.WhichOneof("value"):
        case "tensor_type" | "sparse_tensor_type" as which:
            yield getattr(kind, which)
        case "sequence_type" | "optional_type" as which:
            yield from _tensor_types(getattr(kind, which).elem_type)
        case "map_type":
            yield from _tensor_types(kind.map_type.value_type)


def _element_types(model: onnx.ModelProto) -> dict[str, int]:
    """The element types of tensors by value name, those of bodies included."""
    found: dict[str, int] = {}
    for graph in walk.all_graphs(model.graph):
        for value in (*graph.value_info, *graph.input, *graph.output):
            if value.type.HasField("tensor_type"):
                found[value.name] = value.type.tensor_type.elem_type
        found.update((tensor.name, tensor.data_type) for tensor in graph.initializer)
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
                found[node.output[0]] = node.attribute[0].t.data_type
    return found


class _Conversion:
    """One model on its way to float32.

    Args:
        model: The model; not changed.
        converted: The types that become float32.
        types: Element types by value name.
    """

    def __init__(self, model: onnx.ModelProto, converted: set[int], types: Mapping[str, int]) -> None:
        self._source = model
        self._converted = converted
        self._types = dict(types)
        self._taken = walk.all_names(model)

    def run(self) -> onnx.ModelProto:
        """The converted model.

        Raises:
            _NotConvertibleError: It has to keep its type.
        """
        source = self._source
        for node in (node for body in walk.all_graphs(source.graph)[1:] for node in body.node):
            if self._is_bound(node):
                raise _NotConvertibleError(f"'{node.name or node.op_type}' in a body or function needs the type")
        bound = {node.name for node in source.graph.node if self._is_bound(node)}
        model = copy_without_weights(source)
        graph = model.graph
        inputs = {value.name: self._fresh(f"{value.name}_float32") for value in graph.input if self._at_edge(value)}
        outputs = {
            value.name: self._fresh(f"{value.name}_float32")
            for value in graph.output
            if value.name not in inputs and self._at_edge(value)
        }
        _rename(graph, {**inputs, **outputs})
        self._types.update({new: self._types.get(old, 0) for old, new in (*inputs.items(), *outputs.items())})
        self._store_weights(graph, inputs, outputs)
        for nested in walk.all_graphs(graph):
            self._convert_values(nested, outermost=nested is graph)
        for node in walk.all_nodes(model):
            if node.name not in bound:
                self._convert_node(node)
        self._put_casts(graph, inputs, outputs, bound)
        return model

    # -- questions ----------------------------------------------------------------------------------------------

    def _at_edge(self, value: onnx.ValueInfoProto) -> bool:
        """Whether an input or output is of a type that becomes float32.

        Raises:
            _NotConvertibleError: It is, within a container that no Cast reads.
        """
        if not any(tensor.elem_type in self._converted for tensor in _tensor_types(value.type)):
            return False
        if not value.type.HasField("tensor_type"):
            raise _NotConvertibleError(f"'{value.name}' is no tensor")
        return True

    def _is_bound(self, node: onnx.NodeProto) -> bool:
        """Whether a node needs the very types that it has."""
        kinds = {self._types.get(name, 0) for name in (*node.input, *node.output) if name}
        if node.domain not in _OPEN_DOMAINS or node.op_type in _BOUND:
            return not kinds.isdisjoint({0, *self._converted})  # 0: not known, as often in bodies
        if node.op_type != "Cast":
            return False
        kinds.add(walk.attribute_int(node, "to", 0))
        return onnx.TensorProto.STRING in kinds and not kinds.isdisjoint(self._converted)

    def _fresh(self, base: str) -> str:
        return walk.reserve_name(base, self._taken)

    # -- the inside ---------------------------------------------------------------------------------------------

    def _store_weights(self, graph: onnx.GraphProto, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> None:
        """Adds the stored tensors; one that the interface shows keeps its type."""
        for tensor in self._source.graph.initializer:
            if tensor.name in inputs or tensor.name in outputs:
                graph.initializer.add().CopyFrom(tensor)
            if tensor.name not in inputs:
                graph.initializer.append(self._tensor(tensor))
                graph.initializer[-1].name = outputs.get(tensor.name, tensor.name)

    def _convert_values(self, graph: onnx.GraphProto, *, outermost: bool) -> None:
        for value in (*graph.value_info, *(() if outermost else (*graph.input, *graph.output))):
            self._convert_type(value.type)
        for tensor in () if outermost else graph.initializer:
            tensor.CopyFrom(self._tensor(tensor))

    def _convert_node(self, node: onnx.NodeProto) -> None:
        """Changes the types that a node's attributes name or hold; a Cast between floating types becomes Identity."""
        for attribute in node.attribute:
            if attribute.name in _TYPE_ATTRIBUTES and attribute.i in self._converted:
                attribute.i = FLOAT
            elif attribute.HasField("t"):
                attribute.t.CopyFrom(self._tensor(attribute.t))
            elif attribute.HasField("tp"):
                self._convert_type(attribute.tp)
        copies = node.op_type == "Cast" and walk.attribute_int(node, "to", 0) == FLOAT
        if copies and self._types.get(node.input[0], 0) in {FLOAT, *self._converted}:
            node.op_type = "Identity"
            del node.attribute[:]

    def _convert_type(self, kind: onnx.TypeProto) -> None:
        for tensor in _tensor_types(kind):
            if tensor.elem_type in self._converted:
                tensor.elem_type = FLOAT

    def _tensor(self, tensor: onnx.TensorProto) -> onnx.TensorProto:
        """A tensor as float32; finite numbers beyond its range become the largest."""
        if tensor.data_type not in self._converted:
            return tensor
        array = array_in(tensor)
        if tensor.data_type == onnx.TensorProto.DOUBLE:
            array = np.where(np.isfinite(array), np.clip(array, -_LARGEST, _LARGEST), array)
        return onnx.numpy_helper.from_array(np.asarray(array, np.float32), tensor.name)

    # -- the edges ----------------------------------------------------------------------------------------------

    def _put_casts(
        self, graph: onnx.GraphProto, inputs: Mapping[str, str], outputs: Mapping[str, str], bound: Collection[str]
    ) -> None:
        """Puts Casts behind inputs, in front of outputs, and around the nodes that need the type."""
        constants = {tensor.name for tensor in graph.initializer}
        read = {name for nested in walk.all_graphs(graph) for node in nested.node for name in node.input}
        read.update(value.name for nested in walk.all_graphs(graph)[1:] for value in nested.output)
        first = [
            self._edge(graph, value, value.name, inputs[value.name], inwards=True)
            for value in graph.input
            if inputs.get(value.name) in read
        ]
        last = [
            self._edge(graph, value, outputs[value.name], value.name, inwards=False)
            for value in {value.name: value for value in graph.output}.values()  # a name may be listed twice
            if value.name in outputs and value.name not in constants
        ]
        nodes = [made for n in graph.node for made in (self._between_casts(n) if n.name in bound else (n,))]
        replace_nodes(graph, [*first, *nodes, *last])

    def _edge(
        self, graph: onnx.GraphProto, value: onnx.ValueInfoProto, source: str, target: str, *, inwards: bool
    ) -> onnx.NodeProto:
        """The Cast of an input or output."""
        inside = graph.value_info.add()
        inside.CopyFrom(value)
        inside.name = target if inwards else source
        self._convert_type(inside.type)
        return self._cast(source, target, FLOAT if inwards else value.type.tensor_type.elem_type)

    def _between_casts(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """Yields a node that needs the type, with Casts around it."""
        after = []
        for at, name in enumerate(node.input):
            kind = self._types.get(name, 0)
            if kind in self._converted:
                node.input[at] = self._fresh(f"{name}_exact")
                yield self._cast(name, node.input[at], kind)
        for at, name in enumerate(node.output):
            if self._types.get(name, 0) in self._converted:
                node.output[at] = self._fresh(f"{name}_exact")
                after.append(self._cast(node.output[at], name, FLOAT))
        yield node
        yield from after

    def _cast(self, source: str, target: str, to: int) -> onnx.NodeProto:
        return onnx.helper.make_node("Cast", [source], [target], name=self._fresh(f"{target}_Cast"), to=to)


def _rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Renames values of the main graph wherever nodes and bodies write or read them; its interface keeps them."""
    for nested in walk.all_graphs(graph):
        for node in nested.node:
            for values in (node.input, node.output):
                for at, name in enumerate(values):
                    if name in names:
                        values[at] = names[name]
        for value in nested.output if nested is not graph else ():
            value.name = names.get(value.name, value.name)
