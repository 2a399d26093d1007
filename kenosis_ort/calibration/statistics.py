"""Statistics of one tensor, and the range that follows from them.

A pass that moves scales from one layer to the next changes values whose ranges were collected before. Minima and maxima
by channel scale with the channels; they merge as those of the whole tensor do, and cost next to nothing to collect.

How they are collected and turned into ranges is a `CalibrationConfig`; its defaults are those of
``onnxruntime.quantization``.

Histograms grow by doubling and merge exactly; ranges by stock's methods follow from them. The bins are fixed by a power
of two and by nothing else: bin ``i`` of a histogram with exponent ``e`` covers ``[(i - HALF) * w, (i - HALF + 1) * w)``
with ``w = 2**e / HALF``. When a value falls outside, the exponent goes up and neighbouring bins are added together;
since scaling by a power of two is exact in floating point, the counts are what they would have been with the larger
exponent from the start. So the result depends neither on the order of the data nor on how it was split, and two
histograms of different exponents merge without any error. (A negative value that scaling brings below the smallest
float32, some 1e-34 of the range, counts as zero.)

With ``T`` the largest magnitude seen, the exponent is the smallest with ``T < 2**e``, so the bins are at most
``T / 2048`` wide.

Ranges by percentile, entropy and distribution: each follows the definition of ``onnxruntime.quantization`` on bins of
the same number and place, so that the only difference to it is that of the histograms. With ``T`` the largest magnitude
of the tensor, ``w`` the width of one of its bins and ``v <= T / 2048`` the width of one of ours:

* percentile: each end differs by at most ``w + v`` (``w`` is ``T / num_bins`` when symmetric, else twice that), save
  where the percentile falls between two values exactly and rounding decides for one or the other;
* entropy with ``num_bins == num_quantized_bins`` (the default): equal, since the search has a single candidate;
  with more bins, the candidate chosen has a divergence near the smallest, the values next to an edge aside;
* distribution: range equal, mean and standard deviation differ by at most ``w / 2 + v``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from kenosis_ort.errors import CalibrationError, OptionError, did_you_mean

Counts = npt.NDArray[np.int64]

HALF = 4096
"""Bins on each side of zero."""
MIN_EXPONENT = -100
_LEVELS = HALF.bit_length() - 1


@dataclass(frozen=True, slots=True)
class Extremes:
    """Extremes of one array; ``low`` is greater than ``high`` if it has no element, and both are NaN if one is.

    Attributes:
        low: Smallest value.
        high: Largest value.
        count: Number of elements.
    """

    low: float = math.inf
    high: float = -math.inf
    count: int = 0


def fold(counts: Counts, steps: int) -> Counts:
    """The counts of the histogram whose exponent is larger by ``steps``.

    Args:
        counts: Shape ``(2 * HALF,)``.
        steps: How many times the range doubles, 0 or more.
    """
    if steps <= 0:
        return counts
    factor = 1 << min(steps, _LEVELS)  # beyond, only the two bins next to zero are left, and they stay
    half = HALF // factor
    out = np.zeros(2 * HALF, np.int64)
    out[HALF - half : HALF + half] = counts.reshape(-1, factor).sum(axis=1)
    return out


@dataclass(frozen=True, eq=False)
class Histogram:
    """A finished histogram.

    Attributes:
        exponent: The range is ``[-2**exponent, 2**exponent)``.
        counts: Number of values in each bin, shape ``(8192,)``, read-only.
    """

    exponent: int
    counts: Counts

    def __post_init__(self) -> None:
        counts = np.array(self.counts, np.int64)
        if counts.shape != (2 * HALF,):
            raise ValueError(f"a histogram has {2 * HALF} bins, got an array of shape {counts.shape}")
        counts.flags.writeable = False
        object.__setattr__(self, "counts", counts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Histogram):
            return NotImplemented
        return self.exponent == other.exponent and bool(np.array_equal(self.counts, other.counts))

    __hash__ = None  # type: ignore[assignment]

    @property
    def width(self) -> float:
        """Width of a bin."""
        return math.ldexp(1.0, self.exponent) / HALF

    @property
    def total(self) -> int:
        """Number of values counted."""
        return int(self.counts.sum())

    @property
    def edges(self) -> npt.NDArray[np.float64]:
        """Edges of the bins, shape ``(8193,)``."""
        edges: npt.NDArray[np.float64] = np.arange(-HALF, HALF + 1, dtype=np.float64) * np.float64(self.width)
        return edges

    def merge(self, other: Histogram) -> Histogram:
        """The histogram of both data sets together, without error."""
        exponent = max(self.exponent, other.exponent)
        return Histogram(
            exponent, fold(self.counts, exponent - self.exponent) + fold(other.counts, exponent - other.exponent)
        )

    def cumulative_at(self, points: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Number of values below each point, linear inside a bin."""
        cumulative = np.concatenate(([0], np.cumsum(self.counts)))
        return np.interp(points, self.edges, cumulative)

    def rebin(self, edges: npt.NDArray[np.float64], *, magnitudes: bool = False) -> Counts:
        """The counts in other bins.

        Args:
            edges: Increasing edges, shape ``(n + 1,)``. Values outside go to the first and last bin.
            magnitudes: Bins the absolute values instead.

        Returns:
            Counts of shape ``(n,)`` that sum to `total`. A value can only end up in the wrong bin if an edge
            lies in the same bin of this histogram.
        """
        below = self.cumulative_at(edges)
        if magnitudes:
            below = below - self.cumulative_at(-edges)
        below[0], below[-1] = 0, self.total
        return np.diff(np.rint(below)).astype(np.int64)


