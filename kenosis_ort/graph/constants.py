"""The operator table, and constants as initializers.

What each operator is stands in one table that rewrites, passes, placement and calibration read. Operators go by the
names of `known_as`: one of a custom domain may be anything, and is nothing here. Source: the operator specifications of
ONNX and of ONNX Runtime's own domain.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from enum import Flag, auto
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.graph import walk
from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.walk import drop_initializers


class Is(Flag):
    """Properties of an operator; most have several."""

    LAYER = auto()
    """Multiplies its first input by weights and sums up."""
    HEAVY = auto()
    """A layer that takes nearly all of a net's time and has integer kernels."""
    FUSED = auto()
    """A layer as the runtime writes it with an activation in it."""
    INTEGER = auto()
    """A layer that multiplies integers, as quantized operators do."""
    RECURRENT = auto()
    """Runs layers of its own step by step."""
    ACTIVATION = auto()
    """A fixed function of each single number of its first input."""
    ELEMENTWISE = auto()
    """Each number of the output stems from the numbers at the same place of the inputs."""
    HOMOGENEOUS = auto()
    """A positive factor on its first input is a factor on its output."""
    POOL = auto()
    """Each channel of a picture or signal on its own, over a window or all of it."""
    REDUCTION = auto()
    """Takes axes together."""
    MOVE = auto()
    """The output holds the very numbers of the first input, each once, in another order or shape."""
    FREE = auto()
    """No number is touched: the runtime shares the buffer, or drops the node."""
    PICK = auto()
    """The outputs stay within the least and the largest number of the first input."""
    SHAPE = auto()
    """Reads shapes alone."""
    RANDOM = auto()
    """Returns something else each time."""


_EVERY: Final = Is.ELEMENTWISE | Is.ACTIVATION
_COPY: Final = Is.ELEMENTWISE | Is.HOMOGENEOUS | Is.MOVE | Is.FREE
_RESHAPE: Final = Is.HOMOGENEOUS | Is.MOVE | Is.FREE
_WINDOW: Final = Is.POOL | Is.PICK | Is.HOMOGENEOUS

_ROWS: Final[tuple[tuple[Is, str], ...]] = (
    (Is.LAYER | Is.HEAVY, "Conv Gemm MatMul"),
    (Is.LAYER, "ConvTranspose"),
    (Is.LAYER | Is.HEAVY | Is.FUSED, "FusedConv FusedGemm FusedMatMul"),
    (Is.LAYER | Is.HEAVY | Is.INTEGER, "QLinearConv QLinearMatMul QGemm MatMulIntegerToFloat"),
    (Is.LAYER | Is.HEAVY | Is.INTEGER, "ConvInteger MatMulInteger"),
    (Is.RECURRENT, "LSTM GRU RNN"),
    (_EVERY | Is.HOMOGENEOUS, "Relu LeakyRelu PRelu"),
    (_EVERY, "Clip Elu Selu Celu ThresholdedRelu Sigmoid HardSigmoid Tanh HardSwish Softplus Softsign Mish Swish"),
    (_EVERY, "Gelu FastGelu QuickGelu"),
    (Is.ELEMENTWISE, "Add Sub Mul Div Max Min Mean Sum Pow"),
    (Is.ELEMENTWISE | Is.HOMOGENEOUS, "Abs Neg"),
    (Is.ELEMENTWISE, "Erf Exp Reciprocal Sqrt"),
    (_COPY, "Identity Dropout"),
    (_RESHAPE, "Reshape Flatten Squeeze Unsqueeze"),
    (Is.HOMOGENEOUS | Is.MOVE, "Transpose DepthToSpace SpaceToDepth"),
    (Is.HOMOGENEOUS | Is.PICK, "Slice Gather Expand Split Tile"),
    (_WINDOW, "MaxPool AveragePool GlobalMaxPool GlobalAveragePool"),
    (Is.HOMOGENEOUS | Is.REDUCTION | Is.PICK, "ReduceMean ReduceMax ReduceMin"),
    (Is.HOMOGENEOUS | Is.REDUCTION, "ReduceSum"),
    (Is.SHAPE, "Shape Size"),
    (Is.RANDOM, "Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike"),
)

OPERATORS: Final[Mapping[str, Is]] = {name: what for what, names in _ROWS for name in names.split()}
"""What each operator is; one that is not listed is nothing of this."""

