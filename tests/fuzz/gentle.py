"""Mutations after which the runtime still loads a model, mostly: legal graphs that no exporter writes.

They look for what our own code takes for granted; `structure` looks for what nobody checks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort.graph.canonical import unsound

Mutation = Callable[[onnx.ModelProto, Random], "str | None"]
Shape = tuple["int | str | None", ...]

_FACTORS: Final = (0.0, 1.0, -1.0, 0.5, 2.0, 3.7, 1e-8, 1e-30, 1e8, 1e30, 255.0, 1e-3)
_UNARY: Final = [
    *("Relu", "Sigmoid", "Tanh", "Neg", "Abs", "Identity", "Dropout", "LeakyRelu", "Elu", "HardSwish"),
    *("HardSigmoid", "Softplus", "Softsign", "Exp", "Erf", "Floor", "Round", "Sign", "Sin", "Selu", "Celu"),
    *("ThresholdedRelu", "Reciprocal", "Softmax", "LogSoftmax", "Hardmax", "Atan", "Clip", "Cast", "Flatten"),
    *("Shape", "LpNormalization", "Sqrt", "Log", "IsNaN", "Not", "Ceil", "Size", "GlobalAveragePool"),
    *("ReduceMax", "NonZero", "Transpose"),
]


def _types(model: onnx.ModelProto) -> dict[str, tuple[int, Shape]]:
    """Returns element type and shape of the main graph's values, as far as ONNX infers them."""
    try:
        inferred = onnx.shape_inference.infer_shapes(model)
    except Exception:  # an earlier mutation left nothing to infer
        inferred = model
    found: dict[str, tuple[int, Shape]] = {}
    for value in (*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output):
        tensor = value.type.tensor_type
        if tensor.HasField("shape"):
            dims = tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in tensor.shape.dim)
            found[value.name] = (tensor.elem_type, dims)
    return found


def _fresh(model: onnx.ModelProto, base: str) -> str:
    taken = {name for node in model.graph.node for name in (*node.output, node.name)}
    taken |= {t.name for t in model.graph.initializer}
    number = 0
    while f"{base}{number}" in taken:
        number += 1
    return f"{base}{number}"


def _constant(model: onnx.ModelProto, array: Any) -> str:
    name = _fresh(model, "added_")
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    return name


def _edge(model: onnx.ModelProto, dice: Random) -> tuple[int, int, str, int, Shape] | None:
    """Returns an edge whose value is a float tensor: node, position, value, element type, shape."""
    types = _types(model)
    floats = (TensorProto.FLOAT, TensorProto.FLOAT16)
    edges = [
        (at, position, name, *types[name])
        for at, node in enumerate(model.graph.node)
        for position, name in enumerate(node.input)
        if name in types and types[name][0] in floats
    ]
    return dice.choice(edges) if edges else None


def _insert(model: onnx.ModelProto, at: int, *nodes: onnx.NodeProto) -> None:
    old = list(model.graph.node)
    copies = [copy.deepcopy(node) for node in (*old[:at], *nodes, *old[at:])]
    del model.graph.node[:]
    model.graph.node.extend(copies)


def insert_unary(model: onnx.ModelProto, dice: Random) -> str | None:
    """Puts an operator of one input on an edge, or beside it as a dead end or one more output."""
    edge = _edge(model, dice)
    if edge is None:
        return None
    at, position, value, kind, _ = edge
    op_type = dice.choice(_UNARY)
    out = _fresh(model, "unary_")
    attributes: dict[str, Any] = {"to": dice.choice([1, 7, 10, 11])} if op_type == "Cast" else {}
    inputs = [value]
    if op_type == "Clip":
        dtype = np.float16 if kind == TensorProto.FLOAT16 else np.float32
        bounds = dice.choice([(0, 6), (-1, 1), (0, 0), (3, -3), (0.5, 2), (-5, -1)])
        inputs += [_constant(model, np.array(bound, dtype)) for bound in bounds]
    outputs = [out, f"{out}_mask"] if op_type == "Dropout" and dice.random() < 0.6 else [out]
    name = dice.choice(["", out])
    node = helper.make_node(op_type, inputs, outputs, name=name, **attributes)
    where = dice.choice(["on the edge", "on the edge", "as a dead end", "as an output"])
    if where == "on the edge":
        model.graph.node[at].input[position] = out
    elif where == "as an output":
        model.graph.output.append(onnx.ValueInfoProto(name=out))
    _insert(model, at, node)
    return f"{op_type} {where} {value!r}"


