"""HardSigmoid behind a Conv or Gemm as Clip, its slope and shift moved into the weights.

With ``y[c] = x * W[c] + d[c]`` and a slope ``a > 0``::

    HardSigmoid(y) = max(0, min(1, a * y + b)) = Clip(x * (a W) + (a d + b); 0, 1)

In float it makes no difference. In integer HardSigmoid is a float island, while a Clip vanishes into the requantization
of the layer; and the requantization then spends all its steps on the values between the bounds. Squeeze-and-excite
gates end like that.

Not changed: a value that anything else needs, weights that are not constant, ``alpha`` and ``beta`` of Gemm other than
1, a slope that is not positive, types other than float32.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx.numpy_helper

from kenosis_ort.graph.attributes import attribute_float, attribute_int
from kenosis_ort.rewrite.integer_form import FloatArray, IntegerForm
from kenosis_ort.rewrite.matching import NotCollapsibleError
from kenosis_ort.rewrite.rule import integer_rule


@integer_rule(
    "HardSigmoid", did="HardSigmoid gates became Clips", stays="HardSigmoid gates stay float between integer kernels"
)
def hard_sigmoid_to_clip(form: IntegerForm, gate: onnx.NodeProto) -> None:
    """Turns each named HardSigmoid behind a named Conv or Gemm into Clip, in place."""
    layer = form.producer(gate.input[0], "Conv", "Gemm")
    if layer is None or layer.name not in form.named:
        return
    _change(form, layer, gate)


def _change(form: IntegerForm, layer: onnx.NodeProto, gate: onnx.NodeProto) -> None:
    value = gate.input[0]
    form.require_float32(value)
    if not form.index.is_private(value):
        raise NotCollapsibleError(f"'{value}' is needed elsewhere")
    slope, shift = attribute_float(gate, "alpha", 0.2), attribute_float(gate, "beta", 0.5)
    if slope <= 0.0:
        raise NotCollapsibleError("its slope is not positive")
    weights = form.array(layer.input[1])
    given = layer.input[2] if len(layer.input) > 2 else ""
    bias = form.array(given) if given else np.zeros(1)
    if weights is None or bias is None or weights.dtype != np.float32:
        raise NotCollapsibleError(f"the weights of '{layer.name}' are not constant")
    columns = layer.op_type == "Gemm" and not attribute_int(layer, "transB", 0)
    if any(attribute_float(layer, name, 1.0) != 1.0 for name in ("alpha", "beta")):
        raise NotCollapsibleError(f"'{layer.name}' has factors of its own")
    channels = weights.shape[1 if columns else 0]
    if bias.size not in (1, channels):
        raise NotCollapsibleError(f"the bias of '{layer.name}' is not one number a channel")
    moved: FloatArray = np.broadcast_to(bias.astype(np.float64).reshape(-1) * slope + shift, channels)
    for position, array in ((1, weights.astype(np.float64) * slope), (2, moved)):
        tensor = onnx.numpy_helper.from_array(np.ascontiguousarray(array, np.float32))
        base = layer.input[position] if position < len(layer.input) and layer.input[position] else f"{layer.name}_bias"
        form.index.store_constant(layer, position, tensor, f"{base}_gate")
    low, high = (form.add_constant(np.float32(number), f"{gate.name}_{number:g}") for number in (0, 1))
    form.become(gate, "Clip", [value, low, high])
