"""Output of the commands: stdout for results alone, stderr for progress and complaints.

A progress bar appears on a terminal only. A path that is missing is an error before any work, with a hint.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kenosis_ort.cli.flags import in_shell_words
from kenosis_ort.errors import printable
from kenosis_ort.storage.data import without_odd

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from kenosis_ort.errors import KenosisError

_PIPE_COLUMNS = 120  # a log or a file has no width of its own
OnProgress = Callable[[int, "int | None"], None]


class Screen:
    """Output of a command. Colours follow the terminal and ``NO_COLOR``, as rich does.

    Args:
        as_json: Results are JSON.
        quiet: Nothing but complaints is printed, and JSON where it was asked for.
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json = as_json
        self.quiet = quiet

    def result(self, data: Callable[[], Any], text: Callable[[], RenderableType]) -> None:
        """Prints the result on stdout.

        Args:
            data: Returns it as plain data, for ``--json``.
            text: Returns it for people.
        """
        if self.as_json:
            print(json.dumps(without_odd(data()), indent=1, allow_nan=False))
        elif not self.quiet:
            self._console().print(text())

    def note(self, text: str) -> None:
        """Prints a line for people below the result; nothing with ``--json``."""
        if not self.as_json and not self.quiet:
            self._console().print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    def tell(self, text: str) -> None:
        """Prints a line about work under way on stderr, where somebody watches."""
        if not self.quiet and sys.stderr.isatty():
            print(f"kenosis-ort: {printable(' '.join(text.split()))}", file=sys.stderr)

    def warn(self, text: str) -> None:
        """Prints a warning on stderr."""
        print(f"kenosis-ort: warning: {printable(' '.join(text.split()))}", file=sys.stderr)

    def complain(self, error: KenosisError | str) -> None:
        """Prints an error as one line on stderr, whatever line breaks it holds; with ``--json`` on stdout too."""
        message = in_shell_words(str(error))
        print(f"kenosis-ort: error: {printable(' '.join(message.split()))}", file=sys.stderr)
        if self.as_json:
            names = ("what", "where", "fix")
            parts = {name: getattr(error, name, message if name == "what" else None) for name in names}
            fields = {name: None if text is None else in_shell_words(text) for name, text in parts.items()}
            kind = "" if isinstance(error, str) else type(error).__name__
            print(json.dumps({"error": {"kind": kind, **fields}}, indent=1))

    @contextmanager
    def progress(self, title: str, console: Console | None = None) -> Iterator[OnProgress | None]:
        """Yields a callback that takes (done, total or None) and draws a bar; None where nobody would see it.

        Args:
            title: What is counted.
            console: Where to draw; stderr's by default.
        """
        if self.quiet or not (sys.stderr.isatty() if console is None else console.is_terminal):
            yield None
            return
        from rich import progress as bars

        from kenosis_ort.report.text import PlainConsole

        count = (bars.SpinnerColumn(), bars.TextColumn("{task.description}"), bars.BarColumn())
        columns = (*count, bars.MofNCompleteColumn(), bars.TimeElapsedColumn())
        with bars.Progress(*columns, console=console or PlainConsole(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)

    @staticmethod
    def _console() -> Console:
        from kenosis_ort.report.text import PlainConsole

        console = PlainConsole()
        return console if console.is_terminal else PlainConsole(width=max(_PIPE_COLUMNS, console.width))