_SMOOTHING = 1e-4

Doubles = npt.NDArray[np.float64]


class Moments(NamedTuple):
    """Mean and standard deviation as the distribution method defines them, with the bins they come from."""

    mean: float
    std: float
    counts: Counts
    edges: Doubles


def _signed_bins(low: float, high: float, bins: int) -> Doubles:
    top = max(abs(low), abs(high))
    if top == 0.0:
        return np.linspace(-0.5, 0.5, bins + 1)
    return np.linspace(-top, top, bins + 1)


def _magnitude_bins(low: float, high: float, bins: int) -> Doubles:
    top = max(abs(low), abs(high))
    bottom = 0.0 if low <= 0.0 <= high else min(abs(low), abs(high))
    if top == bottom:
        return np.linspace(top - 0.5, top + 0.5, bins + 1)
    return np.linspace(bottom, top, bins + 1)


def _clip(range_: tuple[float, float], low: float, high: float) -> tuple[float, float]:
    return max(range_[0], low), min(range_[1], high)


def percentile_range(
    histogram: Histogram, low: float, high: float, *, percentile: float, bins: int, symmetric: bool
) -> tuple[float, float]:
    """The range that holds a percentage of the values.

    Args:
        histogram: Counts of the values.
        low: Their minimum.
        high: Their maximum.
        percentile: Percentage inside the range, 0 to 100; when not symmetric half of the rest is cut on each side.
        bins: Number of bins whose edges the ends are taken from.
        symmetric: Takes the percentile of the magnitudes.

    Returns:
        The ends, each the left edge of the bin that holds the percentile, never outside ``[low, high]``.
    """
    if symmetric:
        edges = _magnitude_bins(low, high, bins)
        cdf = _cdf(histogram.rebin(edges, magnitudes=True))
        top = float(edges[np.searchsorted(cdf, percentile / 100.0)])
        return _clip((-top, top), low, high)
    edges = _signed_bins(low, high, bins)
    cdf = _cdf(histogram.rebin(edges))
    cut = (100.0 - percentile) / 200.0
    left, right = np.searchsorted(cdf, cut), np.searchsorted(cdf, 1.0 - cut)
    return _clip((float(edges[left]), float(edges[right])), low, high)


def _cdf(counts: Counts) -> Doubles:
    cumulative: Doubles = np.cumsum(counts / max(int(counts.sum()), 1))  # rounded as stock's, which decides ties
    return cumulative


def distribution_moments(
    histogram: Histogram, low: float, high: float, *, bins: int, scenario: Literal["same", "p3"]
) -> Moments:
    """Mean and standard deviation over symmetric bins.

    Args:
        histogram: Counts of the values.
        low: Their minimum.
        high: Their maximum.
        bins: Number of bins.
        scenario: ``"p3"`` takes the moments of the signed cube root of the values.
    """
    edges = _signed_bins(low, high, bins)
    counts = histogram.rebin(edges)
    values = (edges[:-1] + edges[1:]) * 0.5
    if scenario == "p3":
        values = np.cbrt(values)
    total = max(int(counts.sum()), 1)
    mean = float((counts * values).sum() / total)
    variance = float((counts * values**2).sum() / total) - mean**2
    return Moments(mean, math.sqrt(max(variance, 0.0)), counts, edges)


