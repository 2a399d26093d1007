"""Settings of a pass: declared once, as fields of a frozen dataclass; their types and bounds are their checks."""

from __future__ import annotations

import types
from dataclasses import Field, dataclass, field, fields
from functools import cache
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from kenosis_ort.checks import choice, real, truth, whole, word

_BETWEEN: Final = "between"
_UNIONS: Final = (Union, types.UnionType)


def between(least: float, most: float, *, default: Any) -> Any:
    """Returns a field of a dataclass whose numbers are within bounds."""
    return field(default=default, metadata={_BETWEEN: (least, most)})


@dataclass(frozen=True)
class Settings:
    """Fields that are checked as they are set: ``bool``, ``int``, ``float``, ``str``, ``Literal``, and unions of them.

    Raises:
        OptionError: A value is of another type (then also a TypeError), unknown or out of range.
    """

    def __post_init__(self) -> None:
        hints = _hints(type(self))
        for entry in fields(self):
            value = _checked(f"recipe: {entry.name}", getattr(self, entry.name), hints[entry.name], entry)
            object.__setattr__(self, entry.name, value)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _checked(name: str, value: Any, hint: Any, entry: Field[Any]) -> Any:
    if get_origin(hint) in _UNIONS:
        words = tuple(word for part in get_args(hint) for word in get_args(part) if get_origin(part) is Literal)
        if words and isinstance(value, str):
            return choice(name, value, among=words)
        hint = next(part for part in get_args(hint) if get_origin(part) is not Literal)
    least, most = entry.metadata.get(_BETWEEN, (float("-inf"), float("inf")))
    if get_origin(hint) is Literal:
        return choice(name, value, among=get_args(hint))
    if hint is bool:
        return truth(name, value)
    if hint is int:
        return whole(name, value, least=int(max(least, 0)), most=None if most == float("inf") else int(most))
    if hint is float:
        return real(name, value, least=least, most=most)
    return word(name, value)
