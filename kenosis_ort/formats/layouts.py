"""Layouts of QONNX' constants and operators.

QKeras' weights pass a Transpose behind their quantizer, as do those of channels-last operators. The runtime takes a
weight for its integer kernels only where DQ of an initializer is what the kernel's operator reads.

``Conv``, ``MaxPool`` and ``BatchNormalization`` of the domain ``qonnx.custom_op.channels_last`` read and write values
of shape (N, ..., C); Conv's weights are (O, ..., I). They become ONNX's own between two Transposes. All else about them
is as in ONNX. When it loads the model the runtime moves the Transposes together and drops those that cancel out.
Source: what the `qonnx` package 1.0.0 executes.
"""

from collections.abc import Sequence

import numpy as np
import onnx

from kenosis_ort.errors import UnsupportedModelError
from kenosis_ort.formats.from_qdq import is_dequantize
from kenosis_ort.formats.qonnx_nodes import CHANNELS_LAST, base_name, drop_imports, label, operator_of
from kenosis_ort.formats.tensors import Array, Edits
from kenosis_ort.graph.constants import LAYOUT
from kenosis_ort.graph.live import optional, required
from kenosis_ort.graph.qdq import annotate, declared_datatypes
from kenosis_ort.graph.view import ir
from kenosis_ort.graph.walk import MAIN_DOMAINS


def fold_layouts(model: onnx.ModelProto | Edits) -> Edits:
    """The model with its quantized constants laid out as their readers want them.

    Args:
        model: A private model in the canonical spelling, its nodes in order; it is changed.
    """
    live = Edits.of(model)
    constants: set[ir.Value] = set()  # what DQs of constants write
    declared = declared_datatypes(live.proto.graph)
    for node in live.nodes:
        source = optional(node, 0)
        maker = source.producer() if source is not None and source in constants else None
        if is_dequantize(node) and live.constant(source) is not None and not node.attributes.get_int("block_size", 0):
            constants.add(node.outputs[0])
        elif maker is not None and node.op_type in LAYOUT and node.domain in MAIN_DOMAINS:
            moved = _laid_out(node, maker, live)
            if moved is not None:
                integers, axis = moved
                old = required(maker, 0).name or ""
                new = live.store(integers, f"{old}_{node.op_type.lower()}")
                attributes = None if axis is None else {"axis": axis}
                live.rewrite(node, "DequantizeLinear", [new, *maker.inputs[1:]], attributes)
                constants.add(node.outputs[0])
                if old in declared:
                    declared[new.name or ""] = declared[old]
                    annotate(live.proto.graph, new.name or "", declared[old])
    live.remove_unread(lambda node: node.outputs[0] in constants)
    return live


def _laid_out(node: ir.Node, source: ir.Node, live: Edits) -> tuple[Array, int | None] | None:
    """The integers as the layout operator leaves them, and their channel axis; None where that is not known."""
    integers, scale = live.array(source.inputs[0]), live.array(source.inputs[1])
    others = [live.array(value) for value in node.inputs[1:] if value is not None]
    if integers is None or scale is None or any(array is None for array in others):
        return None
    moved = _moved(node, integers, others)
    if moved is None or scale.ndim == 0:
        return None if moved is None else (moved, None)
    axis = source.attributes.get_int("axis", 1) % max(integers.ndim, 1)
    channels = np.arange(integers.shape[axis]).reshape([-1 if at == axis else 1 for at in range(integers.ndim)])
    places = _moved(node, np.broadcast_to(channels, integers.shape), others)  # the channel of each
    assert places is not None
    along = [at for at, size in enumerate(places.shape) if size == channels.size]
    for at in along:
        shape = [-1 if other == at else 1 for other in range(places.ndim)]
        if np.array_equal(places, np.broadcast_to(channels.reshape(shape), places.shape)):
            return moved, at
    return None


def _moved(node: ir.Node, data: Array, others: Sequence[Array | None]) -> Array | None:
    """What a layout operator makes of a constant, None where the shapes do not fit."""
    from onnx.reference import ReferenceEvaluator

    names = [value.name or "" for value in node.inputs if value is not None]
    try:
        (found,) = ReferenceEvaluator(ir.to_proto(node)).run(None, dict(zip(names, (data, *others), strict=True)))
    except (ValueError, IndexError):
        return None
    return np.asarray(found)


_OPERATORS = frozenset({"Conv", "MaxPool", "BatchNormalization"})


def to_channels_first(model: onnx.ModelProto) -> None:
    """Puts ONNX's operators and Transposes in the place of the channels-last ones, in place.

    Nothing but Python looks at the model here.

    Raises:
        UnsupportedModelError: Another operator of the domain, or the rank of its data is not known.
    """
    if not any(node.domain == CHANNELS_LAST for node in model.graph.node):
        return
    live = Edits(model, copied=False)
    for node in live.nodes:
        if node.domain != CHANNELS_LAST:
            continue
        operator = operator_of(node)
        if operator not in _OPERATORS or len(node.outputs) != 1 or not node.inputs:
            raise UnsupportedModelError(
                f"The channels-last operator has no counterpart in other formats (known are "
                f"{', '.join(sorted(_OPERATORS))}, with one output).",
                where=label(node),
                fix="leave the model in the format that it has, or export it with channels first",
            )
        base, rank = base_name(node), _rank(node, live)
        first, last = [0, rank - 1, *range(1, rank - 1)], [0, *range(2, rank), 1]
        inputs = list(node.inputs)
        for at in range(2 if operator == "Conv" else 1):
            inputs[at] = live.add(node, "Transpose", [inputs[at]], base, perm=first)
        live.put(node, operator, inputs)
        value = node.outputs[0]
        output = live.hand_over(value, f"{base}_channels_first")
        live.add(node, "Transpose", [value], base, behind=True, output=output, perm=last)
    live.finish()
    drop_imports(model, (CHANNELS_LAST,))


def _rank(node: ir.Node, live: Edits) -> int:
    kernel = node.attributes.get("kernel_shape")
    if kernel is not None and kernel.type == ir.AttributeType.INTS and kernel.value:
        return len(kernel.value) + 2
    for value in (node.inputs[0], node.outputs[0]):
        rank = live.rank(value)
        if rank is not None and rank > 1:
            return rank
    what = "The rank of the data of a channels-last operator is not known."
    fix = "declare the shapes of the values, as qonnx' InferShapes does, or give kernel_shape"
    raise UnsupportedModelError(what, where=label(node), fix=fix)
