"""Real nets quantized by stock: every node has its entry, no heavy kernel is left over."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import QuantType, quantize_static

from kenosis_ort.verify import Cause, verify_fusion
from tests.downloaded import ZOO
from tests.models import FeedReader
from tests.verify.expect import check_complete

NETS = {
    "cifar_resnet20.onnx": 20, "mlperf_ic_resnet8.onnx": 10, "mlperf_kws_dscnn.onnx": 10, "squeezenet1.1.onnx": 26,
    "superres_espcn_x3.onnx": 4,
}  # fmt: skip
HEAVY = ("Conv", "Gemm", "MatMul")


@pytest.mark.parametrize("signed", [False, True], ids=["uint8", "int8"])
@pytest.mark.parametrize("net", NETS)
def test_stock_quantized_net(net: str, signed: bool, tmp_path: Path) -> None:
    if not (ZOO / net).exists():
        pytest.skip("the zoo is not here")
    source, path = onnx.load(ZOO / net), tmp_path / "quantized.onnx"
    inputs = {i.name: i.type.tensor_type.shape.dim for i in source.graph.input}
    shapes = {
        n: [d.dim_value or 32 for d in inputs[n]] for n in inputs.keys() - {t.name for t in source.graph.initializer}
    }
    feed = {name: np.random.default_rng(0).random(shape, np.float32) for name, shape in shapes.items()}
    types = {"activation_type": QuantType.QInt8 if signed else QuantType.QUInt8, "weight_type": QuantType.QInt8}
    quantize_static(source, path, FeedReader([feed]), per_channel=True, **types)
    found = verify_fusion(path)
    check_complete(onnx.load(path), found)
    heavy = [k for k in found.kernels if k.op_type in HEAVY]
    assert len(heavy) == NETS[net]
    assert all(k.kernel and k.absorbed_into is None for k in heavy)
    assert not any(kernel.endswith(HEAVY) for kernel in found.overhead)
    assert not any(k.cause is Cause.UNKNOWN for k in found.float_nodes())
    if not signed:
        assert found.integer_share() == 1.0
