"""4-bit weights work on every runtime, also on those whose own quantizer looks for types that onnx dropped."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from onnxruntime.quantization import QuantType, quant_utils

from kenosis_ort.quantizer.fusion_aware import FusionAwareQDQQuantizer
from tests import models

TABLES = ("ONNX_TYPE_TO_NP_TYPE", "ONNX_INT_TYPE_RANGE", "ONNX_INT_TYPE_SYMMETRIC_RANGE", "ONNX_INT_TYPE_REDUCED_RANGE")


def _array(model: onnx.ModelProto, name: str) -> np.ndarray:
    tensor = next(i for i in model.graph.initializer if i.name == name)
    return numpy_helper.to_array(tensor).astype(np.float32)


@pytest.mark.parametrize("weight_type", [QuantType.QInt4, QuantType.QUInt4])
def test_weights_are_four_bit_and_close(weight_type: QuantType) -> None:
    before = {name: copy.deepcopy(getattr(quant_utils, name)) for name in TABLES}
    model = models.conv_relu_chain()
    node = next(n for n in model.graph.node if n.op_type == "Conv")
    real = _array(model, node.input[1])
    quantizer = FusionAwareQDQQuantizer(
        model, False, False, weight_type, QuantType.QUInt8, None, [], [], ["Conv"], {"UseQDQContribOps": True}
    )
    quantized = quantizer.quantize_model()
    name = f"{node.input[1]}_quantized"
    stored = next(i for i in quantized.graph.initializer if i.name == name)
    assert stored.data_type in (TensorProto.INT4, TensorProto.UINT4)
    scale, zero = (_array(quantized, f"{node.input[1]}_{part}") for part in ("scale", "zero_point"))
    np.testing.assert_allclose((_array(quantized, name) - zero) * scale, real, atol=0.51 * float(scale))
    assert {name: getattr(quant_utils, name) for name in TABLES} == before