def insert_binary(model: onnx.ModelProto, dice: Random) -> str | None:
    """Puts an operator with a constant operand on an edge."""
    edge = _edge(model, dice)
    if edge is None:
        return None
    at, position, value, kind, shape = edge
    op_type = dice.choice(
        ["Mul", "Mul", "Add", "Add", "Sub", "Div", "Pow", "Max", "Min", "PRelu", "Mod", "Where", "Concat"]
    )
    dtype = np.float16 if kind == TensorProto.FLOAT16 else np.float32
    with np.errstate(all="ignore"):
        number = np.array(dice.choice(_FACTORS)).astype(dtype)
    form = dice.choice(["scalar", "one", "ones", "channel", "rank"])
    channels = shape[1] if len(shape) > 1 and isinstance(shape[1], int) else 1
    dims = {
        "scalar": [],
        "one": [1],
        "ones": [1] * len(shape),
        "rank": [1] * (len(shape) + 1),
        "channel": [channels, *[1] * (len(shape) - 2)],
    }[form]
    operand = _constant(model, np.full(dims, number))
    out = _fresh(model, "binary_")
    inputs = [value, operand] if dice.random() < 0.6 else [operand, value]
    attributes: dict[str, Any] = {}
    if op_type == "Where":
        inputs = [_constant(model, np.array(dice.random() < 0.5)), *inputs]
    if op_type == "Mod":
        attributes = {"fmod": 1}
    if op_type == "Concat":
        empty = [0 if axis == 0 else size if isinstance(size, int) else 1 for axis, size in enumerate(shape)]
        inputs, attributes = [value, _constant(model, np.zeros(empty, dtype))], {"axis": 0}
    model.graph.node[at].input[position] = out
    _insert(model, at, helper.make_node(op_type, inputs, [out], name=out, **attributes))
    return f"{op_type} with {number} ({form}) on {value!r}"


def join_values(model: onnx.ModelProto, dice: Random) -> str | None:
    """Adds two values of one shape, or reads one in the place of another."""
    types = _types(model)
    places = [
        (at, position, name)
        for at, node in enumerate(model.graph.node)
        for position, name in enumerate(node.input)
        if name in types
    ]
    dice.shuffle(places)
    made = {name: at for at, node in enumerate(model.graph.node) for name in node.output}
    for at, position, name in places:
        others = [n for n, t in types.items() if n != name and t == types[name] and made.get(n, -1) < at]
        if not others:
            continue
        other = dice.choice(others)
        if dice.random() < 0.4:
            model.graph.node[at].input[position] = other
            return f"{other!r} is read in the place of {name!r}"
        out, op_type = _fresh(model, "joined_"), dice.choice(["Add", "Mul", "Sub", "Max", "Sum", "Concat"])
        attributes = {"axis": -1} if op_type == "Concat" else {}
        model.graph.node[at].input[position] = out
        _insert(model, at, helper.make_node(op_type, [name, other], [out], name=out, **attributes))
        return f"{op_type} of {name!r} and {other!r}"
    return None


def add_output(model: onnx.ModelProto, dice: Random) -> str | None:
    """Makes a value, a weight or an input a graph output, with or without a type."""
    names = [name for node in model.graph.node for name in node.output if name]
    names += [t.name for t in model.graph.initializer] + [v.name for v in model.graph.input]
    if not names:
        return None
    name = dice.choice(names)
    types = _types(model)
    if name in types and dice.random() < 0.5:
        model.graph.output.append(helper.make_tensor_value_info(name, types[name][0], list(types[name][1])))
    else:
        model.graph.output.append(onnx.ValueInfoProto(name=name))
    return f"{name!r} is an output too"


def _stored(model: onnx.ModelProto) -> list[TensorProto]:
    """Returns the initializers whose content is in the model and sound."""
    return [t for t in model.graph.initializer if t.data_location != TensorProto.EXTERNAL and not unsound(t)]


