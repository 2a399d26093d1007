"""Mutations after which the runtime still loads a model, mostly: legal graphs that no exporter writes.

They look for what our own code takes for granted; `structure` looks for what nobody checks.
"""

import numpy as np
import onnx
import onnx.parser
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort.graph.structure import unsound
from tests.fuzz.structure import nest_node, rename_value

Shape = tuple["int | str | None", ...]

_FACTORS = (0.0, 1.0, -1.0, 0.5, 2.0, 3.7, 1e-8, 1e-30, 1e8, 1e30, 255.0, 1e-3)
_BOUNDS = ((0, 6), (-1, 1), (0, 0), (3, -3), (0.5, 2), (-5, -1))
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)
_ONE = """Relu Sigmoid Tanh Neg Abs Identity Dropout LeakyRelu Elu HardSwish HardSigmoid Softplus Softsign Exp
    Erf Floor Round Sign Sin Selu Celu ThresholdedRelu Reciprocal Softmax LogSoftmax Hardmax Atan Flatten Shape
    LpNormalization Sqrt Log IsNaN Not Ceil Size GlobalAveragePool ReduceMax NonZero Transpose RandomNormalLike"""
_TWO = "Mul Mul Add Add Sub Div Pow Max Min PRelu"
FORMS = (
    *(f"o = {op}(x)" for op in _ONE.split()),
    *(f"o = Cast<to = {kind}>(x)" for kind in (1, 7, 10, 11)),
    *(f"o = {op}({operands})" for op in _TWO.split() for operands in ("x, c", "c, x")),
    *(f"o = {op}(x, y)" for op in ("Add", "Mul", "Sub", "Max", "Sum")),
    *("o = Concat<axis = -1>(x, y)", "o = Concat<axis = 0>(x, e)", "o = Mod<fmod = 1>(x, c)"),
    *("o = Where(t, x, c)", "o = Where(t, c, x)", "o = Clip(x, l, h)", "o = Clip(x, l, h)"),
    *("o, m = Dropout(x)", 'o, "" = Dropout(x)'),
    *("s = SequenceConstruct(x) o = SequenceAt(s, i)", "s = Optional(x) o = OptionalGetElement(s)"),
    "s = Cast<to = 8>(x) o = Cast<to = 1>(s)",
)
"""What makes ``o`` of a value ``x`` and, where they are named, of another value ``y`` of its kind and of constants."""


def _types(model):
    """Element type and shape of the main graph's values, as far as ONNX infers them."""
    try:
        inferred = onnx.shape_inference.infer_shapes(model)
    except Exception:  # an earlier mutation left nothing to infer
        inferred = model
    found = {}
    for value in (*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output):
        tensor = value.type.tensor_type
        if tensor.HasField("shape"):
            dims = tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in tensor.shape.dim)
            found[value.name] = (tensor.elem_type, dims)
    return found


def _constant(model, array):
    name = f"added_{len(model.graph.initializer)}"
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    return name


def _edges(model, types):
    """Edges whose value is a float tensor: node, position, value."""
    return [
        (at, position, name)
        for at, node in enumerate(model.graph.node)
        for position, name in enumerate(node.input)
        if types.get(name, (0,))[0] in _FLOATS
    ]


def _others(model, types, name, at):
    """Values of the type and shape of one that are there before a node."""
    made = {value: number for number, node in enumerate(model.graph.node) for value in node.output}
    return [n for n, kind in types.items() if n != name and kind == types[name] and made.get(n, -1) < at]


def insert(model, dice):
    """Puts operators on an edge, or beside it as a dead end or one more output."""
    types = _types(model)
    edges = _edges(model, types)
    if not edges:
        return None
    at, position, value = dice.choice(edges)
    kind, shape = types[value]
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    form, low_high = dice.choice(FORMS), dice.choice(_BOUNDS)
    channels = shape[1] if len(shape) > 1 and isinstance(shape[1], int) else 1
    ranks = len(shape)
    dims = dice.choice([[], [1], [1] * ranks, [1] * (ranks + 1), [channels, *[1] * (ranks - 2)]])
    empty = [0 if axis == 0 else size if isinstance(size, int) else 1 for axis, size in enumerate(shape)]
    with np.errstate(all="ignore"):
        factor = np.full(dims, dice.choice(_FACTORS)).astype(dtype)
    arrays = {"c": factor, "e": np.zeros(empty, dtype), "t": np.array(dice.random() < 0.5), "i": np.array(0),
              "l": np.array(low_high[0], dtype), "h": np.array(low_high[1], dtype)}  # fmt: skip
    nodes = onnx.parser.parse_graph(f"g () => () {{ {form} }}").node
    others = _others(model, types, value, at) or [value]
    names, prefix = {"x": value, "y": dice.choice(others), "": ""}, f"inserted_{len(model.graph.node)}"
    for node in nodes:
        for name in node.input:
            if name in arrays and name not in names:
                names[name] = _constant(model, arrays[name])
        node.input[:] = [names.setdefault(name, f"{prefix}{name}") for name in node.input]
        node.output[:] = [names.setdefault(name, f"{prefix}{name}") for name in node.output]
        node.name = dice.choice(["", node.output[0]])
    where = dice.choice(["on the edge", "on the edge", "as a dead end", "as an output"])
    if where == "on the edge":
        model.graph.node[at].input[position] = names["o"]
    elif where == "as an output":
        model.graph.output.append(onnx.ValueInfoProto(name=names["o"]))
    for node in reversed(nodes):
        model.graph.node.insert(at, node)
    return f"{form} {where} of {value!r}"


