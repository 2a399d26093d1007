"""What a model file holds, at a glance."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from kenosis_ort import quantize_static
from kenosis_ort.graph.summary import TensorSummary, summarize
from kenosis_ort.quantizer.stock import QuantFormat
from tests import models
from tests.graph.build import net


def small(weight: np.ndarray, kind: str = "float") -> onnx.ModelProto:
    dims = ",".join(map(str, weight.shape))
    text = f"({kind}[batch,?,3] x, {kind}[{dims}] w) => ({kind}[] z) {{ y = MatMul(x, w) z = my.Foo(y) }}"
    model = net(text, {"w": weight}, domains=("my",))
    model.producer_name, model.producer_version = "me", "3"
    return model


def test_facts_of_a_small_model():
    found = summarize(small(np.zeros((3, 5), np.float32)))
    assert found.inputs == (TensorSummary("x", "float", ("batch", "?", 3)),)
    assert found.outputs == (TensorSummary("z", "float", None),)
    assert found.operators == {"MatMul": 1, "my.Foo": 1}
    assert found.opsets == {"ai.onnx": 17, "my": 1}
    assert (found.parameters, found.weight_bytes, found.weight_types) == (15, 60, {"float": 60})
    assert (found.producer, found.ir_version, found.quantization) == ("me 3", 8, "float")
    assert found.is_float
    assert found.path == "model 'net'"
    assert found.to_dict()["inputs"][0]["name"] == "x"


def test_bodies_and_external_weights_count(tmp_path: Path):
    body = summarize(models.net_with_if())
    assert body.nodes == sum(body.operators.values())
    assert body.nodes > len(models.net_with_if().graph.node)
    path = tmp_path / "m.onnx"
    model = small(np.zeros((300, 50), np.float32))
    onnx.save_model(model, path, save_as_external_data=True, size_threshold=0)
    found = summarize(path)
    assert found.parameters == 15_000
    assert found.file_bytes == path.stat().st_size + 60_000


@pytest.mark.parametrize(("how", "expected"), [({}, "QDQ"), ({"quant_format": QuantFormat.QOperator}, "QOperator")])
def test_what_was_quantized_is_told(how: dict[str, object], expected: str, tmp_path: Path):
    model, out = models.conv_relu_chain(2), tmp_path / "o.onnx"
    quantize_static(model, out, models.reader(model), recipe="plain", promise=False, **how)  # type: ignore[arg-type]
    found = summarize(out)
    assert (found.quantization, found.is_float, found.file_bytes) == (expected, False, out.stat().st_size)


@pytest.mark.parametrize(("model", "expected", "types"), [
    (small(np.zeros((3, 5), np.float16), "float16"), "float16", {"float16": 30}),
    (net("(float[1,3] x) => (float[1,5] y) <int8[3,5] w, float s> { f = DequantizeLinear(w, s) y = MatMul(x, f) }"),
     "weights only", {"int8": 15, "float": 4}),
    (net("(uint8[2,3] x) => (int32[2,5] y) <int8[3,5] w> { y = MatMulInteger(x, w) }"),
     "dynamic or integer kernels", {"int8": 15}),
])  # fmt: skip
def test_types_and_kernels_tell_it(model: onnx.ModelProto, expected: str, types: dict[str, int]):
    found = summarize(model)
    assert (found.quantization, found.weight_types, found.is_float) == (expected, types, expected == "float16")
