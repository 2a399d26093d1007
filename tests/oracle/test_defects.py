"""One regression test for each known defect of onnxruntime.quantization 1.31: what stock does is in the docstring."""

from __future__ import annotations

import logging
import signal
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationMethod, QuantType

from kenosis_ort.api import quantize_static
from kenosis_ort.errors import CalibrationError, KenosisError, OptionError, UnsupportedModelError
from kenosis_ort.quantizer.fusion_aware import FusionAwareQDQQuantizer
from kenosis_ort.rewrite.prepare import prepare
from kenosis_ort.runtime.limits import at_hand
from kenosis_ort.targets.ort_cpu.rules import is_arm
from kenosis_ort.verify import check_bias_alignment, verify_fusion
from tests import models
from tests.graph.build import steps
from tests.models import Feed, FeedReader, Net

needs_x64 = pytest.mark.skipif(is_arm(at_hand().family), reason="a defect of the x86-64 kernels")


# ---- helpers --------------------------------------------------------------------------------------------------


def run(model: onnx.ModelProto | Path, feeds: list[Feed]) -> list[list[Any]]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return [session.run(None, feed) for feed in feeds]


def sqnr_db(want: Any, got: Any) -> float:
    a, b = np.asarray(want, np.float64), np.asarray(got, np.float64)
    noise = float(((a - b) ** 2).sum())
    return float("inf") if noise == 0 else float(10 * np.log10((a * a).sum() / noise))


def quantized(model: onnx.ModelProto, folder: Path, feeds: list[Feed] | None = None, **options: Any) -> Path:
    """Quantizes with the model's own random feeds and returns the written path."""
    out = folder / "out.onnx"
    quantize_static(model, str(out), FeedReader(feeds or models.feeds(model)), **options)
    return out


def quality(model: onnx.ModelProto, path: Path, feeds: list[Feed] | None = None, output: int = 0) -> float:
    samples = feeds or models.feeds(model)
    reference = model
    if model.ir_version > 10:
        reference = onnx.ModelProto()
        reference.CopyFrom(model)
        reference.ir_version = 10
    want, got = run(reference, samples), run(path, samples)
    return sqnr_db([o[output] for o in want], [o[output] for o in got])


def initializers(path: Path) -> dict[str, Any]:
    return {i.name: numpy_helper.to_array(i) for i in onnx.load(str(path)).graph.initializer}


def attempt(call: Callable[[], Path]) -> Path | KenosisError:
    """Returns the path that was written, or the refusal."""
    try:
        return call()
    except KenosisError as error:
        return error


