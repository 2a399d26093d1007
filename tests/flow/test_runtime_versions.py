"""What one version of the runtime can and another cannot: the model is brought to a form that fuses, or refused."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnxruntime.quantization import QuantType, quant_utils

from kenosis_ort import OptionError, quantize_static
from kenosis_ort.runtime.limits import runtime_limits
from tests import models
from tests.flow.support import proof, quality, quantized
from tests.models import Net


def pooled(opset: int) -> onnx.ModelProto:
    net = Net(opset=opset)
    y = net.op("Relu", [net.conv(net.input("x", [1, 3, 16, 16]), 3, 8, name="stem")], name="relu0")
    y = net.op("MaxPool", [y], name="pool", kernel_shape=[2, 2], strides=[2, 2])
    y = net.op("Relu", [net.conv(y, 8, 8, name="conv1")], name="relu1")
    y = net.op("GlobalAveragePool", [net.conv(y, 8, 8, name="conv2")], name="mean")
    net.output(net.gemm(net.op("Flatten", [y], name="flat"), 8, 4, name="head"))
    return net.model("pooled")


@pytest.mark.parametrize("opset", [13, 21, 22, 23, 24])
def test_every_operator_set_fuses_down_to_the_max_pool(tmp_path: Path, opset: int) -> None:
    if opset > onnx.defs.onnx_opset_version():
        pytest.skip(f"onnx {onnx.__version__} knows no operator set {opset}")
    model, out = pooled(opset), tmp_path / "out.onnx"
    report = quantized(model, out)
    kernels = {k.node: k for k in proof(report).kernels}
    assert all(kernels[name].integer for name in ("stem", "pool", "conv1", "conv2", "mean", "head"))
    assert report.left_float() == ()
    written = next(o.version for o in onnx.load(out).opset_import if not o.domain)
    assert written == min(opset, runtime_limits().best_opset({"MaxPool"}))
    lowered = [note for note in report.notes if "lowered" in note]
    assert bool(lowered) == (written < opset)


def test_nodes_of_a_later_operator_set_keep_it(tmp_path: Path) -> None:
    """Where the operator set in which MaxPool fuses lacks another operator, the model stays as it is."""
    if runtime_limits().max_opset < 23:
        pytest.skip(f"onnxruntime {runtime_limits().version} quantizes up to operator set {runtime_limits().max_opset}")
    net = Net(opset=23)
    y = net.op("MaxPool", [net.conv(net.input("x", [1, 4, 8, 8]), 4, 4, name="conv")], name="pool", kernel_shape=[2, 2])
    net.output(net.op("RMSNormalization", [y, net.const([1.0] * 7)], name="norm"))
    model, out = net.model(), tmp_path / "out.onnx"
    quantized(model, out)
    assert next(o.version for o in onnx.load(out).opset_import if not o.domain) == 23
    assert quality(model, out, models.feeds(model)) > 20


@pytest.mark.parametrize("between", ["nothing", "Transpose"])
def test_clip_of_a_graph_input(tmp_path: Path, between: str) -> None:
    """Runtimes before 1.24 die on graph input, Clip, QuantizeLinear."""
    net = Net()
    x = net.input("x", [1, 3, 8, 8])
    if between == "Transpose":
        x = net.op("Transpose", [net.op("Transpose", [x], perm=[0, 2, 3, 1])], perm=[0, 3, 1, 2])
    y = net.op("Clip", [x, net.const(0.0), net.const(1.0)], name="clip")
    y = net.op("Relu", [net.conv(y, 3, 8, name="stem")], name="relu")
    net.output(net.op("GlobalAveragePool", [net.conv(y, 8, 8, name="conv1")], name="mean"))
    model, out = net.model(), tmp_path / "out.onnx"
    report = quantized(model, out, protect_outputs="int8")
    assert report.left_float() == ()
    assert quality(model, out, models.feeds(model)) > 20


@pytest.mark.parametrize(
    ("option", "value", "function"),
    [
        ("ActivationRestrictedAsymmetric", True, "snap_zero_point_to_uint8"),
        ("BlockSize", 16, "compute_scale_zp_blocked"),
    ],
)
def test_options_that_the_runtime_would_ignore_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, value: object, function: str
) -> None:
    monkeypatch.delattr(quant_utils, function, raising=False)
    model = models.residual_block()
    with pytest.raises(OptionError, match=rf"{option}.*needs onnxruntime 1\.27 or later"):
        quantize_static(model, tmp_path / "out.onnx", models.reader(model), extra_options={option: value})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("activation_type", [QuantType.QUInt16, QuantType.QInt16])
def test_sixteen_bit_activations_load(tmp_path: Path, activation_type: QuantType) -> None:
    """Newer runtimes raise the operator set for them, older ones take their own domain's operators."""
    model, out = models.residual_block(), tmp_path / "out.onnx"
    quantized(model, out, activation_type=activation_type, weight_type=QuantType.QInt8)
    assert quality(model, out, models.feeds(model)) > 30
