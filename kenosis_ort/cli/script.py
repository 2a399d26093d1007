"""``python -m kenosis_ort SCRIPT ARGS...``: an existing quantization script, with ours in stock's place.

For the running process only: the names ``quantize_static`` and ``quantize`` of ``onnxruntime.quantization`` and of its
module ``quantize`` become ours before the script begins. Dynamic quantization, float 16 conversion and
``quant_pre_process`` stay stock's. The verdict of each call goes to stderr.
"""

from __future__ import annotations

import functools
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kenosis_ort.api import quantize, quantize_static
from kenosis_ort.cli import exits
from kenosis_ort.errors import KenosisError
from kenosis_ort.quantizer.substitute import substituted


def is_script(argv: Sequence[str]) -> bool:
    """Tells whether a command line names a Python script rather than a command."""
    return bool(argv) and argv[0].endswith(".py")


def run_script(argv: Sequence[str]) -> int:
    """Runs a script as ``__main__`` with its arguments; returns its exit code.

    Args:
        argv: The script's path and its arguments.
    """
    script = Path(argv[0])
    if not script.is_file():
        print(f"kenosis-ort: error: there is no script '{script}'", file=sys.stderr)
        return exits.ERROR
    before, path = sys.argv, list(sys.path)
    sys.argv, sys.path[0] = list(argv), str(script.resolve().parent)
    try:
        with substituted(_reporting(quantize_static), _reporting(quantize)):
            runpy.run_path(str(script), run_name="__main__")
    except KenosisError as error:
        print(f"kenosis-ort: error: {' '.join(str(error).split())}", file=sys.stderr)
        return exits.ERROR
    finally:
        sys.argv, sys.path[:] = before, path
    return exits.SUCCESS


def _reporting(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        report = call(*args, **kwargs)
        print(f"kenosis-ort: {report.model_output}: {report.verdict()}", file=sys.stderr)
        return report

    return wrapped
