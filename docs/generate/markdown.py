"""Markdown out of plain data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table; cells may hold Markdown but for line breaks."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def code(text: str) -> str:
    """Returns text in code style."""
    return f"`{text}`"


def fence(text: str, language: str = "text") -> str:
    """Returns a block of code."""
    return f"```{language}\n{text.rstrip()}\n```"


def from_docstring(text: str) -> str:
    """Returns a docstring as Markdown: blocks behind ``::`` become blocks of code."""
    out: list[str] = []
    block: list[str] = []
    literal = False
    for line in [*text.splitlines(), "end"]:
        if literal and (not line or line.startswith(" ")):
            block.append(line)
            continue
        if literal:
            out += [fence(_dedented(block)), ""]
            block, literal = [], False
        if line.endswith("::"):
            out += [line[:-1], ""]
            literal = True
        else:
            out.append(line)
    return "\n".join(out[:-1]).strip()


def _dedented(lines: Sequence[str]) -> str:
    indents = [len(line) - len(line.lstrip()) for line in lines if line.strip()]
    text = "\n".join(line[min(indents, default=0) :] for line in lines)
    return text.strip("\n")


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()
