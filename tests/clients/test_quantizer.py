"""The public `QDQQuantizer`: stock's in behaviour, never worse, and stock's own result where nothing can be planned."""

import inspect
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import QDQQuantizer as StockQDQQuantizer
from onnxruntime.quantization import QuantType
from onnxruntime.quantization.calibrate import CalibrationMethod, TensorData, TensorsData
from onnxruntime.quantization.onnx_model import ONNXModel

from kenosis_ort import KenosisWarning, QDQQuantizer, create_calibrator, verify_fusion
from kenosis_ort.graph.outside import copy_model
from tests import models
from tests.clients.support import build, calibrated, ranges, worst_db

NETS = [models.ALL[name] for name in models.ALL if name not in ("conv_relu_chain", "mlp_matmul", "net_with_if")]


def test_the_constructor_is_stocks() -> None:
    ours, stock = (inspect.signature(kind.__init__).parameters for kind in (QDQQuantizer, StockQDQQuantizer))
    assert list(ours) == list(stock)
    assert [(p.kind, p.default) for p in ours.values()] == [(p.kind, p.default) for p in stock.values()]


@pytest.mark.parametrize("activation", [QuantType.QUInt8, QuantType.QInt8], ids=lambda t: t.name)
def test_unprepared_models_are_as_good_as_by_stock(activation: QuantType, tmp_path: Path) -> None:
    """Taken together: whose rounding errors cancel better in one small net is chance."""
    gained = []
    for model in (net() for net in NETS):
        feeds = models.feeds(model, 6)
        data = ranges(model, feeds, tmp_path)
        stock, ours = (
            build(kind, model, data, activation_qType=activation) for kind in (StockQDQQuantizer, QDQQuantizer)
        )
        assert None not in (ours.plan, ours.fusion)
        assert {"QuantizeLinear", "DequantizeLinear"} <= {n.op_type for n in ours.model.model.graph.node}
        gained.append(worst_db(model, ours.model.model, feeds) - worst_db(model, sorted_copy(stock.model.model), feeds))
    assert min(gained) > -10  # dB
    assert np.mean(gained) > 0


