"""Facts about the processor at hand that several targets need."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Final

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
    return _TILES in processor()[1]


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


@cache
def processor() -> tuple[str, tuple[str, ...]]:
    """The processor's name and its flags among `FEATURES`; none where the system does not list them."""
    try:
        with _CPU_INFO.open("rb") as file:
            text = file.read(_CPU_INFO_LIMIT).decode("utf-8", "replace")
    except OSError:  # not Linux, or hidden
        text = ""
    return read_cpu_info(text, fallback=platform.processor() or platform.machine() or "unknown processor")


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
