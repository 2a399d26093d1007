"""Changes of a model as a file says it: whatever field of whatever message, names, bodies, functions, bytes.

A mutation takes a model, changes it in place by dice, and returns a sentence about what it did, or None where the model
has nothing for it to change. Dice are a strategy's (``st.randoms``), so that what fails is made smaller.
"""

import contextlib
import copy
from collections.abc import Callable
from random import Random

import numpy as np
import onnx
from google.protobuf.message import Message
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort.graph.walk import all_graphs

Mutation = Callable[[onnx.ModelProto, Random], "str | None"]

NAMES = (
    *("", " ", "x", "a\nb", "\x1b[31mred\x1b[0m", "\u202egnp.x", "\u2066y\u2069", "name\twith\ttab"),
    *("<script>alert(1)</script>", "n" * 5000, "'quoted' \"twice\"", "[bold]markup[/bold]"),
    *("x_QuantizeLinear_Output", "x_scale", "é\u0301\U0001f600", "../../etc/passwd", "%s %d {0} {name}"),
    *("\x00", "conv0_w", "\r", "kv#1#", "a/b:0"),
)
INTS = (
    *(0, 1, -1, 2, 3, 7, -2, -7, 64, 127, 255, 256, 1000),
    *(65536, 2**31 - 1, 2**31, -(2**31), 2**40, 2**62, 2**63 - 1, -(2**63)),
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e-30, 1e30, 3e38, float("inf"), float("-inf"), float("nan"))
_SCHEMAS = [schema for schema in onnx.defs.get_all_schemas() if schema.domain in ("", "ai.onnx.ml")]
_FURTHER = """NoSuchOp FusedConv QLinearConv FusedMatMul Attention block silu FastGelu Affine MatMulNBits Trilu
    SkipLayerNormalization BiasGelu QuickGelu DynamicQuantizeMatMul"""
STRINGS = {
    "domain": ("", "ai.onnx", "com.microsoft", "ai.onnx.ml", "local", "no.such.domain", "com.microsoft.nchwc"),
    "op_type": (*sorted({schema.name for schema in _SCHEMAS}), *_FURTHER.split(), ""),
    "attribute": sorted({name for schema in _SCHEMAS if not schema.domain for name in schema.attributes}),
    "location": (
        *("weights.bin", "model.onnx", "missing", "", "..", ".", "../x", "/etc/passwd", "/dev/zero"),
        *("a\x00b", "weights.bin/x", "*/_ORT_MEM_ADDR_/*"),
    ),
    "offset": ("0", "-1", "4", "x", "", str(2**40), str(2**63), "1e3"),
    "length": ("0", "-4", "64", "x", "", str(2**40), str(2**64)),
}
"""What stands in strings, beside names, by what they are."""

BYTES = (b"", b"\xff\xfe", b"SAME_UPPER", b"VALID", b"reflect", b"linear", b"tanh", bytes(4), b"\x01" * 64)
_LARGEST = 2**20
_OFTEN = ("NodeProto", "AttributeProto", "TensorProto") * 3


def _messages(message):
    """A message and all within it."""
    yield message
    for _, value in message.ListFields():
        if isinstance(value, Message):
            yield from _messages(value)
        elif hasattr(value, "add"):  # several
            for part in value:
                yield from _messages(part)


def _owners(model):
    """What holds nodes."""
    return [*all_graphs(model.graph), *model.functions]


def _node(model, dice):
    nodes = [node for owner in _owners(model) for node in owner.node]
    return dice.choice(nodes) if nodes else None


def some_name(model, dice):
    """A name that is in use, or an odd one."""
    names = {name for owner in _owners(model) for node in owner.node for name in (*node.input, *node.output)}
    names |= {value.name for value in (*model.graph.input, *model.graph.initializer)}
    return dice.choice(sorted(names)) if names and dice.random() < 0.75 else dice.choice(NAMES)


def _odd(model, message, field, old, dice):
    """Another value of the kind of an old one."""
    if isinstance(old, str):
        known = "attribute" if isinstance(message, onnx.AttributeProto) and field == "name" else field
        known = getattr(message, "key", known) if field == "value" else known
        return dice.choice(STRINGS[known]) if known in STRINGS else some_name(model, dice)
    if isinstance(old, bytes):
        cut = dice.randrange(len(old) + 1)
        return dice.choice([*BYTES, old[:cut], old + bytes(dice.choice([1, 2, 4, 64])), old[cut:] + old[:cut]])
    if isinstance(old, float):
        return dice.choice(FLOATS)
    return dice.choice([*INTS, *range(1, 28), old + 1, old - 1])


