"""How far ranges can be trusted that were found with few or no real samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

Range = tuple[float, float]


class Verdict(str, Enum):
    """Whether a model calibrated that way may be shipped."""

    TRUSTED = "trusted"
    USABLE = "usable"
    DO_NOT_SHIP = "do not ship"


class RangeSource(str, Enum):
    """How a tensor's range was found."""

    MEASURED = "measured"
    EXTENDED = "measured, and extended for what the samples do not show"
    BATCH_NORM = "predicted from the statistics of a BatchNormalization"
    BOUND = "measured, up to what the operator cannot exceed"
    REAL = "measured on real samples, and extended towards the made-up ones"


@dataclass(frozen=True)
class TensorTrust:
    """The range of one tensor.

    Attributes:
        source: How it was found.
        depth: Where the tensor stands: 0 for inputs, 1 for the last layer.
        measured: Range over all samples.
        used: Range to quantize with.
        spread: Standard deviation of the range's ends over groups of samples with other seeds, as a share of its width.
    """

    source: RangeSource
    depth: float
    measured: Range
    used: Range
    spread: float


@dataclass(frozen=True)
class CalibrationTrust:
    """How far the ranges of a model can be trusted.

    Attributes:
        verdict: Of the model.
        causes: Why it is not better, the tensors or inputs named; empty where trusted.
        supply: What the caller could give to make it better.
        inputs: What was assumed about each input.
        tensors: By tensor name.
        samples: Number of made-up samples.
        real_samples: Number of real samples.
        real_needed: Number of real samples after which ranges hardly changed; None where they still did, or without.
        misfit: Median misfit of the model's BatchNormalizations, see `BatchNormFit`; None without any.
    """

    verdict: Verdict
    causes: tuple[str, ...] = ()
    supply: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    tensors: Mapping[str, TensorTrust] = field(default_factory=dict)
    samples: int = 0
    real_samples: int = 0
    real_needed: int | None = None
    misfit: float | None = None
