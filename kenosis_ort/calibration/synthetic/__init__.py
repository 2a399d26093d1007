"""Calibration data made up from what the inputs of a model are for."""

from kenosis_ort.calibration.feeds import Known
from kenosis_ort.calibration.synthetic.kinds import InputKind
from kenosis_ort.calibration.synthetic.reader import SyntheticReader

__all__ = ["InputKind", "Known", "SyntheticReader"]
