"""The public QDQQuantizer: stock's in behaviour, never worse, stock's own result where nothing can be planned."""

import inspect
import logging
import math
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st
from onnxruntime.quantization import QDQQuantizer as StockQDQQuantizer, QuantType, qdq_loss_debug as debug
from onnxruntime.quantization.calibrate import CalibrationMethod, TensorData, TensorsData
from onnxruntime.quantization.onnx_model import ONNXModel

from kenosis_ort import KenosisWarning, QDQQuantizer, create_calibrator, verify_fusion
from kenosis_ort.clients import quantizer as quantizers
from kenosis_ort.clients.quantizer import with_derived
from kenosis_ort.graph.outside import copy_model
from kenosis_ort.graph.view import GraphView
from tests import models, planning
from tests.clients.support import build, calibrated, ranges, worst_db
from tests.flow.support import quantized, run

NETS = [models.ALL[name] for name in models.ALL if name not in ("conv_relu_chain", "mlp_matmul", "net_with_if")]


def test_the_constructor_is_stocks():
    ours, stock = (inspect.signature(kind.__init__).parameters for kind in (QDQQuantizer, StockQDQQuantizer))
    assert list(ours) == list(stock)
    assert [(p.kind, p.default) for p in ours.values()] == [(p.kind, p.default) for p in stock.values()]


@pytest.mark.parametrize("activation", [QuantType.QUInt8, QuantType.QInt8], ids=lambda t: t.name)
def test_unprepared_models_are_as_good_as_by_stock(activation, tmp_path):
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


def sorted_copy(model):
    copy = copy_model(model)
    ONNXModel(copy).topological_sort()
    return copy


def test_a_negative_size_is_open(tmp_path):
    model, _, data = calibrated(models.residual_block(), tmp_path)
    for size in model.graph.input[0].type.tensor_type.shape.dim[2:]:
        size.dim_value = -1
    made = build(QDQQuantizer, model, data)
    assert made.plan is not None
    assert [d.dim_value for d in made.model.model.graph.input[0].type.tensor_type.shape.dim] == [1, 3, 0, 0]


def test_positional_arguments_and_what_is_found_afterwards(tmp_path):
    model, feeds, data = calibrated(models.residual_block(channels=16), tmp_path, create=create_calibrator)
    before, entries = model.SerializeToString(), dict(data.items())
    quantizer = QDQQuantizer(model, True, False, QuantType.QInt8, QuantType.QUInt8, data, [], [], ["Conv", "Gemm"])
    assert isinstance(quantizer, StockQDQQuantizer)
    assert quantizer.quantize_model() is quantizer.model.model
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
def test_nodes_without_a_range_stay_float(tmp_path, infinite):
    model, feeds, data = calibrated(models.residual_block(), tmp_path)
    hidden = next(n.output[0] for n in model.graph.node if n.name == "conv2")
    if infinite:
        data[hidden] = TensorData(lowest=np.array([-np.inf], np.float32), highest=np.array([1.0], np.float32))
    else:
        data = TensorsData(data.calibration_method, {k: v for k, v in data.items() if k != hidden})
    quantizer = build(QDQQuantizer, model, data)
    assert quantizer.notes, "without the rewrites no more nodes would be integer"
    assert "no calibrated range" in quantizer.plan.by_node["conv2"].reason
    assert quantizer.plan.by_node["conv1"].kind.value == "integer"
    assert worst_db(model, quantizer.model.model, feeds) > 30


def test_rewrites_for_which_ranges_cannot_be_had_are_left_out(tmp_path):
    """A rewrite joins what the calibrator saw apart: the net stays as it came where that gives more integer nodes."""
    model, _, data = calibrated(models.two_input_detector(), tmp_path, op_types=["Conv"])
    kernels = verify_fusion(build(QDQQuantizer, model, data).model.model).kernels
    assert sum(k.integer for k in kernels if k.op_type == "Conv") == 4


