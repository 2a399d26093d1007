"""Models of other floating types, from the public call to the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from kenosis_ort import SyntheticReader, quantize_static
from tests import models
from tests.flow.support import heavy, quality, quantized, session
from tests.models import Feed

F32, F16, F64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE


def typed(model: onnx.ModelProto, kind: int) -> onnx.ModelProto:
    """Returns a float32 model in another type, edges included."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    for tensor in made.graph.initializer:
        if tensor.data_type == F32:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(dtype), tensor.name))
    for value in (*made.graph.input, *made.graph.output, *made.graph.value_info):
        if value.type.tensor_type.elem_type == F32:
            value.type.tensor_type.elem_type = kind
    return made


def feeds_of(model: onnx.ModelProto, kind: int, count: int = 4) -> list[Feed]:
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    feeds = models.feeds(model, count)
    return [{n: a.astype(dtype) if a.dtype == np.float32 else a for n, a in feed.items()} for feed in feeds]


def interface(model: onnx.ModelProto | Path) -> list[tuple[str, str, list[object]]]:
    opened = session(model)
    return [(v.name, v.type, v.shape) for v in (*opened.get_inputs(), *opened.get_outputs())]


RUN = ["residual_block", "two_input_detector", "mlp_matmul"]  # the runtime runs them in float16


@pytest.mark.parametrize("name", RUN)
def test_half_models_are_integer_where_float_models_are(tmp_path: Path, name: str) -> None:
    single = models.ALL[name]()
    half = typed(single, F16)
    reference = quantized(single, tmp_path / "single.onnx")
    feeds = feeds_of(single, F16)
    report = quantized(half, tmp_path / "half.onnx", feeds)
    assert any(heavy(report).values())
    kinds = {n.node: n.kind for n in report.plan.nodes if not n.node.endswith("_Cast")}
    assert kinds == {n.node: n.kind for n in reference.plan.nodes}
    assert interface(tmp_path / "half.onnx") == interface(half)
    for i in range(len(half.graph.output)):
        assert quality(half, tmp_path / "half.onnx", feeds, output=i) > 28
    stored = {t.data_type for t in onnx.load(tmp_path / "half.onnx").graph.initializer}
    assert F16 not in stored


def test_double_models_are_integer_too(tmp_path: Path) -> None:
    model = typed(models.mlp(), F64)  # the runtime has no Conv in double
    feeds = feeds_of(models.mlp(), F64)
    report = quantized(model, tmp_path / "out.onnx", feeds)
    assert all(heavy(report).values())
    assert interface(tmp_path / "out.onnx") == interface(model)
    assert quality(model, tmp_path / "out.onnx", feeds) > 30


def test_half_models_with_the_defaults_and_made_up_data(tmp_path: Path) -> None:
    model = typed(models.residual_block(), F16)
    quantize_static(model, tmp_path / "out.onnx", SyntheticReader(model, samples=4))
    assert interface(tmp_path / "out.onnx") == interface(model)
