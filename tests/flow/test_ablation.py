"""Every Kenosis stage can be switched off alone, and does what it says where it is on."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import QuantType
from onnxruntime.quantization import quantize_static as stock_quantize_static

from kenosis_ort import KenosisWarning, Stages
from tests import models
from tests.flow.support import heavy, initializers, pairs, parameters, proof, quality, quantized
from tests.models import FeedReader, Net
from tests.oracle.compare import differences

STAGES = [f.name for f in fields(Stages)]
NETS = ["residual_block", "mobile_block", "silu_net", "two_input_detector", "transformer_block", "net_with_if"]


def off(stage: str) -> Stages:
    return Stages(**{stage: False})


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("net", NETS)
def test_each_stage_alone_can_be_off(tmp_path: Path, net: str, stage: str) -> None:
    model = models.ALL[net]()
    out = tmp_path / "out.onnx"
    report = quantized(model, out, stages=off(stage))
    assert quality(model, out, models.feeds(model)) > 25
    assert report.options["stages"].value == {name: name != stage for name in STAGES}
    assert not report.left_float()
    if stage == "placement":
        assert not report.plan
        assert "placement stage is switched off" in report.notes[-1]
    else:
        assert report.plan


@pytest.mark.parametrize("net", [n for n in models.ALL if n != "net_with_if"])
def test_no_stage_is_stock(tmp_path: Path, net: str) -> None:
    """But for net_with_if, where stock folds a Relu whose input a body reads: its result does not load."""
    model = models.ALL[net]()
    feeds = models.feeds(model)
    quantized(model, tmp_path / "ours.onnx", feeds, stages=Stages.none())
    stock_quantize_static(models.ALL[net](), tmp_path / "stock.onnx", FeedReader(feeds))
    assert differences(onnx.load(tmp_path / "ours.onnx"), onnx.load(tmp_path / "stock.onnx")) == []


# ---- weights and bias -----------------------------------------------------------------------------------------


def near_dead_channels() -> onnx.ModelProto:
    """Weights of 1e-7 beside a bias of 5, which overflows int32 unless the weight scale is widened."""
    net = Net()
    w = np.full((4, 1, 1, 1), 1e-7, np.float32)
    w[0] = 1.0
    b = net.const(np.array([0.0, 5.0, -4.5, 5.0]), "b")
    y = net.op("Conv", [net.input("x", [1, 1, 8, 8]), net.const(w, "w"), b], name="conv")
    net.output(net.conv(y, 4, 4, name="conv2"), [1, 4, 8, 8])
    return net.model()


def test_weights_stage_rounds_in_float64(tmp_path: Path) -> None:
    """The stored scale is the nearest float32 of the float64 quotient, and the integers are the nearest to it."""
    for on in (True, False):
        out = tmp_path / f"{on}.onnx"
        quantized(models.residual_block(), out, stages=Stages(weights=on), reduce_range=False, rewrites=False)
    held, rough = initializers(tmp_path / "True.onnx"), initializers(tmp_path / "False.onnx")
    for name in ("stem_w", "conv1_w", "conv2_w"):
        real = onnx.numpy_helper.to_array(
            next(i for i in models.residual_block().graph.initializer if i.name == name)
        ).astype(np.float64)
        walked = real.transpose(0, 2, 3, 1).reshape(len(real), -1)  # in the kernel's order, see graph.qdq
        both = np.pad(walked, [(0, 0), (0, walked.shape[1] % 2)]).reshape(len(real), -1, 2)
        pairs = np.abs(both.sum(axis=2)) * (both.prod(axis=2) > 0)
        scale = np.maximum(np.abs(walked).max(axis=1) / 127, pairs.max(axis=1) / 128)
        assert np.array_equal(held[f"{name}_scale"], scale.astype(np.float32))
        steps = real / held[f"{name}_scale"].astype(np.float64)[:, None, None, None]
        assert np.array_equal(held[f"{name}_quantized"], np.rint(steps))
        assert np.allclose(rough[f"{name}_scale"], np.abs(walked).max(axis=1) / 127, rtol=1e-6)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_bias_stage_widens_where_the_bias_overflows(tmp_path: Path, weights: bool, per_channel: bool) -> None:
    model, out = near_dead_channels(), tmp_path / "out.onnx"
    feeds = models.feeds(model)
    quantized(model, out, feeds, stages=Stages(weights=weights), per_channel=per_channel)
    assert quality(model, out, feeds) > 35


@pytest.mark.parametrize("weight_type", [QuantType.QInt8, QuantType.QUInt8])
def test_bias_overflow_of_a_whole_tensor(tmp_path: Path, weight_type: QuantType) -> None:
    net = Net()
    w, b = net.const(np.full((4, 1, 1, 1), 1e-7, np.float32), "w"), net.const(np.array([1.0, 5.0, -4.5, 5.0]), "b")
    y = net.op("Conv", [net.input("x", [1, 1, 8, 8]), w, b], name="conv")
    net.output(net.conv(y, 4, 4, name="conv2"), [1, 4, 8, 8])
    model, out = net.model(), tmp_path / "out.onnx"
    feeds = models.feeds(model)
    quantized(model, out, feeds, weight_type=weight_type, per_channel=False)
    assert quality(model, out, feeds) > 35


def test_without_the_bias_stage_the_overflow_is_clipped(tmp_path: Path) -> None:
    model, out = near_dead_channels(), tmp_path / "out.onnx"
    feeds = models.feeds(model)
    with pytest.warns(KenosisWarning, match="keeps only"):
        report = quantized(model, out, feeds, stages=off("bias"))
    assert quality(model, out, feeds) < 10
    assert report.warnings


# ---- nudge ----------------------------------------------------------------------------------------------------


def hard_tanh() -> onnx.ModelProto:
    net = Net()
    y = net.conv(net.input("x", [1, 3, 8, 8]), 3, 4, name="conv0")
    y = net.op("Clip", [y, net.const(-1.0), net.const(1.0)], name="clip")
    net.output(net.conv(y, 4, 4, name="conv1"), [1, 4, 8, 8])
    return net.model()


@pytest.mark.filterwarnings("ignore::kenosis_ort.KenosisWarning")
@pytest.mark.parametrize("signed", [False, True])
def test_nudge_keeps_inside_the_bounds_of_a_clip(tmp_path: Path, signed: bool) -> None:
    model = hard_tanh()
    reach, integer = {}, {}
    for on in (True, False):
        out = tmp_path / f"{on}.onnx"
        kind = QuantType.QInt8 if signed else QuantType.QUInt8
        report = quantized(model, out, stages=Stages(nudge=on), activation_type=kind)
        integer[on] = heavy(report)["conv0"]
        scale, zero_point = parameters(out)["clip_out"]
        info = np.iinfo(zero_point.dtype)
        reach[on] = [float(np.float32(q - int(zero_point)) * scale) for q in (info.min, info.max)]
        assert quality(model, out, models.feeds(model)) > 30
    assert reach[True][0] >= -1.0
    assert reach[True][1] <= 1.0
    assert reach[False][0] < -1.0 or reach[False][1] > 1.0
    assert integer[True]
    assert not (signed and integer[False])  # the runtime cannot absorb a Clip that Q reaches beyond


def test_nudge_represents_zero_exactly(tmp_path: Path) -> None:
    """Activations that are never below 3: the range is widened to hold 0.0, and 0.0 is an integer."""
    net = Net()
    y = net.op("Add", [net.op("Relu", [net.input("x", [1, 4])], name="relu"), net.const(3.0)], name="add")
    net.output(net.gemm(y, 4, 4, name="head"), [1, 4])
    out = tmp_path / "out.onnx"
    quantized(net.model(), out)
    for scale, zero_point in parameters(out).values():
        assert scale > 0
        assert 0 <= int(zero_point) <= 255


# ---- placement ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", sorted(models.ALL))
def test_placement_is_no_worse_than_naive(tmp_path: Path, net: str) -> None:
    model = models.ALL[net]()
    feeds = models.feeds(model)
    aware = quantized(model, tmp_path / "aware.onnx", feeds, protect_outputs="int8")
    naive = quantized(model, tmp_path / "naive.onnx", feeds, stages=off("placement"))
    gained = quality(model, tmp_path / "aware.onnx", feeds) - quality(model, tmp_path / "naive.onnx", feeds)
    assert gained > -0.3
    planned = set(aware.plan.integer_nodes())
    assert all(integer for name, integer in heavy(aware).items() if name in planned)
    if net != "transformer_block":  # there the products of attention stay float on purpose
        assert sum(heavy(aware).values()) >= sum(heavy(naive).values())


def test_placement_keeps_convs_integer_that_naive_loses(tmp_path: Path) -> None:
    """A body reads the Conv's output beside its Relu: naive placement leaves the Conv float."""
    model = models.net_with_if()
    aware, naive = (quantized(model, tmp_path / "out.onnx", stages=s) for s in (Stages(), off("placement")))
    assert heavy(aware) == {"conv0": True, "conv1": True}
    assert heavy(naive)["conv0"] is False


