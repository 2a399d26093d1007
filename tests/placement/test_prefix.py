"""What ort-cpu leaves float though its table says integer: stems of mobile nets, and slow pools."""

import dataclasses

import pytest

from kenosis_ort.plan import How, Kind
from kenosis_ort.targets import Hooks
from kenosis_ort.targets.ort_cpu import ORT_CPU
from tests.placement.build import CONV, how, nodes_of
from tests.planning import plan_of

POOL = "MaxPool <kernel_shape = [3,3], pads = [1,1,1,1]>"
DEPTHWISE = f"Conv <{CONV}, group = 8>"


def net(body: str, channels: int = 3, outputs: str = "y", wide: int = 8) -> str:
    weights = f"float[8,{channels},3,3] w, float[8,1,3,3] v, float[{wide},8,1,1] u, float[8,{wide},1,1] t"
    given = f"(float[1,{channels},8,8] x) => ({outputs}) <{weights}, float[8,8,3,3] f, float[8] one>"
    return f"net {given} {{ c = Conv <{CONV}> (x, w) {body} }}"


def stem(
    between: str = "r = Relu (c)", depthwise: str = f"d = {DEPTHWISE} (r, v)", behind: str = "", **how: object
) -> str:
    return net(f"{between} {depthwise} a = Relu (d) y = Conv (a, u) {behind}", **how)  # type: ignore[arg-type]


def mobile(tail: str, project: str = "p = Conv (a, u)", wide: int = 8) -> str:
    return net(f"r = HardSwish (c) d = {DEPTHWISE} (r, v) a = Relu (d) {project} {tail}", wide=wide)


def float_convs(text: str, **options: object) -> str:
    plan = plan_of(text, **options)
    assert all(n.rule == "float-prefix" for n in plan.nodes if n.op_type == "Conv" and n.kind is Kind.FLOAT)
    return "".join(name.removeprefix("Conv_") for name in nodes_of(plan, Kind.FLOAT) if name.startswith("Conv"))


GATED = "g = GlobalAveragePool (a) e = Conv (g, t) h = Sigmoid (e) m = Mul (a, h) p = Conv (m, u)"


@pytest.mark.parametrize(("text", "convs"), [
    # The stem and the depthwise Conv behind it, through light nodes.
    *((stem(between), "cd") for between in ("r = Relu (c)", "r = HardSwish (c)", "r = Identity (c)",
                                            "s = Sigmoid (c) r = Mul (c, s)", "r = LeakyRelu (c)")),
    # Others are no stem: of many channels, before a dense Conv, a pool, two Convs, an output, a second Conv.
    (stem(channels=16), ""),
    (stem(depthwise=f"d = Conv <{CONV}> (r, f)"), ""),
    (stem("r = MaxPool <kernel_shape = [1,1]> (c)"), ""),
    (stem(behind="z = Conv (r, u)", outputs="y, z"), ""),
    (stem(outputs="y, r"), ""),
    (net(f"r = Relu (c) e = Conv (r, u) g = Relu (e) y = {DEPTHWISE} (g, v)"), ""),
    # A net of nothing else is integer.
    (net(f"y = {DEPTHWISE} (c, v)"), ""),
    # The projection joins them where it does not widen; a residual around them takes all three.
    (mobile("y = Conv (p, t)"), "cdp"),
    (mobile("y = Conv (p, t)", wide=16), "cd"),
    (mobile("s = Add (r, p) y = Conv (s, t)"), "cdp"),
    # A sum with anything else takes none, and a gate between them leaves the projection integer.
    (mobile("q = Conv (p, t) z = Relu (q) s = Add (r, z) y = Conv (s, t)"), ""),
    (mobile("y = Conv (p, t)", GATED), "cd"),
])  # fmt: skip
def test_convs_left_float(text: str, convs: str) -> None:
    assert float_convs(text) == convs


def test_what_is_behind_them_is_integer_on_a_q_of_its_own() -> None:
    for text, values in ((stem(), ["a", "y"]), (mobile("s = Add (r, p) y = Conv (s, t)"), ["s", "y"])):
        assert nodes_of(plan_of(text), Kind.INTEGER) == ["Conv_y"]
        assert [v for v, _ in plan_of(text).quantized_values()] == values


def test_a_target_may_switch_it_off() -> None:
    assert float_convs(stem(), target=dataclasses.replace(ORT_CPU, hooks=Hooks())) == ""


# ---- pools on bytes, which are fast where an integer Conv made the layout channels-last ---------------------------


@pytest.mark.parametrize(("between", "fast"), [
    (f"p = {POOL} (c)", True),
    (f"r = Relu (c) p = {POOL} (r)", True),
    (f"s = Sigmoid (c) m = Mul (c, s) p = {POOL} (m)", True),
    (f"h = HardSwish (c) p = {POOL} (h)", True),
    (f"d = Conv <{CONV}> (c, f) a = Concat <axis = 1> (c, d) b = Slice (a, o, e, n) p = {POOL} (b)", True),
    (f"q = {POOL} (c) p = {POOL} (q)", True),
    (f"l = LRN <size = 3> (c) p = {POOL} (l)", False),
    (f"l = InstanceNormalization (c, one, one) p = {POOL} (l)", False),
    (f"l = AveragePool <kernel_shape = [3,3], pads = [1,1,1,1]> (c) p = {POOL} (l)", False),
    (f"i = {POOL} (x) p = Add (c, i)", False),  # a pool of the input
], ids=["conv", "relu", "silu", "island", "concat", "pool", "lrn", "norm", "average pool", "input"])  # fmt: skip
def test_behind_an_integer_conv_a_pool_moves_bytes(between: str, fast: bool) -> None:
    """One that stays float is held back from the Q behind it, or the session would hoist that above the pool."""
    weights = {"o": [0], "e": [8], "n": [1]} if "Slice" in between else None
    plan = plan_of(net(f"{between} y = Conv <{CONV}> (p, f)", channels=8), weights=weights)
    pool = "i" if "i = " in between else "p"
    assert f"MaxPool_{pool}" in nodes_of(plan, Kind.PASS_THROUGH if fast else Kind.FLOAT)
    if not fast:
        assert pool in plan.barriers
        assert pool == "i" or how(plan, "p", "Conv_y") is How.OWN
