"""Calibration data made up from what the inputs of a model are for."""

from kenosis_ort.calibration.synthetic.kinds import InputKind
from kenosis_ort.calibration.synthetic.reader import SyntheticReader
from kenosis_ort.calibration.table_format import Known

__all__ = ["InputKind", "Known", "SyntheticReader"]
