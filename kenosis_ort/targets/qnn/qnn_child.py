"""Runs in a process of its own, as a script: loads models with the QNN provider and tells who takes which node.

A line of JSON in, ``{"model": PATH, "chip": NUMBER}`` or ``{}``, a line of JSON out, until the input ends. The
provider's log goes to standard error. Imports nothing but onnxruntime and the provider.
"""

import json
import os
import sys
from typing import Any

import onnxruntime as ort
import onnxruntime_qnn

PROVIDER = "QNNExecutionProvider"
_ERRORS, _ALL = 3, 0


def open_session(model: str, chip: str, *, fallback: bool, log: bool = True) -> ort.InferenceSession:
    """A session on HTP, simulated where there is none.

    Args:
        model: A path.
        chip: Qualcomm's number of the chip (``soc_model``).
        fallback: Nodes that HTP refuses run on the CPU; without, they are an error.
        log: The provider says on standard error what it refuses.
    """
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


def answer(model: str, chip: str) -> dict[str, Any]:
    """The names of the nodes that each provider takes, or why the model does not load."""
    try:
        session = open_session(model, chip, fallback=True)
    except Exception as error:  # the runtime's exceptions share no base class but Exception
        return {"failure": str(error)}
    taken: dict[str, list[str]] = {}
    for part in session.get_provider_graph_assignment_info():
        taken.setdefault(part.ep_name, []).extend(node.name for node in part.get_nodes())
    return {"taken": taken}


def main() -> None:
    """Answers; what libraries print goes to standard error."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        for line in sys.stdin:
            asked = json.loads(line)
            out.write(json.dumps(answer(**asked) if asked else {}) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
