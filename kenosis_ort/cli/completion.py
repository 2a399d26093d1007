"""``kenosis-ort completion SHELL``: the script that completes the command in a shell."""

from __future__ import annotations

import argparse
from typing import Final

from kenosis_ort.cli import exits
from kenosis_ort.cli.screen import Screen

HELP = "print the completion script of a shell"
USAGE = "SHELL"
DESCRIPTION = """\
Prints a script that completes kenosis-ort's commands and options.

  kenosis-ort completion bash > ~/.local/share/bash-completion/completions/kenosis-ort
  kenosis-ort completion zsh > "${fpath[1]}/_kenosis-ort" """
ONE = ""
SHELLS: Final = ("bash", "zsh", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Performs the command and returns its exit code."""
    import shtab
    from rich.text import Text

    script = shtab.complete(arguments.program, shell=arguments.shell)
    if screen.as_json:
        screen.result(lambda: {"shell": arguments.shell, "script": script}, lambda: Text(script))
    else:  # a script is printed as it is, not wrapped to a width
        print(script)
    return exits.SUCCESS
