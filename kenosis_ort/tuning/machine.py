"""Which machine it is, as far as timings depend on it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Final

import onnxruntime as ort

from kenosis_ort.targets import DEFAULT_TARGET, get_target

_CPU_INFO: Final = Path("/proc/cpuinfo")
_CPU_INFO_LIMIT: Final = 1 << 16  # bytes; the first processor's entry lies within
_FLAGS: Final = frozenset(
    {"avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "amx_bf16"}
    | {"asimddp", "i8mm", "sve", "sve2", "bf16"}
)
"""Processor flags by which the runtime chooses among its float and integer matrix kernels."""

_NUMBERS: Final = ("cpu implementer", "cpu part", "cpu family", "model", "stepping")


@dataclass(frozen=True)
class Machine:
    """What a timing depends on besides the model.

    Attributes:
        cpu: The processor's name as the operating system tells it.
        architecture: Its family, e.g. ``x86_64``.
        flags: Instruction sets that matter to matrix kernels; empty where the system does not list them.
        saturates: Whether 8-bit products saturate.
        cores: Logical processors.
        runtime: Version of onnxruntime.
        threads: Threads of a session, 0 for the runtime's own choice.
    """

    cpu: str
    architecture: str
    flags: tuple[str, ...]
    saturates: bool
    cores: int
    runtime: str
    threads: int

    @property
    def fingerprint(self) -> str:
        """SHA-256 over all attributes, 64 hexadecimal digits."""
        plain = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(plain.encode()).hexdigest()

    def __str__(self) -> str:
        threads = {0: "all threads", 1: "one thread"}.get(self.threads, f"{self.threads} threads")
        flags = f" ({', '.join(self.flags)})" if self.flags else ""
        return f"{self.cpu}{flags}, {self.cores} cores, onnxruntime {self.runtime}, {threads}"


def this_machine(threads: int) -> Machine:
    """Describes the machine this runs on.

    Args:
        threads: Threads of the sessions that are timed.
    """
    cpu, flags = _cpu()
    saturates = get_target(DEFAULT_TARGET).data_types().reduce_range
    return Machine(cpu, platform.machine(), flags, saturates, os.cpu_count() or 1, ort.__version__, threads)


def machine_fingerprint(threads: int) -> str:
    """Returns 64 hexadecimal digits that stay the same while timings on this machine mean the same."""
    return this_machine(threads).fingerprint


@cache
def _cpu() -> tuple[str, tuple[str, ...]]:
    """Returns the processor's name and its flags among `_FLAGS`."""
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
    return name, tuple(sorted(_FLAGS.intersection(listed)))
