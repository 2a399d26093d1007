"""What the host decides where the caller says nothing, and what happens where the caller insists."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import CalibrationMethod, QuantType

from kenosis_ort import KenosisWarning, Stages, quantize_static
from kenosis_ort.runtime.limits import Machine, at_hand
from kenosis_ort.targets import DataTypes
from kenosis_ort.targets.ort_cpu.rules import for_this_machine, is_arm
from tests import models
from tests.flow.support import (
    chosen,
    heavy,
    initializers,
    own_warnings,
    parameters,
    quality,
    quantized,
)
from tests.processor import ARM, NO_VNNI, VNNI, Pretend

needs_x64 = pytest.mark.skipif(is_arm(at_hand().family), reason="about the x86-64 kernels")


@pytest.mark.parametrize(
    ("host", "activation"),
    [(VNNI, QuantType.QUInt8), (NO_VNNI, QuantType.QUInt8), (ARM, QuantType.QInt8)],
    ids=["x64-vnni", "x64", "arm"],
)
def test_types_follow_the_host(tmp_path: Path, pretend: Pretend, host: Machine, activation: QuantType) -> None:
    pretend(host)
    out = tmp_path / "out.onnx"
    said = chosen(quantized(models.mobile_block(), out))
    assert said["activation_type"] == (activation, "host default")
    assert said["weight_type"] == (QuantType.QInt8, "host default")
    assert said["per_channel"] == (True, "host default")
    assert said["reduce_range"] == (False, "host default")
    held = initializers(out)
    weights = held["depthwise_w_quantized"]
    assert weights.dtype == np.int8
    assert np.abs(weights).max() == 127  # depthwise: its kernel adds no pairs
    assert held["depthwise_w_scale"].shape == (weights.shape[0],)
    kinds = {zero_point.dtype for _, zero_point in parameters(out).values()}
    assert kinds == {np.dtype(np.int8 if activation is QuantType.QInt8 else np.uint8)}


def test_the_caller_overrules_the_host(tmp_path: Path, pretend: Pretend) -> None:
    pretend(NO_VNNI)
    out = tmp_path / "out.onnx"
    said = chosen(
        quantized(models.residual_block(), out, reduce_range=False, per_channel=False, activation_type=QuantType.QUInt8)
    )
    assert said["reduce_range"] == (False, "caller")
    assert said["per_channel"] == (False, "caller")
    assert said["activation_type"] == (QuantType.QUInt8, "caller")
    held = initializers(out)
    assert np.abs(held["conv1_w_quantized"]).max() > 64
    assert held["conv1_w_scale"].shape == ()


@pytest.mark.parametrize("weight_type", [QuantType.QUInt8])
def test_uint8_weights_are_per_tensor_unless_said(tmp_path: Path, weight_type: QuantType) -> None:
    said = chosen(quantized(models.residual_block(), tmp_path / "out.onnx", weight_type=weight_type))
    assert said["per_channel"] == (False, "host default")


def test_raw_element_types_count_as_said(tmp_path: Path) -> None:
    said = chosen(
        quantized(models.residual_block(), tmp_path / "out.onnx", activation_type=QuantType.QUInt8.tensor_type.real)
    )
    assert said["activation_type"] == (QuantType.QUInt8, "caller")


def test_without_stages_the_defaults_are_stocks(tmp_path: Path) -> None:
    said = chosen(quantized(models.residual_block(), tmp_path / "out.onnx", stages=Stages.none()))
    assert said["activation_type"] == (QuantType.QInt8, "stock default")
    assert said["per_channel"] == (False, "stock default")
    assert said["reduce_range"] == (False, "stock default")


# ---- insisting on int8 ----------------------------------------------------------------------------------------


@needs_x64
@pytest.mark.parametrize("net", ["residual_block", "concat_net", "two_input_detector", "net_with_if"])
def test_int8_on_x64_with_branches_runs_in_integer(tmp_path: Path, pretend: Pretend, net: str) -> None:
    """Stock's file and a plain placement run Convs around such a value in float."""
    pretend(VNNI)
    model, out = models.ALL[net](), tmp_path / "out.onnx"
    feeds = models.feeds(model)
    ran, close = {}, {}
    for kind in (QuantType.QUInt8, QuantType.QInt8):
        report = quantized(model, out, feeds, activation_type=kind)
        ran[kind], close[kind] = heavy(report), quality(model, out, feeds)
        assert report.warnings == ()
    assert ran[QuantType.QInt8] == ran[QuantType.QUInt8]
    assert close[QuantType.QInt8] == pytest.approx(close[QuantType.QUInt8], abs=0.5)
    assert {zero_point.dtype for _, zero_point in parameters(out).values()} == {np.dtype(np.int8)}


@needs_x64
def test_int8_on_arm_is_placed_as_uint8(tmp_path: Path, pretend: Pretend) -> None:
    """Its kernels take int8 with any number of readers."""
    pretend(ARM)
    out = tmp_path / "out.onnx"
    assert not quantized(models.residual_block(), out, activation_type=QuantType.QInt8).plan.splits


