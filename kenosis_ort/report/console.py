"""A rich console on which names from a model cannot do anything, and its tables.

Apart from the facts of a report, so that a call that prints nothing does not load rich.
"""

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
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


def make_table(
    *headings: str, rows: Iterable[Iterable[str | Text]] = (), title: str | None = None, **settings: Any
) -> Table:
    """A table for a `PlainConsole`.

    Args:
        headings: Of its columns; one that begins with ``>`` is of numbers, which stand to the right on one line.
        rows: Cells; texts are shown as they are, without markup.
        title: Above it.
        settings: Further ones of ``rich.table.Table``.
    """
    table = Table(
        **{"box": box.SIMPLE_HEAD, "title": title, "title_justify": "left", "title_style": "bold", **settings}
    )
    for heading in headings:
        if heading.startswith(">"):
            table.add_column(heading.removeprefix(">"), justify="right", no_wrap=True)
        else:
            table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def make_facts(facts: Iterable[tuple[str, str | Text]], *, style: str = "dim") -> Table:
    """Labels and texts in two columns; facts without a text are left out."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style=style, no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in facts:
        if text:
            table.add_row(label, Text(text) if isinstance(text, str) else text)
    return table
