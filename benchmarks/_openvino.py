"""OpenVINO as one more runtime for a file, where it is installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_TRY = "import sys, _openvino; _openvino.Compiled(sys.argv[1], threads=1)"


class Compiled:
    """A model compiled by OpenVINO for the CPU, with what benchmarks use of an ``InferenceSession``."""

    def __init__(self, path: str | Path, *, threads: int) -> None:
        import openvino

        properties = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
        self._compiled = openvino.Core().compile_model(str(path), "CPU", properties)
        self._request = self._compiled.create_infer_request()

    def run(self, _names: None, input_feed: Mapping[str, Any]) -> list[Any]:
        """Runs the model once."""
        result = self._request.infer(dict(input_feed), share_inputs=True)
        return [result[i] for i in range(len(self._compiled.outputs))]

    def get_inputs(self) -> list[SimpleNamespace]:
        """Returns the inputs by name."""
        return [SimpleNamespace(name=value.any_name) for value in self._compiled.inputs]

    def get_overridable_initializers(self) -> list[SimpleNamespace]:
        """Returns none: there is no such thing."""
        return []


def why_not(path: Path) -> str | None:
    """Returns why OpenVINO cannot run a file, None if it can; tried in a process of its own, since it may crash."""
    if importlib.util.find_spec("openvino") is None:
        return "not installed"
    done = subprocess.run(
        [sys.executable, "-c", _TRY, str(path)], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"crashed (signal {-done.returncode})"
    return done.stderr.strip().splitlines()[-1][:120]
