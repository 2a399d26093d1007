"""What is written is close to the float model and runs as planned, whatever is asked and whichever stage is off."""

import copy
import itertools
import json
import os
from dataclasses import fields
from functools import partial
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType

from kenosis_ort import ArrayReader, Stages, quantize_static
from kenosis_ort.flow.samples import KeepingReader
from kenosis_ort.verify import check_bias_alignment
from tests import models, planning
from tests.flow.support import QDQ, Made, good, interface, make, pairs, quantized

STAGES = ["load", "prepare", "plan", "rewrite", "calibrate", "quantize", "verify", "evidence", "write"]


@pytest.mark.parametrize("rewrites", [True, False])
@pytest.mark.parametrize("net", sorted(models.ALL))
def test_it_is_close_runs_as_planned_and_has_the_same_interface(tmp_path, net, rewrites):
    model = models.ALL[net]()
    made = good(model, tmp_path, models.feeds(model, 6, dims={"batch": 3}), rewrites=rewrites)
    assert made.report.plan.integer_nodes()
    assert [o.name for o in made.report.outputs] == [o.name for o in model.graph.output]
    assert all(o.sqnr_db > 30 for o in made.report.outputs)
    assert os.listdir(tmp_path) == ["out.onnx"]
    assert [stage for stage in made.report.seconds if stage != "check"] == STAGES  # checked where it was rewritten
    assert "integer kernels" in str(made.report)
    assert made.report.options["rewrites"].value is rewrites
    assert rewrites or {*made.ops} - {*QDQ, "Max"} <= {n.op_type for n in model.graph.node}
    assert interface(made.out) == interface(model)
    onnx.checker.check_model(made.written, full_check=True)


def test_without_verification_or_kept_feeds_nothing_is_compared(tmp_path, monkeypatch):
    made = make(models.residual_block(), tmp_path, verify=False)
    assert (made.report.fusion, made.report.outputs) == (None, ())
    assert made.db() > 30
    assert json.loads(made.report.to_json())["fusion"] is None
    monkeypatch.setattr("kenosis_ort.flow.run.KeepingReader", partial(KeepingReader, budget=0))
    report = quantized(models.residual_block(), made.out)
    assert (report.outputs, report.calibration.samples) == ((), 4)


# ---- all the ways to ask --------------------------------------------------------------------------------------

METHODS = [CalibrationMethod[name] for name in ("MinMax", "Entropy", "Percentile", "Distribution")]
EXTRA = (
    {"CalibMovingAverage": True, "CalibStridedMinMax": 2},
    *({name: True} for name in ("CalibMovingAverage", "CalibTensorRangeSymmetric", "MatMulConstBOnly")),
    *({"CalibMaxIntermediateOutputs": 2}, {"QDQDisableWeightAdjustForInt32Bias": True}),
)
TYPES = itertools.product((QuantType.QInt8, QuantType.QUInt8), (False, True), (False, True))
LISTS = {"op_types_to_quantize": ["Conv", "Clip", "Add", "Gemm"], "calibration_providers": ["CPUExecutionProvider"]}
WAYS = [
    *((net, {"calibrate_method": method, "recipe": "fast" if net == "bn_net" else "plain"})
      for method in METHODS for net in ("residual_block", "mlp_matmul", "bn_net")),
    *(("residual_block", {"extra_options": extra}) for extra in EXTRA),
    *(("mobile_block", {"weight_type": kind, "per_channel": by_channel, "reduce_range": reduced})
      for kind, by_channel, reduced in TYPES),
    *((net, {"quant_format": kind, "per_channel": by_channel}) for net in ("residual_block", "mobile_block", "mlp")
      for kind, by_channel in ((QuantFormat.QOperator, False), ("QOperator", True))),
    ("mobile_block", {**LISTS, "recipe": "fast", "nodes_to_exclude": ["stem"], "primary_inputs": ["x"]}),
]  # fmt: skip


@pytest.mark.parametrize(("net", "options"), WAYS)
def test_every_way_to_ask(tmp_path, net, options):
    model, seen = models.ALL[net](), []
    feeds = models.feeds(model, 6)
    usual = {"recipe": "plain", "promise": False, "activation_type": QuantType.QUInt8, **options}
    reader = ArrayReader({"x": np.concatenate([feed["x"] for feed in feeds])})
    before = model.SerializeToString(deterministic=True), copy.deepcopy(usual)
    report = quantize_static(model, out := tmp_path / "out.onnx", reader, progress=lambda *at: seen.append(at), **usual)
    made, said = Made(model, feeds, out, report), usual.get
    assert (model.SerializeToString(deterministic=True), usual) == before, "objects of the caller's are not changed"
    assert seen == [(i, 6) for i in range(7)]
    assert os.listdir(tmp_path) == ["out.onnx"]
    assert made.db() > (30 if said("calibrate_method") is CalibrationMethod.MinMax else 15)
    assert report.calibration.samples == 6
    assert report.calibration.method == said("calibrate_method", CalibrationMethod.MinMax).name.lower()
    assert check_bias_alignment(made.written) == []
    by_channel = said("per_channel", True)
    assert report.left_float() == () or (by_channel and said("weight_type") is QuantType.QUInt8)
    if "weight_type" in options:
        (stem,) = (n.removesuffix("_quantized") for n in made.held if n.startswith("stem_w") and "_quantized" in n)
        assert made.held[f"{stem}_quantized"].dtype == (np.int8 if said("weight_type") == QuantType.QInt8 else np.uint8)
        assert made.held[f"{stem}_scale"].shape == ((8,) if by_channel else ())
    if "quant_format" in options:
        assert {*made.ops} & {"QLinearConv", "QGemm", "QLinearMatMul"}
        assert report.plan == make(model, tmp_path / "qdq.onnx", feeds, per_channel=by_channel).report.plan


