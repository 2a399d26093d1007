"""A node that was planned as integer and that the proof finds in float is left float, with its reason, and no more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from kenosis_ort.plan import Kind
from kenosis_ort.targets import get_target
from kenosis_ort.targets.proof import FusionReport, Status
from tests import models
from tests.flow.support import initializers, quantized


def test_what_the_proof_finds_in_float_is_left_float(tmp_path: Path) -> None:
    target, proved = get_target("ort-cpu"), []

    def prove(model: Any, **options: Any) -> FusionReport:
        assert target.hooks.prove is not None
        found = target.hooks.prove(model, **options)
        proved.append(options["plan"])
        kernels = [
            replace(k, integer=False, status=Status.FLOAT, reason="the test says so") if k.node == "conv1" else k
            for k in found.kernels
        ]
        return replace(found, kernels=tuple(kernels))

    model, out = models.residual_block(), tmp_path / "out.onnx"
    report = quantized(model, out, target=replace(target, hooks=replace(target.hooks, prove=prove)))
    assert [plan.by_node["conv1"].kind for plan in proved][:2] == [Kind.INTEGER, Kind.FLOAT]
    assert report.plan.by_node["conv1"].kind is Kind.FLOAT
    assert report.plan.by_node["conv2"].kind is Kind.INTEGER
    assert "conv1_w" in initializers(out)
    assert any("'conv1' (Conv) left float after verification: the test says so" in note for note in report.notes)
