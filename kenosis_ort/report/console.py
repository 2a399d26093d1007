"""A rich console on which names from a model cannot do anything: control characters are spelled out."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from kenosis_ort.errors import printable


class PlainConsole(Console):
    """A console that spells out control characters and marks of reading order in all that it prints."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, str):
            renderable = printable(renderable)
        elif isinstance(renderable, Text) and printable(renderable.plain) != renderable.plain:
            renderable = renderable.blank_copy(printable(renderable.plain))
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
