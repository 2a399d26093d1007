"""Range trust: ranges from made-up samples, corrected by what the model knows, and a verdict on them."""

from kenosis_ort.calibration.table_format import Known, Provenance
from kenosis_ort.calibration.trust.assess import (
    CalibrationTrust,
    NetEvidence,
    RangeSource,
    TensorAssessment,
    TrustLevel,
    assess,
    real_samples_needed,
)
from kenosis_ort.calibration.trust.collect import collect_with_trust, net_evidence, probe_feeds

__all__ = [
    "CalibrationTrust",
    "Known",
    "NetEvidence",
    "Provenance",
    "RangeSource",
    "TensorAssessment",
    "TrustLevel",
    "assess",
    "collect_with_trust",
    "net_evidence",
    "probe_feeds",
    "real_samples_needed",
]
