"""Numbers as people read them."""

from __future__ import annotations

import math


def number(value: float | None) -> str:
    """Returns a number with three digits, e.g. ``0.00123``, ``12.3``, ``4.57e+08``."""
    if value is None:
        return "–"
    if math.isnan(value) or math.isinf(value):
        return {"inf": "∞", "-inf": "−∞"}.get(str(value), "not a number")
    if value == 0:
        return "0"
    size = abs(value)
    text = f"{value:.3g}" if size < 1e-4 or size >= 1e6 else f"{value:.{max(0, 2 - math.floor(math.log10(size)))}f}"
    return text.replace("-", "−")


def decibels(value: float | None) -> str:
    """Returns a signal-to-noise ratio, e.g. ``31.2 dB``."""
    if value is None:
        return "–"
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "exact" if value > 0 else "no signal"
    return f"{value:.1f} dB".replace("-", "−")


def milliseconds(value: float | None) -> str:
    """Returns a time, e.g. ``12.3 ms`` or ``8.1 µs``."""
    if value is None:
        return "–"
    return f"{number(value * 1e3)} µs" if value < 0.1 else f"{number(value)} ms"


def factor(value: float | None) -> str:
    """Returns a ratio, e.g. ``1.83×``."""
    return "–" if value is None else f"{value:.2f}×"


def percent(value: float | None) -> str:
    """Returns a share, e.g. ``−12.3 %``."""
    return "–" if value is None else f"{100 * value:+.1f} %".replace("-", "−")
