"""Dataclasses as JSON has them, and back, by their fields' types alone."""

import math
import os
import sys
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from typing_extensions import Self


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


T = TypeVar("T")


class Data:
    """A dataclass that converts to plain data and back; unknown fields of the data are ignored."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        data: dict[str, Any] = to_data(self)
        return data

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Reads what `to_dict` returned.

        Raises:
            TypeError: A field is missing, or of another kind.
            ValueError: A field holds what it cannot hold.
        """
        return of_data(cls, raw)


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


def of_data(kind: type[T], raw: Any, **read: Any) -> T:
    """The object of a type that `to_data` made plain data of.

    Args:
        kind: A dataclass.
        raw: Its fields by name.
        read: Fields that are read already.

    Raises:
        TypeError: A field is missing, or of another kind.
        ValueError: A field holds what it cannot hold.
    """
    if not isinstance(raw, Mapping):
        raise TypeError(f"{kind.__name__} of {type(raw).__name__}")
    made: Any = kind
    known = _hints(made)
    return kind(**{n: _read(known[n], entry) for n, entry in raw.items() if n in known and n not in read}, **read)


def _read(kind: Any, raw: Any) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if raw is None else _read(next(each for each in inner if each is not type(None)), raw)
    if origin is tuple:
        each = inner[:1] * len(raw) if inner[1:] == (...,) else inner
        return tuple(_read(of, entry) for of, entry in zip(each, raw, strict=True))
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return {key: _read(inner[1], entry) for key, entry in raw.items()}
    if isinstance(kind, type) and is_dataclass(kind):
        return of_data(kind, raw)
    if isinstance(kind, type) and issubclass(kind, (Enum, float)):
        return kind(raw)
    return raw


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind) if f.init}