@pytest.mark.parametrize(("lacking", "tries"), [("", 1), ("conv2_out", 2)])
def test_what_is_slow_in_integers_stays_float_and_is_told(tmp_path, monkeypatch, lacking, tries):
    """A net is tried without rewrites where ranges lack alone, and their lack is the reason that is told."""
    prepared = Mock(wraps=quantizers.for_integers)
    monkeypatch.setattr(quantizers, "for_integers", prepared)
    slow = dict.fromkeys(("conv1", "conv2"), "slow here"), "Two are slow."
    monkeypatch.setattr(quantizers, "float_regions", lambda *_: slow)
    model, _, data = calibrated(models.residual_block(), tmp_path)
    known = TensorsData(data.calibration_method, {k: v for k, v in data.items() if k != lacking})
    made = build(QDQQuantizer, model, known)
    reasons = [made.plan.by_node[name].reason for name in ("conv1", "conv2")]
    assert reasons == ["slow here", "no calibrated range for 'conv2_out'" if lacking else "slow here"]
    assert slow[1] in made.notes
    assert prepared.call_count == tries


def same_as_stock(model, data, **changes):
    """Asserts that ours warns and gives stock's very model; returns the warnings."""
    stock = build(StockQDQQuantizer, model, data, **changes)
    with pytest.warns(KenosisWarning, match="as stock does") as caught:
        ours = build(QDQQuantizer, model, data, **changes)
    assert ours.plan is None
    assert ours.model.model.SerializeToString() == stock.model.model.SerializeToString()
    return caught


def test_whatever_fails_gives_stocks_result(tmp_path, monkeypatch, caplog):
    def fails(*_, **__):
        raise IndexError("list index out of range")

    model, _, data = calibrated(models.residual_block(), tmp_path)
    monkeypatch.setattr("kenosis_ort.clients.quantizer.for_integers", fails)
    with caplog.at_level(logging.DEBUG, logger="kenosis_ort"):
        caught = same_as_stock(model, data)
    assert "report this" in str(caught[0].message)
    assert any(r.exc_info for r in caplog.records), "the traceback is logged"


def test_a_name_that_is_no_list_goes_through_stock(tmp_path):
    """Which takes it for a text that holds the names."""
    model, _, data = calibrated(models.residual_block(), tmp_path)
    assert "is a string, not a list" in str(same_as_stock(model, data, nodes_to_exclude="conv1")[0].message)


def test_a_quantized_model_goes_through_stock(tmp_path):
    model, feeds, data = calibrated(models.residual_block(), tmp_path)
    quantized = sorted_copy(build(StockQDQQuantizer, model, data).model.model)
    same_as_stock(quantized, ranges(quantized, feeds, tmp_path))


def test_errors_are_stocks(tmp_path):
    model = models.residual_block()
    with pytest.raises(TypeError, match="not TensorData"):
        build(QDQQuantizer, model, {"x": (0.0, 1.0)})
    messages = []
    for kind in (StockQDQQuantizer, QDQQuantizer):
        with pytest.raises(ValueError, match="Quantization parameters are not specified") as caught:
            build(kind, model, None)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


# ---- ranges that follow from others hold what the runtime computes --------------------------------------------------


# Each takes the value named "{0}" of shape (1, 4, 4, 4) to one of the same shape.
STEPS = {
    "Relu": "Relu ({0})", "Clip": "Clip ({0}, low, high)", "Clip above": "Clip ({0}, , high)",
    "Transpose": "Transpose <perm = [0, 2, 3, 1]> ({0})", "Identity": "Identity ({0})",
    "MaxPool": "MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> ({0})",
    "AveragePool": "AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> ({0})", "Reshape": "Reshape ({0}, shape)",
}  # fmt: skip
CONSTANTS = {
    "low": np.float32(-0.5), "high": np.float32(1), "beyond": np.float32(-9), "shape": np.array([1, 4, 4, 4]),
    "pads": np.array([0, 1, 0, 0, 0, 0, 0, 0]), "extra": np.full((1, 1, 4, 4), 7, np.float32),
}  # fmt: skip


