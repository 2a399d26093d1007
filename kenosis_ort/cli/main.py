"""Fusion-aware static quantization for ONNX Runtime, with a proof of what was
fused.

  kenosis-ort quantize model.onnx --data samples.npz --report report.html
  kenosis-ort compare model.onnx model.int8.onnx --data samples.npz
  kenosis-ort COMMAND --help

python -m kenosis_ort SCRIPT ARGS... runs an existing quantization script with
kenosis-ort in place of onnxruntime.quantization's static quantizer.
"""

import logging
import os
import signal
import sys
import threading
import warnings
from argparse import SUPPRESS
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from kenosis_ort import __version__
from kenosis_ort.cli import commands, flags
from kenosis_ort.cli.parser import ERROR, INTERRUPTED, SHORT, SUCCESS, TERMINATED, Parser, epilog
from kenosis_ort.cli.screen import Screen
from kenosis_ort.errors import KenosisError, KenosisWarning, ModelLoadError, did_you_mean, last_gate
from kenosis_ort.storage.writing import room_is_needed

COMMANDS: Final = {
    command.name: command()
    for command in (
        commands.Quantize,
        commands.Verify,
        commands.Explain,
        commands.Compare,
        commands.CompareTargets,
        commands.Targets,
        commands.Bench,
        commands.Inspect,
        commands.Convert,
        commands.Calibrate,
        commands.Merge,
        commands.Fuse,
        commands.QuantizeWeights,
        commands.SweepModels,
        commands.Doctor,
        commands.Profile,
        commands.Demo,
    )
}
_MODELS = ("model", "float_model", "quantized_model")
"""Arguments that name a model which has to be there."""
_OUTPUT = flags.grouped(
    "output",
    flags.switch("--json", "JSON on stdout, nothing else"),
    flags.switch("-q --quiet", "print errors only"),
    flags.argument("-v --verbose", text="log what is done to stderr; -vv: in detail", action="count"),
)
"""What goes before and after a command's name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: The arguments without the program's name; None for the process's own.

    Returns:
        The exit code, see `kenosis_ort.cli.parser`.
    """
    arguments = build_parser().parse_args(argv)
    screen = Screen(as_json=arguments.json, quiet=arguments.quiet)
    try:
        with _logging(arguments.verbose), _warned(screen), _terminable(), room_is_needed():
            for path in (vars(arguments)[name] for name in _MODELS if name in arguments):
                _check_model(path)
            return SHORT if last_gate(arguments.command_data.run)(arguments, screen) else SUCCESS
    except KenosisError as error:
        screen.complain(error)
        return ERROR
    except BrokenPipeError:  # the reader of the output, head for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SUCCESS
    except KeyboardInterrupt as stop:
        terminated = isinstance(stop, _Terminated)
        screen.complain("terminated" if terminated else "interrupted")
        return TERMINATED if terminated else INTERRUPTED


def build_parser() -> Parser:
    """The parser of all commands."""
    parser = Parser(prog="kenosis-ort", description=__doc__, epilog=epilog())
    parser.add_argument("--version", action="version", version=f"kenosis-ort {__version__}")
    parser.set_defaults(json=False, quiet=False, verbose=0)  # a command must not set them again
    flags.add_arguments(parser, _OUTPUT, default=SUPPRESS)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for name, command in COMMANDS.items():
        usage = f"kenosis-ort {name} {command.usage}"
        settings: dict[str, Any] = {"usage": usage, "description": command.about, "epilog": epilog(command.one)}
        subparser: Parser = subparsers.add_parser(name, help=command.summary, first=command.first, **settings)
        flags.add_arguments(subparser, command.arguments)
        flags.add_arguments(subparser, _OUTPUT, default=SUPPRESS)
        subparser.set_defaults(command_data=command, parser=subparser)
    return parser


def _check_model(path: Path) -> None:
    """Raises where there is no such file at all, with the closest one in the folder."""
    if path.exists():
        return
    folder = path.parent
    models = [entry.name for entry in folder.glob("*.onnx")] if folder.is_dir() else []
    listed = f"{folder} holds {', '.join(sorted(models)[:5])}" if models else f"there is no .onnx file in {folder}"
    what = f"The model file does not exist.{did_you_mean(path.name, models)}"
    raise ModelLoadError(what, where=str(path), fix=f"Check the path; {listed}.")


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
def _warned(screen: Screen) -> Iterator[None]:
    """Prints warnings of ours as lines of the command, in its words."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", KenosisWarning)
        show = warnings.showwarning

        def shown(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, KenosisWarning):
                screen.warn(flags.in_shell_words(str(message)))
            else:
                show(message, category, *where, **more)

        warnings.showwarning = shown
        yield


@contextmanager
def _logging(verbose: int) -> Iterator[None]:
    """Sends the package's log to stderr, and leaves logging as it was."""
    from rich.logging import RichHandler

    from kenosis_ort.report.text import PlainConsole

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
