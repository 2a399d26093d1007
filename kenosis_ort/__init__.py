"""Drop-in, fusion-aware static quantization for ONNX Runtime.

Change ``from onnxruntime.quantization import quantize_static`` to ``from kenosis_ort import quantize_static``.
"""

from kenosis_ort.accuracy.compare import compare
from kenosis_ort.accuracy.comparison import Comparison
from kenosis_ort.api import calibrate, preview, quantize, quantize_static
from kenosis_ort.bench import BenchReport, bench
from kenosis_ort.calibration.closed_loop import ClosedLoopReader
from kenosis_ort.calibration.images import ImageFolderReader
from kenosis_ort.calibration.readers import ArrayReader
from kenosis_ort.calibration.synthetic import SyntheticReader
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import (
    AlreadyQuantizedError,
    CalibrationError,
    KenosisError,
    KenosisWarning,
    ModelLoadError,
    NothingToQuantizeError,
    OptionError,
    OutputError,
    UnsupportedModelError,
    VerificationError,
)
from kenosis_ort.options import Stages
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.recipe import RECIPES, Recipe
from kenosis_ort.report.model import QuantizationReport
from kenosis_ort.verify.fusion import verify_fusion
from kenosis_ort.verify.report_model import FusionReport

__version__ = "0.1.0"

__all__ = [
    "RECIPES",
    "AlreadyQuantizedError",
    "ArrayReader",
    "BenchReport",
    "CalibrationError",
    "CalibrationTable",
    "ClosedLoopReader",
    "Comparison",
    "FusionReport",
    "ImageFolderReader",
    "KenosisError",
    "KenosisWarning",
    "ModelLoadError",
    "NothingToQuantizeError",
    "OptionError",
    "OutputError",
    "PlacementPlan",
    "QuantizationReport",
    "Recipe",
    "Stages",
    "SyntheticReader",
    "UnsupportedModelError",
    "VerificationError",
    "__version__",
    "bench",
    "calibrate",
    "compare",
    "preview",
    "quantize",
    "quantize_static",
    "verify_fusion",
]
