"""Checks of the structure of any model file, before anything works on it.

Checked is what this code and the libraries under it rely on: only what the runtime does not check itself, or what it
and ONNX do not survive: names that are no text, nesting without end, functions that unfold without end, tensors whose
content does not fill their shape. All of it takes time and memory linear in the file.
"""

import math
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

import onnx

from kenosis_ort.errors import ModelLoadError
from kenosis_ort.graph import walk
from kenosis_ort.graph.outside import PACKED, tensor_bytes
from kenosis_ort.graph.walk import drop_initializers

_Functions = Mapping[tuple[str, str], onnx.FunctionProto]  # by domain and name
_Option = onnx.defs.OpSchema.FormalParameterOption

_DEEPEST = 40
"""Levels of bodies; the runtime's parser allows 100 levels of messages, three for a body."""

_UNFOLDED = 2_000_000
"""Nodes that the model may have once its functions are written out."""

_FIELDS: dict[int, tuple[str, int]] = {
    onnx.TensorProto.FLOAT: ("float_data", 1),
    onnx.TensorProto.COMPLEX64: ("float_data", 2),
    onnx.TensorProto.DOUBLE: ("double_data", 1),
    onnx.TensorProto.COMPLEX128: ("double_data", 2),
    onnx.TensorProto.INT64: ("int64_data", 1),
    onnx.TensorProto.UINT32: ("uint64_data", 1),
    onnx.TensorProto.UINT64: ("uint64_data", 1),
    onnx.TensorProto.STRING: ("string_data", 1),
}
"""Where a tensor without raw data keeps its content, and numbers an element; otherwise ``int32_data`` and one."""


