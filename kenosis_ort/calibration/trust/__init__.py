"""Range trust: ranges from made-up samples, corrected by what the model knows, and a verdict on them."""

from kenosis_ort.calibration.provenance import Known, Provenance
from kenosis_ort.calibration.trust.assess import NetEvidence, assess, real_samples_needed
from kenosis_ort.calibration.trust.collect import collect_with_trust, net_evidence, probe_feeds
from kenosis_ort.calibration.trust.model import CalibrationTrust, RangeSource, TensorTrust, Verdict

__all__ = [
    "CalibrationTrust",
    "Known",
    "NetEvidence",
    "Provenance",
    "RangeSource",
    "TensorTrust",
    "Verdict",
    "assess",
    "collect_with_trust",
    "net_evidence",
    "probe_feeds",
    "real_samples_needed",
]
