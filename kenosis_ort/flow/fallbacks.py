"""Fallbacks where a quantization fails, and failures that stay errors.

Where a rewrite or what the model computes is the reason, the same placement without rewrites and passes, then the float
model as it came. A planner, an emitter or a proof that fails is a defect: an error, or the float model if the caller
wants that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import onnx

from kenosis_ort.errors import (
    AlreadyQuantizedError,
    CalibrationCacheError,
    CalibrationError,
    ClusterError,
    InternalError,
    KenosisError,
    ModelLoadError,
    OptionError,
    OutputError,
    place_of,
)
from kenosis_ort.flow import steps
from kenosis_ort.flow.call import OF_THE_MODEL, Call
from kenosis_ort.flow.finish import RewriteMismatchError
from kenosis_ort.flow.request import Request
from kenosis_ort.flow.samples import KeepingReader
from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.save import write_model
from kenosis_ort.graph.session import WHOLE_LIMIT, as_array, open_session
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.recipe import RECIPES
from kenosis_ort.report.model import CalibrationSummary, QuantizationReport
from kenosis_ort.storage.writing import is_lack_of_room

_CALLERS: Final = (
    CalibrationCacheError,
    ClusterError,
    OptionError,
    ModelLoadError,
    AlreadyQuantizedError,
    OutputError,
)


class WorthlessError(KenosisError):
    """The quantized model has nothing in common with the float model.

    Attributes:
        samples: How many samples were calibrated on.
    """

    def __init__(self, why: str, samples: int) -> None:
        super().__init__(why)
        self.samples = samples


def without_optional_work(request: Request) -> Request:
    """The request without rewrites and passes."""
    recipe = request.recipe
    plain = replace(RECIPES["plain"], ranges=recipe.ranges, samples=recipe.samples, speed=recipe.speed)
    return replace(request, rewrites=frozenset(), recipe=plain)


def is_of_the_model(error: Exception) -> bool:
    """Whether an error is about the model, or its form after a rewrite, and not a defect."""
    return isinstance(error, (RewriteMismatchError, *OF_THE_MODEL))


def defect(call: Call, error: Exception) -> Exception:
    """The error for a planner, an emitter or a proof that failed; running out of memory is none of them."""
    if isinstance(error, MemoryError):
        return error
    return InternalError(
        f"quantize_static({call.loaded.name}, {call.request.output_name}) failed: {reason_of(error)}",
        where=place_of(error),
        fix="please report this as a bug of kenosis-ort, with the model; on_failure='float' delivers the float model",
    )


def is_the_callers(error: Exception, call: Call, data: KeepingReader | None) -> bool:
    """Whether an error is about the caller's arguments or data, so that no other form of the model helps."""
    if isinstance(error, _CALLERS) or is_lack_of_room(error) or (data is not None and data.failure is not None):
        return True
    if not isinstance(error, CalibrationError):
        return False
    if data is None or data.last is None or call.request.calibration_providers:
        return True
    return not _takes(call, data.last)


def _takes(call: Call, feed: Mapping[str, Any]) -> bool:
    """Whether the float model as it came runs on a feed, and makes no NaN or infinity of what holds some."""
    try:
        source = call.loaded.path or call.loaded.proto
        session = open_session(source, custom_op_libraries=call.request.custom_op_libraries)
        outputs = [as_array(o) for o in session.run(None, dict(feed))]
    except Exception:  # the runtime raises several unrelated classes; whichever it is, the feed is not taken
        return False
    weights = (array_in(tensor) for tensor in call.loaded.proto.graph.initializer if tensor.data_type in _FLOATS)
    return _are_finite(outputs) or (_are_finite(map(as_array, feed.values())) and _are_finite(weights))


_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE)


def _are_finite(arrays: Iterable[Any]) -> bool:
    return all(a.dtype.kind not in "fc" or bool(np.isfinite(a).all()) for a in arrays)


def deliver_float(
    call: Call, why: str, samples: int = 0, fix: str = "nothing, or deploy the float model itself"
) -> QuantizationReport:
    """Writes the float model as it came and reports why.

    Args:
        call: What has gathered so far.
        why: Why there is no quantized form, without a full stop.
        samples: How many samples were calibrated on.
        fix: What the caller can do about it.
    """
    request, loaded = call.request, call.loaded
    with call.stage("write"):
        call.size_after = write_model(
            loaded.proto,
            request.output,
            external_data=request.use_external_data_format,
            check=lambda path: steps.check_loads(
                path, request, pieces=int(len(loaded.proto.graph.node) <= WHOLE_LIMIT)
            ),
            content=loaded.path.read_bytes() if loaded.path is not None and not loaded.is_split else None,
            warn=call.warnings.append,
        )
    call.warnings.append(f"The file holds the float model as it came: {why}. Fix: {fix}.")
    call.fallbacks.append(f"The float model as it came: {why}.")
    if request.caches:
        call.warnings.append("The cache of the file is float, as in the float model. Fix: feed it so.")
    seconds = call.seconds.get("calibrate", 0.0)
    calibration = CalibrationSummary(str(request.choices["calibrate_method"].value), samples, 0, seconds)
    return call.report(PlacementPlan(request.target.name), None, calibration, float_because=why)


def reason_of(error: Exception) -> str:
    """Message of an error, without a full stop."""
    text = error.what if isinstance(error, KenosisError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:300].rstrip(".")
