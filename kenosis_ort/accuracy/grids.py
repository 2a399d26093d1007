"""The grids that a quantized model's weights lie on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper

from kenosis_ort.accuracy.layers import Float64, Layer
from kenosis_ort.graph.outside import array_in


@dataclass(frozen=True)
class WeightGrid:
    """The quantized weights of a layer.

    Attributes:
        integers: As they are stored, int8.
        scale: One number an output channel, or one for all, float64.
        input_scale: Scale of the data input, 0 where it is not known.
    """

    integers: npt.NDArray[Any]
    scale: Float64
    input_scale: float

    def dequantized(self, layer: Layer) -> Float64:
        """Returns the canonical real weights."""
        return layer.canonical(self.integers) * self.scale.reshape(-1, 1, 1)


def weight_grids(quantized: onnx.ModelProto) -> dict[str, WeightGrid]:
    """Returns the symmetric int8 weights of a QDQ model by the name of the node that reads them."""
    arrays = {t.name: t for t in quantized.graph.initializer}
    dequantized = {str(node.output[0]): node for node in quantized.graph.node if node.op_type == "DequantizeLinear"}
    found = {}
    for node in quantized.graph.node:
        weight = dequantized.get(node.input[1]) if len(node.input) > 1 else None
        if weight is None or weight.input[0] not in arrays or weight.input[1] not in arrays:
            continue
        integers = array_in(arrays[weight.input[0]])
        zero = arrays.get(weight.input[2]) if len(weight.input) > 2 else None
        if integers.dtype != np.int8 or (zero is not None and array_in(zero).any()):
            continue
        source = dequantized.get(node.input[0])
        scale = arrays.get(source.input[1]) if source is not None else None
        step = float(array_in(scale).reshape(-1)[0]) if scale is not None else 0.0
        own = array_in(arrays[weight.input[1]]).reshape(-1).astype(np.float64)
        found[str(node.name)] = WeightGrid(integers, own, step)
    return found
