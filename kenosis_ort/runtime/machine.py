"""The machine at hand: its processor and the class of that, its cores, how runs are timed; and what its runtime reads.

Facts are kept between processes in the folder that the system's conventions give caches. They can be found out again: a
file that is missing, damaged or cannot be written costs time and nothing else.

Whoever wants to know of the machine asks `machine`; within `on` it is another one, so that a test says which processor
it means.
"""

import hashlib
import json
import logging
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import onnx
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state

from kenosis_ort.runtime.counting import count

_log = logging.getLogger(__name__)

_SIZE_LIMIT: Final = 1 << 16
"""Bytes of a file of kept facts."""
_CPU_INFO: Final = Path("/proc/cpuinfo")
_CPU_INFO_LIMIT: Final = 1 << 16  # bytes; the first processor's entry lies within
_TILES: Final = "amx_int8"
_ARM: Final = frozenset({"asimddp", "i8mm", "sve", "sve2", "bf16"})
FEATURES: Final = frozenset({"avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", _TILES, "amx_bf16"} | _ARM)
"""Processor flags by which runtimes choose among their float and integer matrix kernels."""
ARM: Final = "Arm"
_CLASSES: Final = (
    ("AMX", {_TILES}),
    ("VNNI", {"avx512_vnni", "avx_vnni"}),
    (ARM, _ARM),
    ("AVX-512 without VNNI", {"avx512f"}),
    ("AVX2", {"avx2"}),
)
_EXACT: Final = frozenset({"AMX", "VNNI", ARM})


def has_matrix_tiles() -> bool:
    """Whether this is Linux on a processor with AMX for 8-bit numbers, where the runtimes use it."""
    return _TILES in machine().features


def processor_class(features: Iterable[str]) -> str:
    """Name of the kind of matrix kernels that a processor has, empty where its flags tell none.

    Args:
        features: Its flags among `FEATURES`.
    """
    flags = frozenset(features)
    return next((name for name, those in _CLASSES if flags & those), "")


def sums_of_products(features: Iterable[str], *, saturates: bool) -> str:
    """The class of the processor and how it adds products of 8 bits, in a sentence without a full stop.

    Args:
        features: Its flags among `FEATURES`.
        saturates: Those products saturate here, as measured.
    """
    known = processor_class(features) or "A processor of unknown class"
    return f"{known}: products of 8 bits are added in {16 if saturates else 32}"


def has_dot_products(features: Iterable[str]) -> bool:
    """Whether flags say that the processor adds products of 8 bits in 32."""
    return processor_class(features) in _EXACT


def read_cpu_info(text: str, *, fallback: str) -> tuple[str, tuple[str, ...]]:
    """Reads the processor's name and flags.

    Args:
        text: Content of ``/proc/cpuinfo``, or nothing.
        fallback: The name where the text has none (Arm processors have numbers only; they are appended).
    """
    fields: dict[str, str] = {}
    for key, value in re.findall(r"^([^\n:]+?)\s*:\s*([^\n]*)$", text, re.MULTILINE):
        fields.setdefault(key.lower(), " ".join(value.split()))
    numbers = [
        fields[key] for key in ("cpu implementer", "cpu part", "cpu family", "model", "stepping") if key in fields
    ]
    name = " ".join([fields.get("model name") or fallback, *numbers])
    listed = (fields.get("flags") or fields.get("features") or "").split()
    return name, tuple(sorted(FEATURES.intersection(listed)))


@dataclass(frozen=True)
class Machine:
    """Facts about the machine that a call runs on.

    Attributes:
        family: Processor family as the operating system names it.
        cpu: Name of the processor.
        features: Its flags among `FEATURES`; none where the system does not list them.
        cores: Processors that this process may use.
        saturates: 8-bit products saturate at 16 bits; None where the runtime is to be asked.
        timed: Gives the way in which a target's runtime is timed here, for the target's own one.
    """

    family: str
    cpu: str
    features: tuple[str, ...]
    cores: int = 1
    saturates: bool | None = None
    timed: Callable[[Any], Any] = lambda runtime: runtime


_given: Final[ContextVar[Machine | None]] = ContextVar("machine", default=None)


def machine() -> Machine:
    """The machine that was handed in by `on`, else the one at hand."""
    return _given.get() or at_hand()


@contextmanager
def on(given: Machine) -> Iterator[Machine]:
    """A context in which calls take another machine for the one at hand."""
    token = _given.set(given)
    try:
        yield given
    finally:
        _given.reset(token)


@cache
def at_hand() -> Machine:
    """The machine that this process runs on."""
    try:
        with _CPU_INFO.open("rb") as file:
            text = file.read(_CPU_INFO_LIMIT).decode("utf-8", "replace")
    except OSError:  # not Linux, or hidden
        text = ""
    family = platform.machine()
    cpu, features = read_cpu_info(text, fallback=platform.processor() or family or "unknown processor")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(family, cpu, features, cores)


# ---- facts kept between processes ------------------------------------------------------------------------------------


def user_cache() -> Path | None:
    """The folder for caches of this package, None where the user has no home.

    ``$XDG_CACHE_HOME`` or ``~/.cache`` (XDG Base Directory Specification 0.8: a relative value is ignored),
    ``~/Library/Caches`` on macOS, ``%LOCALAPPDATA%`` on Windows; below it ``kenosis-ort``.
    """
    cache_home = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", "")
    base: Path | None = Path(cache_home) if cache_home and Path(cache_home).is_absolute() else None
    if base is None:
        try:
            home = Path.home()
        except RuntimeError:
            return None
        usual = {"win32": ("AppData", "Local"), "darwin": ("Library", "Caches")}
        base = home.joinpath(*usual.get(sys.platform, (".cache",)))
    return base / "kenosis-ort"


def recall(name: str) -> Mapping[str, Any] | None:
    """Content cached under a name, None where there is nothing of use.

    Args:
        name: Of a file, without its ending.
    """
    folder = user_cache()
    path = None if folder is None else folder / f"{name}.json"
    try:
        if path is None or not path.is_file() or path.stat().st_size > _SIZE_LIMIT:
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        _log.debug("'%s' is not read: %s", path, error)
        return None
    return found if isinstance(found, dict) else None


def keep(name: str, facts: Mapping[str, Any]) -> None:
    """Keeps facts under a name, whole or not at all; where that is not possible, nothing.

    Args:
        name: As for `recall`.
        facts: Anything JSON takes.
    """
    folder = user_cache()
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as made:
            text = Path(made, "facts")
            text.write_text(json.dumps(dict(facts)), encoding="utf-8")
            os.replace(text, folder / f"{name}.json")
    except OSError as error:
        _log.debug("nothing is kept in '%s': %s", folder, error)


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
