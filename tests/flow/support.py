"""What the end-to-end tests share: sessions, quality, and what a quantized file holds."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx

from kenosis_ort import FusionReport, KenosisWarning, QuantizationReport, quantize_static, verify_fusion
from kenosis_ort.graph.walk import all_graphs
from kenosis_ort.targets.proof import HEAVY_OPS
from kenosis_ort.verify import check_bias_alignment
from tests import models

Model = onnx.ModelProto | Path
QDQ = ("QuantizeLinear", "DequantizeLinear")


class Untouched:
    """A reader that must not be asked."""

    def get_next(self):
        raise AssertionError("data was read")


def quantized(model, out, feeds=None, **options):
    """Quantizes with the given feeds, or the model's own random ones; the core alone unless the options say more."""
    options = {"recipe": "plain", "promise": False, "tune": "off", **options}
    if feeds is None:
        feeds = models.feeds(onnx.load(model) if isinstance(model, Path) else model)
    return quantize_static(model, out, models.FeedReader(feeds), **options)


def run(model, feeds):
    """Returns the outputs for each feed."""
    opened = models.session(model)
    return [opened.run(None, feed) for feed in feeds]


def interface(model):
    opened = models.session(model)
    return [(v.name, v.type, v.shape) for v in (*opened.get_inputs(), *opened.get_outputs())]


def sqnr_db(want, got):
    """Returns signal power over error power in dB."""
    a, b = np.asarray(want, np.float64), np.asarray(got, np.float64)
    noise = float(((a - b) ** 2).sum())
    return float("inf") if noise == 0 else float(10 * np.log10((a * a).sum() / noise))


def quality(model, out, feeds, output=0):
    """Returns the SQNR of one output over all feeds, the quantized file in a fresh session."""
    want, got = run(model, feeds), run(out, feeds)
    return sqnr_db(np.concatenate([o[output].ravel() for o in want]), np.concatenate([o[output].ravel() for o in got]))


@dataclass(frozen=True)
class Made:
    """A float model, its samples, the file that was made of it, and the report."""

    model: onnx.ModelProto
    feeds: list[models.Feed]
    out: Path
    report: QuantizationReport

    @cached_property
    def written(self):
        return onnx.load(self.out)

    @cached_property
    def ops(self):
        return [node.op_type for node in self.written.graph.node]

    @cached_property
    def held(self):
        return initializers(self.out)

    @cached_property
    def grids(self):
        """Scale and zero point by value, by its own name where the quantizer renamed it in front of Q."""
        endings = ("_barrier", "_QuantizeLinear_Input")
        found = {n.input[0]: n.input[1:] for n in self.written.graph.node if n.op_type == "QuantizeLinear"}
        names = {n: next((n.removesuffix(e) for e in endings if n.endswith(e)), n) for n in found}
        return {name: (self.held[found[n][0]], self.held[found[n][1]]) for n, name in names.items()}

    @cached_property
    def heavy(self):
        """Whether each Conv, Gemm and MatMul runs on an integer kernel."""
        return {k.node: k.integer for k in proof(self.report).kernels if k.op_type in HEAVY_OPS}

    @cached_property
    def integer(self):
        """Nodes that run on integer kernels in the file."""
        return {kernel.node for kernel in verify_fusion(self.out).kernels if kernel.integer}

    def db(self, feeds=None):
        """SQNR of the worst output, on the samples or on others."""
        return min(quality(self.model, self.out, feeds or self.feeds, i) for i in range(len(self.model.graph.output)))


def make(model, out, feeds=None, **options):
    """Quantizes, see `quantized`; a folder gets ``out.onnx``."""
    out = out / "out.onnx" if out.is_dir() else out
    feeds = models.feeds(model) if feeds is None else feeds
    return Made(model, feeds, out, quantized(model, out, feeds, **options))


def good(model, out, feeds=None, *, least=30, **options):
    """Quantizes, and checks what holds of every good file: it is close, runs as planned, and nobody is warned."""
    made = make(model, out, feeds, **options)
    assert made.db() > least
    assert made.report.left_float() == ()
    assert proof(made.report).silently_quantized() == ()
    assert not any(k.weights_per_run for k in proof(made.report).kernels)
    assert check_bias_alignment(made.written) == []
    assert made.report.warnings == ()
    names = [node.name for graph in all_graphs(made.written.graph) for node in graph.node]
    assert len(set(names)) == len(names)
    return made


def changed(model, **how):
    """A copy of a model whose constants of these names are others: by a function of it, or by factors."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in copy.graph.initializer:
        if tensor.name in how:
            by, array = how[tensor.name], onnx.numpy_helper.to_array(tensor)
            made = by(array.copy()) if callable(by) else array * np.asarray(by)
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.asarray(made, array.dtype), tensor.name))
    return copy


def typed(model, kind):
    """A float32 model in another type, edges included."""
    made, dtype = changed(model), onnx.helper.tensor_dtype_to_np_dtype(kind)
    for tensor in (t for t in made.graph.initializer if t.data_type == onnx.TensorProto.FLOAT):
        tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(dtype), tensor.name))
    for value in (*made.graph.input, *made.graph.output, *made.graph.value_info):
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            value.type.tensor_type.elem_type = kind
    return made


def proof(report):
    """Returns the fusion report of a verified quantization."""
    assert isinstance(report.fusion, FusionReport)
    return report.fusion


def initializers(out):
    return {i.name: onnx.numpy_helper.to_array(i) for i in onnx.load(out).graph.initializer}


def pairs(out):
    """Returns the names of the values that QuantizeLinear reads."""
    return {n.input[0] for n in onnx.load(out).graph.node if n.op_type == "QuantizeLinear"}


def own_warnings(caught):
    return [str(w.message) for w in caught if issubclass(w.category, KenosisWarning)]


def chosen(report):
    """Returns the options as plain (value, source) pairs."""
    return {name: (choice.value, choice.source) for name, choice in report.options.items()}
