"""The histogram methods against stock's, within the bound that `kenosis_ort.calibration.histogram` states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kenosis_ort.calibration import CalibrationConfig, CalibrationTable
from kenosis_ort.calibration.histogram import _divergence, ends, entropy_range, percentile_range
from tests import models
from tests.calibration.support import histogram_of, one_node_model, random_feeds, stock, swept


def check_bound(theirs: Any, table: CalibrationTable, bins: int, symmetric: bool) -> None:
    ours = table.to_tensors_data()
    for name in theirs:
        s = table.tensors[name]
        top = max(abs(s.low), abs(s.high))
        bound = (top / bins if symmetric else 2 * top / bins) + top / 2048
        for end in ("lowest", "highest"):
            a, b = getattr(theirs[name], end), getattr(ours[name], end)
            assert (a.dtype, np.shape(a)) == (b.dtype, np.shape(b)), name
            assert abs(float(a) - float(b)) <= bound * 1.0001 + 1e-6 * top, (name, end)


@pytest.mark.parametrize("net", ["residual_block", "silu_net", "two_input_detector", "mlp"])
@pytest.mark.parametrize(
    "options",
    [{}, {"percentile": 99.0}, {"symmetric": False}, {"symmetric": False, "percentile": 90.0}, {"percentile": 100.0}],
)
def test_percentile_is_within_the_bound(net: str, options: dict[str, Any]) -> None:
    model = models.ALL[net]()
    samples = models.feeds(model, 5)
    theirs = stock(model, samples, "Percentile", **options)
    table = swept(model, samples, list(theirs.keys()), method="percentile", bit_exact=True, **options)
    check_bound(theirs, table, 2048, options.get("symmetric", True))


@pytest.mark.parametrize("net", ["residual_block", "silu_net", "two_input_detector", "mlp"])
def test_default_entropy_is_exactly_stock(net: str) -> None:
    model = models.ALL[net]()
    samples = models.feeds(model, 4)
    theirs = stock(model, samples, "Entropy")
    ours = swept(model, samples, list(theirs.keys()), method="entropy", bit_exact=True).to_tensors_data()
    for name in theirs:
        assert (theirs[name].lowest, theirs[name].highest) == (ours[name].lowest, ours[name].highest), name


@pytest.mark.parametrize("bins", [256, 512, 1024])
@pytest.mark.parametrize("seed", range(3))
def test_entropy_of_more_bins_is_near_stock_optimum(bins: int, seed: int) -> None:
    """Our candidate's divergence on stock's own counts is near the smallest there is."""
    rng = np.random.default_rng(seed)
    data = rng.standard_t(3, 20_000).astype(np.float32)
    theirs = stock(one_node_model(shape=("N",)), [{"x": data}], "Entropy", num_bins=bins)["y"]
    low, high = entropy_range(histogram_of(data), *ends(data), bins=bins, quantized_bins=128)
    top = max(map(abs, ends(data)))
    counts, edges = np.histogram(data, bins, range=(-top, top))

    def divergence(end: float) -> float:
        reach = int(np.argmin(np.abs(edges - end))) - 1 - bins // 2
        return _divergence(counts, bins // 2 - reach, min(bins // 2 + reach + 1, bins), 128)

    best = divergence(float(theirs.highest))
    ours = divergence(high) if high < data.max() else divergence(float(edges[-1]))
    assert ours <= best * 1.1 + 1e-3
    assert low == pytest.approx(max(-high, data.min()), abs=2.1 * top / bins)


@pytest.mark.parametrize("scenario", ["same", "p3"])
def test_distribution_is_within_the_bound(scenario: Any) -> None:
    model = models.silu_net()
    samples = models.feeds(model, 4)
    theirs = stock(model, samples, "Distribution", scenario=scenario)
    table = swept(model, samples, list(theirs.keys()), method="distribution", scenario=scenario, bit_exact=True)
    ours = table.to_tensors_data()
    for name in theirs:
        a, b = theirs[name], ours[name]
        assert (a.lowest, a.highest) == (b.lowest, b.highest)
        top = float(a.highest)
        bound = 1.5 * top / 2048 if scenario == "same" else 0.05 * np.cbrt(top)
        assert abs(float(a.avg) - float(b.avg)) <= bound
        assert abs(float(a.std) - float(b.std)) <= bound
        assert a.hist.sum() == b.hist.sum()
        assert (a.hist.shape, a.hist_edges.shape) == (b.hist.shape, b.hist_edges.shape)
        assert (a.avg.dtype, a.hist_edges.dtype) == (b.avg.dtype, b.hist_edges.dtype)


@given(
    st.integers(0, 2**31),
    st.floats(0.5, 100.0),
    st.sampled_from([512, 2048]),
    st.booleans(),
    st.sampled_from(["normal", "exponential", "relu", "constant", "two"]),
)
@settings(deadline=None)
def test_percentile_bound_on_any_distribution(
    seed: int, percentile: float, bins: int, symmetric: bool, kind: str
) -> None:
    """Against the definition itself, on the exact sorted values."""
    rng = np.random.default_rng(seed)
    draw = {
        "normal": lambda: rng.standard_normal(3000),
        "exponential": lambda: rng.exponential(2.0, 3000),
        "relu": lambda: np.maximum(rng.standard_normal(3000), 0),
        "constant": lambda: np.full(100, 3.3),
        "two": lambda: rng.choice([-1.0, 7.0], 500),
    }
    data = draw[kind]().astype(np.float32)
    low, high = percentile_range(histogram_of(data), *ends(data), percentile=percentile, bins=bins, symmetric=symmetric)
    top = float(np.abs(data).max())
    bound = (top / bins if symmetric else 2 * top / bins) + top / 2048
    values = np.sort(np.abs(data) if symmetric else data)

    def of_rank(share: float) -> tuple[float, float]:
        """The value of that rank; in a tie, where rounding decides, the two next to it."""
        rank = share * values.size
        ends = (np.ceil(rank - 1e-6) - 1, np.ceil(rank + 1e-6) - 1)
        below, above = (float(values[int(np.clip(i, 0, values.size - 1))]) for i in ends)
        return below - bound * 1.001, above + bound * 1.001

    cut = (100 - percentile) / 200
    below, above = of_rank(percentile / 100 if symmetric else 1 - cut)
    assert min(below, data.max()) <= high <= above
    below, above = (-above, -below) if symmetric else of_rank(cut)
    assert below <= low <= max(above, data.min())
    assert data.min() <= low
    assert high <= data.max()


def test_histogram_methods_do_not_depend_on_stride_or_order() -> None:
    model, samples = one_node_model(), random_feeds(6, (40, 50))
    a, b = (swept(model, s, ["y"], method="percentile", percentile=99.0) for s in (samples, samples[::-1]))
    assert a.tensors["y"].histogram == b.tensors["y"].histogram
    assert a.range_of("y") == b.range_of("y")
    assert a.data_fingerprint == b.data_fingerprint


def test_other_percentile_from_the_same_table() -> None:
    samples = random_feeds(3, (100, 100))
    table = swept(one_node_model(), samples, ["y"], method="percentile")
    other = replace(table, config=CalibrationConfig(method="percentile", percentile=90))
    direct = swept(one_node_model(), samples, ["y"], config=other.config)
    assert other.range_of("y") == direct.range_of("y")
    assert other.range_of("y")[1] < table.range_of("y")[1]
    minmax = replace(table, config=CalibrationConfig())
    assert minmax.range_of("y") == (table.tensors["y"].low, table.tensors["y"].high)