def reroute(model, dice):
    """Reads one value in the place of another of its type and shape."""
    types = _types(model)
    edges = [(*edge, others) for edge in _edges(model, types) if (others := _others(model, types, edge[2], edge[0]))]
    if not edges:
        return None
    at, position, name, others = dice.choice(edges)
    model.graph.node[at].input[position] = other = dice.choice(others)
    return f"{other!r} is read in the place of {name!r}"


def add_output(model, dice):
    """Makes a value, a weight or an input a graph output, with or without a type."""
    names = [name for node in model.graph.node for name in node.output if name]
    names += [entry.name for entry in (*model.graph.initializer, *model.graph.input)]
    if not names:
        return None
    name, types = dice.choice(names), _types(model)
    kind = (types[name][0], list(types[name][1])) if name in types and dice.random() < 0.5 else None
    model.graph.output.append(
        helper.make_tensor_value_info(name, *kind) if kind is not None else onnx.ValueInfoProto(name=name)
    )
    return f"{name!r} is an output too"


def _stored(model):
    """Initializers whose content is in the model and sound."""
    return [t for t in model.graph.initializer if t.data_location != TensorProto.EXTERNAL and not unsound(t)]


ODD = (
    *(("whole", "times", factor) for factor in (0.0, 1.0, -1.0, 1e-30, 1e20, 1e-42)),
    *(("a row", "times", factor) for factor in (0, 1e-12, 1e-6, 1e4, -1)),
    *(("one number", "is", number) for number in (1e4, np.nan, np.inf)),
    *[("whole", "is", 0.3)] * 4,
)
"""What is made of a part of a weight: dead channels, one value, outliers, tiny, huge, not finite."""


def change_weight(model, dice):
    """Gives a weight odd numbers."""
    floats = [t for t in _stored(model) if t.data_type in _FLOATS and 0 not in t.dims]
    if not floats:
        return None
    tensor, (part, how, number) = dice.choice(floats), dice.choice(ODD)
    array = numpy_helper.to_array(tensor).copy()
    rows = array.reshape(len(array) if array.ndim else 1, -1)
    row, place = dice.randrange(len(rows)), dice.randrange(rows.shape[1])
    at = {"whole": np.s_[:, :], "a row": np.s_[row, :], "one number": np.s_[row, place]}[part]
    with np.errstate(all="ignore"):
        rows[at] = number if how == "is" else rows[at] * number
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return f"weight {tensor.name!r}: {part} {how} {number}"


MOVES = {
    "node": "w = Constant<value_int = 0>()",
    "identity": "w = Identity(s)",
    "transposed": "w = Transpose(s)",
    "cast": "c = Cast<to = 11>(s) w = Cast<to = 1>(c)",
}
"""Nodes that make a weight ``w``, of one that is stored as ``s``."""


def move_weight(model, dice):
    """Keeps a weight's numbers but stores them otherwise: as a node, an input's default, typed fields, computed."""
    stored_here, held = _stored(model), model.graph.initializer
    if not stored_here:
        return None
    tensor = dice.choice(stored_here)
    name, kind, array = tensor.name, tensor.data_type, numpy_helper.to_array(tensor)
    how = dice.choice(["default", "typed", "twin", *MOVES])
    if how == "default":
        model.graph.input.append(helper.make_tensor_value_info(name, kind, array.shape))
    elif how == "typed" and kind in (TensorProto.FLOAT, TensorProto.INT64):
        tensor.CopyFrom(helper.make_tensor(name, kind, array.shape, array.ravel().tolist()))
    elif how == "twin":
        readers = [(n, i) for n in model.graph.node for i, read in enumerate(n.input) if read == name]
        if readers:
            node, position = dice.choice(readers)
            node.input[position] = _constant(model, array)
    elif how in MOVES:
        nodes = onnx.parser.parse_graph(f"g () => () {{ {MOVES[how]} }}").node
        names = {"w": name, "s": f"{name}_stored", "c": f"{name}_wide"}
        for node in reversed(nodes):
            node.input[:], node.output[:] = ([names[n] for n in side] for side in (node.input, node.output))
            model.graph.node.insert(0, node)
        if how == "node":
            model.graph.node[0].attribute[0].CopyFrom(helper.make_attribute("value", tensor))
            held.remove(tensor)
        else:
            if how == "cast":
                model.graph.node[1].attribute[0].i = kind
            array = np.ascontiguousarray(array.T) if how == "transposed" else array
            tensor.CopyFrom(numpy_helper.from_array(array, names["s"]))
    return f"weight {name!r}: {how}"


