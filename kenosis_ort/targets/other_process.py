"""Runs in a process of its own, as a script: loads models in runtimes that must not be loaded in the caller's process.

OpenVINO ends its process over some models (2026.4 over stock's file of a DenseNet). The QNN provider may end it over an
operator that it cannot compile, keeps the chip that it was first opened for, and tells in its log alone, on standard
error, what it refuses. Started by `command`. A line of JSON in, the arguments of the runtime's function in `_ANSWERS`,
or ``{}``; a line of JSON out, until the input ends. Imports nothing but the runtime that is asked.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

PROVIDER = "QNNExecutionProvider"
_KEYS = ("layerType", "runtimePrecision", "outputPrecisions", "primitiveType", "originalLayersNames")
_ERRORS = 3


def command(runtime: str) -> list[str]:
    """Command of a process that is asked about a runtime: ``openvino`` or ``onnxruntime_qnn``."""
    return [sys.executable, __file__, runtime]


def executed_by_openvino(model: str, properties: dict[str, Any]) -> dict[str, Any]:
    """The nodes that OpenVINO's CPU plugin executes, or the reason why the model does not load."""
    import openvino

    core = openvino.Core()
    try:
        compiled = core.compile_model(core.read_model(model), "CPU", properties)
    except Exception as error:  # the runtime's exceptions share no base class but Exception
        return {"failure": str(error)}
    nodes = (node.get_rt_info() for node in compiled.get_runtime_model().get_ordered_ops())
    return {"nodes": [{key: str(info[key].astype(str)) for key in _KEYS} for info in nodes]}


def open_on_htp(model: str, chip: str, *, fallback: bool, log: bool = True) -> Any:
    """A session on HTP, simulated where there is none.

    Args:
        model: A path.
        chip: Qualcomm's number of the chip (``soc_model``).
        fallback: Nodes that HTP refuses run on the CPU; without, they are an error.
        log: The provider says on standard error what it refuses.
    """
    import onnxruntime as ort
    import onnxruntime_qnn

    ort.set_default_logger_severity(_ERRORS if log else _ERRORS + 1)
    if not any(d.ep_name == PROVIDER for d in ort.get_ep_devices()):
        ort.register_execution_provider_library(PROVIDER, onnxruntime_qnn.get_library_path())
    options = ort.SessionOptions()
    options.log_severity_level = _ERRORS if log else _ERRORS + 1
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "0" if fallback else "1")
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    settings = {
        "backend_path": onnxruntime_qnn.get_qnn_htp_path(),
        "soc_model": chip,
        "htp_graph_finalization_optimization_mode": "1",
        "offload_graph_io_quantization": "0",
    }
    options.add_provider_for_devices([d for d in ort.get_ep_devices() if d.ep_name == PROVIDER], settings)
    return ort.InferenceSession(model, sess_options=options)


def taken_by_htp(model: str, chip: str) -> dict[str, Any]:
    """The names of the nodes that each provider takes, or why the model does not load."""
    try:
        session = open_on_htp(model, chip, fallback=True)
    except Exception as error:  # the runtime's exceptions share no base class but Exception
        return {"failure": str(error)}
    taken: dict[str, list[str]] = {}
    for part in session.get_provider_graph_assignment_info():
        taken.setdefault(part.ep_name, []).extend(node.name for node in part.get_nodes())
    return {"taken": taken}


_ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {"openvino": executed_by_openvino, "onnxruntime_qnn": taken_by_htp}


def main(runtime: str) -> None:
    """Answers; what libraries print goes to standard error."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        importlib.import_module(runtime)
        for line in sys.stdin:
            asked = json.loads(line)
            out.write(json.dumps(_ANSWERS[runtime](**asked) if asked else {}) + "\n")
            out.flush()


if __name__ == "__main__":
    main(sys.argv[1])
