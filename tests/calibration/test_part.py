"""Statistics of some of the samples, from the sweep over all of them."""

from __future__ import annotations

import numpy as np
import pytest

from kenosis_ort.calibration import parts
from kenosis_ort.calibration.cached_samples import feed_digest
from kenosis_ort.calibration.collector import collect
from kenosis_ort.calibration.config import CalibrationConfig
from kenosis_ort.calibration.feeds import Cut
from kenosis_ort.errors import CalibrationError
from kenosis_ort.runtime.session import counted
from tests import models, planning


@pytest.mark.parametrize(
    "config",
    [CalibrationConfig(), CalibrationConfig(sketch=True), CalibrationConfig(method="percentile")],
    ids=["minmax", "sketch", "percentile"],
)
def test_a_part_is_what_a_sweep_over_it_alone_finds(config: CalibrationConfig):
    model = planning.prepared(models.residual_block(channels=6))  # too few for blocks, which take a session
    feeds = models.feeds(model, 7, seed=3)
    tensors = [model.graph.input[0].name, *(node.output[0] for node in model.graph.node)]
    numbers = (0, 2, 5)
    with counted() as counts:
        table = collect(model, feeds, tensors=tensors, config=config, part=dict.fromkeys(numbers, ()), threads=1)
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
    assert collect(model, models.feeds(model, 4), tensors=tensors, config=config, part={1: ()}).part is None


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("config", [CalibrationConfig(), CalibrationConfig(sketch=True)], ids=["minmax", "sketch"])
def test_a_batch_may_be_of_the_part_by_its_rows(
    config: CalibrationConfig, heavy: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(parts, "_MOST_WEIGHTS", 600 if heavy else 2**32)
    model = planning.prepared(models.with_free_batch(models.residual_block()))
    rows = [feed["x"] for feed in models.feeds(model, 12, seed=3)]
    feeds = [{"x": np.concatenate(rows[at : at + 4])} for at in (0, 4, 8)]
    tensors = [model.graph.input[0].name, *(node.output[0] for node in model.graph.node)]
    part = {0: [Cut(0, 3, True), Cut(3, 4, False)], 2: (), 1: [Cut(0, 1, False), Cut(1, 4, True)]}
    pieces = [{"x": feeds[0]["x"][:3]}, {"x": feeds[1]["x"][1:]}, feeds[2]]
    table = collect(model, feeds, tensors=tensors, config=config, part=part, keep=3, threads=1)
    whole = collect(model, feeds, tensors=tensors, config=config, keep=3, threads=1)
    alone = collect(model, pieces, tensors=tensors, config=config, threads=1)
    assert table.part is not None
    assert table.part.to_json() == alone.to_json()
    assert (table.samples, table.data_fingerprint, table.cached) == (3, whole.data_fingerprint, whole.cached)
    assert table.tensors.keys() == whole.tensors.keys()
    for name in tensors:
        assert table.range_of(name) == pytest.approx(whole.range_of(name), rel=1e-6)
    assert table.part.data_fingerprint == f"{sum(map(feed_digest, pieces)) % 2**256:064x}"
    bad = [feeds[0], {"x": np.where(np.arange(4)[:, None, None, None] == 2, np.nan, feeds[1]["x"]).astype(np.float32)}]
    with pytest.raises(CalibrationError, match="sample 1"):
        collect(model, bad, tensors=tensors, config=config, part=part, threads=1)