def loosen_interface(model, dice):
    """Makes sizes symbolic or unknown, or drops the shapes of inputs or outputs."""
    values = [*model.graph.input, *model.graph.output]
    if not values:
        return None
    value, what = dice.choice(values), dice.choice(["one size", "one size", "shapeless", "all symbols"])
    shape = value.type.tensor_type.shape
    if what == "shapeless" or not shape.dim:
        value.type.tensor_type.ClearField("shape")
    elif what == "one size":
        dice.choice(shape.dim).dim_param = dice.choice(["", "N", "batch", "H", "a b", "0", "-1", "N*2"])
    else:
        for at, dim in ((at, dim) for v in values for at, dim in enumerate(v.type.tensor_type.shape.dim)):
            dim.dim_param = f"d{at}"
    return f"interface: {what} of {value.name!r}"


def clutter(model, dice):
    """Adds what nothing needs: inputs, weights, wrong value_info; takes names away."""
    graph = model.graph
    shapes = [[1], ["a", "b"], [], [9, 9, 9, 9]]
    names = ["nobody", *(n for node in graph.node for n in node.output if n)]
    infos = [helper.make_tensor_value_info(dice.choice(names), 1, dice.choice(shapes)) for _ in range(2)]
    weights = [np.ones((0, 3), np.float32), np.array(["a"], object), np.ones(5, np.complex64)]
    what = dice.choice(["input", "weight", "infos", "names", "doc"])
    if what == "input":
        graph.input.append(helper.make_tensor_value_info("spare", dice.choice([1, 7, 9]), [1, 2]))
    elif what == "weight":
        _constant(model, dice.choice(weights))
    elif what == "infos":
        graph.value_info.extend(infos)
    elif what == "names":
        for node in graph.node:
            node.name = ""
    else:
        graph.doc_string = graph.name = dice.choice(["", "\x1b[31m", "x" * 10000])
    return f"clutter: {what}"


LAYERS = {
    "Conv": 'auto_pad="SAME_UPPER" auto_pad="SAME_LOWER" auto_pad="VALID" auto_pad="NOTSET" dilations=[1,1] '
    "dilations=[2,2] dilations=[3,1] strides=[1,1] strides=[2,1] strides=[3,3] pads=[0,0,0,0] pads=[1,0,2,1] "
    "pads=[3,3,3,3] kernel_shape=",
    "Gemm": "alpha=0.0 alpha=-0.5 alpha=1e-20 beta=0.0 beta=2.0 beta=-1.0 transA=0 transA=1 transB=0 transB=1",
    "Softmax": "axis=0 axis=1 axis=-1 axis=2",
    "MaxPool": "ceil_mode=0 ceil_mode=1 pads=[1,1,1,1] strides=[1,1] strides=[3,3] dilations=[2,2]",
    "Concat": "axis=0 axis=1 axis=2 axis=-1",
    "Transpose": "perm=[0,1,2,3] perm=[3,2,1,0]",
    "LayerNormalization": "axis=-1 axis=1 epsilon=0.0 epsilon=1e-12 epsilon=10.0",
    "BatchNormalization": "epsilon=0.0 epsilon=1e-12 epsilon=1.0 momentum=0.0 training_mode=0 training_mode=1",
    "LSTM": 'hidden_size=6 layout=0 layout=1 direction="forward" direction="reverse" input_forget=0 input_forget=1',
}
"""Legal attributes of layers; those without a value are dropped alone."""


def change_layer(model, dice):
    """Changes a legal attribute of a layer: padding, strides, factors, axes, groups."""
    nodes = [node for node in model.graph.node if node.op_type in LAYERS]
    if not nodes:
        return None
    node = dice.choice(nodes)
    text = dice.choice(LAYERS[node.op_type].split())
    name, _, value = text.partition("=")
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    if value and dice.random() < 0.8:
        kept += onnx.parser.parse_node(f"y = {node.op_type} <{text}> (x)").attribute
    made = onnx.NodeProto(attribute=kept)
    del node.attribute[:]
    node.attribute.extend(made.attribute)
    return f"{node.name!r} ({node.op_type}): {name}"


GENTLE = (
    *[insert] * 8,
    *(reroute, add_output, change_weight, change_weight, move_weight, move_weight, loosen_interface, clutter),
    *(change_layer, rename_value, nest_node),
)
"""How often each counts is how often it stands here."""