def change_field(model, dice):
    """Changes one field of one message of the model, whichever it is."""
    found = {}
    for message in _messages(model):
        found.setdefault(message.DESCRIPTOR.name, []).append(message)
    kind = dice.choice([*sorted(found), *(name for name in _OFTEN if name in found)])
    message = dice.choice(found[kind])
    fields = [d.name for d, _ in message.ListFields()]
    if dice.random() < 0.3 or not fields:
        fields = [d.name for d in message.DESCRIPTOR.fields]
    field = dice.choice(fields)
    value = getattr(message, field)
    with contextlib.suppress(ValueError, TypeError):  # a number that the field cannot hold
        if isinstance(value, Message):
            how = _change_message(message, field, found, dice)
        elif isinstance(value, (str, bytes, int, float)):
            how = "set"
            message.ClearField(field)
            if dice.random() < 0.8:
                setattr(message, field, _odd(model, message, field, value, dice))
        else:
            how = _change_list(model, message, field, dice)
        return f"{kind}.{field} {how}"
    return None


def _change_message(message, field, found, dice):
    value = getattr(message, field)
    others = [other for other in found.get(value.DESCRIPTOR.name, []) if other.ByteSize() < _LARGEST]
    how = dice.choice(["cleared", "made", "taken from elsewhere"]) if others else "made"
    if how == "cleared":
        message.ClearField(field)
    elif how == "made":
        value.SetInParent()
    else:
        value.CopyFrom(copy.deepcopy(dice.choice(others)))
    return how


def _change_list(model, message, field, dice):
    held = getattr(message, field)
    values = [copy.deepcopy(value) for value in held]
    how = dice.choice([*(("dropped", "twice", "odd", "cut", "shuffled") if values else ()), "one more"])
    at = dice.randrange(len(values)) if values else 0
    sample = values[at] if values else {"strings": b"", "floats": 0.0}.get(field, "" if "put" in field else 0)
    odd = copy.deepcopy(held.add()) if hasattr(held, "add") else _odd(model, message, field, sample, dice)
    if how == "dropped":
        del values[at]
    elif how == "cut":
        del values[at:]
    elif how == "shuffled":
        dice.shuffle(values)
    elif how == "odd":
        values[at] = odd
    else:
        values += [sample if how == "twice" else odd] * dice.choice([1, 1, 40])
    del held[:]
    held.extend(values)
    return how


# ---- more than a field ----------------------------------------------------------------------------------------------


def rename_value(model, dice):
    """Renames a value everywhere, so that the model stays as valid as it was, but for clashes."""
    old, new = some_name(model, dice), dice.choice(NAMES) if dice.random() < 0.8 else some_name(model, dice)
    for owner in _owners(model):
        for node in owner.node:
            for names in (node.input, node.output):
                names[:] = [new if name == old else name for name in names]
        if isinstance(owner, onnx.GraphProto):
            for entry in (*owner.input, *owner.output, *owner.value_info, *owner.initializer):
                entry.name = new if entry.name == old else entry.name
    return f"renamed value {old!r} to {new!r}"


def external(model, dice):
    """Gives a tensor external data entries that may lead anywhere."""
    tensors = [message for message in _messages(model) if isinstance(message, TensorProto)]
    if not tensors:
        return None
    tensor = dice.choice(tensors)
    tensor.data_location = dice.choice([TensorProto.EXTERNAL, TensorProto.EXTERNAL, TensorProto.DEFAULT])
    for key in dice.sample(["location", "offset", "length"], dice.randint(1, 3)):
        tensor.external_data.add(key=key, value=dice.choice(STRINGS[key]))
    if dice.random() < 0.7:
        tensor.ClearField("raw_data")
    return f"external entries of {tensor.name!r}"


def store_sparse(model, dice):
    """Stores an initializer as a sparse one, which may lie."""
    held = dice.choice(list(all_graphs(model.graph))).initializer
    if not held:
        return None
    tensor = dice.choice(held)
    values = numpy_helper.from_array(np.ones(3, np.float32), tensor.name)
    indices = numpy_helper.from_array(np.array(dice.choice([[0, 1, 2], [5, 1, 10**9], [-1, 0, 1]])))
    dims = dice.choice([list(tensor.dims), [2**40, 2**20], [-1], []])
    model.graph.sparse_initializer.add(values=values, indices=indices, dims=dims)
    if dice.random() < 0.7:
        held.remove(tensor)
    return f"initializer {values.name!r} is sparse"


