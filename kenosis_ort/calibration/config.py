"""What to collect and how to turn it into ranges; the defaults are those of ``onnxruntime.quantization``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from kenosis_ort.errors import OptionError, did_you_mean

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
            hint = did_you_mean(str(lowered), METHODS)
            raise OptionError(
                f"Unknown calibration method {name!r}.{hint}",
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
            raise OptionError(f"Calibration option {field}={getattr(self, field)!r} must be {requirement}.")

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
