"""Nodes that need not run: constant results, branches that are never taken, copies."""

import logging
import math
from collections.abc import Iterable, Mapping

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from kenosis_ort.errors import VerificationError
from kenosis_ort.graph.bodies import rename_all
from kenosis_ort.graph.constants import Is, constants_to_initializers, having, replace_nodes
from kenosis_ort.graph.outside import array_in, copy_model, tensor_bytes
from kenosis_ort.graph.view import infer_shapes
from kenosis_ort.graph.walk import MAIN_DOMAINS, all_names, attribute_int, reserve_name, subgraphs
from kenosis_ort.rewrite.rule import Editor, rule
from kenosis_ort.runtime.session import open_session

_log = logging.getLogger(__name__)

_GROWTH_FACTOR, _GROWTH_BYTES = 4, 64 * 1024
"""A folded result may take this many times the bytes of its inputs and so many more."""

_SIZE_LIMIT = 2**30
"""Bytes of constants that one run may hold; beyond it nothing more is folded."""

_NEVER = having(Is.RANDOM) | {"Constant", "DequantizeLinear", "Dropout", "DynamicQuantizeLinear", "QuantizeLinear"}

_NEVER_LARGER = frozenset(
    {"Cast", "Concat", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}
)
"""Operators whose result is no larger than their inputs (eight bytes an element at most)."""


@rule(did="nodes that compute constants were replaced by their results", whole=True)
def fold_constants(editor: Editor) -> None:
    """Nodes that compute the same result on every run, replaced by the result.

    A node whose inputs are all constant has constant outputs: ``f(c)`` is stored in the place of ``f``. The runtime
    itself computes them, all in one run of a model that holds only these nodes, so the stored values are exactly the
    ones that it would compute later. ``Shape`` and ``Size`` of a value whose shape is known are constant too, and so
    are the known dimensions that a ``Gather`` takes out of a shape of which others are not known.

    It matters for quantization: a weight that passes through Transpose, Reshape or Unsqueeze is a weight only once this
    is done, and small integer arithmetic on shapes would otherwise hide the amounts of a Pad.

    Not folded: control flow, random operators, custom domains, DequantizeLinear and its kin (weights that are
    stored quantized stay so), values that the caller names, and results that are much
    larger than their inputs (a ConstantOfShape or an Expand is smaller as a node).
    """
    sizes = {name: tensor_bytes(tensor) or 0 for name, tensor in editor.constants.items()}
    types = _tensor_types(editor.graph)
    known = set(editor.constants)
    candidates: list[onnx.NodeProto] = []
    statics: dict[str, onnx.TensorProto] = {}
    total = 0
    for node in editor.nodes:
        if not (editor.may_change(node) and _may_fold(node, editor)):
            continue
        tensor = _static(node, types, editor)
        if tensor is not None:
            statics[node.output[0]] = tensor
            sizes[node.output[0]] = tensor_bytes(tensor) or 0
        elif not all(name in known for name in node.input if name):
            continue
        given = sum(sizes[name] for name in set(node.input) if name in sizes)
        grown = _output_bytes(node, types)
        if grown is None and node.op_type in _NEVER_LARGER and _is_plain(node, types):
            grown = given
        if grown is None or grown > _GROWTH_FACTOR * given + _GROWTH_BYTES or total + given + grown > _SIZE_LIMIT:
            continue
        total += given + grown
        for name in node.output:
            if name:
                known.add(name)
                sizes[name] = grown
        candidates.append(node)
    computed = _compute(candidates, editor, types, statics)
    if computed is not None:
        editor.drop(candidates)
        editor.graph.initializer.extend(computed.values())
        editor.done = len(candidates)


def _may_fold(node: onnx.NodeProto, editor: Editor) -> bool:
    if node.domain not in MAIN_DOMAINS or node.op_type in _NEVER or next(subgraphs(node), None) is not None:
        return False
    return not any(name in editor.outputs or name in editor.keep_values for name in node.output)


def _static(
    node: onnx.NodeProto, types: Mapping[str, onnx.TypeProto.Tensor], editor: Editor
) -> onnx.TensorProto | None:
    """Result of a node that depends on a shape alone, as far as that is known; None where it is not."""
    dims: list[int | None] | None
    if node.op_type in ("Shape", "Size"):
        dims = _dims(types.get(node.input[0]))
        if dims is not None and node.op_type == "Shape":
            bounds = {attribute.name: attribute.i for attribute in node.attribute}
            dims = dims[slice(bounds.get("start", 0), bounds.get("end"))]
        if dims is None or None in dims:
            return None
        numbers = [dim for dim in dims if dim is not None]
        array = np.array(numbers if node.op_type == "Shape" else math.prod(numbers), np.int64)
        return onnx.numpy_helper.from_array(array, node.output[0])
    shape = editor.producers.get(node.input[0]) if node.op_type == "Gather" else None
    chosen = editor.constant(node.input[1]) if shape is not None else None
    if shape is None or chosen is None or shape.op_type != "Shape" or shape.attribute:
        return None
    dims = _dims(types.get(shape.input[0]))
    at = array_in(chosen)
    if dims is None or any(not -len(dims) <= i < len(dims) or dims[i] is None for i in at.reshape(-1).tolist()):
        return None
    found = np.array([dims[i] for i in at.reshape(-1).tolist()], np.int64).reshape(at.shape)
    return onnx.numpy_helper.from_array(found, node.output[0])


