"""Nodes that need not run: constant results, branches that are never taken, copies."""

import logging
import math
from collections.abc import Iterable, Mapping

import numpy as np
import onnx

from kenosis_ort.errors import VerificationError
from kenosis_ort.graph.constants import Is, constants_to_initializers, having, replace_nodes
from kenosis_ort.graph.outside import PLAIN, array_in, copy_model, tensor_bytes
from kenosis_ort.graph.shapes import infer_shapes
from kenosis_ort.graph.view import further_outputs, ir, optional
from kenosis_ort.graph.walk import MAIN_DOMAINS, all_names, rename_all, reserve_name
from kenosis_ort.rewrite.rule import Editor, operand, rule
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
    known: dict[ir.Value, int] = {}  # the bytes of values that are, or can be, constant
    candidates: list[ir.Node] = []
    statics: dict[ir.Value, onnx.TensorProto] = {}
    total = 0
    for node in editor.nodes:
        if not (editor.may_change(node) and _may_fold(node, editor)):
            continue
        read = [value for value in dict.fromkeys(node.inputs) if value is not None]
        for value in read:
            stored = editor.constant(value)
            if stored is not None:
                known[value] = tensor_bytes(stored) or 0
        tensor = _static(node, editor)
        if tensor is not None:
            statics[node.outputs[0]] = tensor
            known[node.outputs[0]] = tensor_bytes(tensor) or 0
        elif not all(value in known for value in read):
            continue
        given = sum(known[value] for value in read if value in known)
        outputs = [output for output in node.outputs if output.name]
        grown = _output_bytes(outputs, editor)
        if (
            grown is None
            and node.op_type in _NEVER_LARGER
            and all(editor.element_type(output) in PLAIN for output in outputs)
        ):
            grown = given
        if grown is None or grown > _GROWTH_FACTOR * given + _GROWTH_BYTES or total + given + grown > _SIZE_LIMIT:
            continue
        total += given + grown
        known.update(dict.fromkeys(outputs, grown))
        candidates.append(node)
    computed = _compute(candidates, editor, statics)
    if computed is not None:
        editor.drop(candidates)
        for output, tensor in computed.items():
            editor.add_initializer(tensor, output)
        editor.done = len(candidates)


def _may_fold(node: ir.Node, editor: Editor) -> bool:
    if node.domain not in MAIN_DOMAINS or node.op_type in _NEVER or editor.has_body(node):
        return False
    return not any(output.is_graph_output() or output.name in editor.keep_values for output in node.outputs)


def _static(node: ir.Node, editor: Editor) -> onnx.TensorProto | None:
    """Result of a node that depends on a shape alone, as far as that is known; None where it is not."""
    name = node.outputs[0].name
    if node.op_type in ("Shape", "Size"):
        dims = editor.dims(node.inputs[0])
        if dims is not None and node.op_type == "Shape":
            dims = dims[slice(node.attributes.get_int("start", 0), node.attributes.get_int("end", None))]
        if dims is None or None in dims:
            return None
        numbers = [dim for dim in dims if dim is not None]
        array = np.array(numbers if node.op_type == "Shape" else math.prod(numbers), np.int64)
        return onnx.numpy_helper.from_array(array, name)
    shape = editor.producer(node.inputs[0], "Shape") if node.op_type == "Gather" else None
    at = editor.array(node.inputs[1]) if shape is not None else None
    if shape is None or at is None or shape.attributes:
        return None
    dims = editor.dims(shape.inputs[0])
    if dims is None or any(not -len(dims) <= i < len(dims) or dims[i] is None for i in at.reshape(-1).tolist()):
        return None
    found = np.array([dims[i] for i in at.reshape(-1).tolist()], np.int64).reshape(at.shape)
    return onnx.numpy_helper.from_array(found, name)


def _output_bytes(outputs: Iterable[ir.Value], editor: Editor) -> int | None:
    """The bytes of the largest of a node's outputs, None where type or size are not known or not plain numbers."""
    largest = 0
    for output in outputs:
        elem_type, dims = editor.element_type(output), editor.dims(output)
        if elem_type not in PLAIN or dims is None or None in dims:
            return None
        itemsize = onnx.helper.tensor_dtype_to_np_dtype(elem_type).itemsize
        largest = max(largest, itemsize * math.prod(dim for dim in dims if dim is not None))
    return largest


def _compute(
    candidates: Iterable[ir.Node], editor: Editor, statics: Mapping[ir.Value, onnx.TensorProto]
) -> dict[ir.Value, onnx.TensorProto] | None:
    """Runs the candidates alone; returns the tensors that other nodes need, None where the runtime refuses."""
    model = editor.proto
    inner = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    inner.graph.name = "constants"
    folded = {id(node) for node in candidates}
    stored: set[str] = set()
    results: dict[ir.Value, onnx.TensorProto] = {}
    wanted: list[ir.Value] = []
    for node in candidates:
        outputs = [output for output in node.outputs if output.name]
        needed = [o for o in outputs if any(id(reader) not in folded for reader, _ in o.uses())]
        tensor = statics.get(node.outputs[0])
        if tensor is not None:
            inner.graph.initializer.append(tensor)
            results.update(dict.fromkeys(needed, tensor))
            continue
        for value in node.inputs:
            constant = editor.constant(value)
            if constant is not None and constant.name not in stored:
                stored.add(constant.name)
                inner.graph.initializer.append(constant)
        inner.graph.node.append(ir.to_proto(node))
        wanted += needed
    if not wanted:
        return results
    for value in wanted:
        inner.graph.output.add(name=value.name).type.tensor_type.elem_type = editor.element_type(value) or 0
    try:
        arrays = open_session(inner, optimize=False).run([value.name or "" for value in wanted], {})
    except Exception as error:  # the binding raises its own classes, all of them direct children of Exception
        _log.info("constants were not folded, the runtime refused: %s", str(error).splitlines()[0])
        return None
    results.update({v: onnx.numpy_helper.from_array(a, v.name) for v, a in zip(wanted, arrays, strict=True)})
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
    if not _settled(editor):
        return
    model = editor.write()
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
    model = editor.proto
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
    graph = editor.write().graph
    constants = {tensor.name for tensor in graph.initializer} - {value.name for value in graph.input}
    found = (n for n in graph.node if n.op_type == "If" and n.domain in MAIN_DOMAINS and n.input[0] in constants)
    return [node for node in found if editor.may_change(node)]


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
def drop_identity(editor: Editor, node: ir.Node) -> None:
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
    if _copies(editor, node) and _bypass(editor, node):
        editor.done += 1


def _copies(editor: Editor, node: ir.Node) -> bool:
    if node.op_type == "Identity":
        return True
    if node.op_type == "Cast":
        return editor.element_type(node.inputs[0]) == node.attributes.get_int("to", 0)
    if node.op_type in _ALONE:
        return len(node.inputs) == 1
    if further_outputs(node):
        return False
    if optional(node, 2) is None:
        return True
    mode = editor.array(node.inputs[2])
    return mode is not None and not mode.any()


def _bypass(editor: Editor, node: ir.Node) -> bool:
    """Takes the node out of the way if names allow; returns whether it did."""
    source, target = operand(node, 0), node.outputs[0]
    if not editor.is_pinned(target):
        editor.drop([node])
        editor.redirect(target, source)
        return True
    producer = source.producer()
    if producer is None or not editor.is_private(source):
        return False
    editor.drop([node])
    editor.take_over_output(producer, target, position=source.index() or 0)
    return True
