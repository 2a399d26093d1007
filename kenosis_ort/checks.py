"""Checks of single values: each returns the value in Python's own types, or raises an error that names the option.

Numpy's numbers and booleans count as Python's.
"""

import math
import numbers
import operator
import os
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from kenosis_ort.errors import ArgumentTypeError, OptionError, did_you_mean

MOST_THREADS: Final = 4096
"""More than any machine has, and few enough for the runtime to start."""

Check = Callable[[str, Any], Any]


def truth(name: str, value: Any) -> bool:
    """A truth value."""
    numpy = sys.modules.get("numpy")  # where it is not imported nothing is of its types
    if isinstance(value, bool) or (numpy is not None and isinstance(value, numpy.bool_)):
        return bool(value)
    raise wrong_type(name, value, "true or false")


def flag(name: str, value: Any) -> bool:
    """A truth value; 0 and 1 count as such."""
    return bool(value) if _is_whole(value) and value in (0, 1) else truth(name, value)


def whole(name: str, value: Any, *, least: int = 0, most: int | None = None) -> int:
    """A whole number within bounds."""
    wanted = f"a whole number, {least} or more" if most is None else f"a whole number from {least} to {most}"
    if not _is_whole(value):
        raise wrong_type(name, value, wanted)
    number = operator.index(value)
    if number < least or (most is not None and number > most):
        raise _out(name, value, wanted)
    return number


def real(
    name: str, value: Any, *, least: float = -math.inf, most: float = math.inf, above: float | None = None
) -> float:
    """A finite number within bounds."""
    bounds = f" above {above:g}" if above is not None else ""
    if least > -math.inf:
        bounds = f", {least:g} or more" if most == math.inf else f" from {least:g} to {most:g}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise wrong_type(name, value, f"a number{bounds}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not least <= number <= most or (above is not None and number <= above):
        raise _out(name, value, f"a number{bounds}")
    return number


def path(name: str, value: Any) -> str | os.PathLike[str]:
    """A path as it is; one of bytes is none."""
    if isinstance(value, (str, os.PathLike)):
        text = os.fspath(value)
        if isinstance(text, str):
            if not text or "\0" in text:
                raise _out(name, value, "a path of one character or more, without null characters")
            return value
    raise wrong_type(name, value, "a path, as a string or an os.PathLike of one")


def word(name: str, value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise wrong_type(name, value, "a string")
    return str(value)


def choice(name: str, value: Any, *, among: tuple[str, ...]) -> str:
    """One of a few strings."""
    listed = ", ".join(map(repr, among))
    if not isinstance(value, str):
        raise wrong_type(name, value, f"one of {listed}")
    if value not in among:
        raise OptionError(
            f"{name}={value!r} is unknown.{did_you_mean(value, among)}", where=name, fix=f"one of {listed}"
        )
    return str(value)


def function(name: str, value: Any) -> Any:
    """Something that can be called."""
    if not callable(value):
        raise wrong_type(name, value, "a function")
    return value


def several(name: str, value: Any, *, each: Check = word, what: str = "strings") -> tuple[Any, ...]:
    """The entries of a list, or of anything else that is iterated over."""
    if isinstance(value, (str, bytes)):
        raise OptionError(f"{name}={value!r} is a string, not a list", where=name, fix=f"{name}=[{value!r}]")
    if not isinstance(value, Iterable) or isinstance(value, Mapping):
        raise wrong_type(name, value, f"a list of {what}")
    return tuple(each(f"{name}[{index}]", entry) for index, entry in enumerate(value))


def mapping(name: str, value: Any, *, each: Check | None = None) -> dict[str, Any]:
    """A copy of a dictionary with strings as keys."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise wrong_type(name, value, "a dictionary with strings as keys")
    return {key: entry if each is None else each(f"{name}[{key!r}]", entry) for key, entry in value.items()}


def instance(name: str, value: Any, *, of: type, what: str) -> Any:
    """An object of a class."""
    if not isinstance(value, of):
        raise wrong_type(name, value, what)
    return value


def or_none(check: Check) -> Check:
    """A check that lets None pass."""
    return lambda name, value: None if value is None else check(name, value)


def either(first: Check, second: Check) -> Check:
    """A check that accepts a value that one of two checks accepts; the second one words the error."""

    def check(name: str, value: Any) -> Any:
        try:
            return first(name, value)
        except OptionError:
            return second(name, value)

    return check


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def wrong_type(name: str, value: Any, wanted: str) -> ArgumentTypeError:
    """The error for a value of another type than wanted."""
    kind = type(value).__name__
    return ArgumentTypeError(f"{name}={_shown(value)} is a {kind}, not {wanted}", where=name, fix=f"pass {wanted}")


def _out(name: str, value: Any, wanted: str) -> OptionError:
    return OptionError(f"{name}={_shown(value)} is not {wanted}", where=name, fix=f"pass {wanted}")


def _shown(value: Any) -> str:
    return reprlib.repr(value)
