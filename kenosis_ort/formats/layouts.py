"""Layouts of QONNX' constants and operators.

QKeras' weights pass a Transpose behind their quantizer, as do those of channels-last operators. The runtime takes a
weight for its integer kernels only where DQ of an initializer is what the kernel's operator reads.

``Conv``, ``MaxPool`` and ``BatchNormalization`` of the domain ``qonnx.custom_op.channels_last`` read and write values
of shape (N, ..., C); Conv's weights are (O, ..., I). They become ONNX's own between two Transposes. All else about them
is as in ONNX. When it loads the model the runtime moves the Transposes together and drops those that cancel out.
Source: what the `qonnx` package 1.0.0 executes.
"""

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.errors import UnsupportedModelError
from kenosis_ort.formats.from_qdq import is_dequantize
from kenosis_ort.formats.qonnx_nodes import CHANNELS_LAST, drop_imports, label
from kenosis_ort.formats.tensors import Array, Draft
from kenosis_ort.graph.constants import LAYOUT
from kenosis_ort.graph.qdq import annotate, declared_datatypes
from kenosis_ort.graph.walk import MAIN_DOMAINS, attribute, attribute_int


def fold_layouts(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its quantized constants laid out as their readers want them.

    Args:
        model: A private model in the canonical spelling, its nodes in order; it is changed.
    """
    draft = Draft(model)
    constants: dict[str, onnx.NodeProto] = {}  # what a DQ of a constant writes -> the DQ
    declared = declared_datatypes(model.graph)
    for node in model.graph.node:
        source = constants.get(node.input[0]) if node.input else None
        if is_dequantize(node) and draft.is_constant(node.input[0]) and not attribute_int(node, "block_size", 0):
            constants[node.output[0]] = node
        elif source is not None and node.op_type in LAYOUT and node.domain in MAIN_DOMAINS:
            moved = _laid_out(node, source, draft)
            if moved is not None:
                node = _dequantized(node, source, *moved, draft)
                constants[node.output[0]] = node
                if source.input[0] in declared:
                    declared[node.input[0]] = declared[source.input[0]]
                    annotate(model.graph, node.input[0], declared[source.input[0]])
        draft.nodes.append(node)
    return draft.finish(may_go=lambda node: node.output[0] in constants)


def _laid_out(node: onnx.NodeProto, source: onnx.NodeProto, draft: Draft) -> tuple[Array, int | None] | None:
    """The integers as the layout operator leaves them, and their channel axis; None where that is not known."""
    integers, scale = draft.array(source.input[0]), draft.array(source.input[1])
    others = [draft.array(name) for name in node.input[1:] if name]
    if integers is None or scale is None or any(array is None for array in others):
        return None
    moved = _moved(node, integers, others)
    if moved is None or scale.ndim == 0:
        return None if moved is None else (moved, None)
    axis = attribute_int(source, "axis", 1) % max(integers.ndim, 1)
    channels = np.arange(integers.shape[axis]).reshape([-1 if at == axis else 1 for at in range(integers.ndim)])
    places = _moved(node, np.broadcast_to(channels, integers.shape), others)  # the channel of each
    assert places is not None
    along = [at for at, size in enumerate(places.shape) if size == channels.size]
    for at in along:
        shape = [-1 if other == at else 1 for other in range(places.ndim)]
        if np.array_equal(places, np.broadcast_to(channels.reshape(shape), places.shape)):
            return moved, at
    return None


def _moved(node: onnx.NodeProto, data: Array, others: list[Array | None]) -> Array | None:
    """What a layout operator makes of a constant, None where the shapes do not fit."""
    from onnx.reference import ReferenceEvaluator

    names = [name for name in node.input[1:] if name]
    try:
        (found,) = ReferenceEvaluator(node).run(None, {node.input[0]: data, **dict(zip(names, others, strict=True))})
    except (ValueError, IndexError):
        return None
    return np.asarray(found)


def _dequantized(
    node: onnx.NodeProto, source: onnx.NodeProto, integers: npt.ArrayLike, axis: int | None, draft: Draft
) -> onnx.NodeProto:
    name = draft.constant(np.ascontiguousarray(integers), f"{source.input[0]}_{node.op_type.lower()}")
    new = onnx.helper.make_node("DequantizeLinear", [name, *source.input[1:]], [node.output[0]], name=node.name)
    if axis is not None:
        new.attribute.append(onnx.helper.make_attribute("axis", axis))
    return new


_OPERATORS = frozenset({"Conv", "MaxPool", "BatchNormalization"})


def to_channels_first(model: onnx.ModelProto) -> None:
    """Puts ONNX's operators and Transposes in the place of the channels-last ones, in place.

    Nothing but Python looks at the model here.

    Raises:
        UnsupportedModelError: Another operator of the domain, or the rank of its data is not known.
    """
    if not any(node.domain == CHANNELS_LAST for node in model.graph.node):
        return
    draft = Draft(model)
    for node in model.graph.node:
        if node.domain != CHANNELS_LAST:
            draft.nodes.append(node)
            continue
        if node.op_type not in _OPERATORS or len(node.output) != 1 or not node.input:
            raise UnsupportedModelError(
                f"The channels-last operator has no counterpart in other formats (known are "
                f"{', '.join(sorted(_OPERATORS))}, with one output).",
                where=label(node),
                fix="leave the model in the format that it has, or export it with channels first",
            )
        _write(node, _rank(node, draft), draft)
    draft.finish()
    drop_imports(model, (CHANNELS_LAST,))


def _write(node: onnx.NodeProto, rank: int, draft: Draft) -> None:
    base = node.name or node.output[0]
    first, last = [0, rank - 1, *range(1, rank - 1)], [0, *range(2, rank), 1]
    new = onnx.NodeProto()
    new.CopyFrom(node)
    new.domain = ""
    for at in range(2 if node.op_type == "Conv" else 1):
        new.input[at] = draft.add("Transpose", [node.input[at]], base, perm=first)
    new.output[0] = draft.fresh(f"{base}_channels_first")
    draft.nodes.append(new)
    draft.add("Transpose", [new.output[0]], base, output=node.output[0], perm=last)


def _rank(node: onnx.NodeProto, draft: Draft) -> int:
    kernel = attribute(node, "kernel_shape")
    if kernel is not None and kernel.ints:
        return len(kernel.ints) + 2
    for name in (node.input[0], node.output[0]):
        rank = draft.rank(name)
        if rank is not None and rank > 1:
            return rank
    raise UnsupportedModelError(
        "The rank of the data of a channels-last operator is not known.",
        where=label(node),
        fix="declare the shapes of the values, as qonnx' InferShapes does, or give kernel_shape",
    )
