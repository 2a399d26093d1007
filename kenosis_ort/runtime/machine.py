"""The machine at hand: its processor and the class of that, its cores, how runs are timed, and facts kept about it.

Facts are kept between processes in the folder that the system's conventions give caches. They can be found out again: a
file that is missing, damaged or cannot be written costs time and nothing else.

Whoever wants to know of the machine asks `machine`; within `on` it is another one, so that a test says which processor
it means.
"""

import json
import logging
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

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
