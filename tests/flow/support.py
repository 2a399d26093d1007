"""What the end-to-end tests share: sessions, quality, and what a quantized file holds."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper

from kenosis_ort import FusionReport, KenosisWarning, QuantizationReport, quantize_static
from kenosis_ort.targets.proof import HEAVY_OPS
from tests import models
from tests.models import Array, Feed, FeedReader

QDQ = ("QuantizeLinear", "DequantizeLinear")


def quantized(
    model: onnx.ModelProto | Path, out: Path, feeds: Sequence[Feed] | None = None, **options: Any
) -> QuantizationReport:
    """Quantizes with the given feeds, or the model's own random ones; the core alone unless the options say more."""
    options = {"recipe": "plain", "promise": False, "tune": "off", **options}
    if feeds is None:
        feeds = models.feeds(onnx.load(model) if isinstance(model, Path) else model)
    return quantize_static(model, out, FeedReader(feeds), **options)


def session(model: onnx.ModelProto | Path, *libraries: str) -> ort.InferenceSession:
    """Opens a fresh session of one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    for library in libraries:
        options.register_custom_ops_library(library)
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run(model: onnx.ModelProto | Path, feeds: Sequence[Feed]) -> list[list[Array]]:
    """Returns the outputs for each feed."""
    opened = session(model)
    return [opened.run(None, feed) for feed in feeds]


def sqnr_db(want: Any, got: Any) -> float:
    """Returns signal power over error power in dB."""
    a, b = np.asarray(want, np.float64), np.asarray(got, np.float64)
    noise = float(((a - b) ** 2).sum())
    return float("inf") if noise == 0 else float(10 * np.log10((a * a).sum() / noise))


def quality(model: onnx.ModelProto | Path, out: Path, feeds: Sequence[Feed], output: int = 0) -> float:
    """Returns the SQNR of one output over all feeds, the quantized file in a fresh session."""
    want, got = run(model, feeds), run(out, feeds)
    return sqnr_db(np.concatenate([o[output].ravel() for o in want]), np.concatenate([o[output].ravel() for o in got]))


def proof(report: QuantizationReport) -> FusionReport:
    """Returns the fusion report of a verified quantization."""
    assert isinstance(report.fusion, FusionReport)
    return report.fusion


def heavy(report: QuantizationReport) -> dict[str, bool]:
    """Returns whether each Conv, Gemm and MatMul runs on an integer kernel."""
    return {k.node: k.integer for k in proof(report).kernels if k.op_type in HEAVY_OPS}


def initializers(out: Path) -> dict[str, Array]:
    return {i.name: numpy_helper.to_array(i) for i in onnx.load(out).graph.initializer}


def pairs(out: Path) -> set[str]:
    """Returns the names of the values that QuantizeLinear reads."""
    return {n.input[0] for n in onnx.load(out).graph.node if n.op_type == "QuantizeLinear"}


def parameters(out: Path) -> dict[str, tuple[Array, Array]]:
    """Returns scale and zero point by the value that QuantizeLinear reads."""
    model, held = onnx.load(out), initializers(out)
    return {n.input[0]: (held[n.input[1]], held[n.input[2]]) for n in model.graph.node if n.op_type == "QuantizeLinear"}


def own_warnings(caught: Sequence[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if issubclass(w.category, KenosisWarning)]


def chosen(report: QuantizationReport) -> Mapping[str, tuple[Any, str]]:
    """Returns the options as plain (value, source) pairs."""
    return {name: (choice.value, choice.source) for name, choice in report.options.items()}
