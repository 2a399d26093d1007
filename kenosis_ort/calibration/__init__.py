"""Calibration: readers, collection of tensor statistics, and the calibration table."""

from kenosis_ort.calibration.cached_samples import model_fingerprint
from kenosis_ort.calibration.collector import Points, collect
from kenosis_ort.calibration.feeds import sample_feeds
from kenosis_ort.calibration.methods import CalibrationConfig
from kenosis_ort.calibration.table import CalibrationTable, TensorStatistics

__all__ = [
    "CalibrationConfig",
    "CalibrationTable",
    "Points",
    "TensorStatistics",
    "collect",
    "model_fingerprint",
    "sample_feeds",
]