def _dims(found: onnx.TypeProto.Tensor | None) -> list[int | None] | None:
    """The shape with None for dimensions that are not known; None where the rank is not."""
    if found is None or not found.HasField("shape"):
        return None
    return [dim.dim_value if dim.HasField("dim_value") else None for dim in found.shape.dim]


def _output_bytes(node: onnx.NodeProto, types: Mapping[str, onnx.TypeProto.Tensor]) -> int | None:
    """The bytes of a node's largest output, None where type or size are not known or not plain numbers."""
    largest = 0
    for name in node.output:
        if not name:
            continue
        found = types.get(name)
        if found is None or found.elem_type not in _PLAIN_TYPES or not found.HasField("shape"):
            return None
        if not all(d.HasField("dim_value") for d in found.shape.dim):
            return None
        itemsize = onnx.helper.tensor_dtype_to_np_dtype(found.elem_type).itemsize
        largest = max(largest, itemsize * math.prod(d.dim_value for d in found.shape.dim))
    return largest


def _is_plain(node: onnx.NodeProto, types: Mapping[str, onnx.TypeProto.Tensor]) -> bool:
    return all(name in types and types[name].elem_type in _PLAIN_TYPES for name in node.output if name)


_PLAIN_TYPES = frozenset(
    {
        onnx.TensorProto.FLOAT,
        onnx.TensorProto.FLOAT16,
        onnx.TensorProto.DOUBLE,
        onnx.TensorProto.BOOL,
        onnx.TensorProto.INT8,
        onnx.TensorProto.INT16,
        onnx.TensorProto.INT32,
        onnx.TensorProto.INT64,
        onnx.TensorProto.UINT8,
        onnx.TensorProto.UINT16,
        onnx.TensorProto.UINT32,
        onnx.TensorProto.UINT64,
    }
)


def _tensor_types(graph: onnx.GraphProto) -> dict[str, onnx.TypeProto.Tensor]:
    values = (*graph.input, *graph.output, *graph.value_info)
    return {value.name: value.type.tensor_type for value in values if value.type.HasField("tensor_type")}


def _compute(
    candidates: Iterable[onnx.NodeProto],
    editor: Editor,
    types: Mapping[str, onnx.TypeProto.Tensor],
    statics: Mapping[str, onnx.TensorProto],
) -> dict[str, onnx.TensorProto] | None:
    """Runs the candidates alone; returns the tensors that other nodes need, None where the runtime refuses."""
    model = editor.model
    inner = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    inner.graph.name = "constants"
    folded = {id(node) for node in candidates}
    stored: set[str] = set()
    results: dict[str, onnx.TensorProto] = {}
    wanted: list[str] = []
    for node in candidates:
        outputs = [name for name in node.output if name]
        needed = [
            n for n in outputs if n in editor.captured or any(id(r) not in folded for r in editor.readers.get(n, ()))
        ]
        tensor = statics.get(node.output[0])
        if tensor is not None:
            inner.graph.initializer.append(tensor)
            results.update(dict.fromkeys(needed, tensor))
            continue
        for name in node.input:
            constant = editor.constant(name)
            if constant is not None and name not in stored:
                stored.add(name)
                inner.graph.initializer.append(constant)
        inner.graph.node.append(node)
        wanted += needed
    if not wanted:
        return results
    for name in wanted:
        inner.graph.output.add(name=name).type.tensor_type.elem_type = types[name].elem_type
    try:
        arrays = open_session(inner, optimize=False).run(wanted, {})
    except Exception as error:  # the binding raises its own classes, all of them direct children of Exception
        _log.info("constants were not folded, the runtime refused: %s", str(error).splitlines()[0])
        return None
    results.update({n: onnx.numpy_helper.from_array(a, n) for n, a in zip(wanted, arrays, strict=True)})
    return results


@rule("If", did="If nodes of a constant condition became the branch they take", whole=True)
def inline_branch(editor: Editor) -> None:
    """An If whose condition is constant, replaced by the branch that it takes.

    ``If(c; then, else)`` with a constant ``c`` computes what one of its branches does, on every run. Exporters write
    such nodes where a condition depends on the rank of a value or on one of its sizes, which are known by now: a
    Squeeze in one branch, a copy in the other. What is inlined may settle further conditions, so shapes are inferred
    and constants folded again until no condition is constant any more.

    Left alone: conditions that are not constant, and a model that the runtime refuses afterwards: it is stricter about
    constants than about values that it does not know (a Range to one number of rank 1).
    """
    model = editor.model
    if not _settled(editor):
        return
    before = copy_model(model)
    while found := _inline(editor):
        editor.done += len(found)
        editor.merged.update(dict.fromkeys(found, ""))
        constants_to_initializers(model)
        infer_shapes(model, thorough=False)
        for rewrite in (drop_identity, fold_constants):
            result = rewrite(model, keep_values=editor.keep_values)
            editor.merged.update(result.merged)
            editor.notes += result.notes
    if not _opens(model) and _opens(before):
        model.CopyFrom(before)
        editor.merged.clear()
        editor.notes.clear()
        editor.done = 0
    editor.reopen()