def test_placement_spares_boxes_beside_scores(tmp_path: Path) -> None:
    model = models.two_input_detector()
    feeds = models.feeds(model)
    quantized(model, tmp_path / "aware.onnx", feeds)
    quantized(model, tmp_path / "naive.onnx", feeds, stages=off("placement"))
    assert quality(model, tmp_path / "aware.onnx", feeds) > quality(model, tmp_path / "naive.onnx", feeds) + 3


# ---- protection -----------------------------------------------------------------------------------------------


def with_image_info() -> onnx.ModelProto:
    """A picture, and a Gemm over ``im_info`` whose result is multiplied in."""
    net = Net()
    x = net.conv(net.input("image", [1, 3, 8, 8]), 3, 4, name="conv0")
    info = net.gemm(net.input("im_info", [1, 3]), 3, 4, name="info")
    info = net.op("Relu", [info], name="info_relu")
    info = net.op("Reshape", [net.gemm(info, 4, 4, name="info2"), net.const([1, 4, 1, 1])], name="spread")
    net.output(net.conv(net.op("Mul", [x, info], name="scaled"), 4, 4, name="conv1"), [1, 4, 8, 8])
    return net.model()


def test_input_protection_keeps_secondary_inputs_float(tmp_path: Path) -> None:
    model, out = with_image_info(), tmp_path / "out.onnx"
    feeds: list[dict[str, Any]] = models.feeds(model)
    for feed in feeds:
        feed["im_info"] = np.array([[800.0, 1333.0, 0.5]], np.float32)
    on = quantized(model, out, feeds)
    assert heavy(on) == {"conv0": True, "info": False, "info2": False, "conv1": True}
    assert "im_info" not in pairs(out)
    assert "'im_info'" in next(n.reason for n in on.plan.nodes if n.node == "info")
    unprotected = quantized(model, out, feeds, stages=off("protect_inputs"))
    assert all(heavy(unprotected).values())
    assert "im_info" in pairs(out)


