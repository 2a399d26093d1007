"""Fusion-aware static quantization for ONNX Runtime, with a proof of what was
fused.

  kenosis-ort quantize model.onnx --data samples.npz --report report.html
  kenosis-ort compare model.onnx model.int8.onnx --data samples.npz
  kenosis-ort COMMAND --help

python -m kenosis_ort SCRIPT ARGS... runs an existing quantization script with
kenosis-ort in place of onnxruntime.quantization's static quantizer.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from kenosis_ort import __version__
from kenosis_ort.cli import exits, file_commands, judging_commands, machine_commands
from kenosis_ort.cli.parser import Command, Parser, add_output_arguments
from kenosis_ort.cli.quantize_command import QUANTIZE
from kenosis_ort.cli.screen import Screen
from kenosis_ort.errors import KenosisError, last_gate
from kenosis_ort.storage.writing import room_is_needed

SHELLS: Final = ("bash", "zsh", "tcsh")


def _completion_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def _completion(arguments: argparse.Namespace, screen: Screen) -> int:
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
        elif action.type is Path or action.dest in ("data", "recipe", "custom_op_libraries", "calibration_cache_path"):
            action.complete = how  # type: ignore[attr-defined]


COMPLETION: Final = Command(
    "print the completion script of a shell",
    "SHELL",
    """Prints a script that completes kenosis-ort's commands and options, for the
shell to read.

  kenosis-ort completion bash > ~/.local/share/bash-completion/completions/kenosis-ort
  kenosis-ort completion zsh > "${fpath[1]}/_kenosis-ort"
""",
    _completion_arguments,
    _completion,
)


COMMANDS: Final[dict[str, Command]] = {
    "quantize": QUANTIZE,
    "verify": judging_commands.VERIFY,
    "explain": judging_commands.EXPLAIN,
    "compare": judging_commands.COMPARE,
    "compare-targets": judging_commands.COMPARE_TARGETS,
    "targets": machine_commands.TARGETS,
    "bench": machine_commands.BENCH,
    "inspect": file_commands.INSPECT,
    "convert": file_commands.CONVERT,
    "calibrate": file_commands.CALIBRATE,
    "merge": file_commands.MERGE,
    "fuse": file_commands.FUSE,
    "weights": file_commands.WEIGHTS,
    "sweep": machine_commands.SWEEP,
    "doctor": machine_commands.DOCTOR,
    "profile": machine_commands.PROFILE,
    "demo": machine_commands.DEMO,
    "completion": COMPLETION,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: The arguments without the program's name; None for the process's own.

    Returns:
        The exit code, see `kenosis_ort.cli.exits`.
    """
    arguments = build_parser().parse_args(argv)
    screen = Screen(as_json=arguments.json, quiet=arguments.quiet)
    try:
        with _logging(arguments.verbose), _terminable(), room_is_needed():
            code: int = last_gate(arguments.run)(arguments, screen)
    except KenosisError as error:
        screen.complain(error)
        code = exits.ERROR
    except BrokenPipeError:  # the reader of the output, head for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = exits.SUCCESS
    except KeyboardInterrupt as stop:
        terminated = isinstance(stop, _Terminated)
        screen.complain("terminated" if terminated else "interrupted")
        code = exits.TERMINATED if terminated else exits.INTERRUPTED
    return code


def build_parser() -> Parser:
    """The parser of all commands."""
    parser = Parser(prog="kenosis-ort", description=__doc__, epilog=exits.EPILOG)
    parser.add_argument("--version", action="version", version=f"kenosis-ort {__version__}")
    add_output_arguments(parser, top=True)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            usage=f"kenosis-ort {name} {command.usage}",
            help=command.summary,
            description=command.about,
            epilog=exits.epilog(command.one),
        )
        command.add_arguments(subparser)
        add_output_arguments(subparser)
        subparser.set_defaults(run=command.run, parser=subparser, program=parser)
    return parser


class _Terminated(KeyboardInterrupt):
    """SIGTERM: what the process has begun is cleaned up as after Ctrl-C."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Lets SIGTERM unwind the command; a second one ends the process at once."""
    if threading.current_thread() is not threading.main_thread():  # only there may signals be handled
        yield
        return

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise _Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _logging(verbose: int) -> Iterator[None]:
    """Sends the package's log to stderr, and leaves logging as it was."""
    from rich.logging import RichHandler

    from kenosis_ort.report.sections import PlainConsole

    handler = RichHandler(console=PlainConsole(stderr=True), show_time=False, show_path=False, markup=False)
    logger = logging.getLogger("kenosis_ort")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel({0: logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG))
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


if __name__ == "__main__":
    sys.exit(main())
