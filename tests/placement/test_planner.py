"""What is decided for whole blocks, edge by edge: the plan as the user reads it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kenosis_ort.graph.view import CAPTURED, GraphView
from kenosis_ort.options import PlacementOptions
from kenosis_ort.placement.planner import Planner
from kenosis_ort.plan import Edge, EdgeRole, How, Kind, PlacementPlan, RangeLimit
from kenosis_ort.targets.ort_cpu import ORT_CPU
from tests import models
from tests.placement.build import CONV, how, kinds, nodes_of, pairs
from tests.planning import parse, plan_of, prepared


def decision(plan: PlacementPlan, value: str, consumer: str) -> Any:
    (found,) = (d for d in plan.decisions if d.edge.value == value and d.edge.consumer == consumer)
    return found


# ---- residual blocks ------------------------------------------------------------------------------------------


def test_residual_block_has_q_on_the_second_conv_and_behind_the_relu_after_the_add() -> None:
    plan = plan_of(models.residual_block())
    assert set(pairs(plan)) == {
        "x", "stem_relu_out", "relu1_out", "conv2_out", "relu2_out", "pool_out", "flatten_out"
    }  # fmt: skip
    assert nodes_of(plan, Kind.ABSORBED) == ["stem_relu", "relu1", "relu2"]
    assert nodes_of(plan, Kind.FLOAT) == []
    assert how(plan, "add_out", "relu2") is How.FLOAT
    assert plan.limits == tuple(RangeLimit(f"{n}_out", 0.0, None) for n in ("stem_relu", "relu1", "relu2"))


def test_the_gemm_head_writes_float_with_an_int32_bias() -> None:
    plan = plan_of(models.residual_block())
    assert how(plan, "head_out", "") is How.FLOAT
    bias = decision(plan, "head_b", "head")
    assert (bias.role, bias.how, bias.scale_from) == (EdgeRole.BIAS, How.DERIVED, ("flatten_out", "head_w"))
    weight = decision(plan, "head_w", "head")
    assert (weight.role, weight.how, weight.axis) == (EdgeRole.WEIGHT, How.OWN, 0)


def test_relu6_carries_both_limits_and_the_project_conv_a_q_of_its_own() -> None:
    plan = plan_of(models.mobile_block())
    assert RangeLimit("depthwise_act_out", 0.0, 6.0) in plan.limits
    assert "project_out" in pairs(plan)
    assert nodes_of(plan, Kind.FLOAT) == []


# ---- activations ----------------------------------------------------------------------------------------------


def test_silu_has_q_on_both_sides() -> None:
    plan = plan_of(models.silu_net())
    assert nodes_of(plan, Kind.FLOAT) == []
    assert {"conv0_out", "sigmoid0_out", "mul0_out"} <= set(pairs(plan))
    assert plan.saturations == (RangeLimit("conv0_out", -8.0, None), RangeLimit("conv1_out", -8.0, None))
    assert how(plan, "conv0_out", "sigmoid0") is how(plan, "conv0_out", "mul0") is How.OWN


@pytest.mark.parametrize("op", ["HardSwish", "Tanh", "Elu", "Softplus", "Gelu"])
def test_any_other_activation_is_a_float_island_with_q_on_both_sides(op: str) -> None:
    domain = "com.microsoft." if op == "Gelu" else ""
    text = f"""net (float[1,16,8,8] x) => (float[1,4,8,8] y) <float[4,16,1,1] w, float[4,4,1,1] v> {{
      c = Conv (x, w)
      t = {domain}{op} (c)
      y = Conv (t, v)
    }}"""
    plan = plan_of(text)
    assert kinds(plan)[f"{op}_t"] == "float"
    assert how(plan, "c", f"{op}_t") is How.DEQUANTIZED
    assert how(plan, "t", "Conv_y") is How.OWN


def test_a_relu_with_a_sibling_keeps_q_on_the_conv() -> None:
    text = """net (float[1,16,8,8] x) => (y) <float[4,16,1,1] w, float[4,4,1,1] v> {
      c = Conv (x, w)
      r = Relu (c)
      s = Sigmoid (c)
      m = Mul (r, s)
      y = Conv (m, v)
    }"""
    plan = plan_of(text)
    assert kinds(plan)["Relu_r"] == "float"
    assert how(plan, "c", "Relu_r") is How.DEQUANTIZED
    assert plan.limits == ()


def test_se_gate() -> None:
    text = """net (float[1,16,8,8] x) => (y) <float[8,16,1,1] w, float[2,8,1,1] a, float[8,2,1,1] b, float[4,8,1,1] v> {
      c = Conv (x, w)
      p = GlobalAveragePool (c)
      s = Conv (p, a)
      r = Relu (s)
      e = Conv (r, b)
      g = HardSigmoid (e)
      m = Mul (c, g)
      y = Conv (m, v)
    }"""
    plan = plan_of(text)
    assert nodes_of(plan, Kind.FLOAT) == ["HardSigmoid_g"]
    assert {"c", "p", "r", "e", "g", "m"} <= set(pairs(plan))
    assert plan.saturations == (RangeLimit("e", -2.5, 2.5),)


# ---- Concat ---------------------------------------------------------------------------------------------------

FAN_IN = """net (float[1,16,8,8] x) => (y) <float[4,16,1,1] a, float[4,16,1,1] b, float[4,8,1,1] v> {
  p = Conv (x, a)
  r = Relu (p)
  q = Conv (x, b)
  c = Concat <axis = 1> (r, q)
  y = Conv (c, v)
}"""


def test_producers_of_a_concat_share_its_scale_where_the_ranges_allow() -> None:
    ranges = {"r": (0.0, 2.0), "q": (0.0, 3.0), "c": (0.0, 3.0)}
    assert pairs(plan_of(FAN_IN, ranges=ranges)) == {"x": None, "r": "c", "q": "c", "c": None, "y": None}


def test_a_relu_beside_a_signed_branch_keeps_its_own_scale() -> None:
    """Shared, the Relu could not vanish: the range of the Concat reaches below 0."""
    ranges = {"r": (0.0, 2.0), "q": (-3.0, 3.0), "c": (-3.0, 3.0)}
    assert pairs(plan_of(FAN_IN, ranges=ranges)) == {"x": None, "r": None, "q": "c", "c": None, "y": None}


def test_one_plan_does_for_all_ranges_that_share_scales_alike() -> None:
    wide, wider = ({"r": (0.0, 2.0), "q": (0.0, top), "c": (0.0, top)} for top in (3.0, 3.5))
    signed = {"r": (0.0, 2.0), "q": (-3.0, 3.0), "c": (-3.0, 3.0)}
    view, finished = GraphView(prepared(parse(FAN_IN))), []
    planner = Planner(view, ORT_CPU, PlacementOptions(), lambda plan: (finished.append(plan), plan)[1])
    plans = [planner.plan(ranges) for ranges in (None, wide, wider, signed, wide, None)]
    assert len(finished) == 3
    assert plans[1] is plans[2] is plans[4]
    for plan, ranges in zip(plans, (None, wide, wider, signed), strict=False):
        assert plan == Planner(view, ORT_CPU, PlacementOptions()).plan(ranges)


def test_before_calibration_every_value_that_may_need_a_range_is_named() -> None:
    late = plan_of(FAN_IN, ranges={"r": (0.0, 2.0), "q": (-3.0, 3.0), "c": (-3.0, 3.0)})
    assert set(pairs(plan_of(FAN_IN))) >= {d.provider or v for v, d in late.quantized_values()}


def test_dense_net_chain_does_not_coarsen_early_features() -> None:
    """Each Concat takes over what came before; a feature of a small range keeps its own scale once the sum is wide."""
    text = """net (float[1,16,8,8] x) => (y)
    <float[4,16,1,1] a, float[4,4,1,1] b, float[4,8,1,1] d, float[4,12,1,1] v> {
      f0 = Conv (x, a)
      f1 = Conv (f0, b)
      c1 = Concat <axis = 1> (f0, f1)
      f2 = Conv (c1, d)
      c2 = Concat <axis = 1> (c1, f2)
      y = Conv (c2, v)
    }"""
    ranges = {"f0": (-1.0, 1.0), "f1": (-1.2, 1.2), "c1": (-1.2, 1.2), "f2": (-9.0, 9.0), "c2": (-9.0, 9.0)}
    plan = plan_of(text, ranges=ranges)
    found = pairs(plan)
    assert (found["f0"], found["f1"]) == ("c1", "c1"), "1.2 times coarser is within the limit"
    assert found["c1"] is None, "7.5 times coarser is not"
    assert found["f2"] == "c2"
    narrow = {**ranges, "f2": (-1.3, 1.3), "c2": (-1.3, 1.3)}
    assert set(pairs(plan_of(text, ranges=narrow)).items()) >= {("f0", "c2"), ("f1", "c2"), ("c1", "c2"), ("f2", "c2")}


def test_a_value_that_a_concat_reads_twice() -> None:
    text = """net (float[1,16,8,8] x) => (y) <float[4,16,1,1] a, float[4,8,1,1] v> {
      p = Conv (x, a)
      c = Concat <axis = 1> (p, p)
      y = Conv (c, v)
    }"""
    assert pairs(plan_of(text))["p"] == "c"


# ---- pass-through ---------------------------------------------------------------------------------------------


def test_pass_through_chain_keeps_one_scale_that_of_the_conv() -> None:
    text = """net (float[1,16,8,8] x) => (y) <float[4,16,1,1] a, float[8,4] v> {
      c = Conv (x, a)
      r = Relu (c)
      m = MaxPool <kernel_shape = [2,2], strides = [2,2]> (r)
      t = Transpose <perm = [0,2,3,1]> (m)
      f = Reshape (t, s)
      y = Gemm <transB = 1> (f, v)
    }"""
    plan = plan_of(text, weights={"s": np.array([16, 4])})
    assert pairs(plan) == {"x": None, "r": None, "m": "r", "t": "r", "f": "r"}
    assert nodes_of(plan, Kind.PASS_THROUGH) == ["MaxPool_m", "Transpose_t", "Reshape_f"]


def test_every_output_of_a_split_has_the_scale_of_its_input() -> None:
    text = """net (float[1,16,8,8] x) => (y, z) <float[4,16,1,1] a, float[4,2,1,1] v> {
      c = Conv (x, a)
      p, q = Split <axis = 1> (c, s)
      y = Conv (p, v)
      z = Conv (q, v)
    }"""
    found = pairs(plan_of(text, weights={"s": np.array([2, 2])}))
    assert (found["c"], found["p"], found["q"]) == (None, "c", "c")


def test_maxpool_in_a_float_region_gets_a_barrier() -> None:
    """The session would hoist Q above it and run it slowly on bytes (rule hoist-q-over-maxpool)."""
    text = """net (float[1,16,8,8] x) => (y) <float[4,16,1,1] v> {
      s = Softmax <axis = 1> (x)
      m = MaxPool <kernel_shape = [2,2]> (s)
      y = Conv (m, v)
    }"""
    plan = plan_of(text)
    assert kinds(plan)["MaxPool_m"] == "float"
    assert plan.barriers == ("m",)


# ---- transformers and MLPs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
def test_transformer_quantizes_the_inputs_of_linear_layers_only(causal: bool) -> None:
    plan = plan_of(models.transformer_block(causal=causal))
    assert set(pairs(plan)) == {"norm1_out", "merge_out", "norm2_out", "gelu_half_out"}
    assert nodes_of(plan, Kind.INTEGER) == ["q", "k", "v", "proj", "up", "down"]
    assert plan.by_node["qk"].rule == plan.by_node["pv"].rule == "matmul-activations"
    assert plan.by_node["hide"].rule == plan.by_node["masked"].rule == "protected-input"
    for value in ("mask", "hide_out", "masked_out", "softmax_out", "skip1_out"):
        assert value not in pairs(plan)


def test_the_add_behind_a_matmul_becomes_its_int32_bias() -> None:
    plan = plan_of(models.mlp(gemm=False))
    assert plan.by_node["fc0_bias"].kind is Kind.ABSORBED
    bias = decision(plan, "fc0_b", "fc0_bias")
    assert (bias.how, bias.scale_from) == (How.DERIVED, ("x", "fc0_w"))
    assert decision(plan, "fc0_w", "fc0").axis == 1
    assert nodes_of(plan, Kind.INTEGER) == ["fc0", "fc1", "fc2"]


def test_mlp_of_gemms_absorbs_relu_and_writes_float_at_the_end() -> None:
    plan = plan_of(models.mlp())
    assert pairs(plan) == {"x": None, "relu0_out": None, "relu1_out": None}
    assert nodes_of(plan, Kind.ABSORBED) == ["relu0", "relu1"]


def test_gemm_beta_goes_into_the_bias() -> None:
    text = "net (float[2,4] x) => (y) <float[4,3] w, float[3] b> { y = Gemm <beta = 0.5> (x, w, b) }"
    assert decision(plan_of(text), "b", "Gemm_y").beta == 0.5


def test_a_weight_that_two_orientations_share_is_per_tensor() -> None:
    text = """net (float[2,4] x) => (y, z) <float[4,4] w> {
      y = Gemm <transB = 1> (x, w)
      z = Gemm (x, w)
    }"""
    assert {d.axis for d in plan_of(text).decisions if d.role is EdgeRole.WEIGHT} == {None}
    assert {d.axis for d in plan_of(models.mlp(), per_channel=False).decisions if d.role is EdgeRole.WEIGHT} == {None}


# ---- detectors --------------------------------------------------------------------------------------------------


def test_boxes_and_scores_are_never_crushed_into_one_scale() -> None:
    plan = plan_of(models.two_input_detector())
    behind = ["box_stride", "box_reshape", "box_transpose", "box_rescale", "score_sigmoid", "score_reshape",
              "score_transpose", "detections"]  # fmt: skip
    assert [kinds(plan)[n] for n in behind] == ["float"] * len(behind)
    assert set(pairs(plan)) == {"image", "stem_relu_out", "body_relu_out", "box_head_out", "score_head_out"}
    assert how(plan, "box_head_out", "box_stride") is How.DEQUANTIZED
    assert how(plan, "detections_out", "") is How.FLOAT


def test_the_scale_factor_stays_float_and_so_does_what_it_touches() -> None:
    plan = plan_of(models.two_input_detector())
    assert [n.node for n in plan.nodes if n.rule == "protected-input"] == [
        "scale_twice", "scale_unsqueeze", "box_rescale"
    ]  # fmt: skip
    unprotected = plan_of(models.two_input_detector(), protect_inputs=False)
    assert not [n for n in unprotected.nodes if n.rule == "protected-input"]


def test_float_heads_are_told_so_and_get_no_dequantized_weights() -> None:
    plan = plan_of(models.two_input_detector(), protect_outputs="float")
    for head in ("box_head", "score_head"):
        assert plan.by_node[head].kind is Kind.FLOAT
        assert plan.by_node[head].rule == "output-protection"
        assert decision(plan, f"{head}_w", head).how is How.FLOAT
    assert plan.barriers == (), "no Q behind them"


# ---- control flow, exclusions, barriers -----------------------------------------------------------------------


def test_a_body_reads_the_dequantized_value_of_an_integer_conv() -> None:
    plan = plan_of(models.net_with_if())
    d = plan.by_edge[Edge("conv0_out", "if", CAPTURED)]
    assert d.how is How.DEQUANTIZED
    assert kinds(plan)["relu0"] == "float"
    plan = plan_of(models.net_with_if(capture_conv=False))
    assert kinds(plan)["relu0"] == "absorbed"
    assert plan.by_edge[Edge("relu0_out", "if", CAPTURED)].how is How.DEQUANTIZED


def test_an_excluded_conv_between_integer_ones_gets_a_barrier() -> None:
    """Without it the session quantizes its float weights (rule float-weight-silently-quantized)."""
    plan = plan_of(models.conv_relu_chain(6), nodes_to_exclude=frozenset({"conv2"}))
    assert plan.by_node["conv2"].rule == "caller-excluded"
    assert how(plan, "relu1_out", "conv2") is How.DEQUANTIZED
    assert plan.barriers == ("relu3_out",)
    assert decision(plan, "conv2_w", "conv2").how is How.FLOAT


def test_an_excluded_first_conv_reads_the_float_input_and_needs_no_barrier() -> None:
    plan = plan_of(models.conv_relu_chain(6), nodes_to_exclude=frozenset({"conv0"}))
    assert how(plan, "x", "conv0") is How.FLOAT
    assert plan.barriers == ()


def test_a_matmul_whose_float_output_also_feeds_an_integer_kernel_gets_a_barrier() -> None:
    text = """net (float[2,3,4] x) => (y, z) <float[4,4] w, float[4,4] v> {
      p = MatMul (x, w)
      y = Tanh (p)
      z = MatMul (p, v)
    }"""
    plan = plan_of(text)
    assert plan.barriers == ("p",)
    assert how(plan, "p", "Tanh_y") is How.FLOAT
    assert how(plan, "p", "MatMul_z") is How.OWN


def test_so_does_one_whose_relu_the_session_removes() -> None:
    """Q would take the place of the Relu, and the MatMul would have a Q and a second reader."""
    text = """net (float[2,3,4] x) => (y, z) <float[4,4] w, float[4,4] v> {
      p = MatMul (x, w)
      y = Tanh (p)
      r = Relu (p)
      z = MatMul (r, v)
    }"""
    assert plan_of(text).barriers == ("r",)


# ---- the plan as a whole --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", models.ALL)
def test_every_float_edge_and_every_node_is_decided_once(name: str) -> None:
    plan = plan_of(models.ALL[name]())
    assert len(plan.by_edge) == len(plan.decisions)
    assert len(plan.by_node) == len(plan.nodes)
    assert all(d.reason and d.rule for d in plan.decisions)
    assert all(n.reason and n.rule for n in plan.nodes)


def test_nothing_is_planned_for_a_model_without_anchors() -> None:
    plan = plan_of("net (float[1,3] x) => (y) { s = Sigmoid (x)\n y = Add (s, x) }")
    assert plan.integer_nodes() == ()
    assert pairs(plan) == {}


def test_a_dead_end_and_an_unused_input_do_no_harm() -> None:
    text = """net (float[1,16,8,8] x, float[1,2] unused) => (y) <float[4,16,1,1] w> {
      d = Tanh (x)
      y = Conv (x, w)
    }"""
    assert nodes_of(plan_of(text), Kind.INTEGER) == ["Conv_y"]


def test_3x3_stem_example_of_the_module_docstring() -> None:
    text = f"""net (float[1,3,8,8] x) => (y) <float[8,3,3,3] w, float[8] b> {{
      c = Conv <{CONV}> (x, w, b)
      y = Relu (c)
    }}"""
    assert kinds(plan_of(text)) == {"Conv_c": "integer", "Relu_y": "absorbed"}
