"""Calibration methods: their settings, and the ranges that ONNX Runtime's methods take from a histogram.

How statistics are collected and turned into ranges is a `CalibrationConfig`; its defaults are those of
``onnxruntime.quantization``.

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
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from kenosis_ort.calibration.statistics import Counts, Float64, Histogram, TensorStatistics
from kenosis_ort.errors import CalibrationError, OptionError, did_you_mean

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


_SMOOTHING = 1e-4


def range_of(statistics: TensorStatistics, config: CalibrationConfig, name: str = "") -> tuple[float, float]:
    """The range of a tensor by the method of ``config``, rounded to the tensor's element type.

    Args:
        statistics: What was seen of it.
        config: Method and settings.
        name: Its name, for messages.

    Raises:
        CalibrationError: The method needs a histogram and there is none.
    """
    if statistics.fixed is not None:
        return statistics.fixed
    low, high = np.array(_range(statistics, config, name)).astype(statistics.dtype).tolist()
    return low, high


def _range(statistics: TensorStatistics, config: CalibrationConfig, name: str) -> tuple[float, float]:
    low, high, histogram = statistics.low, statistics.high, statistics.histogram
    if config.method == "minmax":
        if config.moving_average and statistics.averaged:
            return statistics.averaged
    elif statistics.count == 0:
        return 0.0, 0.0
    elif histogram is None:
        raise CalibrationError(
            f"The calibration method '{config.method}' needs a histogram, and this table holds none.",
            where=f"tensor '{name}'",
            fix="Collect again with that method.",
        )
    elif config.method == "percentile":
        return percentile_range(histogram, low, high, config)
    elif config.method == "entropy":
        return entropy_range(histogram, low, high, bins=config.bins, quantized_bins=config.num_quantized_bins)
    if config.is_symmetric or config.method == "distribution":
        low, high = -max(abs(low), abs(high)), max(abs(low), abs(high))
    return low, high


def _signed_bins(low: float, high: float, bins: int) -> Float64:
    top = max(abs(low), abs(high)) or 0.5
    return np.linspace(-top, top, bins + 1)


def _clip(range_: tuple[float, float], low: float, high: float) -> tuple[float, float]:
    return max(range_[0], low), min(range_[1], high)


def percentile_range(histogram: Histogram, low: float, high: float, config: CalibrationConfig) -> tuple[float, float]:
    """The range that holds a percentage of the values; when not symmetric half of the rest is cut on each side.

    Args:
        histogram: Counts of the values.
        low: Their minimum.
        high: Their maximum.
        config: The percentage, the number of bins whose edges the ends are taken from, and whether the percentile is
            that of the magnitudes.

    Returns:
        The ends, each the left edge of the bin that holds the percentile, never outside ``[low, high]``.
    """
    if config.is_symmetric:
        bottom, top = 0.0 if low <= 0.0 <= high else min(abs(low), abs(high)), max(abs(low), abs(high))
        if top == bottom:
            bottom, top = top - 0.5, top + 0.5
        edges = np.linspace(bottom, top, config.bins + 1)
        end = float(edges[np.searchsorted(_cdf(histogram.rebin(edges, magnitudes=True)), config.percentile / 100.0)])
        return _clip((-end, end), low, high)
    edges = _signed_bins(low, high, config.bins)
    cut = (100.0 - config.percentile) / 200.0
    left, right = np.searchsorted(_cdf(histogram.rebin(edges)), (cut, 1.0 - cut))
    return _clip((float(edges[left]), float(edges[right])), low, high)


def _cdf(counts: Counts) -> Float64:
    cumulative: Float64 = np.cumsum(counts / max(int(counts.sum()), 1))  # rounded as stock's, which decides ties
    return cumulative


def distribution_moments(
    histogram: Histogram, low: float, high: float, config: CalibrationConfig
) -> tuple[float, float, Counts, Float64]:
    """Mean and standard deviation over symmetric bins, the counts in these, and their edges.

    Args:
        histogram: Counts of the values.
        low: Their minimum.
        high: Their maximum.
        config: The number of bins, and the scenario: ``"p3"`` takes the moments of the signed cube root of the values.
    """
    edges = _signed_bins(low, high, config.bins)
    counts = histogram.rebin(edges)
    values = (edges[:-1] + edges[1:]) * 0.5
    if config.scenario == "p3":
        values = np.cbrt(values)
    total = max(int(counts.sum()), 1)
    mean = float((counts * values).sum() / total)
    variance = float((counts * values**2).sum() / total) - mean**2
    return mean, math.sqrt(max(variance, 0.0)), counts, edges


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
