"""Real nets quantized by stock: every node has its entry, no heavy kernel is left over."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

from kenosis_ort.verify import Cause, verify_fusion
from tests.downloaded import ZOO
from tests.verify.expect import check_complete

NETS = {
    "cifar_resnet20.onnx": 20,
    "mlperf_ic_resnet8.onnx": 10,
    "mlperf_kws_dscnn.onnx": 10,
    "squeezenet1.1.onnx": 26,
    "superres_espcn_x3.onnx": 4,
}
HEAVY = ("Conv", "Gemm", "MatMul")


class _Noise(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, model: onnx.ModelProto) -> None:
        rng = np.random.default_rng(0)
        self._feeds = [
            {
                i.name: rng.random([d.dim_value or 32 for d in i.type.tensor_type.shape.dim]).astype(np.float32)
                for i in model.graph.input
                if i.name not in {t.name for t in model.graph.initializer}
            }
        ]

    def get_next(self) -> dict[str, np.ndarray] | None:
        return self._feeds.pop() if self._feeds else None


@pytest.mark.parametrize("signed", [False, True], ids=["uint8", "int8"])
@pytest.mark.parametrize("net", NETS)
def test_stock_quantized_net(net: str, signed: bool, tmp_path: Path) -> None:
    if not (ZOO / net).exists():
        pytest.skip("the zoo is not here")
    source = onnx.load(ZOO / net)
    path = tmp_path / "quantized.onnx"
    quantize_static(
        source,
        path,
        _Noise(source),
        activation_type=QuantType.QInt8 if signed else QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        per_channel=True,
    )
    model = onnx.load(path)
    found = verify_fusion(path)
    check_complete(model, found)
    heavy = [k for k in found.kernels if k.op_type in HEAVY]
    assert len(heavy) == NETS[net]
    assert all(k.kernel and k.absorbed_into is None for k in heavy)
    assert not any(kernel.endswith(HEAVY) for kernel in found.overhead)
    assert not any(k.cause is Cause.UNKNOWN for k in found.float_nodes())
    if not signed:
        assert found.integer_share() == 1.0
