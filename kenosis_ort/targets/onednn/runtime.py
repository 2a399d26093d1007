"""OpenVINO's CPU plugin, whose kernels are oneDNN's: the runtime on which this target is proved and timed.

It is an extra of the package, imported when it is first asked.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kenosis_ort.errors import VerificationError
from kenosis_ort.targets.model import Runner

_DATA: Final = frozenset({"Const", "Input", "Output", "Parameter", "Result"})
_MESSAGE_LIMIT: Final = 600


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
    """Returns why the runtime cannot be asked here, empty where it can."""
    installed = importlib.util.find_spec("openvino") is not None
    return "" if installed else "OpenVINO is not installed (pip install 'kenosis-ort[openvino]')"


def runtime_version() -> str:
    """Returns OpenVINO's version."""
    import openvino

    return str(openvino.__version__).split("-", 1)[0]


def compile_model(source: str | bytes | Path, *, threads: int = 1) -> Any:
    """Compiles a model for the CPU, float operators in float32.

    Without the hint about precision the plugin runs float operators in bfloat16 where the processor has it, which is
    neither what the float model computes elsewhere nor a fair float to compare int8 with.

    Args:
        source: A path or a serialized model.
        threads: Threads of a run.

    Raises:
        VerificationError: OpenVINO is not installed, or refuses the model.
    """
    why = missing()
    if why:
        raise VerificationError(why, fix="install it")
    import openvino

    properties = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    core = openvino.Core()
    try:
        model = core.read_model(source if isinstance(source, bytes) else str(source))
        return core.compile_model(model, "CPU", properties)
    except Exception as error:  # the runtime's exceptions share no base class but Exception
        flat = " ".join(str(error).split())
        raise VerificationError(
            f"OpenVINO {runtime_version()} does not load the model: {flat[-_MESSAGE_LIMIT:]}",
            fix="load the model in OpenVINO alone",
        ) from error


def executed(source: str | bytes | Path, *, threads: int = 1) -> list[Executed]:
    """Returns what the plugin executes for a model, in order, constants, inputs and outputs left out.

    Raises:
        VerificationError: As `compile_model`.
    """
    nodes = []
    for node in compile_model(source, threads=threads).get_runtime_model().get_ordered_ops():
        info = node.get_rt_info()
        said = {
            key: str(info[key].astype(str))
            for key in ("layerType", "runtimePrecision", "outputPrecisions", "primitiveType", "originalLayersNames")
        }
        if said["layerType"] not in _DATA:
            names = tuple(name for name in said["originalLayersNames"].split(",") if name)
            nodes.append(
                Executed(
                    said["layerType"],
                    said["runtimePrecision"].lower(),
                    said["outputPrecisions"].split(",")[0].lower(),
                    said["primitiveType"],
                    names,
                )
            )
    return nodes


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
    """Returns what runs a model on OpenVINO.

    Raises:
        VerificationError: OpenVINO is not installed or refuses the model.
    """
    if custom_op_libraries:
        raise VerificationError(
            "OpenVINO does not load libraries of operators made for onnxruntime", fix="leave custom_op_libraries out"
        )
    return _CompiledRunner(compile_model(source, threads=threads))
