"""Report of a quantization, as pure data (`model`, `sections`, `evidence`), as text (`text`) and as a page (`html`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kenosis_ort.exports import deferred

if TYPE_CHECKING:
    from kenosis_ort.options import OptionChoice
    from kenosis_ort.passes.runner import PassOutcome
    from kenosis_ort.report.evidence import ReportEvidence
    from kenosis_ort.report.quantization_report import CalibrationSummary, OutputQuality, QuantizationReport
    from kenosis_ort.report.sections import SpeedCandidate, SpeedSummary, TensorTrust, TrustSummary

_NAMES: Final = {
    "kenosis_ort.options": "OptionChoice",
    "kenosis_ort.passes.runner": "PassOutcome",
    "kenosis_ort.report.evidence": "ReportEvidence",
    "kenosis_ort.report.quantization_report": "CalibrationSummary OutputQuality QuantizationReport",
    "kenosis_ort.report.sections": "SpeedCandidate SpeedSummary TensorTrust TrustSummary",
}

__all__ = [
    "CalibrationSummary",
    "OptionChoice",
    "OutputQuality",
    "PassOutcome",
    "QuantizationReport",
    "ReportEvidence",
    "SpeedCandidate",
    "SpeedSummary",
    "TensorTrust",
    "TrustSummary",
]

__getattr__ = deferred(__name__, _NAMES)
