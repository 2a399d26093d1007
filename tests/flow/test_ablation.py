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
from tests.flow.support import make, pairs
from tests.planning import parse

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


# ---- weights and nudge ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", [True, False])
def test_scales_of_weights_are_stocks_without_their_stage(tmp_path: Path, on: bool) -> None:
    model = models.residual_block()
    made = make(model, tmp_path, stages=Stages(weights=on), reduce_range=False, rewrites=False)
    weight = next(onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.name == "conv1_w")
    assert np.allclose(made.held["conv1_w_scale"], np.abs(weight).max(axis=(1, 2, 3)) / 127, rtol=1e-6) != on


CLIP = """(float[1,3,8,8] x) => (float[1,4,8,8] y) <float[4,3,1,1] w, float[4,4,1,1] v, float low, float high> {
    a = Conv (x, w)  c = Clip (a, low, high)  y = Conv (c, v) }"""


@pytest.mark.filterwarnings("ignore::kenosis_ort.KenosisWarning")
@pytest.mark.parametrize("kind", [QuantType.QUInt8, QuantType.QInt8])
@pytest.mark.parametrize("on", [True, False])
def test_nudge_keeps_inside_the_bounds_of_a_clip(tmp_path: Path, kind: QuantType, on: bool) -> None:
    made = make(parse(CLIP, {"low": -1, "high": 1}), tmp_path, stages=Stages(nudge=on), activation_type=kind)
    scale, zero_point = made.grids["c"]
    info = np.iinfo(zero_point.dtype)
    reach = [abs(float(np.float32(q - int(zero_point)) * scale)) for q in (info.min, info.max)]
    assert (max(reach) <= 1) == on
    assert made.heavy["Conv_a"] or not on  # the runtime cannot absorb a Clip that Q reaches beyond


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


# ---- protection -----------------------------------------------------------------------------------------------


IMAGE_AND_INFO = """(float[1,3,8,8] image, float[1,3] im_info) => (float[1,4,8,8] y) <float[4,3,3,3] u, float[3,4] v,
    float[4,4] w, int64[4] shape = {1, 4, 1, 1}, float[4,4,3,3] t> {
    c = Conv <pads = [1,1,1,1]> (image, u)  a = Gemm (im_info, v)  r = Relu (a)  b = Gemm (r, w)
    spread = Reshape (b, shape)  scaled = Mul (c, spread)  y = Conv <pads = [1,1,1,1]> (scaled, t) }"""
INFO = {"Gemm_a", "Gemm_b"}


@pytest.mark.parametrize(("options", "stays_float"), [
    ({}, INFO), ({"stages": off("protect_inputs")}, set()), ({"primary_inputs": ["image", "im_info"]}, set()),
    ({"primary_inputs": ["im_info"]}, {"Conv_c"}),
])  # fmt: skip
def test_input_protection(tmp_path: Path, options: dict[str, Any], stays_float: set[str]) -> None:
    """Which inputs are secondary is tested in `tests.placement`."""
    model, info = parse(IMAGE_AND_INFO), np.array([[800.0, 1333.0, 0.5]], np.float32)
    made = make(model, tmp_path, [{**feed, "im_info": info} for feed in models.feeds(model)], **options)
    assert {name for name, integer in made.heavy.items() if not integer} == stays_float
    assert ("im_info" in made.grids) == (stays_float != INFO)
    if stays_float == INFO:
        assert "'im_info'" in made.report.plan.by_node["Gemm_a"].reason


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


@pytest.mark.parametrize(("options", "taken"), [
    ({"rewrites": ["collapse_silu"]}, True), ({"rewrites": ["collapse_gelu"]}, False),
    ({}, False), ({"stages": off("placement")}, False),  # slower on some processors: only where the caller names it
])  # fmt: skip
def test_rewrites_by_name(tmp_path: Path, options: dict[str, Any], taken: bool) -> None:
    assert ("QuickGelu" in make(models.silu_net(), tmp_path, **options).ops) == taken
