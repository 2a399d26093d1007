"""Entry point of the ``kenosis-ort`` command."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console
from rich.logging import RichHandler

from kenosis_ort import __version__
from kenosis_ort.cli import bench, calibrate, completion, demo, exits, explain, inspect, merge, quantize, verify
from kenosis_ort.errors import KenosisError


class Command(Protocol):
    """What a command's module offers."""

    HELP: str
    DESCRIPTION: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Performs the command and returns the exit code."""


_COMMANDS: dict[str, Command] = {
    "quantize": quantize,
    "verify": verify,
    "explain": explain,
    "inspect": inspect,
    "bench": bench,
    "calibrate": calibrate,
    "merge": merge,
    "demo": demo,
    "completion": completion,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: The arguments without the program's name; None for the process's own.

    Returns:
        The exit code, see `kenosis_ort.cli.exits`.
    """
    arguments = build_parser().parse_args(argv)
    handler = RichHandler(console=Console(stderr=True), show_time=False, show_path=False, markup=False)
    logger = logging.getLogger("kenosis_ort")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if arguments.verbose else logging.WARNING)
    logger.propagate = False
    try:
        code: int = arguments.run(arguments)
    except KenosisError as error:
        _complain(str(error))
        code = exits.ERROR
    except KeyboardInterrupt:
        _complain("interrupted")
        code = exits.INTERRUPTED
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
    return code


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="kenosis-ort",
        description="Fusion-aware static quantization for ONNX Runtime, with a proof of what was fused.",
        epilog=exits.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kenosis-ort {__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what is done to stderr")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=command.HELP,
            description=command.DESCRIPTION,
            epilog=exits.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run, parser=parser)
    return parser


def _complain(message: str) -> None:
    """Prints one line on stderr, whatever line breaks the message holds."""
    print(f"kenosis-ort: error: {' '.join(message.split())}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
