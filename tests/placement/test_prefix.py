"""The stem and the depthwise Conv behind it, which stay float together or not at all."""

from __future__ import annotations

import dataclasses

import pytest

from kenosis_ort.plan import Kind
from kenosis_ort.targets import Hooks
from kenosis_ort.targets.ort_cpu import ORT_CPU
from tests.placement.build import CONV, nodes_of
from tests.planning import plan_of


def net(
    stem_channels: int = 3, between: str = "r = Relu (c)", depthwise: str = "", behind: str = "", out: str = "y"
) -> str:
    depthwise = depthwise or f"d = Conv <{CONV}, group = 8> (r, v)"
    return f"""net (float[1,{stem_channels},8,8] x) => ({out})
    <float[8,{stem_channels},3,3] w, float[8,1,3,3] v, float[8,8,1,1] u, float[8,8,3,3] dense> {{
      c = Conv <{CONV}> (x, w)
      {between}
      {depthwise}
      a = Relu (d)
      y = Conv (a, u)
      {behind}
    }}"""


def float_convs(text: str, **options: object) -> list[str]:
    plan = plan_of(text, **options)
    assert all(n.rule == "float-prefix" for n in plan.nodes if n.op_type == "Conv" and n.kind is Kind.FLOAT)
    return [name for name in nodes_of(plan, Kind.FLOAT) if name.startswith("Conv")]


@pytest.mark.parametrize(
    "between",
    ["r = Relu (c)", "r = HardSwish (c)", "r = Identity (c)", "s = Sigmoid (c)\n r = Mul (c, s)", "r = LeakyRelu (c)"],
)
def test_stem_and_depthwise_stay_float(between: str) -> None:
    assert float_convs(net(between=between)) == ["Conv_c", "Conv_d"]


def test_the_dense_conv_behind_them_is_integer_on_a_q_of_its_own() -> None:
    plan = plan_of(net())
    assert nodes_of(plan, Kind.INTEGER) == ["Conv_y"]
    assert [v for v, _ in plan.quantized_values()] == ["a", "y"]


@pytest.mark.parametrize(
    "text",
    [
        net(stem_channels=16),
        net(depthwise=f"d = Conv <{CONV}> (r, dense)"),
        net(between="r = MaxPool <kernel_shape = [1,1]> (c)"),
        net(behind="z = Conv (r, u)", out="y, z"),
        net(out="y, r"),
    ],
    ids=["many channels", "dense next", "pool between", "two next", "an output"],
)
def test_any_other_stem_is_integer(text: str) -> None:
    assert float_convs(text) == []


def test_a_second_conv_of_few_channels_is_no_stem() -> None:
    text = f"""net (float[1,3,8,8] x) => (y) <float[8,3,3,3] w, float[8,8,1,1] u, float[8,1,3,3] v> {{
      c = Conv <{CONV}> (x, w)
      r = Relu (c)
      e = Conv (r, u)
      g = Relu (e)
      y = Conv <{CONV}, group = 8> (g, v)
    }}"""
    assert float_convs(text) == []


def test_a_net_of_nothing_else_is_integer() -> None:
    text = f"""net (float[1,3,8,8] x) => (y) <float[8,3,3,3] w, float[8,1,3,3] v> {{
      c = Conv <{CONV}> (x, w)
      y = Conv <{CONV}, group = 8> (c, v)
    }}"""
    assert float_convs(text) == []


def test_a_target_may_switch_it_off() -> None:
    assert float_convs(net(), target=dataclasses.replace(ORT_CPU, hooks=Hooks())) == []


def mobile(tail: str, *, wide: int = 8) -> str:
    return f"""net (float[1,3,8,8] x) => (y)
    <float[8,3,3,3] w, float[8,1,3,3] v, float[{wide},8,1,1] u, float[8,{wide},1,1] t> {{
      c = Conv <{CONV}> (x, w)
      r = HardSwish (c)
      d = Conv <{CONV}, group = 8> (r, v)
      a = Relu (d)
      p = Conv (a, u)
      {tail}
    }}"""


def test_the_projection_joins_them_where_it_does_not_widen() -> None:
    assert float_convs(mobile("y = Conv (p, t)")) == ["Conv_c", "Conv_d", "Conv_p"]
    assert float_convs(mobile("y = Conv (p, t)", wide=16)) == ["Conv_c", "Conv_d"]


def test_a_residual_around_them_takes_all_three() -> None:
    """Its sum stays float too: what is quantized is its output."""
    text = mobile("s = Add (r, p)\n y = Conv (s, t)")
    assert float_convs(text) == ["Conv_c", "Conv_d", "Conv_p"]
    assert [v for v, _ in plan_of(text).quantized_values()] == ["s", "y"]


def test_a_sum_with_anything_else_takes_none() -> None:
    assert float_convs(mobile("q = Conv (p, t)\n z = Relu (q)\n s = Add (r, z)\n y = Conv (s, t)")) == []


def test_a_gate_between_them_leaves_the_projection_integer() -> None:
    gated = mobile("y = Conv (p, t)").replace(
        "p = Conv (a, u)",
        "g = GlobalAveragePool (a)\n e = Conv (g, t)\n h = Sigmoid (e)\n m = Mul (a, h)\n p = Conv (m, u)",
    )
    assert float_convs(gated) == ["Conv_c", "Conv_d"]
