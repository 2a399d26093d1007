"""Mutations of what a model says: nodes, names, attributes, tensors, interface, operator sets, functions, bodies.

A mutation takes a model, changes it in place by the dice it is given, and returns a sentence about what it did, or
None where the model has nothing for it to change.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from random import Random
from typing import Any, Final

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from kenosis_ort.graph.walk import all_graphs
from tests.fuzz.gentle import GENTLE

Mutation = Callable[[onnx.ModelProto, Random], "str | None"]

ODD_NAMES: Final = (
    *("", " ", "x", "a\nb", "\x1b[31mred\x1b[0m", "\u202egnp.x", "\u2066y\u2069", "name\twith\ttab"),
    *("<script>alert(1)</script>", "n" * 5000, "'quoted' \"twice\"", "[bold]markup[/bold]"),
    *("x_QuantizeLinear_Output", "x_scale", "é\u0301\U0001f600", "../../etc/passwd", "%s %d {0} {name}"),
    *("\x00", "conv0_w", "\r", "kv#1#", "a/b:0"),
)
ODD_INTS: Final = (
    *(0, 1, -1, 2, 3, 7, -2, -7, 64, 127, 255, 256, 1000),
    *(65536, 2**31 - 1, 2**31, -(2**31), 2**40, 2**62, 2**63 - 1, -(2**63)),
)
ODD_FLOATS: Final = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e-30, 1e30, 3e38, float("inf"), float("-inf"), float("nan"))
DOMAINS: Final = (
    *("", "ai.onnx", "com.microsoft", "ai.onnx.ml", "local"),
    *("no.such.domain", "ai.onnx.training", "com.microsoft.nchwc"),
)
OP_TYPES: Final = (
    *sorted({schema.name for schema in onnx.defs.get_all_schemas() if schema.domain in ("", "ai.onnx.ml")}),
    *("NoSuchOp", ""),
    *("FusedConv", "QLinearConv", "FusedMatMul", "Gelu", "LayerNormalization", "Attention", "block", "silu"),
    *("FastGelu", "MatMulNBits", "SkipLayerNormalization", "Trilu", "Affine", "BiasGelu", "QuickGelu"),
    "DynamicQuantizeMatMul",
)
ATTRIBUTE_NAMES: Final = [
    *("axis", "axes", "perm", "pads", "kernel_shape", "strides", "dilations", "group", "alpha", "beta"),
    *("transA", "transB", "to", "epsilon", "mode", "auto_pad", "value", "body", "keepdims", "ceil_mode"),
    *("hidden_size", "direction", "approximate", "start", "end", "momentum", "output_shape"),
    *("count_include_pad", "storage_order", "num_outputs", "coordinate_transformation_mode"),
]


def _graphs(model: onnx.ModelProto) -> list[Any]:
    return [*all_graphs(model.graph), *model.functions]


def _node(model: onnx.ModelProto, dice: Random) -> tuple[Any, int] | None:
    places = [(graph, at) for graph in _graphs(model) for at in range(len(graph.node))]
    return dice.choice(places) if places else None


def _on_node(change: Callable[[onnx.ModelProto, Random, Any, int], str | None]) -> Mutation:
    """Mutation of a graph at one of its nodes, chosen by the dice."""

    @functools.wraps(change)
    def mutation(model: onnx.ModelProto, dice: Random) -> str | None:
        found = _node(model, dice)
        return None if found is None else change(model, dice, *found)

    return mutation


def _values(model: onnx.ModelProto) -> list[str]:
    names = {name for graph in _graphs(model) for node in graph.node for name in (*node.input, *node.output)}
    names.update(value.name for value in model.graph.input)
    names.update(tensor.name for tensor in model.graph.initializer)
    return sorted(names)


def _tensors(model: onnx.ModelProto) -> list[TensorProto]:
    found = [t for graph in all_graphs(model.graph) for t in graph.initializer]
    for graph in _graphs(model):
        found += [a.t for node in graph.node for a in node.attribute if a.HasField("t")]
    return found


def _rewrite(graph: Any, nodes: list[onnx.NodeProto]) -> None:
    copies = [copy.deepcopy(node) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def _some_name(model: onnx.ModelProto, dice: Random) -> str:
    return dice.choice(_values(model)) if dice.random() < 0.75 else dice.choice(ODD_NAMES)


# ---- nodes ----------------------------------------------------------------------------------------------------


@_on_node
def drop_node(model: onnx.ModelProto, dice: Random, graph: Any, at: int) -> str | None:
    what = f"dropped node {graph.node[at].name!r}"
    del graph.node[at]
    return what


@_on_node
def duplicate_node(model: onnx.ModelProto, dice: Random, graph: Any, at: int) -> str | None:
    twin = graph.node.add()
    twin.CopyFrom(graph.node[at])
    if dice.random() < 0.5:
        for position, name in enumerate(twin.output):
            twin.output[position] = f"{name}_twin"
    return f"duplicated node {twin.name!r}"


def reorder_nodes(model: onnx.ModelProto, dice: Random) -> str | None:
    graph = dice.choice(_graphs(model))
    nodes = list(graph.node)
    if len(nodes) < 2:
        return None
    if dice.random() < 0.5:
        dice.shuffle(nodes)
    else:
        a, b = dice.sample(range(len(nodes)), 2)
        nodes[a], nodes[b] = nodes[b], nodes[a]
    _rewrite(graph, nodes)
    return "reordered nodes"


@_on_node
def rewire_input(model: onnx.ModelProto, dice: Random, graph: Any, number: int) -> str | None:
    node = graph.node[number]
    if not node.input:
        node.input.append(_some_name(model, dice))
        return f"gave node {node.name!r} an input"
    at = dice.randrange(len(node.input))
    choice = dice.random()
    new = node.output[0] if choice < 0.1 and node.output else "" if choice < 0.25 else _some_name(model, dice)
    old, node.input[at] = node.input[at], new
    return f"rewired input {at} of {node.name!r} from {old!r} to {new!r}"


@_on_node
def rewire_output(model: onnx.ModelProto, dice: Random, graph: Any, number: int) -> str | None:
    node = graph.node[number]
    if not node.output:
        return None
    at = dice.randrange(len(node.output))
    new = "" if dice.random() < 0.2 else _some_name(model, dice)
    old, node.output[at] = node.output[at], new
    return f"output {at} of {node.name!r} renamed from {old!r} to {new!r}"


@_on_node
def change_arity(model: onnx.ModelProto, dice: Random, graph: Any, at: int) -> str | None:
    node = graph.node[at]
    names = dice.choice([node.input, node.output])
    if names and dice.random() < 0.6:
        del names[dice.randrange(len(names)) :]
        return f"cut inputs or outputs of {node.name!r}"
    names.extend([_some_name(model, dice) for _ in range(dice.choice([1, 1, 2, 40]))])
    return f"added inputs or outputs to {node.name!r}"


@_on_node
def rename_node(model: onnx.ModelProto, dice: Random, graph: Any, at: int) -> str | None:
    node = graph.node[at]
    others = [n.name for graph in _graphs(model) for n in graph.node]
    node.name = dice.choice(ODD_NAMES) if dice.random() < 0.6 else dice.choice(others)
    return f"named a node {node.name!r}"


def rename_value(model: onnx.ModelProto, dice: Random) -> str | None:
    """Renames a value everywhere, so that the model stays as valid as it was, but for clashes."""
    old = dice.choice(_values(model) or ["x"])
    new = dice.choice(ODD_NAMES) if dice.random() < 0.8 else _some_name(model, dice)
    for graph in _graphs(model):
        for node in graph.node:
            for names in (node.input, node.output):
                for at, name in enumerate(names):
                    if name == old:
                        names[at] = new
        if isinstance(graph, onnx.GraphProto):
            for entry in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
                if entry.name == old:
                    entry.name = new
    return f"renamed value {old!r} to {new!r}"


@_on_node
def change_op(model: onnx.ModelProto, dice: Random, graph: Any, at: int) -> str | None:
    node = graph.node[at]
    old, node.op_type = node.op_type, dice.choice(OP_TYPES)
    return f"{node.name!r} is no longer {old} but {node.op_type}"


@_on_node
def change_domain(model: onnx.ModelProto, dice: Random, graph: Any, at: int) -> str | None:
    node = graph.node[at]
    node.domain = dice.choice(DOMAINS)
    if dice.random() < 0.7 and node.domain not in {entry.domain for entry in model.opset_import}:
        model.opset_import.add(domain=node.domain, version=dice.choice([1, 1, 1, 3, 0, 2**31]))
    return f"{node.name!r} moved to domain {node.domain!r}"


# ---- attributes -----------------------------------------------------------------------------------------------


def change_attribute(model: onnx.ModelProto, dice: Random) -> str | None:
    places = [(n, a) for graph in _graphs(model) for n in graph.node for a in n.attribute]
    if not places:
        return None
    node, attribute = dice.choice(places)
    what = dice.choice(["value", "value", "value", "kind", "type", "name", "drop", "twin", "reference"])
    if what == "value":
        _odd_value(attribute, dice)
    elif what == "kind":
        _set(attribute, dice)
    elif what == "type":
        attribute.type = dice.choice(list(AttributeProto.AttributeType.values()))
    elif what == "name":
        attribute.name = dice.choice(ATTRIBUTE_NAMES) if dice.random() < 0.7 else dice.choice(ODD_NAMES)
    elif what == "drop":
        node.attribute.remove(attribute)
    elif what == "twin":
        node.attribute.add().CopyFrom(attribute)
    else:
        attribute.ref_attr_name = dice.choice(["slope", "none", ""])
    return f"attribute of {node.name!r} ({node.op_type}): {what}"


@_on_node
def add_attribute(model: onnx.ModelProto, dice: Random, graph: Any, at: int) -> str | None:
    node = graph.node[at]
    attribute = node.attribute.add(name=dice.choice(ATTRIBUTE_NAMES))
    _set(attribute, dice)
    return f"added attribute {attribute.name!r} to {node.name!r} ({node.op_type})"


def _odd_value(attribute: AttributeProto, dice: Random) -> None:
    kind = attribute.type
    if kind == AttributeProto.INT:
        attribute.i = dice.choice(ODD_INTS)
    elif kind == AttributeProto.FLOAT:
        attribute.f = dice.choice(ODD_FLOATS)
    elif kind == AttributeProto.STRING:
        attribute.s = dice.choice([b"", b"\xff\xfe", b"SAME_UPPER", b"VALID", b"reflect", b"linear", b"tanh"])
    elif kind == AttributeProto.INTS:
        numbers = list(attribute.ints)
        if numbers and dice.random() < 0.7:
            numbers[dice.randrange(len(numbers))] = dice.choice(ODD_INTS)
        else:
            numbers = numbers[:-1] if dice.random() < 0.5 else [*numbers, dice.choice(ODD_INTS)]
        attribute.ints[:] = numbers
    elif kind == AttributeProto.FLOATS:
        attribute.floats[:] = [dice.choice(ODD_FLOATS) for _ in range(dice.randrange(4))]
    elif kind == AttributeProto.TENSOR:
        _damage_tensor(attribute.t, dice)
    else:
        _set(attribute, dice)


def _set(attribute: AttributeProto, dice: Random) -> None:
    name = attribute.name
    value = dice.choice(
        [
            *(1, -1, 0, 7, 2**62, 1.5, float("nan"), "text", "", [1, 1], [0, 1, 2, 3], [-1], [1.5], ["a", "b"]),
            numpy_helper.from_array(np.ones((2, 2), np.float32)),
            numpy_helper.from_array(np.array(3)),
            helper.make_graph([], "empty", [], []),
            helper.make_tensor_type_proto(1, [2]),
        ]
    )
    attribute.CopyFrom(helper.make_attribute(name or "unnamed", value))
    attribute.name = name


# ---- tensors --------------------------------------------------------------------------------------------------


def change_tensor(model: onnx.ModelProto, dice: Random) -> str | None:
    tensors = _tensors(model)
    if not tensors:
        return None
    tensor = dice.choice(tensors)
    return f"tensor {tensor.name!r}: {_damage_tensor(tensor, dice)}"


def _damage_tensor(tensor: TensorProto, dice: Random) -> str:
    what = dice.choice(
        ["dim", "dim", "dims", "type", "cut", "grow", "fields", "segment", "empty", "scale", "odd", "external"]
    )
    if what == "dim" and tensor.dims:
        tensor.dims[dice.randrange(len(tensor.dims))] = dice.choice(ODD_INTS)
    elif what == "dims":
        numbers = list(tensor.dims)
        dice.shuffle(numbers)
        tensor.dims[:] = dice.choice([[], [1, *numbers], numbers[1:], numbers, [0], [2**31, 2**31, 2**31], [1] * 70])
    elif what == "type":
        tensor.data_type = dice.choice([*TensorProto.DataType.values(), 77])
    elif what == "cut":
        tensor.raw_data = tensor.raw_data[: dice.randrange(len(tensor.raw_data) + 1)]
    elif what == "grow":
        tensor.raw_data = tensor.raw_data + bytes(dice.choice([1, 2, 4, 64]))
    elif what == "fields":
        dice.choice([tensor.float_data.append, tensor.double_data.append])(dice.choice(ODD_FLOATS))
        if dice.random() < 0.5:
            tensor.ClearField("raw_data")
        if dice.random() < 0.3:
            tensor.string_data.append(b"\xff")
    elif what == "segment":
        tensor.segment.begin, tensor.segment.end = 0, dice.choice([1, 100])
    elif what == "empty":
        for field in ("raw_data", "float_data", "int32_data", "int64_data"):
            tensor.ClearField(field)
    elif what in ("scale", "odd"):
        _odd_numbers(tensor, dice, scale=what == "scale")
    elif what == "external":
        external(tensor, dice)
    return what


def _odd_numbers(tensor: TensorProto, dice: Random, *, scale: bool) -> None:
    try:
        array = numpy_helper.to_array(tensor).copy()
    except Exception:  # an earlier mutation left nothing to read
        return
    if array.dtype.kind not in "fiu" or not array.size:
        return
    name = tensor.name
    with np.errstate(all="ignore"):
        if scale:
            array = (array * dice.choice([0, 1e-30, 1e-8, 1e6, 1e30, -1])).astype(array.dtype)
        else:
            odd = dice.choice(ODD_FLOATS if array.dtype.kind == "f" else (0, 1, 2, 5, 127))
            array.flat[dice.randrange(array.size)] = odd
    tensor.CopyFrom(numpy_helper.from_array(array, name))


def external(tensor: TensorProto, dice: Random) -> str:
    """Gives a tensor external data entries that may lead anywhere."""
    tensor.data_location = dice.choice([TensorProto.EXTERNAL, TensorProto.EXTERNAL, TensorProto.DEFAULT])
    entries = {
        "location": dice.choice(
            [
                *("weights.bin", "model.onnx", "missing", "", "..", ".", "../x", "/etc/passwd", "/dev/zero"),
                *("a\x00b", "weights.bin/x", "*/_ORT_MEM_ADDR_/*"),
            ]
        ),
        "offset": dice.choice(["0", "-1", "4", "x", "", str(2**40), str(2**63), "1e3"]),
        "length": dice.choice(["0", "-4", "64", "x", "", str(2**40), str(2**64)]),
    }
    for key in dice.sample(sorted(entries), dice.randint(1, 3)):
        tensor.external_data.add(key=key, value=entries[key])
    if dice.random() < 0.7:
        tensor.ClearField("raw_data")
    return "external entries"


def change_initializers(model: onnx.ModelProto, dice: Random) -> str | None:
    held = dice.choice(list(all_graphs(model.graph))).initializer
    if not held:
        return None
    at = dice.randrange(len(held))
    what = dice.choice(["drop", "twin", "other", "input", "sparse", "rename"])
    name = held[at].name
    if what == "drop":
        del held[at]
    elif what == "twin":
        twin = held.add()
        twin.CopyFrom(held[at])
        if dice.random() < 0.5:
            _odd_numbers(twin, dice, scale=True)
    elif what == "other":
        held[at].name = dice.choice(held).name
    elif what == "input":
        model.graph.input.append(helper.make_tensor_value_info(name, held[at].data_type, list(held[at].dims)))
    elif what == "rename":
        held[at].name = dice.choice(ODD_NAMES)
    else:
        sparse = model.graph.sparse_initializer.add()
        sparse.values.CopyFrom(numpy_helper.from_array(np.ones(3, np.float32), name))
        sparse.indices.CopyFrom(numpy_helper.from_array(np.array(dice.choice([[0, 1, 2], [5, 1, 10**9], [-1, 0, 1]]))))
        sparse.dims.extend(dice.choice([list(held[at].dims), [2**40, 2**20], [-1], []]))
        if dice.random() < 0.7:
            del held[at]
    return f"initializer {name!r}: {what}"


# ---- interface ------------------------------------------------------------------------------------------------


def change_interface(model: onnx.ModelProto, dice: Random) -> str | None:
    graph = dice.choice(list(all_graphs(model.graph)))
    values = dice.choice([graph.input, graph.output, graph.value_info])
    what = dice.choice(["drop", "twin", "type", "dim", "untyped", "shapeless", "kind", "unknown", "symbol", "add"])
    if what == "add" or not values:
        values.append(helper.make_tensor_value_info(_some_name(model, dice), dice.choice([1, 7, 10, 9]), [1, 4]))
        return "interface: added a value"
    at = dice.randrange(len(values))
    value = values[at]
    tensor = value.type.tensor_type
    if what == "drop":
        del values[at]
    elif what == "twin":
        values.add().CopyFrom(value)
    elif what == "type":
        tensor.elem_type = dice.choice([*TensorProto.DataType.values(), 77])
    elif what == "dim":
        dims = tensor.shape.dim
        (dice.choice(dims) if dims else dims.add()).dim_value = dice.choice(ODD_INTS)
    elif what == "untyped":
        value.ClearField("type")
    elif what == "shapeless":
        tensor.ClearField("shape")
    elif what == "kind":
        value.type.CopyFrom(_odd_type(dice))
    elif what == "symbol":
        tensor.shape.dim.add().dim_param = dice.choice(ODD_NAMES)
    else:
        value.name = dice.choice(ODD_NAMES)
    return f"interface: {what} of {value.name!r}"


def _odd_type(dice: Random) -> onnx.TypeProto:
    tensor = helper.make_tensor_type_proto(TensorProto.FLOAT, [1, 3])
    return dice.choice(
        [
            helper.make_sequence_type_proto(tensor),
            helper.make_optional_type_proto(tensor),
            helper.make_map_type_proto(TensorProto.INT64, tensor),
            helper.make_sparse_tensor_type_proto(1, [2, 2]),
            onnx.TypeProto(),
            helper.make_optional_type_proto(helper.make_sequence_type_proto(tensor)),
        ]
    )


def change_header(model: onnx.ModelProto, dice: Random) -> str | None:
    what = dice.choice(["opset", "opset", "opset", "drop", "twin", "ir", "metadata", "annotation", "training"])
    imports = model.opset_import
    if what == "opset" and imports:
        dice.choice(imports).version = dice.choice([*range(1, 28), 0, -1, 99, 2**31, 2**63 - 1])
    elif what == "drop" and imports:
        del imports[dice.randrange(len(imports))]
    elif what == "twin":
        imports.add(domain=dice.choice(DOMAINS), version=dice.choice([1, 8, 17, 30]))
    elif what == "ir":
        model.ir_version = dice.choice([0, 1, 2, 3, 4, 7, 13, 99, 2**62, -1])
    elif what == "annotation":
        note = model.graph.quantization_annotation.add(tensor_name=_some_name(model, dice))
        note.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value=dice.choice(ODD_NAMES))
    elif what == "training":
        model.training_info.add().algorithm.node.add(op_type="Adam")
    else:
        model.metadata_props.add(key=dice.choice(["onnx.quant.pre_process", "k", ""]), value=dice.choice(ODD_NAMES))
    return f"header: {what}"


# ---- nesting --------------------------------------------------------------------------------------------------


@_on_node
def nest_node(model: onnx.ModelProto, dice: Random, graph: Any, at: int) -> str | None:
    """Moves a node into the branches of an If, several levels deep."""
    if not graph.node[at].output:
        return None
    inner = copy.deepcopy(graph.node[at])
    depth = dice.choice([1, 1, 2, 5, 30])
    node = inner
    for _ in range(depth):
        body = helper.make_graph([node], "branch", [], [onnx.ValueInfoProto(name=name) for name in node.output])
        flag = dice.choice(["nested_flag", "nested_flag", "missing_flag"])
        node = helper.make_node(
            "If", [flag], list(inner.output), name=f"{inner.name}_if", then_branch=body, else_branch=body
        )
        if node.ByteSize() > 2**16:  # both branches hold the body: the size doubles by level
            break
    graph.node[at].CopyFrom(node)
    if "nested_flag" not in {t.name for t in model.graph.initializer}:
        model.graph.initializer.append(numpy_helper.from_array(np.array(True), "nested_flag"))
    return f"moved {inner.name!r} into {depth} bodies"


def change_function(model: onnx.ModelProto, dice: Random) -> str | None:
    """Makes functions recursive, of other signatures, or takes the place of a standard operator by one."""
    what = dice.choice(["recursive", "override", "signature", "drop", "opsets", "twin", "wrap"])
    functions = model.functions
    if what in ("override", "wrap") or not functions:
        found = _node(model, dice)
        if found is None:
            return None
        node = found[0].node[found[1]]
        own = copy.deepcopy(node)
        domain = node.domain if what == "override" else "local"
        inner = onnx.FunctionProto(domain=domain, name=node.op_type, input=node.input, output=node.output, node=[own])
        inner.opset_import.extend(model.opset_import)
        functions.append(inner)
        node.domain = domain
        if domain not in {entry.domain for entry in model.opset_import}:
            model.opset_import.add(domain=domain, version=1)
        return f"function: {what} of {node.op_type}"
    function = dice.choice(functions)
    if what == "recursive":
        function.node.add(op_type=function.name, domain=function.domain, input=function.input, output=function.output)
    elif what == "signature":
        names = dice.choice([function.input, function.output])
        names.append(dice.choice(ODD_NAMES)) if dice.random() < 0.5 else names.pop() if names else None
    elif what == "drop":
        functions.remove(function)
    elif what == "opsets":
        del function.opset_import[:]
        if dice.random() < 0.5:
            function.opset_import.add(domain="", version=dice.choice([0, 1, 11, 24, 99]))
    else:
        functions.add().CopyFrom(function)
    return f"function {function.name!r}: {what}"


def add_giant(model: onnx.ModelProto, dice: Random) -> str | None:
    """Adds a constant subgraph whose result takes more memory than there is, perhaps used by the net."""
    sizes = dice.choice([[2**31, 2**20], [2**62], [2**40], [2**33], [-1], [2**31, 2**31, 4], [0], [10**5, 10**5]])
    kind = dice.choice(["ConstantOfShape", "Expand", "Tile", "Range", "RandomNormal", "EyeLike"])
    store = model.graph.initializer
    if kind == "Range":
        for name, value in (("giant_0", 0), ("giant_1", sizes[0]), ("giant_2", dice.choice([1, 0, -1]))):
            store.append(numpy_helper.from_array(np.array(value), name))
        node = helper.make_node("Range", ["giant_0", "giant_1", "giant_2"], ["giant"])
    elif kind == "RandomNormal":
        node = helper.make_node("RandomNormal", [], ["giant"], shape=sizes)
    else:
        store.append(numpy_helper.from_array(np.array(sizes), "giant_shape"))
        store.append(numpy_helper.from_array(np.ones([1] * len(sizes), np.float32), "giant_one"))
        inputs = ["giant_shape"] if kind in ("ConstantOfShape", "EyeLike") else ["giant_one", "giant_shape"]
        node = helper.make_node(kind, inputs, ["giant"])
    nodes = [node, *model.graph.node]
    if dice.random() < 0.7:
        target = dice.choice(nodes[1:] or nodes)
        if target.input:
            target.input[dice.randrange(len(target.input))] = "giant"
    _rewrite(model.graph, nodes)
    return f"giant constant by {kind} of {sizes}"


STRUCTURAL: Final[tuple[Mutation, ...]] = (
    *(drop_node, duplicate_node, reorder_nodes, rewire_input, rewire_input, rewire_output, change_arity),
    *(rename_node, rename_value, rename_value, change_op, change_op, change_domain, change_attribute),
    *(change_attribute, change_attribute, add_attribute, change_tensor, change_tensor, change_tensor),
    *(change_initializers, change_interface, change_interface, change_header, nest_node, change_function),
    *(add_giant,),
)


_LEGAL: Final = (*GENTLE, *GENTLE, rename_value, rename_value, rename_node, reorder_nodes, nest_node)
_GENTLE_SHARE: Final = 0.7


def mutate(model: onnx.ModelProto, dice: Random) -> list[str]:
    """Applies one to six mutations in place; returns what was done."""
    said: list[str] = []
    gentle = dice.random() < _GENTLE_SHARE
    for _ in range(dice.choice([1, 2, 3, 4, 6] if gentle else [1, 1, 1, 2, 2, 3, 4])):
        kinds = _LEGAL if gentle and dice.random() < 0.97 else STRUCTURAL
        done = dice.choice(kinds)(model, dice)
        if done is not None:
            said.append(done)
    return said


def damage(data: bytes, dice: Random) -> tuple[bytes, str]:
    """Changes a few bytes of a file."""
    content = bytearray(data)
    what = dice.choice(["flip", "flip", "flip", "cut", "slice", "insert", "repeat", "ends"])
    ends = min(len(content), 800)  # nodes stand at the beginning, the interface at the end, weights between
    at = dice.choice([dice.randrange(len(content)), dice.randrange(ends), len(content) - 1 - dice.randrange(ends)])
    length = dice.choice([1, 2, 8, 64, 512])
    if what == "flip":
        for _ in range(dice.choice([1, 1, 2, 8])):
            where = min(at + dice.randrange(32), len(content) - 1)
            content[where] = dice.choice(
                [0, 0x7F, 0x80, 0xFF, content[where] ^ (1 << dice.randrange(8)), dice.randrange(256)]
            )
    elif what == "cut":
        del content[at:]
    elif what == "slice":
        del content[at : at + length]
    elif what == "insert":
        content[at:at] = dice.randbytes(length)
    elif what == "repeat":
        content[at:at] = content[at : at + length]
    else:
        content = content[: length or 1] + content[-length:]
    return bytes(content), f"bytes: {what} at {at}"
