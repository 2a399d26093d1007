"""Times by operator are told by the model's own nodes."""

from pathlib import Path

import onnx
import pytest

from kenosis_ort import quantize_static
from kenosis_ort.bench.op_times import profile_ops, with_measurements
from kenosis_ort.errors import CalibrationError, VerificationError
from kenosis_ort.report.gathering import gather_evidence
from tests import models
from tests.models import FeedReader, feeds


def test_every_conv_is_timed_once_under_its_own_name(tmp_path: Path):
    model = models.residual_block()
    few, before = feeds(model, 2), model.SerializeToString()
    onnx.save(model, tmp_path / "m.onnx")
    for source in (model, before, tmp_path / "m.onnx"):
        times = profile_ops(source, few, runs=3)
        assert sorted(t.node for t in times if t.op_type == "Conv") == ["conv1", "conv2", "stem"]
        assert all(t.milliseconds >= 0 for t in times)
    assert model.SerializeToString() == before
    assert profile_ops(model, few, runs=50, budget_s=0.0), "at least one run counts"


def test_kernels_behind_and_inside_a_body_are_told_by_their_nodes():
    model = models.net_with_if()
    told = {t.node: t.op_type for t in profile_ops(model, feeds(model, 1), runs=1)}
    nodes = {n.name: n.op_type for n in model.graph.node} | {"then_tanh": "Tanh", "else_neg": "Neg"}
    assert {name: nodes[name] for name in told if name in nodes} == {n: op for n, op in told.items() if n in nodes}
    assert {"conv0", "conv1", "else_neg"} <= set(told)


def test_wrong_feeds_and_none_are_errors():
    model, broken = models.mlp(), models.mlp()
    broken.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(CalibrationError, match="no feed"):
        profile_ops(model, [])
    for given, feed, text in ((model, {"nothing": 1}, "refuses a feed"), (broken, feeds(model)[0], "does not load")):
        with pytest.raises(VerificationError, match=text):
            profile_ops(given, [feed])


def test_evidence_of_a_net_with_a_body(tmp_path: Path):
    model = models.net_with_if()
    few = feeds(model, 3)
    report = quantize_static(model, tmp_path / "q.onnx", FeedReader(few), rewrites=False, recipe="plain", promise=False)
    quantized = onnx.load(tmp_path / "q.onnx")
    held = gather_evidence(model, quantized)
    found = with_measurements(held, model, quantized, few, runs=2)
    assert with_measurements(held, model, quantized, []) is held, "without feeds nothing is run"
    assert {n.name for n in found.graph.nodes} >= set(report.plan.by_node)
    assert found.layers
    assert found.times.before
    assert found.times.after
