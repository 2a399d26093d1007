"""QONNX' operators on channels-last data, written as ONNX's own between two Transposes.

``Conv``, ``MaxPool`` and ``BatchNormalization`` of the domain ``qonnx.custom_op.channels_last`` read and write values
of shape (N, ..., C); Conv's weights are (O, ..., I). All else about them is as in ONNX. When it loads the model the
runtime moves the Transposes together and drops those that cancel out.
Source: what the `qonnx` package 1.0.0 executes.
"""

from __future__ import annotations

import onnx

from kenosis_ort.errors import UnsupportedModelError
from kenosis_ort.formats.draft import Draft
from kenosis_ort.formats.qonnx_nodes import CHANNELS_LAST, drop_imports, label
from kenosis_ort.graph.attributes import attribute

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
    ranks = _declared_ranks(model.graph)
    for node in model.graph.node:
        if node.domain != CHANNELS_LAST:
            draft.nodes.append(node)
            continue
        if node.op_type not in _OPERATORS or len(node.output) != 1 or not node.input:
            raise UnsupportedModelError(
                f"The channels-last operator has no counterpart in other formats (known are "
                f"{', '.join(sorted(_OPERATORS))}, with one output).",
                where=label(node),
            )
        _write(node, _rank(node, ranks), draft)
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


def _rank(node: onnx.NodeProto, ranks: dict[str, int]) -> int:
    kernel = attribute(node, "kernel_shape")
    if kernel is not None and kernel.ints:
        return len(kernel.ints) + 2
    for name in (node.input[0], node.output[0]):
        if ranks.get(name, 0) > 1:
            return ranks[name]
    raise UnsupportedModelError(
        "The rank of the data of a channels-last operator is not known.",
        where=label(node),
        fix="declare the shapes of the values, as qonnx' InferShapes does, or give kernel_shape",
    )


def _declared_ranks(graph: onnx.GraphProto) -> dict[str, int]:
    values = (*graph.input, *graph.output, *graph.value_info)
    return {v.name: len(v.type.tensor_type.shape.dim) for v in values if v.type.tensor_type.HasField("shape")}