# ---- readers --------------------------------------------------------------------------------------------------


WRITTEN = {
    "nested lists": np.ndarray.tolist, "lists of arrays": list, "float64": lambda v: v.astype(np.float64),
    "runtime values": ort.OrtValue.ortvalue_from_numpy,
}  # fmt: skip


def test_the_same_numbers_give_the_same_file(tmp_path):
    model = models.residual_block()
    feeds = models.feeds(model, 8)
    readers = {"generator": (f for f in feeds), "list": feeds}
    written = {how: [{k: write(v) for k, v in f.items()} for f in feeds] for how, write in WRITTEN.items()}
    for how, given in {**written, "ends with {}": [*feeds, {}]}.items():
        readers[how] = SimpleNamespace(get_next=partial(next, iter(given), None))  # it derives from nothing
    for name, reader in readers.items():
        quantize_static(model, tmp_path / name, reader, promise=False, tune="off")
        assert (tmp_path / name).read_bytes() == (tmp_path / "generator").read_bytes(), name


# ---- every stage can be switched off alone, and does what it says where it is on -------------------------------------

ALL_STAGES = [f.name for f in fields(Stages)]
NETS = ["residual_block", "mobile_block", "silu_net", "two_input_detector", "transformer_block", "net_with_if"]


def off(stage):
    return Stages(**{stage: False})


@pytest.mark.parametrize("stage", ALL_STAGES)
@pytest.mark.parametrize("net", NETS)
def test_each_stage_alone_can_be_off(tmp_path, net, stage):
    """With none of them the file is stock's: see `tests.oracle`."""
    made = make(models.ALL[net](), tmp_path, stages=off(stage))
    assert made.db() > 25
    assert made.report.options["stages"].value == {name: name != stage for name in ALL_STAGES}
    assert not made.report.left_float()
    assert bool(made.report.plan) == (stage != "placement")
    if stage == "placement":
        assert "placement stage is switched off" in made.report.notes[-1]


# ---- weights and nudge ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", [True, False])
def test_scales_of_weights_are_stocks_without_their_stage(tmp_path, on):
    model = models.residual_block()
    made = make(model, tmp_path, stages=Stages(weights=on), reduce_range=False, rewrites=False)
    weight = next(onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.name == "conv1_w")
    assert np.allclose(made.held["conv1_w_scale"], np.abs(weight).max(axis=(1, 2, 3)) / 127, rtol=1e-6) != on


CLIP = """(float[1,3,8,8] x) => (float[1,4,8,8] y) <float[4,3,1,1] w, float[4,4,1,1] v, float low, float high> {
    a = Conv (x, w)  c = Clip (a, low, high)  y = Conv (c, v) }"""


@pytest.mark.filterwarnings("ignore::kenosis_ort.KenosisWarning")
@pytest.mark.parametrize("kind", [QuantType.QUInt8, QuantType.QInt8])
@pytest.mark.parametrize("on", [True, False])
def test_nudge_keeps_inside_the_bounds_of_a_clip(tmp_path, kind, on):
    made = make(planning.parse(CLIP, {"low": -1, "high": 1}), tmp_path, stages=Stages(nudge=on), activation_type=kind)
    scale, zero_point = made.grids["c"]
    info = np.iinfo(zero_point.dtype)
    reach = [abs(float(np.float32(q - int(zero_point)) * scale)) for q in (info.min, info.max)]
    assert (max(reach) <= 1) == on
    assert made.heavy["Conv_a"] or not on  # the runtime cannot absorb a Clip that Q reaches beyond


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
def test_input_protection(tmp_path, options, stays_float):
    """Which inputs are secondary is tested in `tests.placement`."""
    model, info = planning.parse(IMAGE_AND_INFO), np.array([[800.0, 1333.0, 0.5]], np.float32)
    made = make(model, tmp_path, [{**feed, "im_info": info} for feed in models.feeds(model)], **options)
    assert {name for name, integer in made.heavy.items() if not integer} == stays_float
    assert ("im_info" in made.grids) == (stays_float != INFO)
    if stays_float == INFO:
        assert "'im_info'" in made.report.plan.by_node["Gemm_a"].reason


def test_output_protection_writes_gemm_heads_as_float(tmp_path):
    """What lies behind a head, and the policies, are tested in `tests.placement`."""
    for is_off, stages in enumerate((Stages(), off("protect_outputs"))):
        made = make(models.residual_block(), tmp_path, stages=stages)
        assert made.heavy["head"] is True
        head = made.written.graph.output[0].name
        assert any(name.startswith(head) for name in pairs(made.out)) == bool(is_off)


@pytest.mark.parametrize(("options", "taken"), [
    ({"rewrites": ["collapse_silu"]}, True), ({"rewrites": ["collapse_gelu"]}, False),
    ({}, False), ({"stages": off("placement")}, False),  # slower on some processors: only where the caller names it
])  # fmt: skip
def test_rewrites_by_name(tmp_path, options, taken):
    assert ("QuickGelu" in make(models.silu_net(), tmp_path, **options).ops) == taken
