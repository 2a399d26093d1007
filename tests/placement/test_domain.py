"""Which nodes are integer: availability forward, demand backward, heads and the output policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kenosis_ort.graph.view import GraphView
from kenosis_ort.options import PlacementOptions
from kenosis_ort.placement.absorption import Absorption
from kenosis_ort.placement.constraints import constrain
from kenosis_ort.placement.domain import Domain, multiply_accumulates
from kenosis_ort.placement.eligibility import classify
from kenosis_ort.targets.ort_cpu import ORT_CPU
from tests import models
from tests.placement.build import CONV, view_of
from tests.planning import prepared


def domain_of(model: Any, weights: dict[str, Any] | None = None, **options: Any) -> Domain:
    view = view_of(model, weights)
    wishes = constrain(view, ORT_CPU, PlacementOptions(**options))
    classes = classify(view, ORT_CPU, wishes, {})
    return Domain(view, ORT_CPU, wishes, classes, Absorption(view, ORT_CPU, wishes, classes))


def net(body: str, inputs: str = "float[1,4,8,8] x", outputs: str = "y") -> str:
    return f"net ({inputs}) => ({outputs}) <float[4,4,1,1] w, float[4,4,1,1] v, float[4,4] m> {{ {body} }}"


def test_a_light_node_between_anchors_is_integer() -> None:
    found = domain_of(net("c = Conv (x, w)\n s = Sigmoid (c)\n y = Conv (s, v)"))
    assert found.integer == {"Conv_c", "Sigmoid_s", "Conv_y"}


def test_a_light_node_behind_the_last_anchor_is_float() -> None:
    """Nothing behind it demands integers."""
    assert domain_of(net("c = Conv (x, w)\n y = Sigmoid (c)")).integer == {"Conv_c"}


def test_a_light_node_before_the_first_anchor_is_float_unless_the_input_is_quantized_anyway() -> None:
    assert domain_of(net("s = Sigmoid (x)\n y = Conv (s, v)")).integer == {"Conv_y"}
    both = net("s = Sigmoid (x)\n c = Conv (x, w)\n a = Add (c, s)\n y = Conv (a, v)")
    assert domain_of(both).integer == {"Sigmoid_s", "Conv_c", "Add_a", "Conv_y"}


def test_a_sum_of_an_integer_and_a_float_branch_is_float() -> None:
    found = domain_of(net("c = Conv (x, w)\n f = Softmax (c)\n a = Add (c, f)\n y = Conv (a, v)"))
    assert found.integer == {"Conv_c", "Conv_y"}


def test_a_small_float_gate_is_quantized_for_the_product() -> None:
    """SE: the gate holds one value a channel, the product all of them."""
    gate = """c = Conv (x, w)
      p = GlobalAveragePool (c)
      g = Softmax <axis = 1> (p)
      a = Mul (c, g)
      y = Conv (a, v)"""
    assert "Mul_a" in domain_of(net(gate)).integer


def test_islands_are_transparent_and_heavy_float_nodes_are_not() -> None:
    island = domain_of(net("c = Conv (x, w)\n t = Tanh (c)\n a = Add (c, t)\n y = Conv (a, v)"))
    assert "Add_a" in island.integer
    heavy = domain_of(
        net("c = Conv (x, w)\n t = ArgMax <axis = 1> (c)\n k = Cast <to = 1> (t)\n a = Add (c, k)\n y = Conv (a, v)")
    )
    assert "Add_a" not in heavy.integer


@pytest.mark.parametrize("policy", ["auto", "float", "int8", None])
def test_shape_operators_at_an_output_move_bytes(policy: str | None) -> None:
    """One DQ at the end, in front of the output."""
    found = domain_of(net("c = Conv (x, w)\n d = Conv (c, v)\n y = Flatten (d)"), protect_outputs=policy)
    assert ("Flatten_y" in found.integer) == (policy != "float")


def test_shape_operators_before_a_body_move_bytes() -> None:
    """The runtime dies of a DQ in front of them (rule pass-through-into-body-dies)."""
    body = """c = Conv (x, w)
      r = Flatten (c)
      y = If (f) <then_branch = t () => (float[1,256] a) { a = Neg (r) },
                  else_branch = e () => (float[1,256] b) { b = Abs (r) }>"""
    assert "Flatten_r" in domain_of(net(body, "float[1,4,8,8] x, bool f")).integer


# ---- anchors that write float ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behind", "floats"),
    [
        ("y = Identity (p)", True),
        ("y = Tanh (p)", True),
        ("y = MatMul (p, m)", False),
        ("r = Relu (p)\n y = MatMul (r, m)", False),
        ("r = Reshape (p, s)\n y = MatMul (r, m)", False),
        ("t = Tanh (p)\n n = Neg (p)\n y = Add (t, n)", True),
        ("q = MatMul (p, m)\n y = Add (p, q)", True),
        ("r = Relu (p)\n y = Softmax (r)", False),
        ("y = Relu (p)", True),
    ],
    ids=["output", "float", "matmul", "absorbed", "reshape", "branches", "residual", "hidden", "relu output"],
)
@pytest.mark.parametrize("op", ["MatMul", "Gemm"])
def test_gemm_and_matmul_write_float_unless_only_integer_kernels_read_it(op: str, behind: str, floats: bool) -> None:
    text = f"net (float[2,4] x) => (y) <float[4,4] w, float[4,4] m> {{ p = {op} (x, w)\n {behind} }}"
    found = domain_of(text, {"s": np.array([2, 4])})
    assert (f"{op}_p" in found.float_output) == floats


def test_a_matmul_that_the_session_would_merge_into_a_float_gemm_writes_integers() -> None:
    """Rule matmul-residual-float-gemm: in two dimensions, with an Add that is no bias."""
    for shape, merged in (("2,4", True), ("2,3,4", False)):
        text = f"net (float[{shape}] x) => (y) <float[4,4] w> {{ p = MatMul (x, w)\n y = Add (p, x) }}"
        assert ("MatMul_p" in domain_of(text).float_output) == (not merged)
    bias = "net (float[2,4] x) => (y) <float[4,4] w, float[4] b> { p = MatMul (x, w)\n y = Add (p, b) }"
    assert "MatMul_p" in domain_of(bias).float_output


def test_int8_outputs_are_stocks() -> None:
    text = "net (float[2,4] x) => (y) <float[4,4] w> { y = MatMul (x, w) }"
    assert domain_of(text).float_output == {"MatMul_y"}
    assert domain_of(text, protect_outputs="int8").float_output == set()
    assert domain_of(text, protect_outputs=None).float_output == set()


# ---- heads ------------------------------------------------------------------------------------------------------


def test_heads_are_the_anchors_behind_which_no_anchor_lies() -> None:
    found = domain_of(models.two_input_detector())
    assert set(found.heads) == {"box_head", "score_head"}
    assert set(domain_of(models.net_with_if()).heads) == {"conv1"}


@pytest.mark.parametrize(("policy", "stays"), [("float", True), ("int8", False), (None, False)])
def test_the_policy_decides_about_conv_heads(policy: str | None, stays: bool) -> None:
    found = domain_of(models.concat_net(), protect_outputs=policy)
    assert found.heads == {"head": stays}
    assert ("head" in found.integer) != stays


def test_gemm_heads_stay_integer_under_every_policy() -> None:
    for policy in ("auto", "float", "int8"):
        assert "fc2" in domain_of(models.mlp(), protect_outputs=policy).integer


@pytest.mark.parametrize(("channels", "stays"), [(8, True), (512, False)])
def test_auto_keeps_a_conv_head_float_where_it_costs_next_to_nothing(channels: int, stays: bool) -> None:
    text = f"""net (float[1,16,64,64] x) => (y) <float[64,16,3,3] w, float[{channels},64,1,1] v> {{
      c = Conv <{CONV}> (x, w)
      p = AveragePool <kernel_shape = [4,4], strides = [4,4]> (c)
      y = Conv (p, v)
    }}"""
    head, body = channels * 64 / 16, 64 * 16 * 9
    assert (head <= ORT_CPU.head_float_share * (head + body)) == stays
    assert domain_of(text).heads == {"Conv_y": stays}


def test_auto_never_keeps_the_only_conv_float() -> None:
    assert domain_of(net("y = Conv (x, w)")).heads == {"Conv_y": False}


@pytest.mark.parametrize(
    ("text", "macs"),
    [
        (f"net (float[1,3,8,8] x) => (y) <float[4,3,3,3] w> {{ y = Conv <{CONV}> (x, w) }}", 4 * 3 * 9 * 64),
        (f"net (float[1,4,8,8] x) => (y) <float[4,1,3,3] w> {{ y = Conv <{CONV}, group = 4> (x, w) }}", 4 * 9 * 64),
        ("net (float[5,8] x) => (y) <float[8,2] w> { y = MatMul (x, w) }", 8 * 2 * 5),
        ("net (float[N,8] x) => (float[N,2] y) <float[8,2] w> { y = Gemm (x, w) }", 8 * 2),
    ],
)
def test_multiply_accumulates(text: str, macs: int) -> None:
    view = view_of(text)
    assert multiply_accumulates(view, view.nodes[0]) == macs


def test_the_sweeps_do_not_change_the_view() -> None:
    proto = prepared(models.residual_block())
    before = proto.SerializeToString(deterministic=True)
    view = GraphView(proto)
    wishes = constrain(view, ORT_CPU, PlacementOptions())
    classes = classify(view, ORT_CPU, wishes, {})
    Domain(view, ORT_CPU, wishes, classes, Absorption(view, ORT_CPU, wishes, classes))
    assert proto.SerializeToString(deterministic=True) == before