def entropy_range(
    histogram: Histogram, low: float, high: float, *, bins: int, quantized_bins: int
) -> tuple[float, float]:
    """The symmetric range, cut to ``[low, high]``, with the smallest Kullback-Leibler divergence.

    Args:
        histogram: Counts of the values.
        low: Their minimum.
        high: Their maximum.
        bins: Number of bins over the full range; the candidates end on their edges.
        quantized_bins: Number of levels that the quantized distribution has.
    """
    edges = _signed_bins(low, high, bins)
    counts = histogram.rebin(edges)
    centre = bins // 2
    half = min(quantized_bins // 2, centre)
    best, best_range = math.inf, (0.0, 0.0)
    for reach in range(half, centre + 1):
        start, end = centre - reach, min(centre + reach + 1, bins)
        divergence = _divergence(counts, start, end, quantized_bins)
        if reach == half or divergence < best:
            best, best_range = divergence, (float(edges[start]), float(edges[end]))
    return _clip(best_range, low, high)


def _divergence(counts: Counts, start: int, end: int, levels: int) -> float:
    """Divergence of the counts cut to ``[start, end)`` and quantized to ``levels`` from those with the tails added."""
    inside = counts[start:end]
    reference = inside.copy()
    reference[0] += counts[:start].sum()
    reference[-1] += counts[end:].sum()
    occupied = reference != 0
    merged = inside.size // levels
    body = levels * merged
    sums = inside[:body].reshape(levels, merged).sum(axis=1)
    sums[-1] += inside[body:].sum()
    holders = occupied[:body].reshape(levels, merged).sum(axis=1)
    level = np.zeros(levels, np.int64)
    np.floor_divide(sums, holders, out=level, where=holders != 0)
    quantized = np.zeros(inside.size, np.int64)
    quantized[:body] = np.repeat(level, merged)
    p, q = _smooth(reference), _smooth(quantized)
    if p is None or q is None:
        return math.inf
    p, q = p / p.sum(), q / q.sum()
    return float(np.sum(p * np.log(p / q)))


def _smooth(counts: Counts) -> npt.NDArray[np.float32] | None:
    """Moves a little weight from the occupied to the empty bins, so that the divergence is finite."""
    empty = counts == 0
    occupied = counts.size - int(empty.sum())
    if occupied == 0:
        return None
    taken = _SMOOTHING * (counts.size - occupied) / occupied
    if taken >= 1.0:
        return None
    return np.where(empty, _SMOOTHING, counts - taken).astype(np.float32)


Method = Literal["minmax", "entropy", "percentile", "distribution"]
METHODS: tuple[str, ...] = get_args(Method)

_EXTRA_OPTIONS = {
    "CalibTensorRangeSymmetric": "symmetric",
    "CalibMovingAverage": "moving_average",
    "CalibMovingAverageConstant": "averaging_constant",
    "CalibMaxIntermediateOutputs": "max_intermediate_outputs",
    "CalibPercentile": "percentile",
    "CalibStridedMinMax": "strided",
}


@dataclass(frozen=True)
class CalibrationConfig:
    """Settings of one calibration run.

    Attributes:
        method: How a tensor's range follows from its statistics. Also takes the name of a member of
            ``onnxruntime.quantization.CalibrationMethod`` (``"MinMax"``) or the member itself.
        moving_average: MinMax only: the range is the mean of the samples' minima and maxima; over several
            chunks (``strided``, ``max_intermediate_outputs``) an exponential moving average of the chunks' means.
        averaging_constant: Weight of the newer chunk in the moving average, 0 to 1.
        max_intermediate_outputs: MinMax only: number of samples after which a chunk is closed and merged.
        strided: Number of samples a chunk; the reader must have ``__len__`` and ``set_range``.
        symmetric: Ranges are made symmetric around 0. None is stock's default: True for percentile, else False.
        percentile: Percentile only: percentage of values inside the range, 0 to 100.
        num_bins: Bins of the histogram that ranges are computed from. None is stock's default: 128 for
            entropy, else 2048.
        num_quantized_bins: Entropy only: number of quantization levels that the search assumes.
        scenario: Distribution only, for float 8: ``"same"`` or ``"p3"``.
        bit_exact: Runs the float model without session optimizations, as stock does. MinMax ranges then equal
            stock's bit for bit (with the same number of threads, on which the runtime's sums depend); otherwise
            they differ by the rounding of the runtime's faster kernels (a few parts in a million) and collection
            takes about a quarter less time.
        sketch: MinMax only: also keeps a histogram of every tensor, of all elements of small tensors and of every
            fifth or eleventh of large ones, from which `kenosis_ort.calibration.estimators` work. The other methods
            have one anyway.
        fetch_budget: Bytes of observed intermediate tensors held at a time; where those of one sample take more, the
            model runs in parts, one after the other.

    Raises:
        OptionError: A value is unknown or out of range.
    """

    method: str = "minmax"
    moving_average: bool = False
    averaging_constant: float = 0.01
    max_intermediate_outputs: int | None = None
    strided: int | None = None
    symmetric: bool | None = None
    percentile: float = 99.999
    num_bins: int | None = None
    num_quantized_bins: int = 128
    scenario: Literal["same", "p3"] = "same"
    bit_exact: bool = False
    sketch: bool = False
    fetch_budget: int = 512 * 2**20

    def __post_init__(self) -> None:
        name = getattr(self.method, "name", self.method)
        lowered = name.lower() if isinstance(name, str) else name
        if lowered not in METHODS:
            raise OptionError(
                f"Unknown calibration method {name!r}.{did_you_mean(str(lowered), METHODS)}",
                where="calibrate_method",
                fix=f"Use one of {', '.join(METHODS)}.",
            )
        object.__setattr__(self, "method", lowered)
        self._check(0 <= self.averaging_constant <= 1, "averaging_constant", "between 0 and 1")
        self._check(0 <= self.percentile <= 100, "percentile", "between 0 and 100")
        for field, least in (("max_intermediate_outputs", 1), ("strided", 1), ("num_bins", 2), ("fetch_budget", 1)):
            value = getattr(self, field)
            self._check(value is None or value >= least, field, f"at least {least}")
        self._check(self.num_quantized_bins >= 2, "num_quantized_bins", "at least 2")
        self._check(self.scenario in ("same", "p3"), "scenario", "'same' or 'p3'")
        self._check(self.method != "distribution" or self.bins >= 512, "num_bins", "at least 512 for distribution")

    def _check(self, ok: bool, field: str, requirement: str) -> None:
        if not ok:
            raise OptionError(
                f"Calibration option {field}={getattr(self, field)!r} must be {requirement}.", fix=f"Correct {field}."
            )

    @classmethod
    def from_extra_options(cls, method: Any, extra_options: Mapping[str, Any]) -> CalibrationConfig:
        """Builds the settings from stock's ``calibrate_method`` and the ``Calib*`` keys of ``extra_options``.

        Args:
            method: A ``CalibrationMethod`` or its name in any case.
            extra_options: Stock's dictionary; keys that have nothing to do with calibration are left alone. As in
                stock, a ``CalibStridedMinMax`` or ``CalibMaxIntermediateOutputs`` of 0 or None means "off".
        """
        found = {field: extra_options[key] for key, field in _EXTRA_OPTIONS.items() if key in extra_options}
        for field in ("strided", "max_intermediate_outputs"):
            if not found.get(field):
                found.pop(field, None)
        return cls(method=method, **found)

    @property
    def is_symmetric(self) -> bool:
        """Whether ranges are symmetric, with stock's default filled in."""
        return self.method == "percentile" if self.symmetric is None else self.symmetric

    @property
    def bins(self) -> int:
        """Number of bins that ranges are computed from, with stock's default filled in."""
        if self.num_bins is not None:
            return self.num_bins
        return 128 if self.method == "entropy" else 2048

    @property
    def uses_histogram(self) -> bool:
        """Whether the method needs a histogram of every tensor."""
        return self.method != "minmax"

    @property
    def keeps_histogram(self) -> bool:
        """Whether a table collected with these settings holds a histogram of every tensor."""
        return self.uses_histogram or self.sketch

    @property
    def is_chunked(self) -> bool:
        """Whether the result depends on the order of samples (moving average over chunks)."""
        return self.moving_average and bool(self.strided or self.max_intermediate_outputs)

    @property
    def depends_on_order(self) -> bool:
        """Whether the result is to the bit that of one sweep over all samples in their order alone."""
        return self.moving_average or bool(self.strided)

    def relevant(self) -> dict[str, Any]:
        """The settings that change the result under this method, defaults filled in."""
        out: dict[str, Any] = {"method": self.method, "symmetric": self.is_symmetric}
        if self.method == "minmax":
            out["moving_average"] = self.moving_average
            if self.moving_average:
                out["strided"] = self.strided
                out["max_intermediate_outputs"] = self.max_intermediate_outputs
                if self.is_chunked:
                    out["averaging_constant"] = self.averaging_constant
        else:
            out["num_bins"] = self.bins
        if self.method == "percentile":
            out["percentile"] = self.percentile
        elif self.method == "entropy":
            out["num_quantized_bins"] = self.num_quantized_bins
        elif self.method == "distribution":
            out["scenario"] = self.scenario
            out.pop("symmetric")
        return out

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain JSON data."""
        return asdict(self)


Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ChannelRange:
    """Range of each channel of a tensor over all samples, exact.

    Attributes:
        axis: Of the channels, counted from the first.
        rank: Number of axes of the tensor.
        low: Smallest values, float64 (channels,).
        high: Largest values, likewise.
    """

    axis: int
    rank: int
    low: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ChannelRange):
            return NotImplemented
        same = np.array_equal(self.low, other.low) and np.array_equal(self.high, other.high)
        return (self.axis, self.rank) == (other.axis, other.rank) and same

    __hash__ = None  # type: ignore[assignment]

    def merge(self, other: ChannelRange) -> ChannelRange | None:
        """The ranges over both data sets; None where the number of channels is not the same."""
        if (self.axis, self.rank, self.low.size) != (other.axis, other.rank, other.low.size):
            return None
        return replace(self, low=np.minimum(self.low, other.low), high=np.maximum(self.high, other.high))


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of one tensor over all samples.

    Attributes:
        low: Smallest value seen, exact; of a gate such as ``x * Sigmoid(x)`` the least that it takes over the range of
            ``x`` (`kenosis_ort.calibration.accumulators`). 0 if no element was seen.
        high: Largest value seen, likewise.
        count: Number of elements seen; 0 for a tensor that was always empty, or where it is not known.
        dtype: ``"float32"`` or ``"float16"``, the tensor's element type.
        histogram: Counts of the values; None for MinMax.
        averaged: Range by moving average, None without.
        fixed: A range that takes the place of the computed one, e.g. from stock's cache file.
        channels: Ranges by channel, of tensors whose channels a pass may scale; None of others.
    """

    low: float
    high: float
    count: int = 0
    dtype: str = "float32"
    histogram: Histogram | None = None
    averaged: tuple[float, float] | None = None
    fixed: tuple[float, float] | None = None
    channels: ChannelRange | None = None

    def range(self, config: CalibrationConfig, name: str = "") -> tuple[float, float]:
        """The range by the method of ``config``, rounded to the tensor's element type.

        Args:
            config: Method and settings.
            name: Name of the tensor, for messages.

        Raises:
            CalibrationError: The method needs a histogram and there is none.
        """
        if self.fixed is not None:
            return self.fixed
        low, high = np.array(self._range(config, name)).astype(self.dtype).tolist()
        return low, high

    def _range(self, config: CalibrationConfig, name: str) -> tuple[float, float]:
        if config.method == "minmax":
            low, high = self.averaged if config.moving_average and self.averaged else (self.low, self.high)
            if config.is_symmetric and not (config.moving_average and self.averaged):
                top = max(abs(low), abs(high))
                return -top, top
            return low, high
        if self.count == 0:
            return 0.0, 0.0
        histogram = self._histogram_or_raise(config, name)
        if config.method == "percentile":
            return percentile_range(
                histogram,
                self.low,
                self.high,
                percentile=config.percentile,
                bins=config.bins,
                symmetric=config.is_symmetric,
            )
        if config.method == "entropy":
            return entropy_range(
                histogram, self.low, self.high, bins=config.bins, quantized_bins=config.num_quantized_bins
            )
        top = max(abs(self.low), abs(self.high))
        return -top, top

    def moments(self, config: CalibrationConfig, name: str = "") -> Moments:
        """Mean and standard deviation as the distribution method defines them."""
        histogram = self._histogram_or_raise(config, name)
        return distribution_moments(histogram, self.low, self.high, bins=config.bins, scenario=config.scenario)

    def _histogram_or_raise(self, config: CalibrationConfig, name: str) -> Histogram:
        if self.histogram is None:
            raise CalibrationError(
                f"The calibration method '{config.method}' needs a histogram, and this table holds none.",
                where=f"tensor '{name}'",
                fix="Collect again with that method.",
            )
        return self.histogram

    def merge(self, other: TensorStatistics, *, weights: tuple[int, int]) -> TensorStatistics:
        """The statistics of both data sets together.

        Args:
            other: Statistics of the same tensor over other samples.
            weights: Number of samples of this and the other, for the moving average.
        """
        low, high = self.low, self.high
        if other.count or not self.count:
            low, high = (min(low, other.low), max(high, other.high)) if self.count else (other.low, other.high)
        histogram = None
        if self.histogram is not None and other.histogram is not None:
            histogram = self.histogram.merge(other.histogram)
        channels = self.channels if not other.count else other.channels if not self.count else None
        if self.channels is not None and other.channels is not None:
            channels = self.channels.merge(other.channels)
        averaged = None
        if self.averaged is not None and other.averaged is not None:
            a, b = weights[0] / sum(weights), weights[1] / sum(weights)
            least, most = (a * one + b * two for one, two in zip(self.averaged, other.averaged, strict=True))
            averaged = least, most
        count = self.count + other.count
        return replace(self, low=low, high=high, count=count, histogram=histogram, averaged=averaged, channels=channels)


@dataclass(frozen=True, eq=False)
class Rescaling:
    """What a change of weights made of the channels of a value: ``(x - shift) * factor``, cut to bounds.

    Attributes:
        axis: Of the channels; negative counts from the end.
        factors: By channel, positive, float64 (channels,).
        shift: By channel, taken off before; 0.0 for none.
        low: Least value of the activations before it; minus infinity without.
        high: Largest value, likewise.
        source: The value that it was before where the change made a new one; "" for the value itself.
    """

    axis: int
    factors: Float64
    shift: Float64 | float = 0.0
    low: float = -math.inf
    high: float = math.inf
    source: str = ""

    def of(self, statistics: TensorStatistics) -> TensorStatistics | None:
        """The statistics of the changed value without a histogram; None where they do not follow.

        Channels beyond those that factors are known for are padding, and stay as they are. A range set by hand or by
        moving average, which is not the one that was seen, keeps its relation to that.
        """
        seen, count = statistics.channels, len(self.factors)
        if seen is None or not statistics.count or not -seen.rank <= self.axis < seen.rank:
            return None
        if self.axis % seen.rank != seen.axis or seen.low.size < count:
            return None
        ends = np.stack([seen.low, seen.high])
        ends[:, :count] = np.clip((ends[:, :count] - self.shift) * self.factors, self.low, self.high)
        low, high = float(ends[0].min()), float(ends[1].max())

        def like(known: tuple[float, float] | None) -> tuple[float, float] | None:
            if known is None:
                return None
            return _in_proportion(known[0], statistics.low, low), _in_proportion(known[1], statistics.high, high)

        averaged, fixed = like(statistics.averaged), like(statistics.fixed)
        channels = replace(seen, low=ends[0], high=ends[1])
        return TensorStatistics(low, high, statistics.count, statistics.dtype, None, averaged, fixed, channels)


def _in_proportion(known: float, before: float, now: float) -> float:
    return known * (now / before) if before else known + now


@dataclass(frozen=True)
class ChannelStatistics:
    """Statistics of one value, one number a channel, float64 of shape (channels,).

    Attributes:
        low: Least values.
        high: Largest values.
        mean: Means.
        second_moment: Means of the squares.
        sample_means: Means of each sample (index 0 of the value's first axis) by itself, shape (samples, channels);
            of shape (0, channels) where they are not known.
    """

    low: Float64
    high: Float64
    mean: Float64
    second_moment: Float64
    sample_means: Float64

    @property
    def channels(self) -> int:
        return int(self.low.size)

    @property
    def peak(self) -> Float64:
        """Largest absolute values."""
        return np.maximum(np.abs(self.low), np.abs(self.high))
