"""What a model file holds, at a glance."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

from kenosis_ort import quantize_static
from kenosis_ort.errors import ModelLoadError
from kenosis_ort.graph.load import TensorSummary, summarize
from kenosis_ort.quantizer.stock import QuantFormat
from tests import models


def value(name: str, shape: list[int | str | None] | None, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def small(weight: np.ndarray, *, kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Foo", ["y"], ["z"], domain="my.ops")],
        "g",
        [value("x", ["batch", None, 3], kind), value("w", list(weight.shape), kind)],
        [value("z", None, kind)],
        [numpy_helper.from_array(weight, "w")],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("my.ops", 2)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8, producer_name="me", producer_version="3")


def test_facts_of_a_small_model():
    found = summarize(small(np.zeros((3, 5), np.float32)))
    assert found.inputs == (TensorSummary("x", "float", ("batch", "?", 3)),)
    assert found.outputs == (TensorSummary("z", "float", None),)
    assert found.operators == {"MatMul": 1, "my.ops.Foo": 1}
    assert found.opsets == {"ai.onnx": 17, "my.ops": 2}
    assert (found.parameters, found.weight_bytes, found.weight_types) == (15, 60, {"float": 60})
    assert (found.producer, found.ir_version, found.quantization) == ("me 3", 8, "float")
    assert found.is_float
    assert found.path == "model 'g'"
    assert found.to_dict()["inputs"][0]["name"] == "x"


def test_half_precision_is_float_still():
    found = summarize(small(np.zeros((3, 5), np.float16), kind=TensorProto.FLOAT16))
    assert found.quantization == "float16"
    assert found.is_float


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


@pytest.mark.parametrize(
    ("how", "expected"),
    [({}, "QDQ"), ({"quant_format": QuantFormat.QOperator}, "QOperator")],
)
def test_what_was_quantized_is_told(how: dict[str, object], expected: str, tmp_path: Path):
    model, out = models.conv_relu_chain(2), tmp_path / "o.onnx"
    quantize_static(model, out, models.reader(model), recipe="plain", promise=False, **how)  # type: ignore[arg-type]
    found = summarize(out)
    assert found.quantization == expected
    assert not found.is_float
    assert found.file_bytes == out.stat().st_size


def test_dynamic_quantization_is_told(tmp_path: Path):
    source, out = tmp_path / "m.onnx", tmp_path / "o.onnx"
    onnx.save(models.mlp(), source)
    quantize_dynamic(source, out, weight_type=QuantType.QInt8)
    assert summarize(out).quantization == "dynamic or integer kernels"


def test_weights_only_is_told():
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["f"]),
        helper.make_node("MatMul", ["x", "f"], ["y"]),
    ]
    weights = [
        numpy_helper.from_array(np.ones((3, 5), np.int8), "w"),
        numpy_helper.from_array(np.float32(0.1), "s"),
    ]
    graph = helper.make_graph(nodes, "g", [value("x", [1, 3])], [value("y", [1, 5])], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    found = summarize(model)
    assert found.quantization == "weights only"
    assert found.weight_types == {"int8": 15, "float": 4}


def test_no_model_is_an_error(tmp_path: Path):
    path = tmp_path / "m.onnx"
    path.write_text("nothing")
    with pytest.raises(ModelLoadError):
        summarize(path)