def nest_node(model, dice):
    """Moves a node into the branches of an If, several levels deep."""
    node = _node(model, dice)
    if node is None or not node.output:
        return None
    inner, depth = copy.deepcopy(node), dice.choice([1, 1, 2, 5, 30])
    for _ in range(depth):
        body = onnx.GraphProto(name="branch", node=[node], output=[onnx.ValueInfoProto(name=n) for n in inner.output])
        flag = dice.choice(["nested_flag", "nested_flag", "missing_flag"])
        outer = helper.make_node("If", [flag], [*inner.output], f"{inner.name}_if", then_branch=body, else_branch=body)
        node.CopyFrom(outer)
        if node.ByteSize() > 2**16:  # both branches hold the body: the size doubles by level
            break
    if "nested_flag" not in {t.name for t in model.graph.initializer}:
        model.graph.initializer.append(numpy_helper.from_array(np.array(True), "nested_flag"))
    return f"moved {inner.name!r} into {depth} bodies"


def make_function(model, dice):
    """Makes a function of a node, in its own domain or another, or has a function call itself."""
    node = _node(model, dice)
    if node is None:
        return None
    what = dice.choice(["recursive", "override", "wrap"]) if model.functions else "wrap"
    if what == "recursive":
        f = dice.choice(model.functions)
        f.node.add(op_type=f.name, domain=f.domain, input=f.input, output=f.output)
        return f"function {f.name!r} calls itself"
    domain = node.domain if what == "override" else "local"
    model.functions.add(
        domain=domain, name=node.op_type, input=node.input, output=node.output, node=[copy.deepcopy(node)]
    ).opset_import.extend(model.opset_import)
    node.domain = domain
    if domain not in {entry.domain for entry in model.opset_import}:
        model.opset_import.add(domain=domain, version=1)
    return f"function: {what} of {node.op_type}"


def add_giant(model, dice):
    """Adds a constant subgraph whose result takes more memory than there is, perhaps used by the net."""
    sizes = dice.choice([[2**31, 2**20], [2**62], [2**40], [2**33], [-1], [2**31, 2**31, 4], [0], [10**5, 10**5]])
    call = dice.choice(["ConstantOfShape(a)", "EyeLike(a)", "Expand(b, a)", "Tile(b, a)", "Range(c, d, e)", "Random"])
    shape = f"<shape = {sizes}>()" if call == "Random" else ""
    node = onnx.parser.parse_node(f"giant = {call.replace('Random', 'RandomNormal')}{shape}")
    step = dice.choice([1, 0, -1])
    arrays = {"a": sizes, "b": np.ones([1] * len(sizes), np.float32), "c": 0, "d": sizes[0], "e": step}
    for at, name in enumerate(node.input):
        node.input[at] = f"giant_{name}"
        model.graph.initializer.append(numpy_helper.from_array(np.array(arrays[name]), node.input[at]))
    readers = [n for n in model.graph.node if n.input]
    if readers and dice.random() < 0.7:
        reader = dice.choice(readers)
        reader.input[dice.randrange(len(reader.input))] = "giant"
    model.graph.node.insert(0, node)
    return f"giant constant by {call} of {sizes}"


STRUCTURAL = (
    *[change_field] * 14,
    *(rename_value, rename_value, external, store_sparse, nest_node, make_function, add_giant),
)


def damage(data, dice):
    """Changes a few bytes of a file."""
    content = bytearray(data)
    what = dice.choice(["flip", "flip", "flip", "cut", "slice", "insert", "repeat"])
    ends = min(len(content), 800)  # nodes stand at the beginning, the interface at the end, weights between
    at = dice.choice([dice.randrange(len(content)), dice.randrange(ends), len(content) - 1 - dice.randrange(ends)])
    length = dice.choice([1, 2, 8, 64, 512])
    if what == "flip":
        for where in range(at, min(at + dice.choice([1, 1, 2, 8]), len(content))):
            content[where] = dice.choice([0, 0x7F, 0x80, 0xFF, content[where] ^ (1 << dice.randrange(8))])
    elif what in ("cut", "slice"):
        del content[at : len(content) if what == "cut" else at + length]
    else:
        content[at:at] = content[at : at + length] if what == "repeat" else bytes(dice.choices(range(256), k=length))
    return bytes(content), f"bytes: {what} at {at}"
