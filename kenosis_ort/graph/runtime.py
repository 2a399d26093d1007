"""What the installed runtime reads: the highest IR version and operator set, found by asking it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import onnx
import onnxruntime

_log = logging.getLogger(__name__)

_OLDEST_IR, _OLDEST_OPSET = 8, 17  # every onnxruntime since 1.14 reads these
_NO_LIMIT = 200


@dataclass(frozen=True)
class RuntimeLimits:
    """The newest formats that a runtime loads.

    Attributes:
        max_ir: Highest ``ir_version``.
        max_opset: Highest version of the main operator set.
        version: The runtime's version string.
    """

    max_ir: int
    max_opset: int
    version: str


@lru_cache(maxsize=1)
def runtime_limits() -> RuntimeLimits:
    """Returns the limits of the installed onnxruntime, found by loading one-node models (a few milliseconds)."""
    limits = RuntimeLimits(
        max_ir=_highest(_OLDEST_IR, lambda version: _loads(ir_version=version, opset=_OLDEST_OPSET)),
        max_opset=_highest(_OLDEST_OPSET, lambda version: _loads(ir_version=_OLDEST_IR, opset=version)),
        version=onnxruntime.__version__,
    )
    _log.debug("onnxruntime %s reads IR %d, opset %d", limits.version, limits.max_ir, limits.max_opset)
    return limits


def _highest(known: int, loads: Callable[[int], bool]) -> int:
    """Returns the highest version that loads: doubling steps up from a known one, then bisection."""
    low, step = known, 1
    while low + step < _NO_LIMIT and loads(low + step):
        low, step = low + step, step * 2
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if loads(middle) else (low, middle)
    return low


def _loads(*, ir_version: int, opset: int) -> bool:
    value = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "probe", value[:1], value[1:])
    imports = [onnx.helper.make_opsetid("", opset)]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=ir_version)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the binding raises its own classes, all of them direct children of Exception
        _log.debug("IR %d, opset %d refused: %s", ir_version, opset, error)
        return False
    return True
