"""What the caller says is done to the letter, by stock's own placement where it dictates one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import QuantType
from onnxruntime.quantization import quantize_static as stock_quantize_static

from tests import models
from tests.flow.support import chosen, heavy, initializers, pairs, parameters, quality, quantized
from tests.models import FeedReader
from tests.oracle.compare import differences

TYPES: dict[str, Any] = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8, "per_channel": False}


def base(name: str) -> str:
    """Returns the value's own name where the quantizer renamed it in front of Q."""
    return name.removesuffix("_QuantizeLinear_Input")


# ---- tensors --------------------------------------------------------------------------------------------------


def test_tensor_overrides_are_exact(tmp_path: Path) -> None:
    model, out = models.residual_block(), tmp_path / "out.onnx"
    overrides: dict[str, Any] = {
        "x": [{"scale": np.array(0.05, np.float32), "zero_point": np.array(100, np.uint8)}],
        "stem_relu_out": [{"rmin": np.array(0.0, np.float32), "rmax": np.array(5.1, np.float32)}],
        "conv1_w": [{"quant_type": QuantType.QInt8, "symmetric": True, "reduce_range": True}],
        "conv2_w": [{"axis": 0, "quant_type": QuantType.QInt8, "symmetric": True}],
    }
    before = {k: [dict(d) for d in v] for k, v in overrides.items()}
    report = quantized(model, out, extra_options={"TensorQuantOverrides": overrides}, **TYPES)
    assert overrides == before
    found, held = parameters(out), initializers(out)
    assert (float(found["x"][0]), int(found["x"][1])) == (pytest.approx(0.05), 100)
    assert float(found["stem_relu_out"][0]) == pytest.approx(5.1 / 255)
    assert np.abs(held["conv1_w_quantized"]).max() == 64
    assert held["conv2_w_scale"].shape == (8,)
    assert held["stem_w_scale"].shape == ()
    assert not report.plan
    assert "TensorQuantOverrides" in report.notes[-1]


def test_sixteen_bit_override_of_one_tensor(tmp_path: Path) -> None:
    model, out = models.residual_block(opset=21), tmp_path / "out.onnx"
    overrides = {"relu1_out": [{"quant_type": QuantType.QUInt16}]}
    quantized(model, out, extra_options={"TensorQuantOverrides": overrides}, activation_type=QuantType.QUInt8)
    kinds = {base(k): zero_point.dtype for k, (_, zero_point) in parameters(out).items()}
    assert kinds["relu1_out"] == np.uint16
    assert kinds["x"] == np.uint8


@pytest.mark.parametrize(
    "options",
    [
        {"AddQDQPairToWeight": True},
        {"DedicatedQDQPair": True},
        {"OpTypesToExcludeOutputQuantization": ["Conv"]},
        {"ForceQuantizeNoInputCheck": True},
        {"QDQKeepRemovableActivations": True},
        {"QuantizeBias": False},
        {"UseQDQContribOps": True},
        {"TensorQuantOverrides": {"x": [{"quant_type": QuantType.QInt8}]}},
    ],
    ids=lambda o: next(iter(o)),
)
def test_dictated_placement_is_stocks(tmp_path: Path, options: dict[str, Any]) -> None:
    model = models.residual_block()
    feeds = models.feeds(model)
    report = quantized(model, tmp_path / "ours.onnx", feeds, extra_options=options, **TYPES)
    stock_quantize_static(
        models.residual_block(), tmp_path / "stock.onnx", FeedReader(feeds), extra_options=options, **TYPES
    )
    ours, stock = onnx.load(tmp_path / "ours.onnx"), onnx.load(tmp_path / "stock.onnx")
    assert differences(stock, ours) == []
    assert next(iter(options)) in report.notes[-1]
    assert chosen(report)[f"extra_options.{next(iter(options))}"][1] == "caller"


@pytest.mark.parametrize("options", [{"ActivationSymmetric": True}, {"WeightSymmetric": False}])
def test_symmetry(tmp_path: Path, options: dict[str, Any]) -> None:
    model, out = models.residual_block(), tmp_path / "out.onnx"
    quantized(model, out, extra_options=options, **TYPES)
    assert quality(model, out, models.feeds(model)) > 25
    if "ActivationSymmetric" in options:
        assert {int(z) for _, z in parameters(out).values()} <= {127, 128}
    else:
        assert {int(z.reshape(-1)[0]) for n, z in initializers(out).items() if n.endswith("w_zero_point")} != {0}


def test_minimum_real_range(tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    quantized(models.residual_block(), out, extra_options={"MinimumRealRange": 20.0}, **TYPES)
    assert all(float(scale) * 255 >= 20.0 * (1 - 1e-6) for scale, _ in parameters(out).values())


# ---- nodes and operators --------------------------------------------------------------------------------------


def test_nodes_to_quantize(tmp_path: Path) -> None:
    model, out = models.residual_block(), tmp_path / "out.onnx"
    report = quantized(model, out, nodes_to_quantize=["conv1", "conv2"])
    held = initializers(out)
    assert {"conv1_w_quantized", "conv2_w_quantized"} <= set(held)
    assert {"stem_w", "head_w"} <= set(held)
    assert "nodes_to_quantize" in report.notes[-1]
    assert quality(model, out, models.feeds(model)) > 30


def test_nodes_to_quantize_and_exclude(tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    quantized(models.residual_block(), out, nodes_to_quantize=["conv1", "conv2"], nodes_to_exclude=["conv2"])
    assert "conv1_w_quantized" in initializers(out)
    assert "conv2_w" in initializers(out)


def test_op_types_to_quantize(tmp_path: Path) -> None:
    model, out = models.residual_block(), tmp_path / "out.onnx"
    report = quantized(model, out, op_types_to_quantize=["Conv"])
    assert heavy(report) == {"stem": True, "conv1": True, "conv2": True, "head": False}
    assert "head_w" in initializers(out)
    assert not any(n.startswith("add_out") for n in pairs(out))
    assert quality(model, out, models.feeds(model)) > 30


def test_op_types_that_the_target_would_leave_float(tmp_path: Path) -> None:
    model, out = models.transformer_block(), tmp_path / "out.onnx"
    report = quantized(model, out, op_types_to_quantize=["MatMul", "Softmax"])
    assert "Softmax" in report.notes[-1]
    assert any(base(n) == "softmax_out" for n in pairs(out))


def test_exclusion_of_what_preparation_moves(tmp_path: Path) -> None:
    """Named nodes are not rewritten away: Identity and Dropout stay where they are excluded."""
    net = models.Net()
    x = net.op("Identity", [net.conv(net.input("x", [1, 3, 8, 8]), 3, 4, name="conv0")], name="same")
    net.output(net.conv(net.op("Relu", [x], name="relu"), 4, 4, name="conv1"), [1, 4, 8, 8])
    model, out = net.model(), tmp_path / "out.onnx"
    quantized(model, out, nodes_to_exclude=["same"])
    assert quality(model, out, models.feeds(model)) > 30
