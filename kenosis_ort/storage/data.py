"""Values as JSON has them: dataclasses, options, numbers that JSON lacks."""

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any


def finite(number: float) -> float | str:
    """``number``, or its name where JSON has no such number; ``float()`` reads both."""
    return number if abs(number) < float("inf") else str(number)


def plain(value: object) -> Any:
    """An option's value as JSON data; objects without a plain form by their text."""
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    numpy = sys.modules.get("numpy")  # where it is not imported nothing is of its types
    if numpy is not None and isinstance(value, numpy.ndarray):
        return {"dtype": str(value.dtype), "values": value.tolist()}
    if numpy is not None and isinstance(value, numpy.generic):
        return plain(value.item())
    if isinstance(value, Mapping):
        return {str(plain(k)): plain(v) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((plain(v) for v in value), key=str)
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return type(value).__name__ if callable(value) else str(value)


def without_odd(value: Any) -> Any:
    """The data with infinity and NaN, which JSON lacks, as None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: without_odd(entry) for key, entry in value.items()}
    return [without_odd(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def to_data(value: Any) -> Any:
    """A dataclass, or a container of such, as plain data; numbers that JSON does not have by their names."""
    if is_dataclass(value):
        return {f.name: to_data(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, Mapping):
        return {str(key): to_data(entry) for key, entry in value.items()}
    return [to_data(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def format_bytes(count: int) -> str:
    """A byte count with a decimal unit, e.g. ``"30.6 MB"``."""
    if count < 1000:
        return f"{count} B"
    size = float(count)
    for unit in ("kB", "MB"):
        size /= 1000
        if size < 999.95:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} GB"
