"""What the installed runtime reads and can quantize: the highest IR version and operator sets, and facts of processors.

A model from outside is loaded by the runtime before any other library written in C++ reads it. ONNX's shape inference,
checker and version converter crash or never end on some models that the runtime refuses in one sentence. So it loads
every one first: without optimization, without custom operators nobody asked for. What it refuses is refused here; what
it loads has sound types, attributes and references.
"""

import hashlib
import logging
import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import onnx
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state

from kenosis_ort.errors import ModelLoadError, VerificationError
from kenosis_ort.graph.outside import copy_model
from kenosis_ort.graph.walk import MAIN_DOMAINS, name_nodes, opset_of
from kenosis_ort.runtime.session import open_session, session_options
from kenosis_ort.storage.writing import keep, recall

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
    processor = _processor()
    name = f"{what}-{installation()}-{hashlib.sha256(processor.encode()).hexdigest()[:16]}"
    known = (recall(name) or {}).get(what) if processor else None
    if fits(known):
        return cast(T, known)
    found = find()
    if processor:
        keep(name, {what: found})
    return found


def _processor() -> str:
    """The model and the features of the processor as Linux names them; "" elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return "; ".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))


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
        max_ir=_highest(_OLDEST_IR, lambda version: _loads(ir_version=version, opset=_OLDEST_OPSET)),
        max_opset=_highest(_OLDEST_OPSET, lambda version: _loads(ir_version=_OLDEST_IR, opset=version)),
        version=onnxruntime.__version__,
        max_ml=_highest(_OLDEST_ML, lambda version: _loads(ir_version=_OLDEST_IR, opset=_OLDEST_OPSET, ml=version)),
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


def _loads(*, ir_version: int, opset: int, ml: int = _OLDEST_ML) -> bool:
    value = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in ("x", "y")]
    nodes = [
        onnx.helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        onnx.helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ]
    parameters = [
        onnx.helper.make_tensor("scale", onnx.TensorProto.FLOAT, [], [1.0]),
        onnx.helper.make_tensor("zero", onnx.TensorProto.UINT8, [], [0]),
    ]
    graph = onnx.helper.make_graph(nodes, "probe", value[:1], value[1:], parameters)
    imports = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid("ai.onnx.ml", ml)]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=ir_version)
    try:
        open_session(model)
    except VerificationError as error:
        _log.debug("IR %d, opset %d refused: %s", ir_version, opset, error)
        return False
    return True


_REFUSAL_LIMIT: Final = 400
_OLDEST_KERNELS: Final = 7
"""The runtime has no kernels for some operators of older sets, which preparation converts."""


def check_runtime_loads(
    proto: onnx.ModelProto,
    path: Path | None,
    name: str,
    *,
    is_split: bool = False,
    custom_op_libraries: Sequence[str] = (),
) -> None:
    """Has the runtime load a model.

    What preparation mends by itself is no reason for a refusal: node names used twice, an IR version or operator set
    newer than the runtime's, operators of sets so old that it has no kernels for them, shapes in external data.

    Args:
        proto: The model with all data in memory; not changed.
        path: Its file, None if there is none.
        name: What messages call it.
        is_split: Whether the file refers to external data.
        custom_op_libraries: Libraries with custom operators to register.

    Raises:
        ModelLoadError: The runtime refuses the model.
    """
    refusal = _refusal(path or proto, custom_op_libraries)
    if refusal is None or _lacks_kernels_only(refusal, proto):
        return
    mended = _mended(proto, is_split=is_split)
    if mended is not None and _refusal(mended, custom_op_libraries) is None:
        _log.info("%s: the runtime loads it after small repairs only (%s)", name, refusal)
        return
    raise ModelLoadError(
        f"The runtime refuses the model: {' '.join(str(refusal).split())[:_REFUSAL_LIMIT]}",
        where=name,
        fix="Check that the model runs in onnxruntime; for custom operators give custom_op_libraries.",
    ) from refusal


def _refusal(source: onnx.ModelProto | Path, libraries: Sequence[str]) -> BaseException | None:
    """The runtime's error at load, None where it loads the model."""
    try:
        options = session_options(optimize=False)
        options.add_session_config_entry("session.disable_prepacking", "1")  # nothing is run: no second copy of weights
        open_session(source, options=options, custom_op_libraries=libraries)
    except VerificationError as error:
        return error.__cause__
    return None


def _lacks_kernels_only(refusal: BaseException, proto: onnx.ModelProto) -> bool:
    return type(refusal).__name__ == "NotImplemented" and 0 < opset_of(proto) < _OLDEST_KERNELS


def _mended(proto: onnx.ModelProto, *, is_split: bool) -> onnx.ModelProto | None:
    """A copy with unique node names and a header that the runtime reads; None where nothing would differ."""
    limits = runtime_limits()
    copy = copy_model(proto)
    changed = bool(name_nodes(copy).duplicates) or copy.ir_version > limits.max_ir
    copy.ir_version = min(copy.ir_version, limits.max_ir)
    for entry in copy.opset_import:
        if entry.domain in MAIN_DOMAINS and entry.version > limits.max_opset:
            entry.version, changed = limits.max_opset, True
    return copy if changed or is_split else None
