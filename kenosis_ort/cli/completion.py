"""``kenosis-ort completion SHELL``: the script that completes the command in a shell."""

from __future__ import annotations

import argparse
import json

import shtab

from kenosis_ort.cli import exits

HELP = "print the completion script of a shell"
DESCRIPTION = """\
Prints a script that completes kenosis-ort's commands and options.

  kenosis-ort completion bash > ~/.local/share/bash-completion/completions/kenosis-ort
  kenosis-ort completion zsh > "${fpath[1]}/_kenosis-ort" """


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "shell", choices=shtab.SUPPORTED_SHELLS, metavar="SHELL", help=", ".join(shtab.SUPPORTED_SHELLS)
    )
    parser.add_argument("--json", action="store_true", help="print the script as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Performs the command and returns its exit code."""
    script = shtab.complete(arguments.parser, shell=arguments.shell)
    print(json.dumps({"shell": arguments.shell, "script": script}) if arguments.json else script)
    return exits.SUCCESS
