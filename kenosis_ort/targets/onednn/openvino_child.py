"""Runs in a process of its own, as a script: compiles models with OpenVINO and tells what the plugin executes.

A line of JSON in, ``{"model": PATH, "properties": {...}}``, a line of JSON out, until the input ends. OpenVINO ends its
process over some models (2026.4 over stock's file of a DenseNet), which must not be the caller's. Imports nothing but
OpenVINO.
"""

import json
import os
import sys
from typing import Any

import openvino

KEYS = ("layerType", "runtimePrecision", "outputPrecisions", "primitiveType", "originalLayersNames")


def answer(model: str, properties: dict[str, Any]) -> dict[str, Any]:
    """Executed kernels, or the reason why the model does not load."""
    core = openvino.Core()
    try:
        compiled = core.compile_model(core.read_model(model), "CPU", properties)
    except Exception as error:  # the runtime's exceptions share no base class but Exception
        return {"failure": str(error)}
    nodes = (node.get_rt_info() for node in compiled.get_runtime_model().get_ordered_ops())
    return {"nodes": [{key: str(info[key].astype(str)) for key in KEYS} for info in nodes]}


def main() -> None:
    """Answers; what libraries print goes to standard error."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        for line in sys.stdin:
            out.write(json.dumps(answer(**json.loads(line))) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
