"""Every Kenosis stage can be switched off alone, and does what it says where it is on."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import QuantType

from kenosis_ort import Stages
from tests import models
from tests.flow.support import good, make, pairs
from tests.models import Net

STAGES = [f.name for f in fields(Stages)]
NETS = ["residual_block", "mobile_block", "silu_net", "two_input_detector", "transformer_block", "net_with_if"]


def off(stage: str) -> Stages:
    return Stages(**{stage: False})


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("net", NETS)
def test_each_stage_alone_can_be_off(tmp_path: Path, net: str, stage: str) -> None:
    """With none of them the file is stock's: see `tests.oracle`."""
    made = make(models.ALL[net](), tmp_path, stages=off(stage))
    assert made.db() > 25
    assert made.report.options["stages"].value == {name: name != stage for name in STAGES}
    assert not made.report.left_float()
    assert bool(made.report.plan) == (stage != "placement")
    if stage == "placement":
        assert "placement stage is switched off" in made.report.notes[-1]


# ---- bias -----------------------------------------------------------------------------------------------------


def near_dead(*alive: int) -> onnx.ModelProto:
    """Weights of 1e-7 beside a bias of 5, which overflows int32 unless the weight scale is widened."""
    net = Net()
    w = np.full((4, 1, 1, 1), 1e-7, np.float32)
    w[[*alive]] = 1.0
    b = net.const(np.array([0.0 if alive else 1.0, 5.0, -4.5, 5.0]), "b")
    y = net.op("Conv", [net.input("x", [1, 1, 8, 8]), net.const(w, "w"), b], name="conv")
    net.output(net.conv(y, 4, 4, name="conv2"), [1, 4, 8, 8])
    return net.model()


@pytest.mark.parametrize("options", [{"stages": off("weights")}, {"per_channel": False}, {}], ids=str)
@pytest.mark.parametrize("alive", [(), (0,)], ids=["whole tensor", "beside another"])
@pytest.mark.parametrize("weight_type", [QuantType.QInt8, QuantType.QUInt8])
def test_bias_stage_widens_where_the_bias_overflows(tmp_path: Path, weight_type: Any, alive: Any, options: Any) -> None:
    assert make(near_dead(*alive), tmp_path, weight_type=weight_type, **options).db() > 35


# ---- weights and nudge ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", [True, False])
def test_scales_of_weights_are_stocks_without_their_stage(tmp_path: Path, on: bool) -> None:
    model = models.residual_block()
    made = make(model, tmp_path, stages=Stages(weights=on), reduce_range=False, rewrites=False)
    weight = next(onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.name == "conv1_w")
    assert np.allclose(made.held["conv1_w_scale"], np.abs(weight).max(axis=(1, 2, 3)) / 127, rtol=1e-6) != on


@pytest.mark.filterwarnings("ignore::kenosis_ort.KenosisWarning")
@pytest.mark.parametrize("kind", [QuantType.QUInt8, QuantType.QInt8])
@pytest.mark.parametrize("on", [True, False])
def test_nudge_keeps_inside_the_bounds_of_a_clip(tmp_path: Path, kind: QuantType, on: bool) -> None:
    net = Net()
    y = net.op("Clip", [net.conv(net.input("x", [1, 3, 8, 8]), 3, 4, name="conv0"), -1.0, 1.0], name="clip")
    net.output(net.conv(y, 4, 4, name="conv1"), [1, 4, 8, 8])
    made = make(net.model(), tmp_path, stages=Stages(nudge=on), activation_type=kind)
    scale, zero_point = made.grids["clip_out"]
    info = np.iinfo(zero_point.dtype)
    reach = [abs(float(np.float32(q - int(zero_point)) * scale)) for q in (info.min, info.max)]
    assert (max(reach) <= 1) == on
    assert made.heavy["conv0"] or not on  # the runtime cannot absorb a Clip that Q reaches beyond


# ---- placement ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", sorted(models.ALL))
def test_placement_is_no_worse_than_naive(tmp_path: Path, net: str) -> None:
    model = models.ALL[net]()
    aware = make(model, tmp_path / "aware.onnx", protect_outputs="int8")
    naive = make(model, tmp_path / "naive.onnx", stages=off("placement"))
    assert aware.db() - naive.db() > -0.3
    planned = set(aware.report.plan.integer_nodes())
    assert all(integer for name, integer in aware.heavy.items() if name in planned)
    if net != "transformer_block":  # there the products of attention stay float on purpose
        assert sum(aware.heavy.values()) >= sum(naive.heavy.values())
    if net == "net_with_if":  # a body reads the Conv's output beside its Relu: naive placement leaves the Conv float
        assert aware.heavy == {"conv0": True, "conv1": True}
        assert naive.heavy["conv0"] is False


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


INFO = {"info", "info2"}


@pytest.mark.parametrize(("options", "stays_float"), [
    ({}, INFO), ({"stages": off("protect_inputs")}, set()), ({"primary_inputs": ["image", "im_info"]}, set()),
    ({"primary_inputs": ["im_info"]}, {"conv0"}),
])  # fmt: skip
def test_input_protection(tmp_path: Path, options: dict[str, Any], stays_float: set[str]) -> None:
    """Which inputs are secondary is tested in `tests.placement`."""
    model, info = with_image_info(), np.array([[800.0, 1333.0, 0.5]], np.float32)
    made = make(model, tmp_path, [{**feed, "im_info": info} for feed in models.feeds(model)], **options)
    assert {name for name, integer in made.heavy.items() if not integer} == stays_float
    assert ("im_info" in made.grids) == (stays_float != INFO)
    if stays_float == INFO:
        assert "'im_info'" in made.report.plan.by_node["info"].reason


def test_output_protection_writes_gemm_heads_as_float(tmp_path: Path) -> None:
    """What lies behind a head, and the policies, are tested in `tests.placement`."""
    model, found = models.residual_block(), []
    for number, stages in enumerate((Stages(), off("protect_outputs"))):
        made = make(model, tmp_path / f"{number}.onnx", models.feeds(model, 32), stages=stages)
        assert made.heavy["head"] is True
        head = made.written.graph.output[0].name
        assert any(name.startswith(head) for name in pairs(made.out)) == (number == 1)
        found.append(made.db())
    assert found[0] >= found[1]


# ---- rewrites -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", sorted(models.ALL))
def test_rewrites_can_be_off(tmp_path: Path, net: str) -> None:
    model = models.ALL[net]()
    made = good(model, tmp_path, models.feeds(model, dims={"batch": 3}), rewrites=False)
    assert made.report.options["rewrites"].value is False
    assert {*made.ops} - {"QuantizeLinear", "DequantizeLinear", "Max"} <= {n.op_type for n in model.graph.node}


@pytest.mark.parametrize(("options", "taken"), [
    ({"rewrites": ["collapse_silu"]}, True),
    ({"rewrites": ["collapse_gelu"]}, False),
    ({}, False),  # slower on some processors: only where the caller names it
    ({"stages": off("placement")}, False),
])  # fmt: skip
def test_rewrites_by_name(tmp_path: Path, options: dict[str, Any], taken: bool) -> None:
    assert ("QuickGelu" in make(models.silu_net(), tmp_path, **options).ops) == taken
