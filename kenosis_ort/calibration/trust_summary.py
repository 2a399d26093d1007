"""What is told of ranges of made-up samples: how each was found, and how far they can be trusted."""

from dataclasses import dataclass
from enum import Enum


class RangeSource(str, Enum):
    """Source of a tensor's range."""

    MEASURED = "measured"
    EXTENDED = "measured, and extended for what the samples do not show"
    BATCH_NORM = "predicted from the statistics of a BatchNormalization"
    BOUND = "measured, up to what the operator cannot exceed"
    REAL = "measured on real samples, and extended towards the made-up ones"


@dataclass(frozen=True)
class TensorTrust:
    """Trust in the range of one tensor.

    Attributes:
        tensor: Name of the tensor.
        how: How the range was found, e.g. ``seen in the data`` or ``BatchNormalization statistics``.
        stability: 0 to 1: agreement of the ranges across seeds or parts of the data; None if not measured.
        reason: What is wrong with it, one sentence; empty where nothing is.
    """

    tensor: str
    how: str = ""
    stability: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class TrustSummary:
    """Trust in the calibration.

    Attributes:
        verdict: ``trusted``, ``usable`` or ``do not ship``.
        reason: Why, one sentence.
        source: Where the data came from, e.g. ``caller``, ``synthetic``, ``mixed`` or ``cache``.
        advice: What the caller should supply, e.g. ten real samples; empty where nothing is needed.
        tensors: The tensors, those that led to the verdict first.
    """

    verdict: str
    reason: str = ""
    source: str = ""
    advice: str = ""
    tensors: tuple[TensorTrust, ...] = ()
