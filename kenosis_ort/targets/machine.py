"""What several targets ask about the processor at hand."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def has_matrix_tiles() -> bool:
    """Tells whether this is Linux on a processor with AMX for 8-bit numbers, where the runtimes use it."""
    try:
        return "amx_int8" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
