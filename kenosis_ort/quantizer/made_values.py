"""Names for the dequantized form of values that the float model does not have.

``onnxruntime.quantization.qdq_loss_debug`` takes ``X_DequantizeLinear_Output`` for the counterpart of the float model's
``X``, and fails where there is no ``X``: a value that a rewrite made.
"""

from __future__ import annotations

from typing import Final

import onnx
from onnxruntime.quantization.quant_utils import DEQUANT_OUTPUT_SUFFIX

from kenosis_ort.graph.walk import all_graphs, reserve_name

_SUFFIX: Final = "_dequantized"


def name_made_values(quantized: onnx.ModelProto, original: onnx.ModelProto) -> None:
    """Renames in place what dequantizes values and weights that ``original`` does not have."""
    known = _names(original.graph)
    taken = _names(quantized.graph)
    new: dict[str, str] = {}
    for node in quantized.graph.node:
        name = node.output[0] if node.op_type == "DequantizeLinear" else ""
        base = name.removesuffix(DEQUANT_OUTPUT_SUFFIX)
        if base != name and base not in known:
            new[name] = node.output[0] = reserve_name(f"{base}{_SUFFIX}", taken)
    if not new:
        return
    for graph in all_graphs(quantized.graph):
        for node in graph.node:
            for index, name in enumerate(node.input):
                if name in new:
                    node.input[index] = new[name]


def _names(graph: onnx.GraphProto) -> set[str]:
    """The names of all values of a graph and its bodies."""
    names: set[str] = set()
    for inner in all_graphs(graph):
        names.update(value.name for value in (*inner.input, *inner.output, *inner.initializer))
        names.update(name for node in inner.node for name in node.output)
    return names