def change_weight(model: onnx.ModelProto, dice: Random) -> str | None:
    """Gives a weight odd numbers: dead channels, one value, outliers, tiny, huge, not finite."""
    floats = [t for t in _stored(model) if t.data_type in (TensorProto.FLOAT, TensorProto.FLOAT16)]
    if not floats:
        return None
    tensor = dice.choice(floats)
    array = numpy_helper.to_array(tensor).copy()
    if not array.size:
        return None
    what = dice.choice(
        ["zero", "dead", "same", "outlier", "tiny", "huge", "nan", "infinite", "denormal", "negative", "scaled"]
    )
    rows = array.reshape(array.shape[0], -1) if array.ndim else array.reshape(1, 1)
    with np.errstate(all="ignore"):
        if what in ("zero", "same"):
            array[...] = 0 if what == "zero" else 0.3
        elif what == "dead":
            rows[dice.randrange(len(rows))] = 0
        elif what == "scaled":
            rows[dice.randrange(len(rows))] *= array.dtype.type(dice.choice([1e-12, 1e-6, 1e4, -1]))
        elif what == "negative":
            array = -np.abs(array)
        elif what in ("tiny", "huge", "denormal"):
            array = (array * {"tiny": 1e-30, "huge": 1e20, "denormal": 1e-42}[what]).astype(array.dtype)
        else:
            array.flat[dice.randrange(array.size)] = {"outlier": 1e4, "nan": np.nan, "infinite": np.inf}[what]
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return f"weight {tensor.name!r}: {what}"


def move_weight(model: onnx.ModelProto, dice: Random) -> str | None:
    """Keeps a weight's numbers but stores them otherwise: as a node, an input's default, typed fields, computed."""
    stored_here, held = _stored(model), model.graph.initializer
    if not stored_here:
        return None
    at = list(held).index(dice.choice(stored_here))
    name, array = held[at].name, numpy_helper.to_array(held[at])
    how = dice.choice(["node", "default", "typed", "identity", "transposed", "cast", "twin", "unlisted"])
    kind = held[at].data_type
    if how == "node":
        node = helper.make_node("Constant", [], [name], value=held[at])
        del held[at]
        _insert(model, 0, node)
    elif how == "default":
        model.graph.input.append(helper.make_tensor_value_info(name, kind, array.shape))
    elif how == "typed" and array.dtype.kind in "fi" and kind in (TensorProto.FLOAT, TensorProto.INT64):
        held[at].CopyFrom(helper.make_tensor(name, kind, array.shape, array.ravel().tolist()))
    elif how == "twin":
        twin = _constant(model, array)
        readers = [(n, i) for n in model.graph.node for i, read in enumerate(n.input) if read == name]
        if readers:
            node, position = dice.choice(readers)
            node.input[position] = twin
    elif how in ("identity", "transposed", "cast"):
        held[at].name = stored = _fresh(model, "stored_")
        if how == "identity":
            nodes = [helper.make_node("Identity", [stored], [name])]
        elif how == "cast":
            nodes = [
                helper.make_node("Cast", [stored], [f"{stored}_c"], to=TensorProto.DOUBLE),
                helper.make_node("Cast", [f"{stored}_c"], [name], to=kind),
            ]
        else:
            axes = list(range(array.ndim))[::-1]
            held[at].CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array.T), stored))
            nodes = [helper.make_node("Transpose", [stored], [name], **({"perm": axes} if axes else {}))]
        _insert(model, 0, *nodes)
    return f"weight {name!r}: {how}"


def loosen_interface(model: onnx.ModelProto, dice: Random) -> str | None:
    """Makes sizes symbolic or unknown, or drops the shapes of outputs."""
    values = [*model.graph.input, *model.graph.output]
    if not values:
        return None
    value = dice.choice(values)
    tensor = value.type.tensor_type
    what = dice.choice(["symbol", "unknown", "shapeless", "all symbols"])
    dims = tensor.shape.dim
    if what == "shapeless" or not dims:
        tensor.ClearField("shape")
    elif what == "all symbols":
        for other in values:
            for at, dim in enumerate(other.type.tensor_type.shape.dim):
                dim.dim_param = f"d{at}"
    else:
        dim = dice.choice(dims)
        dim.Clear()
        if what == "symbol":
            dim.dim_param = dice.choice(["N", "batch", "H", "a b", "0", "-1", "N*2"])
    return f"interface: {what} of {value.name!r}"


