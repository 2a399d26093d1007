"""Prints a script that completes kenosis-ort's commands and options, for the
shell to read.

  kenosis-ort completion bash > ~/.local/share/bash-completion/completions/kenosis-ort
  kenosis-ort completion zsh > "${fpath[1]}/_kenosis-ort"
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from kenosis_ort.cli import exits
from kenosis_ort.cli.screen import Screen

HELP = "print the completion script of a shell"
USAGE = "SHELL"
ONE = ""
SHELLS: Final = ("bash", "zsh", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    import shtab
    from rich.text import Text

    _complete_files(arguments.program, shtab.FILE)
    script = shtab.complete(arguments.program, shell=arguments.shell)
    if screen.as_json:
        screen.result(lambda: {"shell": arguments.shell, "script": script}, lambda: Text(script))
    else:  # a script is printed as it is, not wrapped to a width
        print(script)
    return exits.SUCCESS


def _complete_files(parser: argparse.ArgumentParser, how: Any) -> None:
    """Marks the arguments of all commands that take a path."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no public list of its arguments
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for command in action.choices.values():
                _complete_files(command, how)
        elif action.type is Path or action.dest in ("data", "recipe", "custom_op_library"):
            action.complete = how  # type: ignore[attr-defined]
