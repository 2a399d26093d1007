"""Statistics of some of the samples, from the sweep over all of them."""

from __future__ import annotations

import pytest

from kenosis_ort.calibration.collector import collect
from kenosis_ort.calibration.config import CalibrationConfig
from kenosis_ort.runtime.session import counted
from tests import models, planning


@pytest.mark.parametrize(
    "config",
    [CalibrationConfig(), CalibrationConfig(sketch=True), CalibrationConfig(method="percentile")],
    ids=["minmax", "sketch", "percentile"],
)
def test_a_part_is_what_a_sweep_over_it_alone_finds(config: CalibrationConfig):
    model = planning.prepared(models.residual_block())
    feeds = models.feeds(model, 7, seed=3)
    tensors = [model.graph.input[0].name, *(node.output[0] for node in model.graph.node)]
    numbers = (0, 2, 5)
    with counted() as counts:
        table = collect(model, feeds, tensors=tensors, config=config, part=numbers, threads=1)
    assert (counts.total.sessions, counts.total.runs) == (1, 7)
    assert table == collect(model, feeds, tensors=tensors, config=config, threads=1)
    assert table.part == collect(model, [feeds[n] for n in numbers], tensors=tensors, config=config, threads=1)
    assert table.part is not None
    assert table.part != table
    assert "part" not in table.to_json()


def test_a_moving_average_has_no_part():
    model = planning.prepared(models.residual_block())
    config = CalibrationConfig(moving_average=True)
    tensors = [model.graph.node[0].output[0]]
    assert collect(model, models.feeds(model, 4), tensors=tensors, config=config, part=(1,)).part is None