def net(steps, *last):
    lines = [f"v{i + 1} = {STEPS[s].format(f'v{i}')}" for i, s in enumerate(steps)]
    lines += [f"w{i} = {text.format(f'v{len(steps)}')}" for i, text in enumerate(last)]
    names = [f"v{i + 1}" for i in range(len(steps))] + [f"w{i}" for i in range(len(last))]
    text = f"(float[1,4,4,4] v0) => ({', '.join(names)}) {{ {chr(10).join(lines)} }}"
    return planning.parse(text, CONSTANTS, checked=False)


@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=6), st.integers(0, 2**16))
def test_derived_ranges_hold_what_is_computed(steps, seed):
    model = net(steps, "Pad ({0}, pads)", "Pad ({0}, pads, beyond)", "Concat <axis = 1> ({0}, extra)")
    x = models.normal((1, 4, 4, 4), seed, 2)
    found = with_derived(GraphView(model), {"v0": (float(x.min()), float(x.max()))})
    for name, array in zip((o.name for o in model.graph.output), run(model, [{"v0": x}])[0], strict=True):
        low, high = np.nextafter(np.float32(found[name]), np.float32([-9e9, 9e9]))
        assert low <= array.min() <= array.max() <= high, name


ENDS = "Pad ({0}, pads, beyond)", "Concat <axis = 1> ({0}, extra)"


@pytest.mark.parametrize(("model", "known", "more"), [
    (net(["Relu", "Clip"], *ENDS), {"v0": (-3, 2)}, {"v1": (0, 2), "v2": (0, 1), "w0": (-9, 1), "w1": (0, 7)}),
    (net(["Relu", "Reshape", "Transpose", "MaxPool"]), {"v3": (0, 2)}, dict.fromkeys(("v1", "v2", "v4"), (0, 2))),
    (net(["Relu", "Identity"]), {"v0": (-1, 1), "v1": (0, 9), "v2": (0, 5)}, {}),
    *((net([], text), {"v0": (0, 1)}, {}) for text in ("Sigmoid ({0})", "Concat <axis = 1> ({0}, no)", "Exp ({0})")),
], ids=["ends", "moved", "known", "sigmoid", "unknown", "exp"])  # fmt: skip
def test_the_ends_are_those_of_the_operator_and_nothing_is_made_up(model, known, more):
    assert with_derived(GraphView(model), known) == {**known, **more}


# ---- the runtime's own qdq_loss_debug on our files pairs weights and activations with the float ones by name --------


LINEAR = """(float[N,T,16] x) => (float[N,T,16] y)
    <float[16,16] w0, float[1,1,16] b0, float[16,16] w1, float[1,1,16] b1> {
    m0 = MatMul (x, w0) a0 = Add (m0, b0) r0 = Relu (a0) m1 = MatMul (r0, w1) a1 = Add (m1, b1) y = Relu (a1) }"""
REWRITTEN = {
    "SpaceToDepth": models.two_input_detector, "read a multiple of 4": models.mobile_block,
    "MatMul and Add became Gemm": lambda: planning.parse(LINEAR),
}  # fmt: skip
"""Nets by what the notes say of the rewrite that they meet."""


@pytest.mark.parametrize("rewrite", REWRITTEN)
def test_weights_and_activations_are_paired_and_compared(rewrite, tmp_path):
    model = REWRITTEN[rewrite]()
    feeds = models.feeds(model, 3)
    float_path, path = tmp_path / "float.onnx", tmp_path / "q.onnx"
    onnx.save(model, float_path)
    report = quantized(model, path, feeds)
    assert any(rewrite in note for note in report.notes), report.notes

    errors = debug.compute_weight_error(debug.create_weight_matching(str(float_path), str(path)))
    assert errors
    assert all(map(math.isfinite, errors.values()))

    activations = []
    for source in (float_path, path):
        augmented = tmp_path / f"augmented_{source.name}"
        debug.modify_model_output_intermediate_tensors(str(source), str(augmented))
        activations.append(debug.collect_activations(str(augmented), models.FeedReader(feeds)))
    pairs = debug.create_activation_matching(activations[1], activations[0])
    assert pairs or rewrite.startswith("MatMul"), "there only reshaped values are quantized, which are new"
    for name, error in debug.compute_activation_error(pairs).items():
        assert min(error["qdq_err"], error["xmodel_err"]) > 10, name
