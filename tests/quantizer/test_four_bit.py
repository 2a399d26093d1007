"""4-bit weights work on every runtime, also on those whose own quantizer looks for types that onnx dropped."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from onnxruntime.quantization import QuantType, quant_utils

import kenosis_ort
from tests import models

TABLES = ("ONNX_TYPE_TO_NP_TYPE", "ONNX_INT_TYPE_RANGE", "ONNX_INT_TYPE_SYMMETRIC_RANGE", "ONNX_INT_TYPE_REDUCED_RANGE")


def _array(model: onnx.ModelProto, name: str) -> np.ndarray:
    tensor = next(i for i in model.graph.initializer if i.name == name)
    return numpy_helper.to_array(tensor).astype(np.float32)


@pytest.mark.parametrize(
    ("weight_type", "elem_type"), [(QuantType.QInt4, TensorProto.INT4), (QuantType.QUInt4, TensorProto.UINT4)]
)
def test_weights_are_four_bit_and_close(weight_type: QuantType, elem_type: int, tmp_path: Path) -> None:
    tables = {name: copy.deepcopy(getattr(quant_utils, name)) for name in TABLES}
    model = models.conv_relu_chain(2)
    weight = model.graph.node[0].input[1]
    reader = models.FeedReader(models.feeds(model, 2))
    kenosis_ort.quantize_static(model, tmp_path / "q.onnx", reader, weight_type=weight_type, per_channel=False)
    quantized = onnx.load(tmp_path / "q.onnx")
    stored = next(i for i in quantized.graph.initializer if i.name == f"{weight}_quantized")
    assert stored.data_type == elem_type
    scale, zero = _array(quantized, f"{weight}_scale"), _array(quantized, f"{weight}_zero_point")
    real = (_array(quantized, f"{weight}_quantized") - zero) * scale
    np.testing.assert_allclose(real, _array(model, weight), atol=0.51 * float(scale))
    assert {name: getattr(quant_utils, name) for name in TABLES} == tables