def complaint(call: Callable[[], Any]) -> str:
    """Returns what a call warned of or refused, in one string."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except OptionError as error:
            return str(error)
    return " ".join(str(w.message) for w in caught)


@contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """Fails the test where the code inside does not come to an end."""

    def expire(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def integer_kernels(path: Path) -> dict[str, bool]:
    return {k.node: k.integer for k in verify_fusion(str(path)).kernels if k.op_type in ("Conv", "Gemm", "MatMul")}


# ---- time and memory ------------------------------------------------------------------------------------------


def test_long_chain_is_linear(tmp_path: Path) -> None:
    """Stock: 26 s for 2,000 nodes of Conv and Relu, 117 s for 4,000: quadratic. Four times the nodes cost 16 times."""

    def calls(pairs: int) -> int:
        model = models.conv_relu_chain(pairs, channels=2, size=2)
        return steps(lambda: quantized(model, tmp_path, models.feeds(model, 1), verify=False, promise=False))

    calls(10)  # imports and caches
    few, more, most = map(calls, (10, 30, 70))
    assert most - more < 3 * (more - few)  # twice as many nodes more


@pytest.mark.parametrize("method", [CalibrationMethod.Percentile, CalibrationMethod.Entropy])
def test_histogram_memory_is_flat(tmp_path: Path, method: CalibrationMethod) -> None:
    """Stock: keeps every intermediate output of every sample."""
    model = models.conv_relu_chain(6, channels=4, size=64)

    def peak(samples: int) -> int:
        feed = models.feeds(model, 1)[0]
        tracemalloc.start()
        quantized(model, tmp_path, [feed] * samples, calibrate_method=method, verify=False, recipe="plain")
        high = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return high

    peak(2)  # imports and caches
    assert peak(32) < 1.2 * peak(4) + 2**18


@pytest.mark.filterwarnings("ignore:output .* keeps only")  # ranges of a sample 100 times as large as the others
def test_max_intermediate_outputs_loses_nothing(tmp_path: Path) -> None:
    """Stock: `CalibMaxIntermediateOutputs` clears what it collected without merging it."""
    model = models.conv_relu_chain(2)
    feeds = models.feeds(model, 4)
    feeds[0] = {"x": feeds[0]["x"] * 100}
    plain = initializers(quantized(model, tmp_path, feeds, recipe="plain"))
    limited = initializers(
        quantized(model, tmp_path, feeds, recipe="plain", extra_options={"CalibMaxIntermediateOutputs": 1})
    )
    assert limited["x_scale"] == plain["x_scale"]
    assert limited["x_scale"] > 1


# ---- data types and opsets ------------------------------------------------------------------------------------


@needs_x64
@pytest.mark.parametrize("build", [models.silu_net, models.residual_block, models.concat_net])
def test_defaults_run_on_integer_kernels(tmp_path: Path, build: Callable[[], onnx.ModelProto]) -> None:
    """Stock: int8 activations by default; with two consumers they stay int8 and ORT runs the Convs in float."""
    model = build()
    out = quantized(model, tmp_path, protect_outputs="int8")
    kernels = integer_kernels(out)
    assert kernels
    assert all(kernels.values()), kernels
    assert quality(model, out) > 20


@needs_x64
def test_int8_activations_on_x64(tmp_path: Path) -> None:
    """Stock: the runtime runs every Conv whose input has a second reader in float."""
    kernels = integer_kernels(quantized(models.concat_net(), tmp_path, activation_type=QuantType.QInt8))
    assert kernels
    assert all(kernels.values()), kernels


@pytest.mark.parametrize("opset", [9, 11, 12])
def test_per_channel_below_opset_13_loads(tmp_path: Path, opset: int) -> None:
    """Stock: writes a model that ORT refuses to load."""
    model = models.conv_relu_chain(4, opset=opset)
    out = quantized(model, tmp_path, per_channel=True)
    assert quality(model, out) > 20


def test_opset_9_upsample(tmp_path: Path) -> None:
    """Stock: RuntimeError from deep inside the version converter."""
    net = Net(opset=9)
    y = net.conv(net.input("x", [1, 3, 8, 8]), 3, 4, name="conv")
    y = net.op("Upsample", [y, net.const([1.0, 1.0, 2.0, 2.0])], name="upsample", mode="nearest")
    net.output(net.conv(y, 4, 4, name="conv2"), [1, 4, 16, 16])
    model = net.model(ir_version=6)
    result = attempt(lambda: quantized(model, tmp_path))
    if isinstance(result, KenosisError):
        assert isinstance(result, UnsupportedModelError)
        assert "upsample" in str(result)
        assert not (tmp_path / "out.onnx").exists()
    else:
        assert quality(model, result) > 20


def test_initializers_listed_as_inputs(tmp_path: Path) -> None:
    """Stock: treats such weights as activations."""
    model = models.conv_relu_chain(4)
    for tensor in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    out = quantized(model, tmp_path)
    held = initializers(out)
    assert held["conv0_w_quantized"].dtype == np.int8
    assert [i.name for i in onnx.load(str(out)).graph.input] == ["x"]
    assert quality(model, out) > 20


def test_newer_ir_version_than_the_runtime(tmp_path: Path) -> None:
    """Stock: calibrates, then fails with the runtime's load error."""
    model = models.conv_relu_chain(4)
    model.ir_version = onnx.IR_VERSION
    assert quality(model, quantized(model, tmp_path)) > 20


