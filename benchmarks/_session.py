"""Sessions of stock ONNX Runtime on the CPU, what they return, and how alike two models' outputs are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from _openvino import Compiled

from kenosis_ort.runtime.session import session_options

Outputs = list[list[Any]]


def session(model: str | Path | bytes | onnx.ModelProto, *, threads: int = 1, optimize: bool = True) -> Any:
    """Loads a model, with full optimization unless told otherwise; OpenVINO loads what ends with ``.xml``."""
    if isinstance(model, (str, Path)) and str(model).endswith(".xml"):
        return Compiled(model, threads=threads)
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
    options = session_options(threads=threads, optimize=optimize, spinning=True)
    options.inter_op_num_threads = 1
    source = source if isinstance(source, bytes) else str(source)
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def outputs(
    model: str | Path | bytes | onnx.ModelProto, feeds: Iterable[Mapping[str, Any]], *, optimize: bool = True
) -> Outputs:
    """Runs a model over feeds with one thread; of a feed it takes what it knows."""
    runner = session(model, optimize=optimize)
    known = {value.name for value in (*runner.get_inputs(), *runner.get_overridable_initializers())}
    return [runner.run(None, {name: value for name, value in feed.items() if name in known}) for feed in feeds]


def sqnr_by_output(reference: Outputs, got: Outputs) -> list[float]:
    """Signal-to-quantization-noise ratio of each output over all samples, in dB."""
    found = []
    for index in range(len(reference[0])):
        signal = sum(float(np.sum(np.square(row[index], dtype=np.float64))) for row in reference)
        pairs = zip(reference, got, strict=True)
        noise = sum(float(np.sum(np.square(a[index].astype(np.float64) - b[index]))) for a, b in pairs)
        found.append(10 * float(np.log10(signal / max(noise, 1e-30))))
    return found
