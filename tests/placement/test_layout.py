"""Pools on bytes, which are fast where an integer Conv made the layout channels-last."""

from __future__ import annotations

import pytest

from kenosis_ort.plan import How, Kind
from tests.placement.build import CONV, how, nodes_of
from tests.planning import plan_of

POOL = "MaxPool <kernel_shape = [3,3], pads = [1,1,1,1]>"


def net(between: str) -> str:
    return f"""net (float[1,8,8,8] x) => (y)
    <float[8,8,3,3] w, float[8,8,3,3] v, float[8,8,3,3] u, float[8] one> {{
      c = Conv <{CONV}> (x, w)
      {between}
      y = Conv <{CONV}> (p, u)
    }}"""


@pytest.mark.parametrize(
    "between",
    [
        f"p = {POOL} (c)",
        f"r = Relu (c)\n p = {POOL} (r)",
        f"s = Sigmoid (c)\n m = Mul (c, s)\n p = {POOL} (m)",
        f"h = HardSwish (c)\n p = {POOL} (h)",
        f"d = Conv <{CONV}> (c, v)\n a = Concat <axis = 1> (c, d)\n b = Slice (a, o, e, n)\n p = {POOL} (b)",
        f"q = {POOL} (c)\n p = {POOL} (q)",
    ],
    ids=["conv", "relu", "silu", "island", "concat", "pool"],
)
def test_behind_an_integer_conv_a_pool_moves_bytes(between: str) -> None:
    weights = {"o": [0], "e": [8], "n": [1]} if "Slice" in between else None
    assert "MaxPool_p" in nodes_of(plan_of(net(between), weights=weights), Kind.PASS_THROUGH)


@pytest.mark.parametrize(
    "float_",
    [
        "l = LRN <size = 3> (c)",
        "l = InstanceNormalization (c, one, one)",
        "l = AveragePool <kernel_shape = [3,3], pads = [1,1,1,1]> (c)",
    ],
    ids=["lrn", "norm", "pool"],
)
def test_behind_a_float_node_that_breaks_the_layout_it_stays_float(float_: str) -> None:
    plan = plan_of(net(f"{float_}\n p = {POOL} (l)"))
    assert "MaxPool_p" in nodes_of(plan, Kind.FLOAT)
    assert how(plan, "p", "Conv_y") is How.OWN


def test_its_output_is_held_back_from_the_quantization() -> None:
    """Or the session would hoist the Q above the pool, which makes it slow again (rule hoist-q-over-maxpool)."""
    plan = plan_of(net(f"l = LRN <size = 3> (c)\n p = {POOL} (l)"))
    assert "p" in plan.barriers


def test_a_pool_of_the_input_stays_float() -> None:
    text = f"""net (float[1,8,8,8] x) => (y) <float[8,8,3,3] w> {{
      p = {POOL} (x)
      a = Conv <{CONV}> (x, w)
      b = Conv <{CONV}> (p, w)
      y = Add (a, b)
    }}"""
    assert "MaxPool_p" in nodes_of(plan_of(text), Kind.FLOAT)