BOUNDS: Final[Mapping[str, tuple[float, float]]] = {
    **dict.fromkeys(("Sigmoid", "HardSigmoid", "Softmax"), (0.0, 1.0)),
    **dict.fromkeys(("Tanh", "Erf", "Softsign", "Sin", "Cos"), (-1.0, 1.0)),
    **dict.fromkeys(("Relu", "Softplus", "Exp", "Abs", "Sqrt"), (0.0, math.inf)),
    "LogSoftmax": (-math.inf, 0.0),
}
"""What the output of a function cannot exceed, whatever it is given."""


class HasOperator(Protocol):
    """A node, of ONNX or of `onnx_ir`."""

    @property
    def domain(self) -> str: ...
    @property
    def op_type(self) -> str: ...


def what(node: HasOperator) -> Is:
    """Properties of a node's operator; ``Is(0)``, which is false, for one that is not listed."""
    return OPERATORS.get(walk.known_as(node.domain, node.op_type), Is(0))


QONNX: Final = "qonnx.custom_op.general"
QONNX_DOMAINS: Final = frozenset({QONNX, "onnx.brevitas", "finn.custom_op.general"})
"""Where QONNX' operators live: its own domain, that of Brevitas' exports, and that of FINN before QONNX was."""


def having(wanted: Is) -> frozenset[str]:
    """The names of the operators that are all of what is wanted."""
    return frozenset(name for name, found in OPERATORS.items() if wanted in found)


LAYERS: Final = having(Is.LAYER) - having(Is.FUSED) - having(Is.INTEGER)
"""Conv, ConvTranspose, Gemm, MatMul."""
HEAVY: Final = having(Is.HEAVY) - having(Is.FUSED) - having(Is.INTEGER)
"""Conv, Gemm, MatMul."""
LAYOUT: Final = having(Is.MOVE) - {"DepthToSpace", "Dropout", "SpaceToDepth"}
"""Flatten, Identity, Reshape, Squeeze, Transpose, Unsqueeze."""


# Source operator that a kernel executes, where the names differ by more than a prefix.
_MATMULS: Final = ("FusedMatMul", "MatMulInteger", "MatMulIntegerToFloat", "MatMulNBits", "DynamicQuantizeMatMul")
_BASE: Final = {
    **dict.fromkeys(("QGemm", "FusedGemm"), "Gemm"),
    **dict.fromkeys(("FusedConv", "ConvInteger"), "Conv"),
    **dict.fromkeys(_MATMULS, "MatMul"),
    "NhwcMaxPool": "MaxPool",
    "QAttention": "Attention",
    "DynamicQuantizeLSTM": "LSTM",
}


def base_op(op_type: str) -> str:
    """The source operator of a kernel type: ``QLinearConv`` -> ``Conv``."""
    return _BASE.get(op_type) or (op_type[7:] if op_type.startswith("QLinear") else op_type)


_DEFAULTS_SINCE = 4  # IR version; before, exporters had to list every initializer as an input
_WEIGHTED = LAYERS | having(Is.RECURRENT) | {"BatchNormalization"}


def default_inputs(model: onnx.ModelProto) -> tuple[str, ...]:
    """The inputs of the main graph that callers may leave out, since an initializer has their name."""
    stored = {t.name for t in model.graph.initializer} | {s.values.name for s in model.graph.sparse_initializer}
    return tuple(v.name for v in model.graph.input if v.name in stored and model.ir_version >= _DEFAULTS_SINCE)


def meant_as_defaults(model: onnx.ModelProto) -> dict[str, npt.NDArray[Any]]:
    """The inputs with a default that are meant to be overridden, as far as the model tells, and the defaults.

    Where all initializers are listed, or weights of layers among them, they are listed out of habit.
    """
    listed = default_inputs(model)
    if not listed:
        return {}
    weights = {name for node in model.graph.node if node.op_type in _WEIGHTED for name in node.input[1:]}
    habit = len(listed) == len(model.graph.initializer) or weights.intersection(listed)
    found = {t.name: array_in(t) for t in model.graph.initializer if t.name in listed and not habit}
    return {name: array for name, array in found.items() if array.dtype.kind in "fiub"}


