"""What an option's text may say: the types that argparse checks it with."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from kenosis_ort.checks import MOST_THREADS


def whole(text: str) -> int:
    """Reads a whole number from 0 up."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 0 up")
    return int(text)


def threads(text: str) -> int:
    """Reads a number of threads, 0 for all."""
    number = whole(text)
    if number > MOST_THREADS:
        raise argparse.ArgumentTypeError(f"'{text}' is more than {MOST_THREADS} threads")
    return number


def positives(text: str) -> list[int]:
    """Reads whole numbers from 1 up, with commas between them."""
    return [positive(part.strip()) for part in text.split(",")]


def positive(text: str) -> int:
    """Reads a whole number from 1 up."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return int(text)


def number(text: str) -> float:
    """Reads a finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number")
    return value


def seconds(text: str) -> float:
    """Reads a time in seconds above 0."""
    value = number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds above 0")
    return value


def share(text: str) -> float:
    """Reads a share from 0 to 1, or one in percent like ``0.5%``."""
    value = number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a share from 0 to 1, e.g. 0.005 or 0.5%")
    return value


def numbers(text: str) -> tuple[float, ...]:
    """Reads numbers with commas between them."""
    try:
        return tuple(number(part) for part in text.split(","))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of numbers like 0.485,0.456,0.406") from None


def image_size(text: str) -> tuple[int, int]:
    """Reads height and width, e.g. ``224x224``."""
    sizes = _sizes(text)
    if len(sizes) != 2:
        raise argparse.ArgumentTypeError(f"'{text}' is not HxW, e.g. 224x224")
    return sizes[0], sizes[1]


def named_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Reads ``NAME=1x3x224x224``."""
    name, sizes = _named(text, "1x3x224x224")
    return name, _sizes(sizes)


def named_word(text: str) -> tuple[str, str]:
    """Reads ``NAME=WORD``."""
    return _named(text, "WORD")


def input_range(text: str) -> tuple[str | None, tuple[float, float]]:
    """Reads ``LOW,HIGH`` or ``NAME=LOW,HIGH``; the name is None where there is none."""
    name, equals, bounds = text.rpartition("=")
    found = numbers(bounds)
    if len(found) != 2 or not found[0] < found[1]:
        raise argparse.ArgumentTypeError(f"'{text}' is not LOW,HIGH or NAME=LOW,HIGH, e.g. 0,255")
    return name if equals else None, (found[0], found[1])


def extra_option(text: str) -> tuple[str, Any]:
    """Reads ``KEY=VALUE``; the value as JSON where it is JSON, else as text."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"'{text}' is not KEY=VALUE")
    if value in ("True", "False"):
        value = value.lower()
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def _named(text: str, example: str) -> tuple[str, str]:
    name, equals, value = text.rpartition("=")  # a tensor's name may hold an equals sign
    if not name or not equals or not value:
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME={example}")
    return name, value


def _sizes(text: str) -> tuple[int, ...]:
    parts = text.lower().split("x")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of sizes like 1x3x224x224")
    return tuple(int(part) for part in parts)
