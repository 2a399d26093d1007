"""What a quantization did, as pure data (`model`) and as text (`text`)."""

from kenosis_ort.report.model import (
    CalibrationSummary,
    OptionChoice,
    OutputQuality,
    QuantizationReport,
    RecordedFusion,
    RecordedKernel,
)

__all__ = [
    "CalibrationSummary",
    "OptionChoice",
    "OutputQuality",
    "QuantizationReport",
    "RecordedFusion",
    "RecordedKernel",
]
