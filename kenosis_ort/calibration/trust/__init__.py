"""Range trust: ranges from made-up samples, corrected by what the model knows, and a verdict on them."""

from kenosis_ort.calibration.provenance import Known, Provenance
from kenosis_ort.calibration.trust.assess import BatchNormEvidence, assess, real_samples_needed
from kenosis_ort.calibration.trust.collect import batch_norm_evidence, collect_with_trust, probe_feeds
from kenosis_ort.calibration.trust.model import CalibrationTrust, RangeSource, TensorTrust, Verdict

__all__ = [
    "BatchNormEvidence",
    "CalibrationTrust",
    "Known",
    "Provenance",
    "RangeSource",
    "TensorTrust",
    "Verdict",
    "assess",
    "batch_norm_evidence",
    "collect_with_trust",
    "probe_feeds",
    "real_samples_needed",
]
