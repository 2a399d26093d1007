"""What a quantization did, as pure data (`model`, `sections`, `evidence`), as text (`text`) and as a page (`html`)."""

from kenosis_ort.passes.outcome import PassOutcome
from kenosis_ort.report.evidence import ReportEvidence
from kenosis_ort.report.model import CalibrationSummary, OptionChoice, OutputQuality, QuantizationReport
from kenosis_ort.report.sections import SpeedRung, SpeedSummary, TensorTrust, TrustSummary

__all__ = [
    "CalibrationSummary",
    "OptionChoice",
    "OutputQuality",
    "PassOutcome",
    "QuantizationReport",
    "ReportEvidence",
    "SpeedRung",
    "SpeedSummary",
    "TensorTrust",
    "TrustSummary",
]
