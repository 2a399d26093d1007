"""Any small net through the public call: it loads, it computes what the float model computes, its plan holds."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import numpy as np
import onnx
from hypothesis import HealthCheck, given, settings

from kenosis_ort import quantize_static
from kenosis_ort.plan import Kind
from tests import models
from tests.graph.build import run
from tests.quantizer.random_nets import nets

HEAVY = ("Conv", "Gemm", "MatMul")


@settings(derandomize=True, suppress_health_check=list(HealthCheck))
@given(nets())
def test_any_net(model: onnx.ModelProto) -> None:
    check(model)


def check(model: onnx.ModelProto) -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # random nets may well be of poor quality
        out = Path(folder) / "out.onnx"
        report = quantize_static(model, out, models.reader(model, 3))
        quantized = onnx.load(out)
        assert [p.name for p in Path(folder).iterdir()] == ["out.onnx"]
    assert [v.name for v in quantized.graph.output] == [v.name for v in model.graph.output]
    feed = models.feeds(model, 1)[0]
    for want, got in zip(run(model, feed), run(quantized, feed), strict=True):
        assert want.shape == got.shape
        assert np.isfinite(got).all()
        noise = np.linalg.norm((want - got).astype(np.float64))
        assert noise <= 0.5 * np.linalg.norm(want.astype(np.float64)) + 1e-3
    assert report.fusion is not None
    planned = [n.node for n in report.plan.nodes if n.kind is Kind.INTEGER and n.op_type in HEAVY]
    assert [n for n in planned if not report.fusion.by_node[n].integer] == []
