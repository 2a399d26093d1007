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
import runpy
import signal
import sys
import threading
import warnings
from argparse import SUPPRESS
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kenosis_ort import __version__
from kenosis_ort.cli import flags
from kenosis_ort.cli.commands import COMMANDS
from kenosis_ort.cli.parser import ERROR, INTERRUPTED, SHORT, SUCCESS, TERMINATED, Parser, epilog
from kenosis_ort.cli.screen import Screen
from kenosis_ort.errors import KenosisError, KenosisWarning, ModelLoadError, did_you_mean, last_gate
from kenosis_ort.storage.writing import room_is_needed

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
            code = SHORT if last_gate(arguments.command_data.run)(arguments, screen) else SUCCESS
    except KenosisError as error:
        screen.complain(error)
        code = ERROR
    except BrokenPipeError:  # the reader of the output, head for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = SUCCESS
    except KeyboardInterrupt as stop:
        terminated = isinstance(stop, _Terminated)
        screen.complain("terminated" if terminated else "interrupted")
        code = TERMINATED if terminated else INTERRUPTED
    return code


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
        subparser.set_defaults(command_data=command, parser=subparser, program=parser)
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


def is_script(argv: Sequence[str]) -> bool:
    """Whether a command line names a Python script, or a module after ``-m``, rather than a command."""
    return bool(argv) and (argv[0].endswith(".py") or (argv[0] == "-m" and len(argv) > 1))


def run_script(argv: Sequence[str]) -> int:
    """Runs a script or module as ``__main__`` with ours in stock's place; returns its exit code.

    For the running process only, by `kenosis_ort.patch`. Dynamic quantization, float 16 conversion and
    ``quant_pre_process`` stay stock's. What came of each call goes to stderr, and at the end how often ours was called.
    What the script raises goes up as it is, as under ``python SCRIPT``.

    Args:
        argv: The script's path, or ``-m`` and a module's name, and its arguments.
    """
    module = argv[1] if argv[0] == "-m" else None
    script = Path(argv[0])
    if module is None and not script.is_file():
        beside = [p.name for p in script.parent.glob("*.py")] if script.parent.is_dir() else []
        _say(f"error: there is no script '{script}'.{did_you_mean(script.name, beside)} Fix: check the path")
        return ERROR
    from kenosis_ort.clients.patching import patch

    before, path = sys.argv, list(sys.path)
    sys.argv = list(argv if module is None else argv[1:])
    sys.path[0] = str(Path.cwd() if module is not None else script.resolve().parent)
    try:
        with patch(on_call=_tell) as patched:
            try:
                if module is None:
                    runpy.run_path(str(script), run_name="__main__")
                else:
                    runpy.run_module(module, run_name="__main__", alter_sys=True)
            finally:
                _say(_summary(patched.calls, patched.failed))
    except KenosisError as error:
        _say(f"error: {' '.join(str(error).split())}")
        return ERROR
    finally:
        sys.argv, sys.path[:] = before, path
    return SUCCESS


def _say(text: str) -> None:
    print(f"kenosis-ort: {text}", file=sys.stderr)


def _tell(name: str, result: Any) -> None:
    if name == "QDQQuantizer":
        _say(f"QDQQuantizer: {'placed as stock does' if result.fusion is None else str(result.fusion).splitlines()[0]}")
    elif hasattr(result, "verdict"):
        _say(f"{result.model_output}: {result.verdict()}")


def _summary(calls: Mapping[str, int], failed: Mapping[str, int]) -> str:
    parts = [
        f"{what} {', '.join(f'{name} {count} time' + 's' * (count != 1) for name, count in counted.items())}"
        for what, counted in (("called", calls), ("raised by", failed))
        if counted
    ]
    return "; ".join(parts) or (
        "nothing of kenosis-ort was called: quantize_static, quantize, QDQQuantizer and create_calibrator of "
        "onnxruntime.quantization were not used"
    )


if __name__ == "__main__":
    sys.exit(main())
