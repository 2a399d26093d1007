"""Ranges of changed weights follow from those by channel: what is collected on the changed model says the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kenosis_ort import RECIPES
from kenosis_ort.accuracy.channel_statistics import channel_statistics
from kenosis_ort.calibration.collector import Points, collect
from kenosis_ort.calibration.statistics import CalibrationConfig, ChannelRange, Rescaling, TensorStatistics
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.flow.calibrate import following_table
from kenosis_ort.passes import Candidate, Context, Skipped, State, Statistics, WeightPass, changed_weights, runner
from kenosis_ort.passes.equalize_layers import equalize, scaled_by_equalization, values_for_equalization
from kenosis_ort.passes.smooth import scaled_by_smoothing, smooth, values_for_smoothing
from tests import models, planning
from tests.flow.support import quality
from tests.flow.test_tables import FEEDS, MODEL, depthwise, run, transformer
from tests.models import Net


def never(*_: object, **__: object) -> CalibrationTable:
    raise AssertionError("all ranges follow")


def pooled() -> onnx.ModelProto:
    """Conv, Relu, pool, Flatten, Gemm: channels become several features each."""
    net, rng = Net(seed=2), np.random.default_rng(2)
    sizes = np.exp(rng.normal(0, 1.5, 8))
    weight = rng.normal(0, 0.3, (8, 3, 3, 3)) * sizes[:, None, None, None]
    y = net.op("Conv", [net.input("x", [1, 3, 8, 8]), net.const(weight, "w")], name="c", pads=[1, 1, 1, 1])
    y = net.op("MaxPool", [net.op("LeakyRelu", [y], name="act")], name="pool", kernel_shape=[2, 2], strides=[2, 2])
    net.output(net.gemm(net.op("Flatten", [y], name="flat"), 128, 4, name="g"), [1, 4])
    return net.model()


NETS = {"unbalanced": lambda: MODEL, "pooled": pooled, "depthwise": lambda: depthwise()[0]}


@pytest.mark.parametrize("net", NETS)
def test_equalized(net: str) -> None:
    model = planning.prepared(NETS[net]())
    feeds = models.feeds(model, 30, seed=1)  # through a Clip it is exact on the observed range
    peaks = channel_statistics(model, feeds, values_for_equalization(model))
    found = equalize(model, peaks=peaks)
    assert found.pairs
    axes = scaled_by_equalization(model)
    assert found.rescaled.keys() <= axes.keys()
    follows(model, found.model, found.rescaled, axes, feeds)


def test_smoothed() -> None:
    model, feeds = transformer()
    model = planning.prepared(model)
    for insert in (False, True):
        peaks = channel_statistics(model, feeds[:20], values_for_smoothing(model, insert=insert))
        found = smooth(model, peaks=peaks, insert=insert)
        assert found.layers
        follows(model, found.model, found.rescaled, scaled_by_smoothing(model, insert=insert), feeds)


def follows(
    model: onnx.ModelProto,
    changed: onnx.ModelProto,
    rescaled: Mapping[str, Rescaling],
    axes: Mapping[str, int],
    feeds: list[models.Feed],
) -> None:
    """Checks that ranges carried over are those that a sweep of the changed model finds."""
    before = [name for node in model.graph.node for name in node.output]
    table = collect(model, feeds, Points(before, channels=axes, threads=1))
    asked = [name for node in changed.graph.node for name in node.output]
    carried = following_table(table, (model, model, before), (changed, changed, asked), rescaled, never, None)
    seen = collect(changed, feeds, Points(asked, threads=1))
    assert carried.tensors.keys() == seen.tensors.keys()
    for name in seen.tensors:
        assert carried.range_of(name) == pytest.approx(seen.range_of(name), rel=1e-4, abs=1e-5), name
    assert any(np.ptp(how.factors) > 0.1 for how in rescaled.values())
    moved = [n for n in table.tensors if table.range_of(n) != pytest.approx(seen.range_of(n), rel=1e-3, abs=1e-3)]
    assert set(moved) <= rescaled.keys()


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0, 3), st.floats(0.1, 4)), min_size=1, max_size=6))
def test_a_range_by_channel(channels: list[tuple[float, float, float]]) -> None:
    low, width, factors = (np.array(column) for column in zip(*channels, strict=True))
    known = TensorStatistics(low.min(), (low + width).max(), 3, channels=ChannelRange(1, 4, low, low + width))
    found = Rescaling(-3, factors).of(known)
    assert found is not None
    assert (found.low, found.high) == ((low * factors).min(), ((low + width) * factors).max())
    cut = Rescaling(1, factors, low, low=0.0).of(known)
    assert cut is not None
    assert cut.low == 0.0
    assert cut.high == pytest.approx((width * factors).max())
    assert Rescaling(2, factors).of(known) is None
    assert Rescaling(1, np.append(factors, 1.0)).of(known) is None
    padded = Rescaling(1, factors[:-1]).of(known)
    assert padded is not None
    assert padded.channels is not None
    assert padded.channels.high[-1] == (low + width)[-1]


SMALL = planning.prepared(models.residual_block(channels=4, size=4))
SWEPT = [SMALL.graph.input[0].name, *(node.output[0] for node in SMALL.graph.node)]
POOL = models.feeds(SMALL, 9, seed=5)


def table_of(places: list[int]) -> CalibrationTable:
    feeds = [POOL[place] for place in places]
    axes = scaled_by_equalization(SMALL)
    assert axes
    return collect(SMALL, feeds, Points(SWEPT, config=CalibrationConfig(sketch=True), channels=axes, threads=1))


@settings(max_examples=6)
@given(st.permutations(range(len(POOL))), st.sets(st.integers(1, len(POOL) - 1), max_size=3), st.randoms())
def test_neither_the_split_nor_the_order_of_merging_matters(order: list[int], cuts: set[int], random: object) -> None:
    edges = [0, *sorted(cuts), len(order)]
    tables = [table_of(order[a:b]) for a, b in pairwise(edges)]
    random.shuffle(tables)  # type: ignore[attr-defined]
    merged = reduce(CalibrationTable.merge, tables)
    assert merged == table_of(list(range(len(POOL))))
    assert CalibrationTable.from_json(merged.to_json()) == merged


@dataclass(frozen=True)
class Silent(WeightPass):
    """Scales channels, and does not say which."""

    name: ClassVar[str] = "silent"
    title: ClassVar[str] = "A silent pass"

    @property
    def wanted(self) -> bool:
        return True

    def apply(self, state: State, statistics: Statistics, context: Context) -> Candidate | Skipped:
        found = equalize(state.prepared.proto, nodes=set(context.nodes))
        return Candidate(State(changed_weights(state.prepared, found.model, ())), "changed")


def test_a_pass_that_does_not_say_what_became_of_values_is_believed_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_order", [*runner.PASSES])
    runner.register(Silent, before="equalize")
    recipe = replace(RECIPES["fast"], name="own", equalize=False, passes=(Silent(),))
    report = run(tmp_path / "out.onnx", recipe=recipe)
    assert [p.kept for p in report.passes if p.name == "silent"] == [True]
    assert quality(MODEL, tmp_path / "out.onnx", FEEDS) > 30
