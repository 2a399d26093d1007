"""What the tests of clients share: models on disk, stock's ranges, and how good a result is."""

import contextlib
import io

import onnx
from onnxruntime.quantization import QuantType
from onnxruntime.quantization.calibrate import CalibrationMethod, create_calibrator as stocks

from kenosis_ort.graph.outside import copy_model
from kenosis_ort.quantizer.stock import QUANTIZABLE_OPS
from tests import models
from tests.flow.support import run, sqnr_db


def ranges(model, feeds, folder, *, create=stocks, method=CalibrationMethod.MinMax, op_types=None, calls=1, **options):
    """Returns a calibrator's ranges from feeds given over some number of calls."""
    path = folder / "to_calibrate.onnx"
    onnx.save(model, path)
    with contextlib.redirect_stdout(io.StringIO()):
        calibrator = create(path, op_types, str(folder / "augmented.onnx"), method, extra_options=options)
        size = len(feeds) // calls
        for start in range(0, len(feeds), size):
            calibrator.collect_data(models.FeedReader(feeds[start : start + size]))
        return calibrator.compute_data()


def calibrated(model, folder, **options):
    """Returns a model with feeds for it and their ranges."""
    feeds = models.feeds(model)
    return model, feeds, ranges(model, feeds, folder, **options)


def build(kind, model, tensors_range, **changes):
    """Returns a quantizer, by keywords as clients build it, after `quantize_model`."""
    usual = {
        "weight_qType": QuantType.QInt8, "activation_qType": QuantType.QUInt8, "per_channel": True,
        "reduce_range": False, "nodes_to_quantize": [], "nodes_to_exclude": [],
        "op_types_to_quantize": list(QUANTIZABLE_OPS), "extra_options": {},
    }  # fmt: skip
    copy = copy_model(model)  # stock changes a model in place that its shape inference has seen
    quantizer = kind(model=copy, tensors_range=tensors_range, **{**usual, **changes})
    quantizer.quantize_model()
    return quantizer


def worst_db(model, quantized, feeds):
    """Returns the lowest SQNR of any output on any feed."""
    pairs = zip(run(model, feeds), run(quantized, feeds), strict=True)
    return min(sqnr_db(w, g) for want, got in pairs for w, g in zip(want, got, strict=True))