@pytest.mark.parametrize("primary", [["image", "im_info"], ["im_info"]])
def test_primary_inputs_overrule_names_and_shapes(tmp_path: Path, primary: list[str]) -> None:
    report = quantized(with_image_info(), tmp_path / "out.onnx", primary_inputs=primary)
    assert heavy(report)["info"] is True
    assert heavy(report)["conv0"] is ("image" in primary)


def test_output_protection_writes_gemm_heads_as_float(tmp_path: Path) -> None:
    model, out = models.residual_block(), tmp_path / "out.onnx"
    feeds = models.feeds(model, 32)
    on = quantized(model, out, feeds)
    protected = quality(model, out, feeds)
    assert heavy(on)["head"] is True
    head = onnx.load(out).graph.output[0].name
    assert not any(name.startswith(head) for name in pairs(out))
    quantized(model, out, feeds, stages=off("protect_outputs"))
    assert any(name.startswith(head) for name in pairs(out))
    assert protected >= quality(model, out, feeds)


def boxes_and_scores() -> onnx.ModelProto:
    net = Net()
    x = net.op("Relu", [net.conv(net.input("image", [1, 3, 8, 8]), 3, 8, name="stem")], name="relu")
    boxes = net.op("Mul", [net.conv(x, 8, 4, k=1, name="box"), net.const(100.0)], name="stride")
    scores = net.op("Sigmoid", [net.conv(x, 8, 3, k=1, name="score")], name="sigmoid")
    net.output(net.op("Concat", [boxes, scores], name="both", axis=1), [1, 7, 8, 8])
    return net.model()


def test_output_protection_reaches_back_through_concat_and_sigmoid(tmp_path: Path) -> None:
    model, out = boxes_and_scores(), tmp_path / "out.onnx"
    report = quantized(model, out, rewrites=False)
    floats = {k.node for k in proof(report).float_nodes()}
    assert floats >= {"stride", "sigmoid", "both"}
    assert pairs(out) <= {"image", "relu_out", "box_out", "score_out"}
    crushed = quantized(model, out, stages=off("protect_outputs"))
    assert {k.node: k.integer for k in proof(crushed).kernels}["both"] is True


@pytest.mark.parametrize("policy", ["auto", "float", "int8"])
def test_output_policy_of_conv_heads(tmp_path: Path, policy: Any) -> None:
    model, out = models.silu_net(), tmp_path / "out.onnx"
    feeds = models.feeds(model)
    report = quantized(model, out, feeds, protect_outputs=policy)
    assert quality(model, out, feeds) > 25
    if policy == "float":
        assert heavy(report)["head"] is False
        assert "output" in next(n.reason for n in report.plan.nodes if n.node == "head")
    elif policy == "int8":
        assert heavy(report)["head"] is True
        assert "head_out_QuantizeLinear_Input" in pairs(out)
    assert not proof(report).silently_quantized()


# ---- rewrites -------------------------------------------------------------------------------------------------


def op_types(out: Path) -> set[str]:
    return {n.op_type for n in onnx.load(out).graph.node}


@pytest.mark.parametrize("net", sorted(models.ALL))
def test_rewrites_can_be_off(tmp_path: Path, net: str) -> None:
    model, out = models.ALL[net](), tmp_path / "out.onnx"
    feeds = models.feeds(model, dims={"batch": 3})
    report = quantized(model, out, feeds, rewrites=False)
    assert report.options["rewrites"].value is False
    assert quality(model, out, feeds) > 30
    assert report.left_float() == ()
    kept = op_types(out) - {"QuantizeLinear", "DequantizeLinear", "Max"}
    assert kept <= {n.op_type for n in model.graph.node}


def test_rewrites_by_name(tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    quantized(models.silu_net(), out, rewrites=["collapse_silu"])
    assert "QuickGelu" in op_types(out)
    quantized(models.silu_net(), out, rewrites=["collapse_gelu"])
    assert "QuickGelu" not in op_types(out)
    quantized(models.silu_net(), out)
    assert "QuickGelu" not in op_types(out)  # slower on some processors: only where the caller names it


def test_stock_placement_rewrites_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    quantized(models.silu_net(), out, stages=off("placement"))
    assert "QuickGelu" not in op_types(out)
