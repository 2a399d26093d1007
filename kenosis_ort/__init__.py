"""Drop-in, fusion-aware static quantization for ONNX Runtime.

Change ``from onnxruntime.quantization import quantize_static`` to ``from kenosis_ort import quantize_static``.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from kenosis_ort.exports import deferred

if TYPE_CHECKING:  # the names of `_NAMES`, for type checkers
    from kenosis_ort.api import calibrate as calibrate
    from kenosis_ort.api import convert as convert
    from kenosis_ort.api import layer_times as layer_times
    from kenosis_ort.api import measure_host as measure_host
    from kenosis_ort.api import preview as preview
    from kenosis_ort.api import quantize as quantize
    from kenosis_ort.api import quantize_static as quantize_static
    from kenosis_ort.bench.benchmark import BenchReport as BenchReport
    from kenosis_ort.bench.benchmark import bench as bench
    from kenosis_ort.calibration.archives import ImageFolderReader as ImageFolderReader
    from kenosis_ort.calibration.archives import ParquetReader as ParquetReader
    from kenosis_ort.calibration.archives import TarReader as TarReader
    from kenosis_ort.calibration.computed_feeds import ClosedLoopReader as ClosedLoopReader
    from kenosis_ort.calibration.pipeline import PipelineReader as PipelineReader
    from kenosis_ort.calibration.readers import ArrayReader as ArrayReader
    from kenosis_ort.calibration.readers import Shards as Shards
    from kenosis_ort.calibration.synthetic import SyntheticReader as SyntheticReader
    from kenosis_ort.calibration.table import CalibrationTable as CalibrationTable
    from kenosis_ort.clients.calibrator import create_calibrator as create_calibrator
    from kenosis_ort.clients.patching import Patch as Patch
    from kenosis_ort.clients.patching import patch as patch
    from kenosis_ort.clients.quantizer import QDQQuantizer as QDQQuantizer
    from kenosis_ort.cluster.client import Cluster as Cluster
    from kenosis_ort.cluster.client import ShardDone as ShardDone
    from kenosis_ort.errors import AlreadyQuantizedError as AlreadyQuantizedError
    from kenosis_ort.errors import ArgumentTypeError as ArgumentTypeError
    from kenosis_ort.errors import CalibrationError as CalibrationError
    from kenosis_ort.errors import ClusterError as ClusterError
    from kenosis_ort.errors import InternalError as InternalError
    from kenosis_ort.errors import KenosisError as KenosisError
    from kenosis_ort.errors import KenosisWarning as KenosisWarning
    from kenosis_ort.errors import ModelLoadError as ModelLoadError
    from kenosis_ort.errors import NothingToQuantizeError as NothingToQuantizeError
    from kenosis_ort.errors import OptionError as OptionError
    from kenosis_ort.errors import OutputError as OutputError
    from kenosis_ort.errors import UnsupportedModelError as UnsupportedModelError
    from kenosis_ort.errors import VerificationError as VerificationError
    from kenosis_ort.fusing import FusedModel as FusedModel
    from kenosis_ort.fusing import fuse as fuse
    from kenosis_ort.interop import Conversion as Conversion
    from kenosis_ort.options import Placement as Placement
    from kenosis_ort.options import Speed as Speed
    from kenosis_ort.options import Stages as Stages
    from kenosis_ort.passes.recipe import RECIPES as RECIPES
    from kenosis_ort.passes.recipe import Recipe as Recipe
    from kenosis_ort.plan import PlacementPlan as PlacementPlan
    from kenosis_ort.report.comparison import Comparison as Comparison
    from kenosis_ort.report.comparison import compare as compare
    from kenosis_ort.report.quantization_report import QuantizationReport as QuantizationReport
    from kenosis_ort.targets.profile import HostProfile as HostProfile
    from kenosis_ort.targets.proof import FusionReport as FusionReport
    from kenosis_ort.targets.proof import PatternReport as PatternReport
    from kenosis_ort.verify import verify_fusion as verify_fusion
    from kenosis_ort.verify import verify_patterns as verify_patterns
    from kenosis_ort.weights.quantize import WeightReport as WeightReport
    from kenosis_ort.weights.quantize import quantize_weights as quantize_weights

__version__ = "0.1.0"

# Imported when they are first used: ``kenosis-ort --help`` needs neither ONNX nor the runtime.
_NAMES: Final = {
    "kenosis_ort.report.comparison": "Comparison compare",
    "kenosis_ort.api": "calibrate convert layer_times measure_host preview quantize quantize_static",
    "kenosis_ort.bench.benchmark": "BenchReport bench",
    "kenosis_ort.calibration.archives": "ImageFolderReader ParquetReader TarReader",
    "kenosis_ort.calibration.computed_feeds": "ClosedLoopReader",
    "kenosis_ort.calibration.pipeline": "PipelineReader",
    "kenosis_ort.calibration.readers": "ArrayReader Shards",
    "kenosis_ort.calibration.synthetic": "SyntheticReader",
    "kenosis_ort.calibration.table": "CalibrationTable",
    "kenosis_ort.clients.calibrator": "create_calibrator",
    "kenosis_ort.clients.patching": "Patch patch",
    "kenosis_ort.clients.quantizer": "QDQQuantizer",
    "kenosis_ort.cluster.client": "Cluster ShardDone",
    "kenosis_ort.errors": "AlreadyQuantizedError ArgumentTypeError CalibrationError ClusterError InternalError "
    "KenosisError KenosisWarning ModelLoadError NothingToQuantizeError OptionError OutputError UnsupportedModelError "
    "VerificationError",
    "kenosis_ort.fusing": "FusedModel fuse",
    "kenosis_ort.interop": "Conversion",
    "kenosis_ort.options": "Placement Speed Stages",
    "kenosis_ort.plan": "PlacementPlan",
    "kenosis_ort.passes.recipe": "RECIPES Recipe",
    "kenosis_ort.report.quantization_report": "QuantizationReport",
    "kenosis_ort.targets.profile": "HostProfile",
    "kenosis_ort.targets.proof": "FusionReport PatternReport",
    "kenosis_ort.verify": "verify_fusion verify_patterns",
    "kenosis_ort.weights.quantize": "WeightReport quantize_weights",
}
_HOMES: Final = tuple(name for names in _NAMES.values() for name in names.split())

__all__ = [*_HOMES, "__version__"]


__getattr__ = deferred(__name__, _NAMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps a function from being hidden by the subpackage of its name, `bench`, once that is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