@needs_x64
def test_int8_on_x64_with_branches_warns_once(tmp_path: Path, pretend: Pretend) -> None:
    pretend(VNNI)
    naive = Stages(placement=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = quantized(models.concat_net(), tmp_path / "out.onnx", activation_type=QuantType.QInt8, stages=naive)
    (text,) = own_warnings(caught)
    slow = [name for name, integer in heavy(report).items() if not integer]
    assert slow
    assert f"{len(slow)} Convs" in text
    assert f"'{slow[0]}'" in text
    assert "Fix: activation_type=QuantType.QUInt8" in text
    assert report.warnings == (text,)
    assert chosen(report)["activation_type"] == (QuantType.QInt8, "caller")


@needs_x64
def test_the_warning_points_at_the_callers_line(tmp_path: Path, pretend: Pretend) -> None:
    pretend(VNNI)
    model = models.concat_net()
    with pytest.warns(KenosisWarning) as caught:
        quantize_static(
            model,
            tmp_path / "out.onnx",
            models.reader(model),
            activation_type=QuantType.QInt8,
            stages=Stages(placement=False),
        )
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("build", "host"),
    [(lambda: models.conv_relu_chain(4), VNNI), (models.concat_net, ARM)],
    ids=["no branch on x64", "branches on Arm"],
)
def test_int8_without_harm_does_not_warn(
    tmp_path: Path, pretend: Pretend, build: Callable[[], onnx.ModelProto], host: Machine
) -> None:
    pretend(host)
    report = quantized(build(), tmp_path / "out.onnx", activation_type=QuantType.QInt8)
    assert not [w for w in report.warnings if "QInt8" in w]


@pytest.mark.parametrize("options", [{"nodes_to_exclude": ["conv2"]}, {"protect_outputs": "float"}])
def test_what_the_caller_keeps_float_is_not_warned_of(
    tmp_path: Path, pretend: Pretend, options: dict[str, Any]
) -> None:
    pretend(VNNI)
    report = quantized(models.conv_relu_chain(4), tmp_path / "out.onnx", activation_type=QuantType.QInt8, **options)
    assert heavy(report)["conv2"] is False
    assert report.warnings == ()


def test_nothing_said_does_not_warn(tmp_path: Path) -> None:
    assert quantized(models.concat_net(), tmp_path / "out.onnx").warnings == ()


@needs_x64
@pytest.mark.parametrize("placement", [True, False])
@pytest.mark.parametrize("host", [VNNI, NO_VNNI], ids=["vnni", "no-vnni"])
def test_float8_goes_by_default_on_every_host(tmp_path: Path, pretend: Pretend, host: Machine, placement: bool) -> None:
    pretend(host)
    float8 = {"activation_type": QuantType.QFLOAT8E4M3FN, "weight_type": QuantType.QFLOAT8E4M3FN}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KenosisWarning)  # its accuracy is not the question
        report = quantized(
            models.residual_block(),
            tmp_path / "o.onnx",
            calibrate_method=CalibrationMethod.Distribution,
            stages=Stages(placement=placement),
            **float8,
        )
    assert chosen(report)["reduce_range"] == (False, "host default")


# ---- the probe ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "arm"), [("aarch64", True), ("arm64", True), ("ARM64", True), ("x86_64", False), ("AMD64", False)]
)
def test_processor_families(pretend: Pretend, machine: str, arm: bool) -> None:
    pretend(replace(VNNI, family=machine))
    found = for_this_machine(DataTypes())
    assert is_arm(machine) == arm == (found.activation == onnx.TensorProto.INT8) == (not found.single_reader)


@pytest.mark.parametrize("saturates", [False, True])
def test_the_reason_follows_the_probe(pretend: Pretend, saturates: bool) -> None:
    pretend(NO_VNNI if saturates else VNNI)
    found = for_this_machine(DataTypes())
    assert found.saturates == saturates
    assert ("clipped there" in found.why) == saturates
    pretend(ARM)
    assert for_this_machine(DataTypes()).saturates is False


def test_the_file_does_not_depend_on_the_probe(tmp_path: Path, pretend: Pretend) -> None:
    files = []
    for host in (VNNI, NO_VNNI):
        pretend(host)
        quantized(models.mobile_block(), tmp_path / "out.onnx")
        files.append((tmp_path / "out.onnx").read_bytes())
    assert files[0] == files[1]


@pytest.mark.parametrize("options", [{"stages": Stages(weights=False)}, {"extra_options": {"WeightSymmetric": False}}])
def test_weights_by_stocks_scales_get_seven_bits(tmp_path: Path, options: dict[str, Any]) -> None:
    model, out = models.residual_block(), tmp_path / "out.onnx"
    assert chosen(quantized(model, out, **options))["reduce_range"] == (True, "host default")
    assert quality(model, out, models.feeds(model)) > 25
    assert not chosen(quantized(model, out, weight_type=QuantType.QUInt8, **options))["reduce_range"][0]
