"""The code blocks of Markdown pages, and how each is run."""

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FENCE = re.compile(
    r"(?:^(?P<mark>[ ]*<!-- not run: (?P<why>.+?) -->)\n)?"
    r"^(?P<indent>[ ]*)```(?P<language>\w+)[^\n]*\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        page: The file it stands in.
        line: Number of its first line of code, from 1.
        language: What its fence says.
        text: The code.
        why_not: Why it is not run; empty where it is.
    """

    page: Path
    line: int
    language: str
    text: str
    why_not: str = ""

    def commands(self) -> list[list[str]]:
        """Returns the ``kenosis-ort`` command lines of a shell block as words."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("kenosis-ort ")]


def blocks_of(page: Path) -> list[Block]:
    """Returns the blocks of a page in order."""
    text = page.read_text(encoding="utf-8")
    blocks = []
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start("text")) + 1
        blocks.append(Block(page, line, found["language"], textwrap.dedent(found["text"]), found["why"] or ""))
    return blocks


def run_python(block: Block, namespace: dict[str, Any]) -> None:
    """Runs a block as a module of its own; a traceback shows the line of the page."""
    exec(compile("\n" * (block.line - 1) + block.text, str(block.page), "exec", dont_inherit=True), namespace)
