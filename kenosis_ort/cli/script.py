"""``python -m kenosis_ort SCRIPT ARGS...``: an existing quantization script, with ours in stock's place.

For the running process only, by `kenosis_ort.patch`. Dynamic quantization, float 16 conversion and
``quant_pre_process`` stay stock's. What came of each call goes to stderr, and at the end how often ours was called.
``-m MODULE ARGS...`` runs a module.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kenosis_ort.cli import exits
from kenosis_ort.errors import KenosisError, did_you_mean


def is_script(argv: Sequence[str]) -> bool:
    """Whether a command line names a Python script, or a module after ``-m``, rather than a command."""
    return bool(argv) and (argv[0].endswith(".py") or (argv[0] == "-m" and len(argv) > 1))


def run_script(argv: Sequence[str]) -> int:
    """Runs a script or module as ``__main__`` with its arguments; returns its exit code.

    What the script raises goes up as it is, as under ``python SCRIPT``.

    Args:
        argv: The script's path, or ``-m`` and a module's name, and its arguments.
    """
    module = argv[1] if argv[0] == "-m" else None
    script = Path(argv[0])
    if module is None and not script.is_file():
        beside = [p.name for p in script.parent.glob("*.py")] if script.parent.is_dir() else []
        hint = did_you_mean(script.name, beside)
        print(f"kenosis-ort: error: there is no script '{script}'.{hint} Fix: check the path", file=sys.stderr)
        return exits.ERROR
    before, path = sys.argv, list(sys.path)
    sys.argv = list(argv if module is None else argv[1:])
    sys.path[0] = str(Path.cwd() if module is not None else script.resolve().parent)
    try:
        _run(script if module is None else module)
    except KenosisError as error:
        print(f"kenosis-ort: error: {' '.join(str(error).split())}", file=sys.stderr)
        return exits.ERROR
    finally:
        sys.argv, sys.path[:] = before, path
    return exits.SUCCESS


def _run(script: Path | str) -> None:
    from kenosis_ort.clients.patching import patch

    with patch(on_call=_tell) as patched:
        try:
            if isinstance(script, Path):
                runpy.run_path(str(script), run_name="__main__")
            else:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
        finally:
            print(f"kenosis-ort: {_summary(patched.calls, patched.failed)}", file=sys.stderr)


def _tell(name: str, result: Any) -> None:
    if name == "QDQQuantizer":
        text = "placed as stock does" if result.fusion is None else str(result.fusion).splitlines()[0]
        print(f"kenosis-ort: QDQQuantizer: {text}", file=sys.stderr)
    elif hasattr(result, "verdict"):
        print(f"kenosis-ort: {result.model_output}: {result.verdict()}", file=sys.stderr)


def _summary(calls: Mapping[str, int], failed: Mapping[str, int]) -> str:
    if not calls and not failed:
        return (
            "nothing of kenosis-ort was called: quantize_static, quantize, QDQQuantizer and create_calibrator of "
            "onnxruntime.quantization were not used"
        )
    done = [f"called {', '.join(map(_times, calls.items()))}"] if calls else []
    return "; ".join([*done, *([f"raised by {', '.join(map(_times, failed.items()))}"] if failed else [])])


def _times(call: tuple[str, int]) -> str:
    return f"{call[0]} {call[1]} time{'s' * (call[1] != 1)}"