# ---- placement ------------------------------------------------------------------------------------------------


def test_boxes_and_scores_in_one_concat(tmp_path: Path) -> None:
    """Stock: one scale for boxes of hundreds of pixels and scores of 0..1; YOLOX-Nano's mAP falls to 0.002."""
    model = models.two_input_detector()
    feeds = models.feeds(model)
    for feed in feeds:
        feed["scale_factor"] = np.array([[0.5, 0.75]], np.float32)
    out = quantized(model, tmp_path, feeds)
    want = np.concatenate([o[0] for o in run(model, feeds)])
    got = np.concatenate([o[0] for o in run(out, feeds)])
    assert sqnr_db(want[..., 4:], got[..., 4:]) > 25
    assert sqnr_db(want[..., :4], got[..., :4]) > 20


def test_causal_mask(tmp_path: Path) -> None:
    """Stock: the -1e9 of a mask becomes the scale of the attention scores."""
    model = models.transformer_block()
    feeds = models.feeds(model)
    for feed in feeds:
        feed["mask"] = (feed["mask"] > 1.5).astype(np.float32)
    assert quality(model, quantized(model, tmp_path, feeds), feeds) > 20


def test_relu_folding_keeps_what_a_body_captures(tmp_path: Path) -> None:
    """Stock: folds the Relu, which renames a tensor that the If's body captures: INVALID_GRAPH."""
    model = models.net_with_if()
    feeds = [{**feed, "flag": np.array(i % 2 == 0)} for i, feed in enumerate(models.feeds(model))]
    assert quality(model, quantized(model, tmp_path, feeds), feeds) > 20


@pytest.mark.parametrize("excluded", ["conv2", "head"])
def test_excluded_node_stays_float(tmp_path: Path, excluded: str) -> None:
    """Stock: ORT's session quantizes the float weight of an excluded Conv or Gemm silently, per tensor."""
    model = models.residual_block()
    out = quantized(model, tmp_path, nodes_to_exclude=[excluded])
    assert integer_kernels(out)[excluded] is False
    optimized = tmp_path / "optimized.onnx"
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(optimized)
    options.log_severity_level = 4
    ort.InferenceSession(str(out), options, providers=["CPUExecutionProvider"])
    floats = [i for i in onnx.load(str(optimized)).graph.initializer if i.data_type == TensorProto.FLOAT]
    want = next(i for i in model.graph.initializer if i.name == f"{excluded}_w")
    size = int(np.prod(want.dims))
    assert any(int(np.prod(i.dims)) >= size for i in floats)


def test_bias_scale_is_the_product_of_its_scales(tmp_path: Path) -> None:
    """Stock: an int32 bias on any other scale still becomes QGemm, silently wrong."""
    net = Net()
    x = net.input("x", [4, 8])
    w, b = net.weight((8, 8), name="w"), net.const(net.rng.normal(0, 1, 8), "b")
    near = net.op("Gemm", [x, w, b], name="near")
    far = net.op("Gemm", [net.op("Mul", [x, net.const(30.0)], name="scaled"), w, b], name="far", beta=0.5)
    net.output(net.op("Concat", [near, far], name="both", axis=1), [4, 16])
    model = net.model()
    out = quantized(model, tmp_path)
    assert not check_bias_alignment(onnx.load(str(out)))
    assert quality(model, out) > 25


def test_bias_too_large_for_int32(tmp_path: Path) -> None:
    """Near-dead channels: a weight of 1e-7 with a bias of 5 overflows int32 unless the scale is widened."""
    net = Net()
    w = np.full((4, 1, 1, 1), 1e-7, np.float32)
    w[0] = 1.0
    b = net.const(np.array([0.0, 5.0, -4.5, 5.0]), "b")
    net.output(net.op("Conv", [net.input("x", [1, 1, 8, 8]), net.const(w, "w"), b], name="conv"), [1, 4, 8, 8])
    model = net.model()
    for per_channel in (False, True):
        assert quality(model, quantized(model, tmp_path, per_channel=per_channel)) > 25


