"""Ranges from histograms: what every estimator keeps, and stock's methods within the bound that we state."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from kenosis_ort import errors, plan
from kenosis_ort.calibration import CalibrationConfig, CalibrationTable, estimators
from kenosis_ort.calibration.accumulators import ends
from kenosis_ort.calibration.estimators import estimates, least_error_range, sketch
from kenosis_ort.calibration.methods import _divergence, entropy_range
from kenosis_ort.calibration.statistics import TensorStatistics
from tests import models
from tests.calibration.support import histogram_of, one_node_model, random_feeds, same_as_stock, stock, swept

METHODS = [*estimators.ESTIMATORS]
methods = st.sampled_from(METHODS)


def statistics_of(data):
    return TensorStatistics(float(data.min()), float(data.max()), data.size, histogram=histogram_of(data))


def estimate(statistics, method, **bounds):
    return estimates(statistics, (method,), **bounds)[method]


def quantization_error(data, low, high, power, levels=256):
    """What `Sketch.errors` predicts, from the data themselves."""
    values = data.astype(np.float64)
    low, high = min(low, 0.0), max(high, 0.0)
    step = (high - low) / (levels - 1)
    if step == 0.0:
        return float((np.abs(values) ** power).mean())
    below = round(-low / step)
    quantized = np.clip(np.rint(values / step), -below, levels - 1 - below) * step
    return float((np.abs(values - quantized) ** power).mean())


@st.composite
def activations(draw, size=4000):
    """Gaussian, heavy-tailed, rectified, clipped, shifted or spiky data of any magnitude."""
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    kinds = {"standard_normal": (), "laplace": (), "standard_t": (3,), "uniform": (-1, 2), "lognormal": ()}
    kind = draw(st.sampled_from(sorted(kinds)))
    data = getattr(rng, kind)(*kinds[kind], size=size)
    data = data * draw(st.sampled_from([1e-3, 1.0, 37.0])) + draw(st.sampled_from([0.0, 0.0, 0.5, -2.0]))
    if draw(st.booleans()):
        data[:3] *= 20.0  # a few outliers
    rectified = draw(st.sampled_from([data, data, np.maximum(data, 0.0), np.clip(data, 0.0, 6.0), -np.abs(data)]))
    return rectified.astype(np.float32)


@given(activations(), methods, st.sampled_from([None, -8.0, 0.0, 0.3]), st.sampled_from([None, 6.0, 0.4]))
def test_range_lies_within_extremes_and_limits(data, method, low_limit, high_limit):
    low, high = estimate(statistics_of(data), method, low_limit=low_limit, high_limit=high_limit)
    floor = data.min() if low_limit is None else max(float(data.min()), low_limit)
    ceiling = data.max() if high_limit is None else min(float(data.max()), high_limit)
    tolerance = 1e-6 * max(abs(floor), abs(ceiling), 1e-30)
    assert low <= high
    assert low >= min(floor, ceiling) - tolerance
    assert high <= max(floor, ceiling) + tolerance


@given(activations(), st.sampled_from([2.0, 3.0]))
def test_least_error_is_near_the_best_there_is(data, power):
    """No worse than the full range, and within a few percent of a brute-force search over the data."""
    low, high = least_error_range(sketch(statistics_of(data)), power=power)
    found = quantization_error(data, low, high, power)
    full = (float(data.min()), float(data.max()))
    assert found <= quantization_error(data, *full, power) * 1.03
    shares = np.geomspace(0.03, 1, 12)
    brute = min(quantization_error(data, full[0] * a, full[1] * b, power) for a in shares for b in shares)
    assert found <= brute * 1.1


@pytest.mark.parametrize("seed", range(3))
def test_ends_are_moved_one_by_one_until_no_fine_step_is_better(seed):
    """Tails of different length on the two sides, and few levels: a range shrunk on both sides at once is no match."""
    rng = np.random.default_rng(seed)
    data = np.concatenate([np.abs(rng.standard_normal(4000)), -3 * np.abs(rng.laplace(size=4000))]).astype(np.float32)
    values = sketch(statistics_of(data))
    low, high = least_error_range(values, levels=16)
    steps = [step**power for step in (1.12, 1.06, 1.03) for power in (-1, 1)]
    moved = np.array([(low, high), *((low * s, high) for s in steps), *((low, high * s) for s in steps)])
    found, *others = values.errors(moved, power=2.0, levels=16)
    assert min(others) > 0.998 * found


def test_what_a_percentile_leaves_in():
    data = np.random.default_rng(0).laplace(size=100_000).astype(np.float32)
    for percentile in (99.0, 99.9, 99.99):
        low, high = estimators.quantile_range(sketch(statistics_of(data)), percentile)
        assert ((data >= low) & (data <= high)).mean() * 100 == pytest.approx(percentile, abs=0.03)


def test_more_levels_clip_less():
    statistics = statistics_of(np.random.default_rng(0).standard_normal(100_000).astype(np.float32))
    ends = [estimate(statistics, "mse", levels=levels)[1] for levels in (16, 256, 65536)]
    assert ends[0] < ends[1] <= ends[2]


@pytest.mark.parametrize("method", METHODS)
def test_constant_and_empty_tensors(method):
    assert estimate(statistics_of(np.full(10, 2.5, np.float32)), method) == pytest.approx((2.5, 2.5))
    assert estimate(statistics_of(np.zeros(10, np.float32)), method) == (0.0, 0.0)
    assert estimate(TensorStatistics(0.0, 0.0, 0), method) == (0.0, 0.0)


def test_a_range_set_by_hand_is_kept():
    fixed = TensorStatistics(-9.0, 9.0, 5, fixed=(-1.0, 2.0))
    assert estimate(fixed, "mse") == (-1.0, 2.0)
    assert estimate(fixed, "mse", low_limit=0.0) == (0.0, 2.0)


def test_a_whole_table():
    data = np.random.default_rng(0).standard_t(3, 100_000).astype(np.float32)
    statistics = statistics_of(data)
    table = CalibrationTable({"a": statistics, "b": statistics, "constant": TensorStatistics(-1.0, 5.0, 3)})
    found = estimators.estimate_all(table, ("mse", "percentile"), limits={"b": plan.RangeLimit("b", 0.0, 6.0)})
    assert found["percentile"]["a"] == estimate(statistics, "percentile") != found["mse"]["a"]
    ranges = found["mse"]
    assert ranges["a"] == estimate(statistics, "mse")
    assert ranges["b"] == estimate(statistics, "mse", low_limit=0.0, high_limit=6.0)
    assert ranges["constant"] == (-1.0, 5.0)
    assert table.with_ranges(ranges).range_of("a") == ranges["a"]


def test_what_has_no_histogram_keeps_its_own_range():
    averaged = TensorStatistics(-9.0, 9.0, 5, averaged=(-2.0, 3.0))
    table = CalibrationTable({"a": averaged}, CalibrationConfig(moving_average=True))
    assert estimators.estimate_all(table, ("mse",)) == {"mse": {"a": (-2.0, 3.0)}}


def test_statistics_without_a_histogram():
    with pytest.raises(errors.CalibrationError, match="histogram"):
        sketch(TensorStatistics(0.0, 1.0, 5))


# ---- distributions --------------------------------------------------------------------------------------------------


@given(
    activations(), st.sampled_from([None, -0.5]), st.floats(0.2, 1.0), st.floats(0.2, 1.0),
    st.sampled_from([1.0, 2.0, 2.4, 3.0]),
)  # fmt: skip
def test_error_is_that_of_the_data(data, limit, a, b, power):
    """And what lies beyond a limit counts as the limit."""
    assume(np.ptp(data) > 2**-7 * np.abs(data).max())  # else it fills no more than a few bins
    values, data = sketch(statistics_of(data), low_limit=limit), data if limit is None else np.maximum(data, limit)
    assert (values.low, values.high, values.total) == (data.min(), data.max(), data.size)
    low, high = a * min(values.low, 0.0), b * max(values.high, 0.0)
    (predicted,) = values.errors([(low, high)], power=power)
    actual = quantization_error(data, low, high, power)
    step = (high - low) / 255
    assert predicted == pytest.approx(actual, rel=0.15, abs=(0.4 * step) ** power)


@given(activations())
def test_quantiles(data):
    values = sketch(statistics_of(data))
    bin_width = 4.0 * np.abs(data).max() / 2048
    for share in (0.0, 0.01, 0.5, 0.99, 1.0):
        exact = np.quantile(data, share, method="inverted_cdf" if share < 0.5 else "higher")
        near = np.sort(np.abs(data - exact))[:20].max()  # where data are sparse, a neighbour is as good
        assert abs(values.quantile(share) - exact) <= bin_width + near


def test_extremes_that_a_partial_histogram_missed():
    part = statistics_of(np.linspace(-1, 1, 1000, dtype=np.float32))
    values = sketch(TensorStatistics(-50.0, 90.0, 5000, histogram=part.histogram))
    assert (values.low, values.high) == (-50.0, 90.0)
    assert values.total == pytest.approx(1000.4)


# ---- stock's methods -------------------------------------------------------------------------------------------------


FOUR = pytest.mark.parametrize("net", ["residual_block", "silu_net", "two_input_detector", "mlp"])


@FOUR
@pytest.mark.parametrize("options", [
    {}, {"percentile": 99.0}, {"symmetric": False}, {"symmetric": False, "percentile": 90.0}, {"percentile": 100.0},
])  # fmt: skip
def test_percentile_is_within_the_bound(net, options):
    bins = 2 if options.get("symmetric", True) else 3  # of 2048, ours and stock's, which are as wide or twice
    error = bins * 1.0001 / 2048 + 1e-6
    same_as_stock(models.ALL[net](), models.feeds(models.ALL[net](), 5), "Percentile", error=error, **options)


def test_percentile_of_a_constant_is_exactly_stock():
    same_as_stock(one_node_model(), [{"x": np.full((4, 4), 3.3, np.float32)}], "Percentile", num_bins=129)


@FOUR
def test_default_entropy_is_exactly_stock(net):
    same_as_stock(models.ALL[net](), models.feeds(models.ALL[net](), 4), "Entropy")


@pytest.mark.parametrize("bins", [256, 512, 1024])
@pytest.mark.parametrize("seed", range(3))
def test_entropy_of_more_bins_is_near_stock_optimum(bins, seed):
    """Our candidate's divergence on stock's own counts is near the smallest there is."""
    data = np.random.default_rng(seed).standard_t(3, 20_000).astype(np.float32)
    theirs = stock(one_node_model(shape=("N",)), [{"x": data}], "Entropy", num_bins=bins)["y"]
    low, high = entropy_range(histogram_of(data), *ends(data), bins=bins, quantized_bins=128)
    top = max(map(abs, ends(data)))
    counts, edges = np.histogram(data, bins, range=(-top, top))

    def divergence(end):
        reach = int(np.argmin(np.abs(edges - end))) - 1 - bins // 2
        return _divergence(counts, bins // 2 - reach, min(bins // 2 + reach + 1, bins), 128)

    best = divergence(float(theirs.highest))
    ours = divergence(high) if high < data.max() else divergence(float(edges[-1]))
    assert ours <= best * 1.1 + 1e-3
    assert low == pytest.approx(max(-high, data.min()), abs=2.1 * top / bins)


@pytest.mark.parametrize("scenario", ["same", "p3"])
def test_distribution_is_within_the_bound(scenario):
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


def test_other_percentile_from_the_same_table():
    configs = CalibrationConfig("percentile"), CalibrationConfig("percentile", percentile=90), CalibrationConfig()
    tables = [swept(one_node_model(), random_feeds(3, (100, 100)), ["y"], config=config) for config in configs]
    ranges = [replace(tables[0], config=config).range_of("y") for config in configs]
    assert ranges == [table.range_of("y") for table in tables]
    assert ranges[1][1] < ranges[0][1] <= ranges[2][1]