def clutter(model: onnx.ModelProto, dice: Random) -> str | None:
    """Adds what nothing needs: inputs, weights, wrong value_info, annotations, nodes without names."""
    graph = model.graph
    what = dice.choice(
        [
            *("input", "weight", "info", "twin info", "names", "doc", "random", "sequence", "optional"),
            *("string", "empty outputs"),
        ]
    )
    if what == "input":
        graph.input.append(helper.make_tensor_value_info(_fresh(model, "spare_"), dice.choice([1, 7, 9]), [1, 2]))
    elif what == "weight":
        _constant(model, dice.choice([np.ones((0, 3), np.float32), np.array(["a"], object), np.ones(5, np.complex64)]))
    elif what in ("info", "twin info"):
        names = [n for node in graph.node for n in node.output if n] or ["x"]
        for _ in range(2 if what == "twin info" else 1):
            shape: list[Any] = dice.choice([[1], ["a", "b"], [], [9, 9, 9, 9]])
            graph.value_info.append(helper.make_tensor_value_info(dice.choice([*names, "nobody"]), 1, shape))
    elif what == "names":
        for node in graph.node:
            node.name = ""
    elif what == "doc":
        graph.doc_string = graph.name = dice.choice(["", "\x1b[31m", "x" * 10000])
    else:
        edge = _edge(model, dice)
        if edge is None:
            return None
        at, position, value, _, _ = edge
        out = _fresh(model, "clutter_")
        nodes = {
            "random": [helper.make_node("RandomNormalLike", [value], [out])],
            "sequence": [
                helper.make_node("SequenceConstruct", [value], [f"{out}_s"]),
                helper.make_node("SequenceAt", [f"{out}_s", _constant(model, 0)], [out]),
            ],
            "optional": [
                helper.make_node("Optional", [value], [f"{out}_o"]),
                helper.make_node("OptionalGetElement", [f"{out}_o"], [out]),
            ],
            "string": [
                helper.make_node("Cast", [value], [f"{out}_t"], to=TensorProto.STRING),
                helper.make_node("Cast", [f"{out}_t"], [out], to=TensorProto.FLOAT),
            ],
            "empty outputs": [helper.make_node("Dropout", [value], [out, ""])],
        }[what]
        if what != "random" or dice.random() < 0.3:
            graph.node[at].input[position] = out
        elif dice.random() < 0.3:
            graph.output.append(onnx.ValueInfoProto(name=out))
        _insert(model, at, *nodes)
    return f"clutter: {what}"


def change_layer(model: onnx.ModelProto, dice: Random) -> str | None:
    """Changes a legal attribute of a layer: padding, strides, factors, axes, groups."""
    choices: dict[str, dict[str, list[Any]]] = {
        "Conv": {
            "auto_pad": ["SAME_UPPER", "SAME_LOWER", "VALID", "NOTSET"],
            "dilations": [[1, 1], [2, 2], [3, 1]],
            "strides": [[1, 1], [2, 1], [3, 3]],
            "pads": [[0, 0, 0, 0], [1, 0, 2, 1], [3, 3, 3, 3]],
            "kernel_shape": [],
        },
        "Gemm": {"alpha": [0.0, 1.0, -0.5, 1e-20], "beta": [0.0, 2.0, -1.0], "transA": [0, 1], "transB": [0, 1]},
        "Softmax": {"axis": [0, 1, -1, 2]},
        "MaxPool": {"ceil_mode": [0, 1], "pads": [[1, 1, 1, 1]], "strides": [[1, 1], [3, 3]], "dilations": [[2, 2]]},
        "Concat": {"axis": [0, 1, 2, -1]},
        "Transpose": {"perm": [[0, 1, 2, 3], [3, 2, 1, 0]]},
        "LayerNormalization": {"axis": [-1, 1], "epsilon": [0.0, 1e-12, 10.0]},
        "BatchNormalization": {"epsilon": [0.0, 1e-12, 1.0], "momentum": [0.0], "training_mode": [0, 1]},
        "LSTM": {"hidden_size": [6], "layout": [0, 1], "direction": ["forward", "reverse"], "input_forget": [0, 1]},
        "Loop": {},
    }
    nodes = [node for node in model.graph.node if choices.get(node.op_type)]
    if not nodes:
        return None
    node = dice.choice(nodes)
    name = dice.choice(sorted(choices[node.op_type]))
    for attribute in [a for a in node.attribute if a.name == name]:
        node.attribute.remove(attribute)
    values = choices[node.op_type][name]
    if values and dice.random() < 0.8:
        node.attribute.append(helper.make_attribute(name, dice.choice(values)))
    return f"{node.name!r} ({node.op_type}): {name}"


GENTLE: Final[tuple[Mutation, ...]] = (
    *(insert_unary, insert_unary, insert_unary, insert_binary, insert_binary, join_values, add_output),
    *(change_weight, change_weight, move_weight, move_weight, loosen_interface, clutter, clutter, change_layer),
)
