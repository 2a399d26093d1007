"""Fusion-aware static quantization for ONNX Runtime, with a proof of what was
fused.

  kenosis-ort quantize model.onnx --data samples.npz --report report.html
  kenosis-ort compare model.onnx model.int8.onnx --data samples.npz
  kenosis-ort COMMAND --help

python -m kenosis_ort SCRIPT ARGS... runs an existing quantization script with
kenosis-ort in place of onnxruntime.quantization's static quantizer.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kenosis_ort import __version__
from kenosis_ort.cli import exits
from kenosis_ort.cli.commands import COMMANDS
from kenosis_ort.cli.parser import Parser, add_output_arguments
from kenosis_ort.cli.screen import Screen
from kenosis_ort.errors import KenosisError, last_gate
from kenosis_ort.storage.writing import room_is_needed


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
            code: int = last_gate(arguments.command_data.run)(arguments, screen)
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
    parser = Parser(prog="kenosis-ort", description=__doc__, epilog=exits.epilog())
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
        command.fill(subparser)
        add_output_arguments(subparser)
        subparser.set_defaults(command_data=command, parser=subparser, program=parser)
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
