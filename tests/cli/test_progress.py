"""The progress bar appears on a terminal and nowhere else."""

from __future__ import annotations

import io

from rich.console import Console

from kenosis_ort.cli.screen import Screen


def test_no_terminal_no_bar():
    stream = io.StringIO()
    with Screen().progress("calibrating", Console(file=stream)) as progress:
        assert progress is None
    assert stream.getvalue() == ""


def test_a_terminal_gets_a_bar_that_clears_itself():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, force_interactive=True, width=80, legacy_windows=False)
    with Screen().progress("calibrating", console) as progress:
        assert progress is not None
        progress(1, None)
        progress(3, 4)
    assert "calibrating" in stream.getvalue()
    assert "3/4" in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[2K")
