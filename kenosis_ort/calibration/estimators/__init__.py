"""Range estimators: from what was seen of a tensor to the range that it is quantized over."""

from kenosis_ort.calibration.estimators.estimate import METHODS, check_method, estimate, estimate_all
from kenosis_ort.calibration.estimators.sketch import Sketch, sketch

__all__ = ["METHODS", "Sketch", "check_method", "estimate", "estimate_all", "sketch"]
