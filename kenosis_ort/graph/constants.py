"""The operator table, constants as initializers, and an index of a main graph for changes in linear time.

What each operator is stands in one table that rewrites, passes, placement and calibration read. Operators go by the
names of `known_as`: one of a custom domain may be anything, and is nothing here. Source: the operator specifications of
ONNX and of ONNX Runtime's own domain.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Flag, auto
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import onnx
import onnx.helper
import onnx.numpy_helper

from kenosis_ort.graph import walk
from kenosis_ort.graph.outside import array_in, copy_without_weights, put_outside


class GraphIndex:
    """Producers, readers and constants of a main graph, kept up to date through its own edits.

    Edits to nodes are made in place. New content of constants, and the removal of nodes, reach the graph when `commit`
    is called, after which the index is not to be used any more: protobuf frees nothing that is overwritten, so that a
    weight changed twice in place would be held three times.

    Args:
        model: The model to index and edit.
        keep_values: Values that must keep existing with their meaning.

    Attributes:
        model: The model; of a copy made by `of_copy`, complete only behind `commit`.
    """

    @classmethod
    def of_copy(cls, model: onnx.ModelProto, keep_values: Collection[str] = ()) -> GraphIndex:
        """The index of a copy of a model; constants are copied once, by `commit`, as they are then."""
        index = cls(copy_without_weights(model, lambda _: True), keep_values, constants=model.graph.initializer)
        index._whole = False
        return index

    def __init__(
        self,
        model: onnx.ModelProto,
        keep_values: Collection[str] = (),
        *,
        constants: Sequence[onnx.TensorProto] | None = None,
    ) -> None:
        self.model = model
        self.graph = model.graph
        self._stored = {t.name: t for t in (self.graph.initializer if constants is None else constants)}
        self._whole = True
        self.nodes = list(self.graph.node)  # also keeps the wrappers alive, which makes their identity meaningful
        self.inputs = {value.name for value in self.graph.input}
        self.outputs = {value.name for value in self.graph.output}
        self.captured = {name for node in self.nodes for name in walk.captured_names(node)}
        self.keep_values = frozenset(keep_values)
        self.constants = {name: t for name, t in self._stored.items() if name not in self.inputs}
        self.producers: dict[str, onnx.NodeProto] = {}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        self._names = self.inputs | self.outputs | self.captured | self._stored.keys()
        for graph in walk.all_graphs(self.graph):  # a body may use a name of its own
            self._names.update(name for node in graph.node for name in node.output)
        for node in self.nodes:
            for name in node.output:
                self.producers[name] = node
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        self._changed: dict[str, None] = {}
        self._removed: set[int] = set()
        self._released: set[str] = set()

    def is_private(self, value: str) -> bool:
        """Whether exactly one node of the main graph reads the value and nothing else depends on it."""
        return len(self.readers.get(value, ())) == 1 and not self.is_pinned(value)

    def is_pinned(self, value: str) -> bool:
        """Whether the value's name and meaning are needed outside the main graph's nodes."""
        return value in self.outputs or value in self.captured or value in self.keep_values

    def constant(self, value: str) -> onnx.TensorProto | None:
        """The initializer of that name unless callers can override it."""
        return self.constants.get(value)

    def fresh_name(self, base: str) -> str:
        """A value name that the model does not use yet, and reserves it."""
        return walk.reserve_name(base, self._names)

    def store_constant(self, node: onnx.NodeProto, position: int, tensor: onnx.TensorProto, base: str) -> None:
        """Makes ``tensor`` the node's constant input at ``position``.

        A constant that only this input reads is replaced, under its own name where its shape stays: tools that compare
        a quantized model with the float one pair weights by name. One that others read as well is left to them, and
        the node gets a private one named after ``base``, as does one of another shape.
        """
        old = node.input[position] if position < len(node.input) else ""
        private = old in self.constants and self.readers.get(old) == [node] and not self.is_pinned_constant(old)
        if private and list(self.constants[old].dims) == list(tensor.dims):
            self.replace_constant(old, tensor)
            return
        self.replace_constant(self.fresh_name(base), tensor)
        while len(node.input) <= position:
            node.input.append("")
        if old:
            self.release(node, old)
        node.input[position] = tensor.name
        self.readers.setdefault(tensor.name, []).append(node)

    def replace_constant(self, name: str, tensor: onnx.TensorProto) -> None:
        """Makes ``tensor``, which is not to be used elsewhere, the constant of that name, new or not."""
        tensor.name = name
        self.constants[name] = put_outside(tensor)
        self._changed[name] = None

    def is_pinned_constant(self, value: str) -> bool:
        """Whether a constant's content is needed outside the main graph's nodes."""
        return value in self.outputs or value in self.captured

    def release(self, node: onnx.NodeProto, value: str) -> None:
        """Records that one input of ``node`` no longer reads ``value``."""
        readers = self.readers[value]
        for at, reader in enumerate(readers):
            if reader is node:
                del readers[at]
                break
        if not readers and value in self.constants:
            self._released.add(value)

    def remove(self, node: onnx.NodeProto) -> None:
        """Removes a node; its outputs must have been taken over by another node."""
        self._removed.add(id(node))
        for value in node.input:
            if value:
                self.release(node, value)

    def redirect(self, old: str, new: str) -> None:
        """Makes every node that reads ``old`` read ``new`` instead."""
        for reader in self.readers.pop(old, ()):
            for at, name in enumerate(reader.input):
                if name == old:
                    reader.input[at] = new
            self.readers.setdefault(new, []).append(reader)

    def take_over_output(self, node: onnx.NodeProto, output: str, *, position: int = 0) -> None:
        """Makes ``output`` an output of ``node`` in the place of its present one."""
        self.producers.pop(node.output[position], None)
        self.readers.pop(node.output[position], None)
        node.output[position] = output
        self.producers[output] = node

    def commit(self) -> onnx.ModelProto:
        """Brings the graph up to date, without constants that lost their last reader; returns the model."""
        if self._removed:
            replace_nodes(self.graph, [node for node in self.nodes if id(node) not in self._removed])
        unused = {name for name in self._released if not self.readers.get(name) and not self.is_pinned_constant(name)}
        if self._whole:
            self._change_constants(unused)
        else:
            self._fill_constants(unused)
        return self.model

    def _change_constants(self, unused: Collection[str]) -> None:
        for at in range(len(self.graph.initializer) - 1, -1, -1) if unused else ():
            if self.graph.initializer[at].name in unused:
                del self.graph.initializer[at]
        for name in self._changed:
            if name in unused:
                continue
            tensor = self._stored[name] if name in self._stored else self.graph.initializer.add()
            tensor.CopyFrom(self.constants[name])

    def _fill_constants(self, unused: Collection[str]) -> None:
        stored, constants = self._stored, self.constants
        self._stored, self.constants = {}, {}  # what was replaced is let go one by one
        for name in [*stored, *(name for name in self._changed if name not in stored)]:
            tensor = constants.pop(name, None)
            if name not in unused:
                self.graph.initializer.add().CopyFrom(stored[name] if tensor is None else tensor)


class Is(Flag):
    """What an operator is; most are several things."""

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


def having(wanted: Is) -> frozenset[str]:
    """The names of the operators that are all of what is wanted."""
    return frozenset(name for name, found in OPERATORS.items() if wanted in found)


LAYERS: Final = having(Is.LAYER) - having(Is.FUSED) - having(Is.INTEGER)
"""Conv, ConvTranspose, Gemm, MatMul."""
HEAVY: Final = having(Is.HEAVY) - having(Is.FUSED) - having(Is.INTEGER)
"""Conv, Gemm, MatMul."""
LAYOUT: Final = having(Is.MOVE) - {"DepthToSpace", "Dropout", "SpaceToDepth"}
"""Flatten, Identity, Reshape, Squeeze, Transpose, Unsqueeze."""


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
    remaining = [value for value in graph.input if value.name not in stored or value.name in keep]
    if not stored.intersection(value.name for value in graph.input):
        return ()
    moved = tuple(value.name for value in graph.input if value.name in stored and value.name not in keep)
    inputs = [_copy_value(value) for value in remaining]
    del graph.input[:]
    graph.input.extend(inputs)
    drop_initializers(graph, [at for at, tensor in enumerate(graph.initializer) if tensor.name in keep])
    return moved


def drop_initializers(graph: onnx.GraphProto, indices: Iterable[int]) -> None:
    """Removes the initializers at some places, in place."""
    for at in sorted(indices, reverse=True):
        del graph.initializer[at]


def drop_unread(graph: onnx.GraphProto) -> None:
    """Removes initializers that nothing reads, in place, with what the graph says of their data types."""
    read = {name for node in graph.node for name in walk.read_names(node)}
    read |= {value.name for value in (*graph.output, *graph.input)}
    drop_initializers(graph, [at for at, tensor in enumerate(graph.initializer) if tensor.name not in read])
    left = read | {name for node in graph.node for name in node.output}
    remaining = [entry for entry in graph.quantization_annotation if entry.tensor_name in left]
    if len(remaining) < len(graph.quantization_annotation):
        holder = onnx.GraphProto()
        holder.quantization_annotation.extend(remaining)
        del graph.quantization_annotation[:]
        graph.quantization_annotation.MergeFrom(holder.quantization_annotation)


def constants_to_initializers(model: onnx.ModelProto) -> tuple[str, ...]:
    """Turns the main graph's Constant nodes into initializers of the same names, in place.

    Sparse constants and those that are graph outputs stay nodes; bodies of control flow are left alone.

    Returns:
        The names of the nodes that are gone.
    """
    graph = model.graph
    outputs = {value.name for value in graph.output}
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
    holder = onnx.GraphProto()
    holder.node.extend(nodes)
    del owner.node[:]
    owner.node.MergeFrom(holder.node)


def _copy_value(value: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(value)
    return copy