def detach_initializers(model: onnx.ModelProto, *, keep: Collection[str] = ()) -> tuple[str, ...]:
    """Takes initializers out of the main graph's inputs, in place.

    Exporters for IR versions before 4 had to list every weight as an input; a weight that is an input can be
    overridden by the caller, so neither the runtime nor quantization may treat it as constant.

    Args:
        model: The model to change.
        keep: Names of inputs that stay inputs; they lose their default values.

    Returns:
        The names taken out.
    """
    graph = model.graph
    stored = {tensor.name for tensor in graph.initializer} | {s.values.name for s in graph.sparse_initializer}
    listed = {value.name: value for value in graph.input}  # the runtime takes one that is listed twice
    remaining = [value for name, value in listed.items() if name not in stored or name in keep]
    if stored.isdisjoint(listed):
        return ()
    moved = tuple(name for name in listed if name in stored and name not in keep)
    replace_entries(graph, "input", remaining)
    drop_initializers(graph, [at for at, tensor in enumerate(graph.initializer) if tensor.name in keep])
    return moved


def drop_unread(graph: onnx.GraphProto) -> None:
    """Removes initializers that nothing reads, in place, with what the graph says of their data types."""
    read = {name for node in graph.node for name in walk.read_names(node)}
    read |= {value.name for value in (*graph.output, *graph.input)}
    drop_initializers(graph, [at for at, tensor in enumerate(graph.initializer) if tensor.name not in read])
    left = read | {name for node in graph.node for name in node.output}
    remaining = [entry for entry in graph.quantization_annotation if entry.tensor_name in left]
    if len(remaining) < len(graph.quantization_annotation):
        replace_entries(graph, "quantization_annotation", remaining)


def constants_to_initializers(model: onnx.ModelProto) -> tuple[str, ...]:
    """Turns the main graph's Constant nodes into initializers of the same names, in place.

    Sparse constants stay nodes, and graph outputs that are not inputs too; bodies of control flow are left alone.

    Returns:
        The names of the nodes that are gone.
    """
    graph = model.graph
    outputs = {value.name for value in graph.output} - {value.name for value in graph.input}
    others, gone = [], []
    for node in graph.node:
        tensor = constant_value(node) if node.op_type == "Constant" and node.output[0] not in outputs else None
        if tensor is None:
            others.append(node)
        else:
            tensor.name = node.output[0]
            graph.initializer.append(tensor)
            gone.append(node.name)
    if gone:
        replace_nodes(graph, others)
    return tuple(gone)


def constant_value(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """A copy of the tensor that a Constant node holds, None for a sparse or malformed one."""
    if len(node.attribute) != 1 or node.domain not in walk.MAIN_DOMAINS:
        return None
    attribute = node.attribute[0]
    if attribute.name == "value":
        if attribute.type != onnx.AttributeProto.TENSOR:
            return None
        copy = onnx.TensorProto()
        copy.CopyFrom(attribute.t)
        return copy
    if attribute.name in ("value_float", "value_floats"):
        numbers = attribute.floats if attribute.name.endswith("s") else attribute.f
        return onnx.numpy_helper.from_array(np.array(numbers, dtype=np.float32))
    if attribute.name in ("value_int", "value_ints"):
        integers = attribute.ints if attribute.name.endswith("s") else attribute.i
        return onnx.numpy_helper.from_array(np.array(integers, dtype=np.int64))
    if attribute.name == "value_string":
        return onnx.helper.make_tensor("", onnx.TensorProto.STRING, [], [attribute.s])
    if attribute.name == "value_strings":
        return onnx.helper.make_tensor("", onnx.TensorProto.STRING, [len(attribute.strings)], list(attribute.strings))
    return None


def replace_nodes(owner: walk.NodeOwner, nodes: list[onnx.NodeProto]) -> None:
    """Makes ``nodes`` the node list of a graph or function. They may be members of the present list."""
    replace_entries(owner, "node", nodes)


def replace_entries(owner: walk.NodeOwner | onnx.ModelProto, field: str, entries: Iterable[Any]) -> None:
    """Makes messages all that a repeated field holds, in place. They may be members of it."""
    holder = type(owner)()
    getattr(holder, field).extend(entries)
    owner.ClearField(field)
    getattr(owner, field).MergeFrom(getattr(holder, field))


def drop_stale_value_info(model: onnx.ModelProto, changed: Collection[str] = ()) -> None:
    """Removes value_info of values that the main graph no longer has, or whose type has changed, in place."""
    graph = model.graph
    names = {name for node in graph.node for name in node.output}
    names.update(value.name for value in graph.input)
    names.difference_update(changed)
    replace_entries(graph, "value_info", (value for value in graph.value_info if value.name in names))