def _inline(editor: Editor) -> list[str]:
    """Inlines the nodes whose condition is a constant now; returns their names."""
    model = editor.model
    graph = model.graph
    settled = _settled(editor)
    if not settled:
        return []
    constants = {tensor.name: tensor for tensor in graph.initializer}
    taken = all_names(model)
    chosen = {id(node): _branch(node, constants[node.input[0]], taken) for node in settled}
    nodes = []
    for node in graph.node:
        branch = chosen.get(id(node))
        if branch is None:
            nodes.append(node)
            continue
        graph.initializer.extend(branch.initializer)
        graph.sparse_initializer.extend(branch.sparse_initializer)
        nodes += branch.node
        for value, output in zip(branch.output, node.output, strict=True):
            if output:
                name = reserve_name(f"{node.name}_{output}", taken)
                nodes.append(onnx.helper.make_node("Identity", [value.name], [output], name=name))
    names = [node.name for node in settled]
    replace_nodes(graph, nodes)
    return names


def _settled(editor: Editor) -> list[onnx.NodeProto]:
    """The If nodes of the main graph whose condition is a constant that callers cannot override."""
    graph = editor.model.graph
    constants = {tensor.name for tensor in graph.initializer} - {value.name for value in graph.input}
    found = (n for n in graph.node if n.op_type == "If" and n.domain in MAIN_DOMAINS and n.input[0] in constants)
    return list(filter(editor.may_change, found))


def _opens(model: onnx.ModelProto) -> bool:
    try:
        open_session(model, optimize=False)
    except VerificationError as error:
        _log.info("not inlined: %s", error)
        return False
    return True


def _branch(node: onnx.NodeProto, condition: onnx.TensorProto, taken: set[str]) -> onnx.GraphProto:
    """A copy of the branch that a node takes; what it defines has names that nothing else has."""
    taken_branch = "then_branch" if array_in(condition).any() else "else_branch"
    made = onnx.GraphProto()
    made.CopyFrom(next(attribute.g for attribute in node.attribute if attribute.name == taken_branch))
    values = {tensor.name for tensor in made.initializer}
    values.update(name for inner in made.node for name in inner.output if name)
    rename_all(made, {name: reserve_name(name, taken) for name in sorted(values)})
    return made


_ALONE = ("Concat", "Sum", "Max", "Min", "Mean")  # of one input
_COPIES = ("Identity", "Dropout", "Cast", *_ALONE)


@rule(*_COPIES, did="nodes that only copy their input (Identity, Dropout, Cast, Concat) were removed")
def drop_identity(editor: Editor, node: onnx.NodeProto) -> None:
    """Nodes that copy their input: Identity, Dropout in inference, Cast to the type that a value has, Concat of one
    value.

    ``y = Identity(x)``, ``y = Dropout(x)`` without ``training_mode``, a Cast to its own type, and Concat, Sum, Max, Min
    and Mean of ``x`` alone compute ``y = x``. Readers of ``y`` read ``x`` instead. Where ``y`` is a graph output its
    name must stay: then the producer of ``x`` writes ``y`` directly, if nothing else needs ``x``.

    Exported decoders put an empty cache in front of each cache they get, and what the exporter leaves of it is a Concat
    that copies it: a ninth of a token's time in int8 (4 layers 768 wide, 128 positions, one thread).

    Left alone: an Identity between a graph input or a constant and a graph output, values that a body of control
    flow or the caller names, a Dropout whose mask is used or whose training mode is not constantly false.
    """
    copies = _keeps_type(editor, node) if node.op_type == "Cast" else _copies(editor, node)
    if copies and _bypass(editor, node):
        editor.done += 1


def _keeps_type(editor: Editor, cast: onnx.NodeProto) -> bool:
    known = editor.element_type(cast.input[0])
    return known is not None and known == attribute_int(cast, "to", 0)


def _copies(editor: Editor, node: onnx.NodeProto) -> bool:
    if node.op_type == "Identity":
        return True
    if node.op_type in _ALONE:
        return len(node.input) == 1
    if any(node.output[1:]):
        return False
    if len(node.input) < 3 or not node.input[2]:
        return True
    mode = editor.constant(node.input[2])
    return mode is not None and not array_in(mode).any()


def _bypass(editor: Editor, node: onnx.NodeProto) -> bool:
    """Takes the node out of the way if names allow; returns whether it did."""
    source, target = node.input[0], node.output[0]
    if not editor.is_pinned(target):
        editor.drop([node])
        editor.redirect(target, source)
        return True
    producer = editor.producers.get(source)
    if producer is None or not editor.is_private(source):
        return False
    editor.drop([node])
    editor.take_over_output(producer, target, position=list(producer.output).index(source))
    return True
