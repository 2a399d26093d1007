"""Any small net: what is made of it is what the plan says, loads, and computes what the float model computes."""

import tempfile
import warnings
from pathlib import Path

import numpy as np
import onnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kenosis_ort import quantize_static, verify_fusion
from kenosis_ort.plan import Kind
from tests import models, planning
from tests.graph.build import run
from tests.quantizer.performed import Performed
from tests.quantizer.random_nets import nets

HEAVY = ("Conv", "Gemm", "MatMul")


@settings(derandomize=True, suppress_health_check=list(HealthCheck))
@given(nets(), st.data())
def test_every_edge_is_as_decided_and_integer_nodes_are_integer(model: onnx.ModelProto, data: st.DataObject) -> None:
    names = [node.name for node in planning.prepared(model).graph.node]
    done = planning.quantize(
        model,
        nodes_to_exclude=frozenset(data.draw(st.lists(st.sampled_from(names), max_size=2))),
        protect_outputs=data.draw(st.sampled_from(["auto", "float", "int8", None])),
        per_channel=data.draw(st.booleans()),
    )
    Performed(done.model, done.quantized, done.plan).check()
    assert verify_fusion(done.quantized, plan=done.plan).avoidable(done.plan) == ()


@settings(derandomize=True, suppress_health_check=list(HealthCheck))
@given(nets())
def test_the_public_call(model: onnx.ModelProto) -> None:
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
