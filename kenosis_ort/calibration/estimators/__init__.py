"""Range estimators: from what was seen of a tensor to the range that it is quantized over."""

from kenosis_ort.calibration.estimators.choose import RangeChoice, choose_ranges
from kenosis_ort.calibration.estimators.estimate import METHODS, check_method, estimate, estimate_all
from kenosis_ort.calibration.estimators.sketch import Sketch, sketch

__all__ = ["METHODS", "RangeChoice", "Sketch", "check_method", "choose_ranges", "estimate", "estimate_all", "sketch"]
