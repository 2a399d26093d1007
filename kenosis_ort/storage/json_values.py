"""Values as JSON has them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from enum import Enum
from typing import Any


def finite(number: float) -> float | str:
    """Returns ``number``, or its name where JSON has no such number; ``float()`` reads both."""
    return number if abs(number) < float("inf") else str(number)


def plain(value: object) -> Any:
    """Returns an option's value as JSON data; objects without a plain form by their text."""
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
