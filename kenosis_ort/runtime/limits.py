"""What the installed runtime reads and can quantize: the highest IR version and operator sets, facts found out once."""

import hashlib
import logging
import platform
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

import onnx
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state

from kenosis_ort.runtime.counting import count
from kenosis_ort.runtime.machine import at_hand, keep, recall

_log = logging.getLogger(__name__)

T = TypeVar("T")

_OLDEST_IR, _OLDEST_OPSET, _OLDEST_ML = 8, 17, 3  # every onnxruntime since 1.14 reads these
_NO_LIMIT = 200
_FUSES_LATER = {"MaxPool": (21, (1, 28))}
"""Operators whose newer definitions run on 8-bit data only since some runtime: last older operator set, runtime."""


@dataclass(frozen=True)
class RuntimeLimits:
    """The newest formats that a runtime loads.

    Attributes:
        max_ir: Highest ``ir_version``.
        max_opset: Highest version of the main operator set in which it runs QuantizeLinear and DequantizeLinear.
        version: The runtime's version string.
        max_ml: Highest version of the operator set ``ai.onnx.ml``.
    """

    max_ir: int
    max_opset: int
    version: str
    max_ml: int = _OLDEST_ML

    def best_opset(self, op_types: Collection[str]) -> int:
        """The highest operator set in which all of some operators run on 8-bit data, as far as they can."""
        late = [o for op, (o, since) in _FUSES_LATER.items() if op in op_types and not self.is_at_least(*since)]
        return min([self.max_opset, *late])

    def is_at_least(self, major: int, minor: int) -> bool:
        """Whether the runtime is of a version or a later one."""
        return tuple(int(part) for part in self.version.split(".")[:2]) >= (major, minor)


@lru_cache(maxsize=1)
def runtime_limits() -> RuntimeLimits:
    """The limits of the installed onnxruntime.

    Found by loading tiny models, once for an installation: they are kept in the user's cache, under the version, place
    and time of the runtime's library, and found again wherever that is not possible.
    """
    name = f"runtime-{installation()}"
    limits = _from_facts(recall(name) or {})
    if limits is None:
        limits = _probed()
        keep(name, asdict(limits))
    _log.debug("onnxruntime %s reads IR %d, opset %d", limits.version, limits.max_ir, limits.max_opset)
    return limits


def fact_of_processor(what: str, find: Callable[[], T], fits: Callable[[Any], bool]) -> T:
    """A fact about the runtime on this processor, found out once and kept where the processor is known.

    Args:
        what: Name of the fact, in letters.
        find: Finds it out: a truth value or a number.
        fits: Whether what was kept can be such a fact.
    """
    here = at_hand()
    name = f"{what}-{installation()}-{hashlib.sha256(repr((here.cpu, here.features)).encode()).hexdigest()[:16]}"
    known = (recall(name) or {}).get(what) if here.features else None
    if fits(known):
        return cast(T, known)
    found = find()
    if here.features:
        keep(name, {what: found})
    return found


def installation() -> str:
    """Identity of this installation of the runtime, in letters and digits."""
    try:
        library = Path(onnxruntime_pybind11_state.__file__)
        seen = library.stat()
        place = f"{library} {seen.st_size} {seen.st_mtime_ns}"
    except (OSError, TypeError):
        place = str(onnxruntime.__file__)
    return hashlib.sha256(f"{onnxruntime.__version__} {place} {platform.machine()}".encode()).hexdigest()[:24]


def _from_facts(facts: Mapping[str, Any]) -> RuntimeLimits | None:
    """Limits as they were kept; None where they are not of this runtime, or no limits at all."""
    numbers = [facts.get(name) for name in ("max_ir", "max_opset", "max_ml")]
    known = (_OLDEST_IR, _OLDEST_OPSET, _OLDEST_ML)
    fits = all(type(n) is int and least <= n < _NO_LIMIT for n, least in zip(numbers, known, strict=True))
    if not fits or facts.get("version") != onnxruntime.__version__:
        return None
    return RuntimeLimits(**{name: facts[name] for name in ("max_ir", "max_opset", "version", "max_ml")})


def _probed() -> RuntimeLimits:
    return RuntimeLimits(
        max_ir=_highest(_OLDEST_IR, lambda version: _loads(ir=version)),
        max_opset=_highest(_OLDEST_OPSET, lambda version: _loads(opset=version)),
        version=onnxruntime.__version__,
        max_ml=_highest(_OLDEST_ML, lambda version: _loads(ml=version)),
    )


def _highest(known: int, loads: Callable[[int], bool]) -> int:
    """The highest version that loads: doubling steps up from a known one, then bisection."""
    low, step = known, 1
    while low + step < _NO_LIMIT and loads(low + step):
        low, step = low + step, step * 2
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if loads(middle) else (low, middle)
    return low


_PROBE = """
    <ir_version: {ir}, opset_import: ["": {opset}, "ai.onnx.ml": {ml}]>
    probe (float[1] x) => (float[1] y) <float scale = {{1}}, uint8 zero = {{0}}> {{
        q = QuantizeLinear (x, scale, zero)
        y = DequantizeLinear (q, scale, zero)
    }}
"""


def _loads(*, ir: int = _OLDEST_IR, opset: int = _OLDEST_OPSET, ml: int = _OLDEST_ML) -> bool:
    model = onnx.parser.parse_model(_PROBE.format(ir=ir, opset=opset, ml=ml))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the runtime raises several unrelated classes
        _log.debug("IR %d, opset %d refused: %s", ir, opset, error)
        return False
    count(sessions=1)
    return True
