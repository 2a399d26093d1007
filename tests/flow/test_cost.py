"""What the default call asks of the runtime before anything is timed, held below bounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from kenosis_ort import quantize_static
from kenosis_ort.runtime.limits import runtime_limits
from kenosis_ort.runtime.session import counted
from kenosis_ort.targets.ort_cpu.rules import products_saturate
from tests import models, planning
from tests.models import Net


def net(layers: int):
    made = Net(seed=1)
    y = made.input("x", [1, 6, 12, 12])  # too few channels for blocks, which take a session
    for at in range(layers):
        y = made.op("Relu", [made.conv(y, 6, 6, name=f"c{at}")])
    made.output(made.gemm(made.op("Flatten", [made.op("GlobalAveragePool", [y])]), 6, 4, name="g"))
    return planning.prepared(made.model())


def cost(layers: int, samples: int, folder: Path, **options):
    model = net(layers)
    reader = models.FeedReader(models.feeds(model, samples))
    runtime_limits(), products_saturate()  # once for a process
    with counted() as counts:
        report = quantize_static(model, folder / "out.onnx", reader, promise=False, **options)
    assert not report.warnings
    return counts


def test_depth_costs_no_sessions_and_no_runs(tmp_path: Path):
    """Bias correction went layer by layer: a session a layer, and a run of it for each sample."""
    shallow, deep = (cost(layers, 24, tmp_path).total for layers in (3, 12))
    assert abs(deep.sessions - shallow.sessions) <= 4  # a pass may find nothing to do in one of them; nine layers more
    assert abs(deep.runs - shallow.runs) <= 2 * 24  # nine layers' would be 216


@pytest.mark.parametrize(("samples", "sessions", "runs"), [(16, 20, 125), (40, 23, 275)])
def test_bounds(samples: int, sessions: int, runs: int, tmp_path: Path):
    counts = cost(4, samples, tmp_path)
    assert counts.total.sessions <= sessions, counts.by_stage
    assert counts.total.runs <= runs, counts.by_stage
    assert counts.by_stage["calibrate"].sessions == 1
    assert counts.by_stage["calibrate"].runs == samples  # with the ranges of the samples to fit to


def test_the_plain_recipe_runs_the_float_model_once(tmp_path: Path):
    counts = cost(4, 10, tmp_path, recipe="plain", verify=False, evidence="none")
    assert counts.total.runs == 10, counts.by_stage
    assert counts.total.sessions <= 4, counts.by_stage