@pytest.mark.parametrize("per_channel", [False, True])
def test_gemm_bias_of_two_dimensions(tmp_path: Path, per_channel: bool) -> None:
    """Stock: per channel, ValueError "truth value of an array" from the bias check."""
    net = Net()
    x = net.op("Relu", [net.gemm(net.input("x", [1, 8]), 8, 8, name="first")], name="relu")
    y = net.op("Gemm", [x, net.weight((8, 4), name="w"), net.const([[5.0, -4.5, 5.0, -4.5]], "b")], name="second")
    net.output(y, [1, 4])
    model = net.model()
    assert quality(model, quantized(model, tmp_path, per_channel=per_channel)) > 20


# ---- models with quantized weights ----------------------------------------------------------------------------


def _pre_quantized(*, zero_point: bool, transpose: bool) -> onnx.ModelProto:
    """A Conv whose weight is DequantizeLinear of an int8 initializer; optionally a Transpose reads it too."""
    net = Net()
    x = net.input("x", [1, 3, 8, 8])
    values = net.rng.integers(-127, 128, (4, 3, 3, 3)).astype(np.int8)
    inputs = [net.const(values, "w_int8"), net.const(0.01, "w_scale")]
    if zero_point:
        inputs.append(net.const(np.array(0, np.int8), "w_zero_point"))
    w = net.op("DequantizeLinear", inputs, name="w_dq")
    y = net.op("Conv", [x, w], name="conv", pads=[1, 1, 1, 1])
    net.output(net.conv(net.op("Relu", [y], name="relu"), 4, 4, name="conv2"), [1, 4, 8, 8])
    if transpose:
        net.output(net.op("Transpose", [w], name="transpose", perm=[1, 0, 2, 3]), [3, 4, 3, 3])
    return net.model()


def test_pre_quantized_weight_with_two_consumers_ends(tmp_path: Path) -> None:
    """Stock: `_quantize_sharing_param_tensors` loops for ever."""
    model = _pre_quantized(zero_point=True, transpose=True)
    with deadline(20):
        result = attempt(lambda: quantized(model, tmp_path))
    if isinstance(result, KenosisError):
        assert "w_dq" in str(result) or "conv" in str(result)
    else:
        assert quality(model, result) > 20
        assert quality(model, result, output=1) > 35


@pytest.mark.parametrize("zero_point", [False, True])
def test_dequantized_weight_without_zero_point(tmp_path: Path, zero_point: bool) -> None:
    """Stock: IndexError where the optional zero point is absent."""
    model = _pre_quantized(zero_point=zero_point, transpose=False)
    assert quality(model, quantized(model, tmp_path)) > 20


def test_quantizer_without_extra_options() -> None:
    """Stock: AttributeError for `QDQQuantizer(extra_options=None)`."""
    model = onnx.shape_inference.infer_shapes(models.conv_relu_chain(2))
    types = TensorProto.INT8, TensorProto.UINT8
    FusionAwareQDQQuantizer(model, False, False, *types, None, [], [], ["Conv"], None)


# ---- options --------------------------------------------------------------------------------------------------


def test_unknown_extra_option_is_not_ignored(tmp_path: Path) -> None:
    """Stock: silently ignored."""
    model = models.conv_relu_chain(2)
    text = complaint(lambda: quantized(model, tmp_path, extra_options={"ActivationSymetric": True}))
    assert "ActivationSymetric" in text
    assert "'ActivationSymmetric'" in text


@pytest.mark.parametrize(
    ("option", "wrong", "right"), [("nodes_to_exclude", "conv_0", "conv0"), ("op_types_to_quantize", "Conf", "Conv")]
)
def test_unknown_node_or_operator_is_not_ignored(tmp_path: Path, option: str, wrong: str, right: str) -> None:
    """Stock: silently ignored."""
    model = models.conv_relu_chain(4)
    wishes: dict[str, Any] = {option: [wrong]}
    text = complaint(lambda: quantized(model, tmp_path, **wishes))
    assert f"'{wrong}'" in text
    assert f"'{right}'" in text


