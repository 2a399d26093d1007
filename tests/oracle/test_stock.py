"""The drop-in proof: without a plan and stages the result is stock's; and what stock does wrong is right."""

import functools
import logging
import signal
import tempfile
import tracemalloc
from copy import deepcopy
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors
from onnxruntime.quantization import CalibrationMethod, QDQQuantizer, create_calibrator, quantize_static as by_stock
from onnxruntime.quantization.quant_utils import add_pre_process_metadata
from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

from kenosis_ort import KenosisError, KenosisWarning, Stages, quantize_static
from kenosis_ort.graph.outside import copy_model
from kenosis_ort.graph.walk import opset_of
from kenosis_ort.quantizer.fusion_aware import FusionAwareQDQQuantizer
from kenosis_ort.quantizer.stock import stock_model
from kenosis_ort.verify import check_bias_alignment
from tests import models, planning
from tests.flow import support
from tests.oracle import corpus
from tests.oracle.compare import differences
from tests.oracle.corpus import GRAPHS, OPTIONS

OP_TYPES = tuple(sorted({*QDQRegistry, *QLinearOpsRegistry}))


@pytest.fixture
def _quiet():
    logging.disable(logging.WARNING)  # stock asks for pre-processing on every call
    yield
    logging.disable(logging.NOTSET)


@functools.cache
def _model(name, opset):
    model = GRAPHS[name]()
    if opset_of(model) != opset:
        model = onnx.version_converter.convert_version(model, opset)  # the corpus' operators have adapters
    model = onnx.shape_inference.infer_shapes(model)
    add_pre_process_metadata(model)
    return bytes(model.SerializeToString())


def _load(name, opset):
    return onnx.load_from_string(_model(name, opset))


@functools.cache
def _ranges(name, opset):
    model = _load(name, opset)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        onnx.save(model, str(path))
        calibrator = create_calibrator(path, OP_TYPES, augmented_model_path=str(Path(folder) / "augmented.onnx"))
        calibrator.collect_data(models.FeedReader(corpus.feeds(model)))
        return calibrator.compute_data()


