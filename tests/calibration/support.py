"""Stock's calibrators as the oracle, and small helpers."""

import tempfile
import warnings
from pathlib import Path

import numpy as np
import numpy.testing as npt
import onnx
from onnxruntime.quantization import CalibrationMethod

from kenosis_ort.calibration import CalibrationConfig, Points, collect
from kenosis_ort.calibration.accumulators import HistogramBuilder, extremes
from tests.clients.support import ranges
from tests.models import FeedReader
from tests.planning import parse


class ListReader(FeedReader):
    """A reader with length and range, as CalibStridedMinMax needs."""

    def __init__(self, samples):
        super().__init__(samples)
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def set_range(self, start_index, end_index):
        self._it = iter(self.samples[start_index:end_index])


def stock(model, samples, method="MinMax", *, stride=None, **options):
    """Stock's ranges of all float tensors."""
    calls = len(samples) // (stride or len(samples))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ranges(model, samples, Path(folder), method=CalibrationMethod[method], calls=calls, **options)


def swept(model, reader, tensors=None, *, threads=1, **options):
    """The table of some tensors, all by default; options are those of `collect`, of `Points`, or of its settings."""
    of_call = {k: options.pop(k) for k in ("part", "progress") if k in options}
    names = ("channels", "keep", "seen_as", "custom_op_libraries")
    of_points = {k: options.pop(k) for k in names if k in options}
    config = options.pop("config", None) or CalibrationConfig(**options)
    points = Points(tensors or node_outputs(model), config, threads=threads, **of_points)
    return collect(model, reader, points, **of_call)


def same_as_stock(model, samples, method="MinMax", *, stride=None, threads=1, error=0.0, bit_exact=True, **options):
    """Ranges have stock's types and shapes, and its values but for an error, given as a share of the largest one."""
    theirs = stock(model, samples, method, stride=stride, **options)
    config = CalibrationConfig(method, strided=stride, bit_exact=bit_exact, **options)
    table = swept(model, ListReader(samples), list(theirs.keys()), config=config, threads=threads)
    ours = table.to_tensors_data()
    for name in theirs:
        most = error * max(abs(table.tensors[name].low), abs(table.tensors[name].high))
        for end in ("lowest", "highest"):
            a, b = np.asarray(getattr(theirs[name], end)), np.asarray(getattr(ours[name], end))
            assert (a.dtype, a.shape) == (b.dtype, b.shape), name
            npt.assert_allclose(b, a, rtol=0, atol=most, err_msg=name)


def histogram_of(*parts):
    """The histogram of all elements, added part by part."""
    builder = HistogramBuilder()
    for part in parts:
        if part.size:
            builder.add(part, extremes(part))
    return builder.finish()


def one_node_model(op="Identity", shape=("N", "M"), *, element="float", annotate=True):
    """``x -> op -> y -> Neg -> z``."""
    text = f"({element}[{','.join(map(str, shape))}] x) => ({element} z) {{ y = {op} (x)  z = Neg (y) }}"
    model = parse(text, checked=False)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return onnx.shape_inference.infer_shapes(model) if annotate else model


def node_outputs(model):
    """All values that the main graph's nodes compute, and its inputs."""
    return [v.name for v in model.graph.input] + [name for node in model.graph.node for name in node.output if name]


def random_feeds(count, shape=(3, 5), *, seed=0, name="x"):
    """Feeds of one input whose magnitude grows from sample to sample."""
    rng = np.random.default_rng(seed)
    return [{name: (rng.standard_normal(shape) * (i + 1)).astype(np.float32)} for i in range(count)]