def test_cache_of_another_model_is_refused(tmp_path: Path) -> None:
    """Stock: accepted silently; same tensor names, other weights."""
    cache = tmp_path / "ranges.json"
    quantized(models.conv_relu_chain(4, seed=0), tmp_path, calibration_cache_path=str(cache))
    (tmp_path / "out.onnx").unlink()
    with pytest.raises(CalibrationError):
        quantized(models.conv_relu_chain(4, seed=1), tmp_path, calibration_cache_path=str(cache))
    assert not (tmp_path / "out.onnx").exists()


def test_smooth_quant_works_or_says_why(tmp_path: Path) -> None:
    """Stock: imports a module that `neural_compressor` no longer has."""
    model = models.mlp()
    result = attempt(lambda: quantized(model, tmp_path, extra_options={"SmoothQuant": True}))
    if isinstance(result, KenosisError):
        assert isinstance(result, OptionError)
        assert "Fix:" in str(result)
    else:
        assert quality(model, result) > 20


# ---- what is left behind --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Stock's preprocessing: leaves `sym_shape_infer_temp.onnx` and data files there."""
    work, temporary, target = (tmp_path / n for n in ("work", "temporary", "target"))
    for folder in (work, temporary, target):
        folder.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    model = models.bn_net()
    feeds = [{"x": np.full((1, 3, 8, 8), np.nan, np.float32)}] if fails else None
    result = attempt(lambda: quantized(model, target, feeds))
    assert isinstance(result, KenosisError) == fails
    assert not list(work.iterdir())
    assert not list(temporary.iterdir())
    assert [p.name for p in target.iterdir()] == ([] if fails else ["out.onnx"])


def test_incomplete_shape_inference_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock: symbolic shape inference saves the model in the working folder where it does not get through."""
    net = Net()
    y = net.op("Unheard", [net.input("x", [1, 3, 8, 8])], name="unheard", domain="example.custom")
    net.output(net.conv(y, 3, 4, name="conv"), [1, 4, 8, 8])
    monkeypatch.chdir(tmp_path)
    prepare(net.model(), min_opset=13, max_ir=10, max_opset=21)
    assert not list(tmp_path.iterdir())


def test_no_prints_no_root_logger_but_progress(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Stock: no progress; `print` and root-logger lines."""
    seen: list[int] = []
    model = models.residual_block()
    with caplog.at_level(logging.INFO):
        quantized(model, tmp_path, progress=lambda done, _total: seen.append(done))
    assert seen
    assert max(seen) == 4
    assert capfd.readouterr().out == ""
    assert [r.getMessage() for r in caplog.records if r.name == "root" and r.levelno >= logging.WARNING] == []


def test_the_callers_objects_are_not_changed(tmp_path: Path) -> None:
    """Stock: changes a ModelProto that is passed in, and the caller's lists."""
    model = models.bn_net()
    before = model.SerializeToString()
    options: dict[str, Any] = {"nodes_to_exclude": ["conv1"], "extra_options": {"MinimumRealRange": 0.001}}
    quantized(model, tmp_path, **options)
    assert model.SerializeToString() == before
    assert options == {"nodes_to_exclude": ["conv1"], "extra_options": {"MinimumRealRange": 0.001}}


@pytest.mark.filterwarnings("ignore:The file holds the float model:kenosis_ort.KenosisWarning")
@pytest.mark.parametrize("op_type", ["And", "Or", "Xor"])
def test_boolean_models(tmp_path: Path, op_type: str) -> None:
    """Stock: the augmented model does not load."""
    net = Net()
    x, y = (net.input(n, [3, 4], TensorProto.BOOL) for n in "xy")
    net.output(net.op(op_type, [x, y], name="op"), [3, 4], TensorProto.BOOL)
    model = net.model()
    assert onnx.load(quantized(model, tmp_path)) == model
