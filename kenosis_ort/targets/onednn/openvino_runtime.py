"""OpenVINO's CPU plugin, whose kernels are oneDNN's: the runtime on which this target is proved and timed.

It is an extra of the package, imported when it is first asked.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kenosis_ort.errors import VerificationError
from kenosis_ort.runtime.child import Child
from kenosis_ort.storage.scratch import Scratch
from kenosis_ort.targets.model import Runner

_DATA: Final = frozenset({"Const", "Input", "Output", "Parameter", "Result"})
_MESSAGE_LIMIT: Final = 600
_SCRIPT: Final = Path(__file__).with_name("openvino_child.py")


@dataclass(frozen=True)
class Executed:
    """One node of the graph that the plugin executes.

    Attributes:
        layer: Its type, ``Convolution`` for one.
        precision: What it computes on: ``u8`` and ``i8`` for quantized data.
        output: What it writes.
        primitive: The implementation that was chosen.
        names: Names of the model's nodes that it executes.
    """

    layer: str
    precision: str
    output: str
    primitive: str
    names: tuple[str, ...]


def missing() -> str:
    """Reason why the runtime cannot be asked here, empty where it can."""
    installed = importlib.util.find_spec("openvino") is not None
    return "" if installed else "OpenVINO is not installed (pip install 'kenosis-ort[openvino]')"


def runtime_version() -> str:
    """OpenVINO's version."""
    import openvino

    return str(openvino.__version__).split("-", 1)[0]


def executed(source: str | bytes | Path, *, threads: int = 1) -> list[Executed]:
    """Kernels that the plugin executes for a model, in order, without constants, inputs and outputs.

    A process of its own is asked: OpenVINO ends its process over some models.

    Args:
        source: A path or a serialized model.
        threads: Threads of a run.

    Raises:
        VerificationError: OpenVINO is not installed, refuses the model or ends its process over it.
    """
    why = missing()
    if why:
        raise VerificationError(why, fix="install it")
    with Scratch("openvino") as folder:
        path = folder / "model.onnx" if isinstance(source, bytes) else Path(source)
        if isinstance(source, bytes):
            path.write_bytes(source)
        answer = _child().ask({"model": str(path.absolute()), "properties": _properties(threads)})
    if "failure" in answer:
        raise _refused(answer["failure"])
    return [
        Executed(
            one["layerType"],
            one["runtimePrecision"].lower(),
            one["outputPrecisions"].split(",")[0].lower(),
            one["primitiveType"],
            tuple(name for name in one["originalLayersNames"].split(",") if name),
        )
        for one in answer["nodes"]
        if one["layerType"] not in _DATA
    ]


_lock = threading.Lock()
_children: dict[Path, Child] = {}


def _child() -> Child:
    """The process that is asked, kept for the next question."""
    with _lock:
        known = _children.get(_SCRIPT)
        if known is None or not known.runs:
            known = _children[_SCRIPT] = Child([sys.executable, str(_SCRIPT)], f"OpenVINO {runtime_version()}")
        return known


def _properties(threads: int) -> dict[str, Any]:
    """Float operators in float32.

    Without the hint about precision the plugin runs float operators in bfloat16 where the processor has it, which is
    neither what the float model computes elsewhere nor a fair float to compare int8 with.
    """
    return {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}


def _refused(message: str) -> VerificationError:
    flat = " ".join(message.split())
    return VerificationError(
        f"OpenVINO {runtime_version()} does not load the model: {flat[-_MESSAGE_LIMIT:]}",
        fix="load the model in OpenVINO alone",
    )


class _CompiledRunner:
    """A compiled model with the ``run`` of an ``onnxruntime.InferenceSession``."""

    def __init__(self, compiled: Any) -> None:
        self._outputs = len(compiled.outputs)
        self._request = compiled.create_infer_request()

    def run(self, output_names: None, input_feed: Mapping[str, Any]) -> list[Any]:
        """Runs the model once; returns all its outputs."""
        assert output_names is None
        result = self._request.infer(dict(input_feed), share_inputs=True)
        return [result[index] for index in range(self._outputs)]


def open_runner(source: str | bytes, *, threads: int, custom_op_libraries: Sequence[str]) -> Runner:
    """Function that runs a model on OpenVINO.

    Raises:
        VerificationError: OpenVINO is not installed or refuses the model.
    """
    if custom_op_libraries:
        raise VerificationError(
            "OpenVINO does not load libraries of operators made for onnxruntime", fix="leave custom_op_libraries out"
        )
    executed(source, threads=threads)  # whose process may end over the model, ours may not
    import openvino

    core = openvino.Core()
    try:
        return _CompiledRunner(core.compile_model(core.read_model(source), "CPU", _properties(threads)))
    except Exception as error:  # the runtime's exceptions share no base class but Exception
        raise _refused(str(error)) from error