def check_structure(proto: onnx.ModelProto, name: str) -> None:
    """Checks a model that was just parsed; takes out what the runtime passes over.

    Args:
        proto: The model. Initializers that are not read and are not sound are removed, as the runtime passes them over.
        name: What messages call the model.

    Raises:
        ModelLoadError: It is no model, or not one that can be worked on.
    """
    if not proto.HasField("graph") or not proto.HasField("ir_version"):  # of any number, as the runtime has it
        raise _refusal("There is no ONNX graph in it.", name)
    if not proto.opset_import and proto.graph.node:
        raise _refusal("The model names no operator set.", name)
    if not proto.graph.output:
        raise _refusal("The graph has no outputs.", name)
    check_depth(proto, name)
    _check_text(proto, name)
    functions = {(f.domain, f.name): f for f in proto.functions}
    if functions:
        _check_functions(proto, functions, name)
        _check_calls(proto, functions, name)
    _check_arity(proto, functions, name)
    _drop_unsound(proto)
    for node in walk.all_nodes(proto, functions=False):
        for attribute in node.attribute:
            attribute.ClearField("ref_attr_name")  # refers to nothing outside functions; the runtime reads the value
    for tensor in walk.all_tensors(proto):
        flaw = unsound(tensor)
        if flaw:
            raise _refusal(f"Tensor '{tensor.name}' {flaw}.", name)
        tensor.ClearField("segment")
    for graph in walk.all_graphs(proto.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            for size in value.type.tensor_type.shape.dim:
                if size.dim_value < 0:  # open, as the runtime has it; shape inference would reckon with it
                    size.ClearField("dim_value")


def unsound(tensor: onnx.TensorProto) -> str | None:
    """Reason why a tensor cannot be read, None where it can. External data are not read."""
    if tensor.data_type not in onnx.TensorProto.DataType.values() or not tensor.data_type:
        return f"has the unknown data type {tensor.data_type}"
    if any(size < 0 for size in tensor.dims):
        return f"has a negative size: {list(tensor.dims)}"
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return None
    expected = tensor_bytes(tensor)
    if tensor.HasField("raw_data"):
        if tensor.data_type == onnx.TensorProto.STRING:
            return "is of strings but stored as raw data"
        if expected is not None and len(tensor.raw_data) != expected:
            parts = " (a segment, which ONNX Runtime does not read)" if tensor.HasField("segment") else ""
            return f"holds {len(tensor.raw_data)} bytes{parts}, its shape {list(tensor.dims)} takes {expected}"
        return None
    field, width = _FIELDS.get(tensor.data_type, ("int32_data", 1))
    elements = width * math.prod(tensor.dims)
    if expected is not None and tensor.data_type in PACKED:
        elements = expected
    count = len(getattr(tensor, field))
    return None if count == elements else f"holds {count} numbers, its shape {list(tensor.dims)} takes {elements}"


def _refusal(what: str, name: str) -> ModelLoadError:
    return ModelLoadError(what, where=name, fix="Export the model again with a current exporter.")


def check_depth(proto: onnx.ModelProto, name: str) -> None:
    """Checks that bodies are not nested too deep for any code that calls itself, copying included.

    Raises:
        ModelLoadError: They are.
    """
    level: list[walk.NodeOwner] = [proto.graph, *proto.functions]
    for _ in range(_DEEPEST):
        level = [body for owner in level for node in owner.node for body in walk.subgraphs(node)]
        if not level:
            return
    raise _refusal(f"Bodies of control flow are nested more than {_DEEPEST} levels deep.", name)


def _check_text(proto: onnx.ModelProto, name: str) -> None:
    """Refuses names that are no UTF-8 text: protobuf hands them out as bytes, which equal no name."""
    for text in _names(proto):
        if not isinstance(text, str):
            raise _refusal(f"The name {text!r} is not UTF-8 text.", name)
    for holder in (proto, proto.graph):
        for field in ("producer_name", "producer_version", "doc_string"):
            if isinstance(getattr(holder, field, ""), bytes):
                holder.ClearField(field)  # nothing depends on it


def _names(proto: onnx.ModelProto) -> Iterator[str | bytes]:
    """Yields all names that link the parts of a model."""
    yield from (entry.domain for entry in proto.opset_import)
    yield from (text for entry in proto.metadata_props for text in (entry.key, entry.value))
    yield proto.domain
    for function in proto.functions:
        yield from (function.name, function.domain, *function.input, *function.output, *function.attribute)
        yield from (entry.domain for entry in function.opset_import)
    for graph in walk.all_graphs(proto.graph):
        yield graph.name
        for value in (*graph.input, *graph.output, *graph.value_info):
            yield value.name
            for dim in value.type.tensor_type.shape.dim:
                yield dim.dim_param
    for node in walk.all_nodes(proto):
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        for attribute in node.attribute:
            yield from (attribute.name, attribute.ref_attr_name)
    for tensor in walk.all_tensors(proto):
        yield tensor.name
        yield from (text for entry in tensor.external_data for text in (entry.key, entry.value))


def _check_functions(proto: onnx.ModelProto, functions: _Functions, name: str) -> None:
    """Refuses functions that call themselves, and those that unfold to more nodes than could be worked on."""
    calls = {key: [(n.domain, n.op_type) for n in walk.nodes_within(f.node)] for key, f in functions.items()}
    try:
        order = list(TopologicalSorter({key: functions.keys() & found for key, found in calls.items()}).static_order())
    except CycleError as error:
        raise _refusal(f"Function '{error.args[1][0][1]}' calls itself.", name) from None
    sizes: dict[tuple[str, str], int] = {}
    for key in order:
        sizes[key] = sum(sizes.get(call, 1) for call in calls[key])
        if sizes[key] > _UNFOLDED:
            raise _refusal(f"Function '{key[1]}' unfolds to {sizes[key]:,} nodes.", name)
    total = sum(sizes.get((n.domain, n.op_type), 1) for n in walk.all_nodes(proto, functions=False))
    if total > _UNFOLDED:
        raise _refusal(f"The model unfolds to {total:,} nodes.", name)


def _check_calls(proto: onnx.ModelProto, functions: _Functions, name: str) -> None:
    """Refuses calls that leave out an input which the function hands to an operator that needs it.

    The runtime writes the function out without a second look, and crashes.
    """
    seen: set[tuple[tuple[str, str], frozenset[str]]] = set()
    calls = [(node, frozenset[str]()) for node in walk.all_nodes(proto, functions=False)]
    while calls:
        call, unknown = calls.pop()
        key = (call.domain, call.op_type)
        if key not in functions:
            continue
        given = [given if given not in unknown else "" for given in call.input]
        formal = functions[key].input
        missing = frozenset(f for at, f in enumerate(formal) if at >= len(given) or not given[at])
        if (key, missing) in seen:
            continue
        seen.add((key, missing))
        versions = {entry.domain: entry.version for entry in functions[key].opset_import}
        for node in walk.nodes_within(functions[key].node):
            calls.append((node, missing))
            for at, read in enumerate(node.input):
                if read in missing and _needs(node, at, versions):
                    raise _refusal(
                        f"A call of function '{key[1]}' leaves out its input '{read}', which it needs.", name
                    )


def _check_arity(proto: onnx.ModelProto, functions: _Functions, name: str) -> None:
    """Refuses operators of ONNX that lack inputs or outputs, as the runtime does; our code counts on their number."""
    version = walk.opset_of(proto)
    for node in walk.all_nodes(proto, functions=False):
        if node.domain not in walk.MAIN_DOMAINS or (node.domain, node.op_type) in functions:
            continue
        schema = walk.schema(node.op_type, version)
        inputs, outputs = (0, 0) if schema is None else (schema.min_input, schema.min_output)
        if len(node.input) < inputs or len(node.output) < outputs:
            raise _refusal(
                f"Node '{node.name}' ({node.op_type}) has {len(node.input)} inputs and {len(node.output)} outputs; it "
                f"needs {inputs} and {outputs}.",
                name,
            )


def _needs(node: onnx.NodeProto, at: int, versions: Mapping[str, int]) -> bool:
    """Whether an operator of ONNX cannot do without an input."""
    domain = "" if node.domain in walk.MAIN_DOMAINS else node.domain
    version = max(versions.get(name, 0) for name in (walk.MAIN_DOMAINS if not domain else (domain,)))
    schema = walk.schema(node.op_type, version, domain)
    return schema is not None and at < len(schema.inputs) and schema.inputs[at].option == _Option.Single


def _drop_unsound(proto: onnx.ModelProto) -> None:
    """Removes initializers without a name, which the runtime skips, and unsound ones that no node reads."""
    for graph in walk.all_graphs(proto.graph):
        drop_initializers(graph, [at for at, tensor in enumerate(graph.initializer) if not tensor.name])
    suspects = {tensor.name for tensor in proto.graph.initializer if unsound(tensor)}
    if not suspects:
        return
    read = {name for node in walk.all_nodes(proto) for name in node.input}
    for graph in walk.all_graphs(proto.graph):
        read.update(value.name for value in graph.output)
    unread = suspects - read
    stored = enumerate(proto.graph.initializer)
    drop_initializers(proto.graph, [at for at, tensor in stored if tensor.name in unread and unsound(tensor)])