def _quantize(make, source, name, options, **extras):
    """Returns the quantized model, or what the quantizer raised."""
    numbers = (options[key] for key in ("per_channel", "reduce_range", "weight_type", "activation_type"))
    nodes = (list(options[key]) for key in ("nodes_to_quantize", "nodes_to_exclude"))
    op_types, further = list(options["op_types_to_quantize"] or OP_TYPES), dict(options["extra_options"])
    quantizer = make(copy_model(source), *numbers, _ranges(name, options["opset"]), *nodes, op_types, further, **extras)
    try:
        quantizer.quantize_model()
    except (ValueError, AssertionError, RuntimeError, KeyError, TypeError, AttributeError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    return quantizer.model.model


def _loads(model):
    try:
        models.session(model)
    except (ort_errors.InvalidGraph, ort_errors.Fail, ort_errors.InvalidArgument, ort_errors.NotImplemented):
        return False
    return True


def _some(options):
    """All graphs for the plain data types; every third, another third each time, for the other options."""
    names = list(GRAPHS)
    if options in ("u8s8", "u8s8_per_channel", "s8s8_symmetric"):
        return names
    return names[list(OPTIONS).index(options) % 3 :: 3]


def test_corpus_covers_both_registries():
    assert not set(OP_TYPES) - {n.op_type for build in GRAPHS.values() for n in build().graph.node}


FOUR_BITS = pytest.param("u8s4_opset21", marks=pytest.mark.since("1.24"))  # stock of before fails beside onnx of today


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("options", [FOUR_BITS if name == "u8s4_opset21" else name for name in OPTIONS])
def test_empty_plan_equals_stock(options):
    problems, quantized = {}, 0
    graphs, chosen = _some(options), OPTIONS[options]
    for name in graphs:
        types = chosen["weight_type"], chosen["activation_type"]
        source = stock_model(_load(name, chosen["opset"]), *types, chosen["extra_options"])
        want = _quantize(QDQQuantizer, source, name, chosen)
        got = _quantize(FusionAwareQDQQuantizer, source, name, chosen, plan=None)
        if isinstance(want, str) or isinstance(got, str):
            if isinstance(want, onnx.ModelProto):
                problems[name] = [f"stock works, ours raises {got}"]
            continue
        quantized += any(n.op_type == "QuantizeLinear" for n in want.graph.node)
        found = differences(want, got)
        if found and _loads(want):  # nothing to be equal to where stock's file is invalid
            problems[name] = found
    assert not problems
    assert quantized > (0 if options in ("only_front", "some_op_types") else len(graphs) // 2)


@pytest.mark.usefixtures("_quiet")
@pytest.mark.filterwarnings("ignore:The file holds the float model:kenosis_ort.KenosisWarning")
@pytest.mark.parametrize("options", ["u8s8", "u8s8_per_channel", "s8s8_symmetric", "keep_removable", "dedicated_pairs",
                                     "without_front", "u16s8"])  # fmt: skip
def test_all_stages_off_equals_stock(options, tmp_path):
    arguments = {**deepcopy(OPTIONS[options]), "op_types_to_quantize": list(OP_TYPES), "nodes_to_quantize": []}
    opset, problems, stock, ours = arguments.pop("opset"), {}, tmp_path / "stock.onnx", tmp_path / "ours.onnx"
    for name in list(GRAPHS)[:: 2 if options == "u8s8" else 6]:
        model = _load(name, opset)
        nodes = {n.name for n in model.graph.node}
        if not {n.op_type for n in model.graph.node} & set(OP_TYPES):
            continue
        arguments["nodes_to_exclude"] = [n for n in OPTIONS[options]["nodes_to_exclude"] if n in nodes]
        try:
            by_stock(model, str(stock), models.FeedReader(corpus.feeds(model)), **arguments)
            want = onnx.load(stock)
        except (ValueError, RuntimeError, AssertionError, TypeError, ort_errors.Fail):
            continue  # where stock has no answer there is nothing to be equal to
        if not _loads(want):
            continue
        feeds, model = (
            models.FeedReader(corpus.feeds(model)),
            _load(name, opset),
        )  # stock made its weights file references
        try:
            report = quantize_static(model, ours, feeds, stages=Stages.none(), verify=False, **arguments)
        except KenosisError as error:
            problems[name] = [f"ours raises {error}"]
            continue
        if not report.is_float:
            problems[name] = differences(want, onnx.load(ours))
        elif any(n.op_type == "QuantizeLinear" for n in want.graph.node):
            problems[name] = ["ours finds nothing to quantize"]
    assert not any(problems.values()), problems


# ---- one regression test for each known defect of onnxruntime.quantization 1.31: what stock does is said of each -----


def made(model, out, feeds=None, **options):
    """Quantizes as a drop-in call does, but for timing."""
    return support.make(model, out, feeds, **{"recipe": "fast", **options})


# ---- files that load and are close to the float model -----------------------------------------------------------


def _pre_quantized(zero_point="", more="", outputs=""):
    """A Conv whose weight is DequantizeLinear of an int8 initializer."""
    text = f"""(float[1,3,8,8] x) => (float[1,4,8,8] y{outputs})
        <int8[4,3,3,3] q, float s, int8 z, float[4,4,3,3] v, float[4] b> {{
        [w_dq] w = DequantizeLinear (q, s{zero_point}) [conv] c = Conv <pads = [1,1,1,1]> (x, w) [relu] r = Relu (c)
        [conv2] y = Conv <pads = [1,1,1,1]> (r, v, b) {more} }}"""
    return planning.parse(text, {"q": np.random.default_rng(0).integers(-127, 128, (4, 3, 3, 3)), "s": 0.01})


def _weights_as_inputs():
    model = models.conv_relu_chain(4)
    for tensor in model.graph.initializer:
        model.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    return model


UPSAMPLE = """(float[1,3,8,8] x) => (float[1,4,16,16] y) <float[4,3,3,3] w, float[4,4,3,3] v, float[4] twice> {
    [conv] c = Conv <pads = [1, 1, 1, 1]> (x, w) [upsample] u = Upsample <mode = "nearest"> (c, twice)
    [conv2] y = Conv <pads = [1, 1, 1, 1]> (u, v) }"""
FLAT_BIASES = """(float[1,8] x) => (y) <float[8,8] v, float[8,4] w, float[1,4] b> {
    [first] g = Gemm (x, v) r = Relu (g) [second] y = Gemm (r, w, b) }"""
DEAD = "(float[1,1,8,8] x) => (y) <float[4,1,1,1] w, float[4] b> { [conv] y = Conv (x, w, b) }"
BOTH = (False, True)
SCALES = """(float[4,8] x) => (y) <float[8,8] w, float[8] b, float thirty> {
    [near] n = Gemm (x, w, b) m = Mul (x, thirty) [far] f = Gemm <beta = 0.5> (m, w, b)
    y = Concat <axis = 1> (n, f) }"""
CLOSE = {
    **{f"per channel below opset 13 ORT refuses to load stock's file: {opset}": (
            lambda opset=opset: models.conv_relu_chain(4, opset=opset), {"per_channel": True}, 20.0)
       for opset in (9, 11, 12)},
    "RuntimeError from deep inside the version converter": (
        lambda: planning.parse(UPSAMPLE, {"twice": [1, 1, 2, 2]}, opset=9, ir_version=6, checked=False), {}, 20.0),
    "treats weights that are listed as inputs as activations": (_weights_as_inputs, {}, 20.0),
    "loops for ever where a quantized weight has two readers": (
        lambda: _pre_quantized(", z", "t = Transpose <perm = [1,0,2,3]> (w)", ", float[3,4,3,3] t"), {}, 20.0),
    **{f"IndexError where the optional zero point is absent: {zero_point}": (
            lambda zero_point=zero_point: _pre_quantized(zero_point), {}, 20.0)
       for zero_point in ("", ", z")},
    **{f"ValueError, truth value of an array, from a bias of two dimensions: {each}": (
            lambda: planning.parse(FLAT_BIASES, {"b": [[5, -4.5, 5, -4.5]]}), {"per_channel": each}, 20.0)
       for each in BOTH},
    **{f"a bias on near-dead channels overflows int32 unless the scale is widened: {each}": (
            lambda: planning.parse(DEAD, {"w": [1, *[1e-7] * 3], "b": [0, 5, -4.5, 5]}), {"per_channel": each}, 25.0)
       for each in BOTH},
    "an int32 bias on any other scale than the product still becomes QGemm, silently wrong": (
        lambda: planning.parse(SCALES, {"b": np.linspace(-2, 2, 8), "thirty": 30}), {}, 25.0),
    "imports a module that neural_compressor no longer has": (
        models.mlp, {"extra_options": {"SmoothQuant": True}}, 20.0),
}  # fmt: skip
"""What stock does, with the net, the options, and the least SQNR of each output."""


@pytest.mark.parametrize("stock", CLOSE)
def test_the_file_is_close_to_the_float_model(stock, tmp_path):
    build, options, least = CLOSE[stock]
    signal.alarm(60)  # ends the run where it does not come to an end
    found = made(build(), tmp_path, **options)
    signal.alarm(0)
    assert found.db() > least
    assert not check_bias_alignment(found.written)
    assert [i.name for i in found.written.graph.input] == ["x"]
    assert any(array.dtype == np.int8 for array in found.held.values())


# ---- memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [CalibrationMethod.Percentile, CalibrationMethod.Entropy])
def test_histogram_memory_is_flat(tmp_path, method):
    """Stock: keeps every intermediate output of every sample."""
    model = models.conv_relu_chain(6, channels=4, size=64)

    def peak(samples):
        feed = models.feeds(model, 1)[0]
        tracemalloc.start()
        made(model, tmp_path, [feed] * samples, calibrate_method=method, verify=False, recipe="plain")
        high = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return high

    peak(2)  # imports and caches
    assert peak(32) < 1.2 * peak(4) + 2**18


@pytest.mark.filterwarnings("ignore:The file holds the float model:kenosis_ort.KenosisWarning")
def test_an_unknown_operator_is_not_ignored(tmp_path):
    """Stock: silently ignored; of other names see `tests.flow.test_odd_models`."""
    with pytest.warns(KenosisWarning, match="'Conf'.*Did you mean 'Conv'"):
        made(models.conv_relu_chain(4), tmp_path, op_types_to_quantize=["Conf"])


# ---- what is left behind --------------------------------------------------------------------------------------


def test_nothing_is_printed_or_left_and_the_callers_objects_stay(tmp_path, capfd, caplog, monkeypatch):
    """Stock: no progress; `print` and root-logger lines; changes a ModelProto that is passed in, and lists.

    Its preprocessing leaves files in the working folder; after calls that fail see `tests.flow.test_odd_models`.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    seen, model = [], models.bn_net()
    before = model.SerializeToString()
    options = {"nodes_to_exclude": ["conv1"], "extra_options": {"MinimumRealRange": 0.001}}
    with caplog.at_level(logging.INFO):
        made(model, tmp_path, progress=lambda done, _total: seen.append(done), **options)
    assert (max(seen), capfd.readouterr().out) == (4, "")
    assert [r.getMessage() for r in caplog.records if r.name == "root" and r.levelno >= logging.WARNING] == []
    assert model.SerializeToString() == before
    assert options == {"nodes_to_exclude": ["conv1"], "extra_options": {"MinimumRealRange": 0.001}}
    assert [path.name for path in tmp_path.iterdir()] == ["out.onnx"]


@pytest.mark.filterwarnings("ignore:The file holds the float model:kenosis_ort.KenosisWarning")
@pytest.mark.parametrize("op_type", ["And", "Or", "Xor"])
def test_boolean_models(tmp_path, op_type):
    """Stock: the augmented model does not load."""
    model = planning.parse(f"(bool[3,4] x, bool[3,4] y) => (bool[3,4] z) {{ [op] z = {op_type} (x, y) }}")
    assert made(model, tmp_path).written == model
