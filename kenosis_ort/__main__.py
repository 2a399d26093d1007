"""``python -m kenosis_ort`` is the ``kenosis-ort`` command; with a path it runs that script, ours in stock's place."""

import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kenosis_ort.cli.main import main
from kenosis_ort.cli.parser import ERROR, SUCCESS
from kenosis_ort.errors import KenosisError, did_you_mean


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
    from kenosis_ort import patch

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
    sys.stderr.write(f"kenosis-ort: {text}\n")


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
    sys.exit(run_script(sys.argv[1:]) if is_script(sys.argv[1:]) else main())
