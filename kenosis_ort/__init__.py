"""Drop-in, fusion-aware static quantization for ONNX Runtime.

Change ``from onnxruntime.quantization import quantize_static`` to ``from kenosis_ort import quantize_static``.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kenosis_ort.accuracy.compare import compare
    from kenosis_ort.accuracy.comparison import Comparison
    from kenosis_ort.api import calibrate, convert, layer_times, measure_host, preview, quantize, quantize_static
    from kenosis_ort.bench import BenchReport, bench
    from kenosis_ort.calibration.archives import ParquetReader, TarReader
    from kenosis_ort.calibration.closed_loop import ClosedLoopReader
    from kenosis_ort.calibration.images import ImageFolderReader
    from kenosis_ort.calibration.pipeline import PipelineReader
    from kenosis_ort.calibration.readers import ArrayReader
    from kenosis_ort.calibration.shards import Shards
    from kenosis_ort.calibration.synthetic import SyntheticReader
    from kenosis_ort.calibration.table import CalibrationTable
    from kenosis_ort.clients.calibrator import create_calibrator
    from kenosis_ort.clients.patching import Patch, patch
    from kenosis_ort.clients.quantizer import QDQQuantizer
    from kenosis_ort.cluster.client import Cluster, ShardDone
    from kenosis_ort.errors import (
        AlreadyQuantizedError,
        ArgumentTypeError,
        CalibrationError,
        ClusterError,
        InternalError,
        KenosisError,
        KenosisWarning,
        ModelLoadError,
        NothingToQuantizeError,
        OptionError,
        OutputError,
        UnsupportedModelError,
        VerificationError,
    )
    from kenosis_ort.fusing import FusedModel, fuse
    from kenosis_ort.interop.conversion import Conversion
    from kenosis_ort.options import Placement, Speed, Stages
    from kenosis_ort.plan import PlacementPlan
    from kenosis_ort.recipe import RECIPES, Recipe
    from kenosis_ort.report.model import QuantizationReport
    from kenosis_ort.targets.pattern_report import PatternReport
    from kenosis_ort.targets.profile import HostProfile
    from kenosis_ort.targets.proof import FusionReport
    from kenosis_ort.verify.fusion import verify_fusion
    from kenosis_ort.verify.patterns import verify_patterns
    from kenosis_ort.weights.quantize import WeightReport, quantize_weights

__version__ = "0.1.0"

__all__ = [
    "RECIPES",
    "AlreadyQuantizedError",
    "ArgumentTypeError",
    "ArrayReader",
    "BenchReport",
    "CalibrationError",
    "CalibrationTable",
    "ClosedLoopReader",
    "Cluster",
    "ClusterError",
    "Comparison",
    "Conversion",
    "FusedModel",
    "FusionReport",
    "HostProfile",
    "ImageFolderReader",
    "InternalError",
    "KenosisError",
    "KenosisWarning",
    "ModelLoadError",
    "NothingToQuantizeError",
    "OptionError",
    "OutputError",
    "ParquetReader",
    "Patch",
    "PatternReport",
    "PipelineReader",
    "Placement",
    "PlacementPlan",
    "QDQQuantizer",
    "QuantizationReport",
    "Recipe",
    "ShardDone",
    "Shards",
    "Speed",
    "Stages",
    "SyntheticReader",
    "TarReader",
    "UnsupportedModelError",
    "VerificationError",
    "WeightReport",
    "__version__",
    "bench",
    "calibrate",
    "compare",
    "convert",
    "create_calibrator",
    "fuse",
    "layer_times",
    "measure_host",
    "patch",
    "preview",
    "quantize",
    "quantize_static",
    "quantize_weights",
    "verify_fusion",
    "verify_patterns",
]

# Imported when they are first used: ``kenosis-ort --help`` needs neither ONNX nor the runtime.
_HOMES = {
    "AlreadyQuantizedError": "kenosis_ort.errors",
    "ArgumentTypeError": "kenosis_ort.errors",
    "ArrayReader": "kenosis_ort.calibration.readers",
    "BenchReport": "kenosis_ort.bench",
    "CalibrationError": "kenosis_ort.errors",
    "CalibrationTable": "kenosis_ort.calibration.table",
    "ClosedLoopReader": "kenosis_ort.calibration.closed_loop",
    "Cluster": "kenosis_ort.cluster.client",
    "ClusterError": "kenosis_ort.errors",
    "Comparison": "kenosis_ort.accuracy.comparison",
    "Conversion": "kenosis_ort.interop.conversion",
    "FusedModel": "kenosis_ort.fusing",
    "FusionReport": "kenosis_ort.targets.proof",
    "HostProfile": "kenosis_ort.targets.profile",
    "ImageFolderReader": "kenosis_ort.calibration.images",
    "InternalError": "kenosis_ort.errors",
    "KenosisError": "kenosis_ort.errors",
    "KenosisWarning": "kenosis_ort.errors",
    "ModelLoadError": "kenosis_ort.errors",
    "NothingToQuantizeError": "kenosis_ort.errors",
    "OptionError": "kenosis_ort.errors",
    "OutputError": "kenosis_ort.errors",
    "ParquetReader": "kenosis_ort.calibration.archives",
    "Patch": "kenosis_ort.clients.patching",
    "PatternReport": "kenosis_ort.targets.pattern_report",
    "PipelineReader": "kenosis_ort.calibration.pipeline",
    "PlacementPlan": "kenosis_ort.plan",
    "QDQQuantizer": "kenosis_ort.clients.quantizer",
    "QuantizationReport": "kenosis_ort.report.model",
    "RECIPES": "kenosis_ort.recipe",
    "Recipe": "kenosis_ort.recipe",
    "Placement": "kenosis_ort.options",
    "Speed": "kenosis_ort.options",
    "Stages": "kenosis_ort.options",
    "ShardDone": "kenosis_ort.cluster.client",
    "Shards": "kenosis_ort.calibration.shards",
    "SyntheticReader": "kenosis_ort.calibration.synthetic",
    "TarReader": "kenosis_ort.calibration.archives",
    "UnsupportedModelError": "kenosis_ort.errors",
    "VerificationError": "kenosis_ort.errors",
    "WeightReport": "kenosis_ort.weights.quantize",
    "bench": "kenosis_ort.bench",
    "calibrate": "kenosis_ort.api",
    "compare": "kenosis_ort.accuracy.compare",
    "convert": "kenosis_ort.api",
    "create_calibrator": "kenosis_ort.clients.calibrator",
    "fuse": "kenosis_ort.fusing",
    "layer_times": "kenosis_ort.api",
    "measure_host": "kenosis_ort.api",
    "patch": "kenosis_ort.clients.patching",
    "preview": "kenosis_ort.api",
    "quantize": "kenosis_ort.api",
    "quantize_static": "kenosis_ort.api",
    "quantize_weights": "kenosis_ort.weights.quantize",
    "verify_fusion": "kenosis_ort.verify.fusion",
    "verify_patterns": "kenosis_ort.verify.patterns",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps a function from being hidden by the subpackage of its name, `bench`, once that is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