def sorted_copy(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = copy_model(model)
    ONNXModel(copy).topological_sort()
    return copy


def test_a_negative_size_is_open(tmp_path: Path) -> None:
    model, _, data = calibrated(models.residual_block(), tmp_path)
    for size in model.graph.input[0].type.tensor_type.shape.dim[2:]:
        size.dim_value = -1
    made = build(QDQQuantizer, model, data)
    assert made.plan is not None
    assert [d.dim_value for d in made.model.model.graph.input[0].type.tensor_type.shape.dim] == [1, 3, 0, 0]


def test_positional_arguments_and_what_is_found_afterwards(tmp_path: Path) -> None:
    model, feeds, data = calibrated(models.residual_block(channels=16), tmp_path, create=create_calibrator)
    before, entries = model.SerializeToString(), dict(data.items())
    quantizer = QDQQuantizer(model, True, False, QuantType.QInt8, QuantType.QUInt8, data, [], [], ["Conv", "Gemm"])
    assert isinstance(quantizer, StockQDQQuantizer)
    made = quantizer.quantize_model()
    assert made is quantizer.model.model
    assert type(quantizer.model).__mro__[1] is ONNXModel
    quantizer.model.save_model_to_file(str(tmp_path / "plain.onnx"))
    assert worst_db(model, tmp_path / "plain.onnx", feeds) > 30
    quantizer.model.save_model_to_file(str(tmp_path / "external.onnx"), use_external_data_format=True)
    assert (tmp_path / "external.onnx.data").exists()
    assert worst_db(model, tmp_path / "external.onnx", feeds) > 30
    assert model.SerializeToString() == before, "the caller's model is not changed"
    assert all(data[name] is entry for name, entry in entries.items()), "nor the caller's ranges"


@pytest.mark.parametrize(("method", "least"), [*zip(CalibrationMethod, (30, 15, 15), strict=False)])
def test_ranges_of_every_method_will_do_and_bodies_see_what_they_read_after_saving(method, least, tmp_path):
    """Stock's sorting on save puts an If before what its bodies read, and the file does not load."""
    model, feeds, data = calibrated(models.net_with_if(), tmp_path, method=method)
    quantizer = build(QDQQuantizer, model, data)
    assert quantizer.plan is not None
    quantizer.model.save_model_to_file(str(tmp_path / "q.onnx"))
    assert worst_db(model, tmp_path / "q.onnx", feeds) > least


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the arithmetic in stock's constructor
@pytest.mark.parametrize("infinite", [False, True], ids=["none", "infinite"])
def test_nodes_without_a_range_stay_float(tmp_path: Path, infinite: bool) -> None:
    model, feeds, data = calibrated(models.residual_block(), tmp_path)
    hidden = next(n.output[0] for n in model.graph.node if n.name == "conv2")
    if infinite:
        data[hidden] = TensorData(lowest=np.array([-np.inf], np.float32), highest=np.array([1.0], np.float32))
    else:
        data = TensorsData(data.calibration_method, {k: v for k, v in data.items() if k != hidden})
    quantizer = build(QDQQuantizer, model, data)
    assert quantizer.plan is not None
    assert "no calibrated range" in quantizer.plan.by_node["conv2"].reason
    assert quantizer.plan.by_node["conv1"].kind.value == "integer"
    assert worst_db(model, quantizer.model.model, feeds) > 30


def test_rewrites_for_which_ranges_cannot_be_had_are_left_out(tmp_path: Path) -> None:
    """A rewrite joins what the calibrator saw apart: the net stays as it came where that gives more integer nodes."""
    model, _, data = calibrated(models.two_input_detector(), tmp_path, op_types=["Conv"])
    quantizer = build(QDQQuantizer, model, data)
    kernels = verify_fusion(quantizer.model.model).kernels
    assert sum(k.integer for k in kernels if k.op_type == "Conv") == 4


def same_as_stock(model: onnx.ModelProto, data: TensorsData, **changes: Any) -> Any:
    """Asserts that ours warns and gives stock's very model; returns the warnings."""
    stock = build(StockQDQQuantizer, model, data, **changes)
    with pytest.warns(KenosisWarning, match="as stock does") as caught:
        ours = build(QDQQuantizer, model, data, **changes)
    assert ours.plan is None
    assert ours.model.model.SerializeToString() == stock.model.model.SerializeToString()
    return caught


def test_whatever_fails_gives_stocks_result(tmp_path, monkeypatch, caplog):
    def fails(*_: Any, **__: Any) -> Any:
        raise IndexError("list index out of range")

    model, _, data = calibrated(models.residual_block(), tmp_path)
    monkeypatch.setattr("kenosis_ort.clients.quantizer.for_integers", fails)
    with caplog.at_level(logging.DEBUG, logger="kenosis_ort"):
        caught = same_as_stock(model, data)
    assert "report this" in str(caught[0].message)
    assert any(r.exc_info for r in caplog.records), "the traceback is logged"


def test_a_quantized_model_goes_through_stock(tmp_path: Path) -> None:
    model, feeds, data = calibrated(models.residual_block(), tmp_path)
    quantized = sorted_copy(build(StockQDQQuantizer, model, data).model.model)
    same_as_stock(quantized, ranges(quantized, feeds, tmp_path))


def test_errors_are_stocks(tmp_path: Path) -> None:
    model = models.residual_block()
    with pytest.raises(TypeError, match="not TensorData"):
        build(QDQQuantizer, model, {"x": (0.0, 1.0)})  # type: ignore[arg-type]
    messages = []
    for kind in (StockQDQQuantizer, QDQQuantizer):
        with pytest.raises(ValueError, match="Quantization parameters are not specified") as caught:
            build(kind, model, None)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
