"""What all static plots share: their size and their grid lines.

The plots are few and plain, so they are drawn by hand, geometry here and SVG in the templates: a plotting library would
add tens of megabytes to an installation, and its SVG knows neither the page's colours, light and dark, nor which node
a mark stands for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

WIDTH: Final = 960
HEIGHT: Final = 250
LEFT: Final = 56
RIGHT: Final = 16
TOP: Final = 16
BOTTOM: Final = 28
INNER: Final = HEIGHT - TOP - BOTTOM
"""Height between the lowest and the highest grid line."""


@dataclass(frozen=True)
class Tick:
    """A grid line: its place in pixels and its label."""

    at: float
    label: str
