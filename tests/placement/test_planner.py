"""What is decided for whole blocks, edge by edge, as the user reads it; plans of shared nets are golden."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from kenosis_ort.placement.planner import Planner
from kenosis_ort.placement.scale_groups import ScaleGroups
from kenosis_ort.plan import EdgeRole, How, Kind, PlacementOptions, RangeLimit
from kenosis_ort.targets import Hooks, get_target
from kenosis_ort.targets.ort_cpu import ORT_CPU
from tests import models
from tests.planning import plan_of, view_of

CONV = "kernel_shape=[3,3], pads=[1,1,1,1]"
POOL = "MaxPool <kernel_shape = [2,2], strides = [2,2]>"


def net(body, outputs="y"):
    """A net over a picture, with the weights of 1x1 Convs: a, b, d, e, h of 16, 4, 8, 12, 2 channels to 4."""
    weights = "float[4,16,1,1] a, float[4,4,1,1] b, float[4,8,1,1] d, float[4,12,1,1] e, float[4,2,1,1] h, float[8,4] m"
    return f"net (float[1,16,8,8] x) => ({outputs}) <{weights}> {{ {body} }}"


def matrices(body, outputs="y, z"):
    return f"net (float[2,3,4] x) => ({outputs}) <float[4,4] w, float[4,4] v> {{ p = MatMul (x, w) {body} }}"


def nodes_of(plan, kind):
    return [n.node for n in plan.nodes if n.kind is kind]


def pairs(plan):
    """Returns the values that get Q/DQ with the value whose parameters they take (None: their own)."""
    return {v: d.provider for v, d in plan.quantized_values()}


def how(plan, value, consumer):
    """Returns how a node ("" for the graph's outputs) reads a value."""
    (found,) = {d.how for d in plan.decisions if d.edge.value == value and d.edge.consumer == consumer}
    return found


@dataclass(frozen=True)
class Block:
    """A net and what its plan says.

    Attributes:
        text: The net.
        of: Nodes by what becomes of them, apart by spaces, as far as it is asked.
        values: Values that are quantized, ``p:c`` with the parameters of another, apart by spaces.
        reads: How edges are read, by value and consumer.
        saturations: What is said of saturation; None for nothing.
        barriers: Values with a barrier.
        weights: Contents of constants.
    """

    text: str
    of: dict[Kind, str] = field(default_factory=dict)
    values: str = ""
    reads: dict[tuple[str, str], How] = field(default_factory=dict)
    saturations: tuple[RangeLimit, ...] | None = None
    barriers: tuple[str, ...] = ()
    weights: dict[str, Any] = field(default_factory=dict)


BLOCKS = {
    "a float island has Q on both sides": Block(
        net("c = Conv (x, a) t = com.microsoft.Gelu (c) y = Conv (t, b)", "float[1,4,8,8] y"),
        {Kind.FLOAT: "Gelu_t"}, reads={("c", "Gelu_t"): How.DEQUANTIZED, ("t", "Conv_y"): How.OWN},
    ),
    "a Relu with a sibling keeps Q on the Conv": Block(
        net("c = Conv (x, a) r = Relu (c) s = Sigmoid (c) m2 = Mul (r, s) y = Conv (m2, b)"),
        {Kind.FLOAT: "Relu_r"}, reads={("c", "Relu_r"): How.DEQUANTIZED},
    ),
    "squeeze and excite": Block(
        net("c = Conv (x, a) p = GlobalAveragePool (c) s = Conv (p, b) r = Relu (s) f = Conv (r, b) "
            "g = HardSigmoid (f) n = Mul (c, g) y = Conv (n, b)"),
        {Kind.FLOAT: "HardSigmoid_g"}, "c p r f g n", saturations=(RangeLimit("f", -2.5, 2.5),),
    ),
    "a value that a Concat reads twice": Block(
        net("p = Conv (x, a) c = Concat <axis = 1> (p, p) y = Conv (c, d)"), values="p:c"),
    "operators that move bytes keep the scale of the Conv": Block(
        net(f"c = Conv (x, a) r = Relu (c) p = {POOL} (r) t = Transpose <perm = [0,2,3,1]> (p) f = Reshape (t, s) "
            "y = Gemm <transB = 1> (f, m)"),
        {Kind.PASS_THROUGH: "MaxPool_p Transpose_t Reshape_f"}, "x r p:r t:r f:r", weights={"s": np.array([16, 4])},
    ),
    "every output of a Split has the scale of its input": Block(
        net("c = Conv (x, a) p, q = Split <axis = 1> (c, s) y = Conv (p, h) z = Conv (q, h)", "y, z"),
        values="c p:c q:c", weights={"s": np.array([2, 2])},
    ),
    # The session would hoist Q above it and run it slowly on bytes (rule hoist-q-over-maxpool).
    "a MaxPool in a float region gets a barrier": Block(
        net(f"f = Softmax <axis = 1> (x) p = {POOL} (f) y = Conv (p, a)"), {Kind.FLOAT: "Softmax_f MaxPool_p"},
        barriers=("p",),
    ),
    "a MatMul that feeds a float node and an integer kernel gets a barrier": Block(
        matrices("y = Tanh (p) z = MatMul (p, v)"), reads={("p", "Tanh_y"): How.FLOAT, ("p", "MatMul_z"): How.OWN},
        barriers=("p",),
    ),
    # Q would take the place of the Relu, and the MatMul would have a Q and a second reader.
    "so does one whose Relu the session removes": Block(
        matrices("y = Tanh (p) r = Relu (p) z = MatMul (r, v)"), barriers=("r",)),
    "nothing is planned for a model without anchors": Block(
        "net (float[1,3] x) => (y) { s = Sigmoid (x) y = Add (s, x) }", {Kind.FLOAT: "Sigmoid_s Add_y"}),
    "a dead end and an unused input do no harm": Block(
        "net (float[1,16,8,8] x, float[1,2] unused) => (y) <float[4,16,1,1] w> { d = Tanh (x) y = Conv (x, w) }",
        {Kind.INTEGER: "Conv_y"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name):
    block = BLOCKS[name]
    plan = plan_of(block.text, weights=block.weights)
    for kind, nodes in block.of.items():
        assert nodes_of(plan, kind) == nodes.split()
    expected = {value.partition(":")[0]: value.partition(":")[2] or None for value in block.values.split()}
    assert expected.items() <= pairs(plan).items()
    assert {edge: how(plan, *edge) for edge in block.reads} == block.reads
    assert block.saturations is None or plan.saturations == block.saturations
    assert plan.barriers == block.barriers


# ---- Concat ---------------------------------------------------------------------------------------------------

FAN_IN = net("p = Conv (x, a) r = Relu (p) q = Conv (x, a) c = Concat <axis = 1> (r, q) y = Conv (c, d)")
SIGNED = {"r": (0.0, 2.0), "q": (-3.0, 3.0), "c": (-3.0, 3.0)}


@pytest.mark.parametrize(
    ("ranges", "relu"), [({"r": (0.0, 2.0), "q": (0.0, 3.0), "c": (0.0, 3.0)}, "c"), (SIGNED, None)]
)
def test_producers_of_a_concat_share_its_scale_where_the_ranges_allow(ranges, relu):
    """Shared with a signed branch, the Relu could not vanish: the range of the Concat reaches below 0."""
    assert pairs(plan_of(FAN_IN, ranges=ranges)) == {"x": None, "r": relu, "q": "c", "c": None, "y": None}


def test_one_plan_does_for_all_ranges_that_share_scales_alike():
    wide, wider = ({"r": (0.0, 2.0), "q": (0.0, top), "c": (0.0, top)} for top in (3.0, 3.5))
    view, finished = view_of(FAN_IN), []
    planner = Planner(view, ORT_CPU, PlacementOptions(), lambda plan: (finished.append(plan), plan)[1])
    plans = [planner.plan(ranges) for ranges in (None, wide, wider, SIGNED, wide, None)]
    assert (len(finished), plans[1] is plans[2] is plans[4]) == (3, True)
    for plan, ranges in zip(plans, (None, wide, wider, SIGNED), strict=False):
        assert plan == Planner(view, ORT_CPU, PlacementOptions()).plan(ranges)


def test_values_on_a_grid_of_their_own():
    """In 16 bits, where the caller gives no scale; a Concat that reads one covers it, and follows its own range."""
    body = "p = Softmax (x) s = Sigmoid (x) m = Neg (x) y = Concat <axis = 1> (s, m, p)"
    view = view_of(f"(float[1,4,8,8] x) => (y) {{ {body} }}")

    def planner(**overrides):
        said = {name: [entry] for name, entry in overrides.items()}
        return Planner(view, get_target("qnn"), PlacementOptions(activation_type=TensorProto.UINT16, overrides=said))

    def grids(plan):
        return {limit.value: (limit.low, limit.high) for limit in plan.grids}

    usual, sigmoid = planner(p={"symmetric": True}), (0.0, 65535 / 65536)  # no kernel of 16 bits refuses an offset
    for most in (0.5, 3.0):
        ranges = {"x": (-most, most), "m": (-most, most), "s": (0.1, 0.9), "p": (0.0, 0.9), "y": (-most, most)}
        assert grids(usual.plan(ranges)) == {"s": sigmoid, "y": (-most, max(most, sigmoid[1]))}
    assert "s" not in grids(planner(s={"scale": 0.01, "zero_point": 0}).plan())


def test_before_calibration_every_value_that_may_need_a_range_is_named():
    late = plan_of(FAN_IN, ranges=SIGNED)
    assert set(pairs(plan_of(FAN_IN))) >= {d.provider or v for v, d in late.quantized_values()}


# ---- layers -----------------------------------------------------------------------------------------------------


def test_a_weight_that_two_orientations_share_is_per_tensor():
    text = "net (float[2,4] x) => (y, z) <float[4,4] w> { y = Gemm <transB = 1> (x, w) z = Gemm (x, w) }"
    for plan in (plan_of(text), plan_of(models.mlp(), per_channel=False)):
        assert {d.axis for d in plan.decisions if d.role is EdgeRole.WEIGHT} == {None}


# ---- what stays float ---------------------------------------------------------------------------------------------


def test_an_excluded_conv_between_integer_ones_gets_a_barrier_and_a_first_one_needs_none():
    """Without it the session quantizes its float weights (rule float-weight-silently-quantized)."""
    plan = plan_of(models.conv_relu_chain(6), nodes_to_exclude=frozenset({"conv2"}))
    assert (plan.by_node["conv2"].rule, plan.barriers) == ("caller-excluded", ("relu3_out",))
    assert [how(plan, value, "conv2") for value in ("relu1_out", "conv2_w")] == [How.DEQUANTIZED, How.FLOAT]
    first = plan_of(models.conv_relu_chain(6), nodes_to_exclude=frozenset({"conv0"}))
    assert (how(first, "x", "conv0"), first.barriers) == (How.FLOAT, ())


# ---- scale groups: union-find against a plain model, and when a Concat's producers may join -------------------------


@pytest.mark.parametrize(("own", "limit", "shared", "elsewhere", "said"), [
    # Read elsewhere, a value must not lose resolution; ranges are widened to hold 0 before they are compared.
    ((0.0, 1.0), None, (0.0, 1.4), True, None), ((0.0, 1.0), None, (0.0, 1.6), True, "'v' is read elsewhere"),
    ((0.0, 1.0), None, (0.0, 100.0), False, None), ((2.0, 3.0), None, (0.0, 4.0), True, None),
    ((-1.0, 0.0), None, (-1.0, 1.0), True, "'v' is read elsewhere"),
    # An absorbed activation must stay absorbed.
    ((0.0, 4.0), (0.0, None), (-1.0, 4.0), False, "below 0.0"),
    ((0.0, 4.0), (0.0, 6.0), (0.0, 8.0), False, "above 6.0"), ((0.0, 4.0), (0.0, 6.0), (0.0, 6.0), False, None),
    ((0.0, 4.0), (0.0, None), (0.5, 4.0), False, None),
    # Before calibration everything may be shared, so that every value that may need its own range is observed.
    (None, (0.0, None), None, True, None),
])  # fmt: skip
def test_what_a_value_may_share(own, limit, shared, elsewhere, said):
    limits = {} if limit is None else {"v": RangeLimit("v", *limit)}
    groups = ScaleGroups({} if own is None else {"v": own, "out": shared}, limits, 1.5)
    reason = groups.may_share("v", "out", lambda _: elsewhere)
    assert reason is None if said is None else said in reason


# ---- what ort-cpu leaves float though its table says integer: stems of mobile nets, and slow pools ------------------


WIDE_POOL = "MaxPool <kernel_shape = [3,3], pads = [1,1,1,1]>"
DEPTHWISE = f"Conv <{CONV}, group = 8>"


def behind_stem(body, channels=3, outputs="y", wide=8):
    weights = f"float[8,{channels},3,3] w, float[8,1,3,3] v, float[{wide},8,1,1] u, float[8,{wide},1,1] t"
    given = f"(float[1,{channels},8,8] x) => ({outputs}) <{weights}, float[8,8,3,3] f, float[8] one>"
    return f"net {given} {{ c = Conv <{CONV}> (x, w) {body} }}"


def stem(between="r = Relu (c)", depthwise=f"d = {DEPTHWISE} (r, v)", behind="", **how):
    return behind_stem(f"{between} {depthwise} a = Relu (d) y = Conv (a, u) {behind}", **how)


def mobile(tail, project="p = Conv (a, u)", wide=8):
    return behind_stem(f"r = HardSwish (c) d = {DEPTHWISE} (r, v) a = Relu (d) {project} {tail}", wide=wide)


def float_convs(text, **options):
    plan = plan_of(text, **options)
    assert all(n.rule == "float-prefix" for n in plan.nodes if n.op_type == "Conv" and n.kind is Kind.FLOAT)
    return "".join(name.removeprefix("Conv_") for name in nodes_of(plan, Kind.FLOAT) if name.startswith("Conv"))


GATED = "g = GlobalAveragePool (a) e = Conv (g, t) h = Sigmoid (e) m = Mul (a, h) p = Conv (m, u)"


@pytest.mark.parametrize(("text", "convs"), [
    # The stem and the depthwise Conv behind it, through light nodes.
    *((stem(between), "cd") for between in ("r = Relu (c)", "r = HardSwish (c)", "r = Identity (c)",
                                            "s = Sigmoid (c) r = Mul (c, s)", "r = LeakyRelu (c)")),
    # Others are no stem: of many channels, before a dense Conv, a pool, two Convs, an output, a second Conv.
    (stem(channels=16), ""), (stem(depthwise=f"d = Conv <{CONV}> (r, f)"), ""),
    (stem("r = MaxPool <kernel_shape = [1,1]> (c)"), ""), (stem(behind="z = Conv (r, u)", outputs="y, z"), ""),
    (stem(outputs="y, r"), ""), (behind_stem(f"r = Relu (c) e = Conv (r, u) g = Relu (e) y = {DEPTHWISE} (g, v)"), ""),
    # A net of nothing else is integer.
    (behind_stem(f"y = {DEPTHWISE} (c, v)"), ""),
    # The projection joins them where it does not widen; a residual around them takes all three.
    (mobile("y = Conv (p, t)"), "cdp"), (mobile("y = Conv (p, t)", wide=16), "cd"),
    (mobile("s = Add (r, p) y = Conv (s, t)"), "cdp"),
    # A sum with anything else takes none, and a gate between them leaves the projection integer.
    (mobile("q = Conv (p, t) z = Relu (q) s = Add (r, z) y = Conv (s, t)"), ""),
    (mobile("y = Conv (p, t)", GATED), "cd"),
])  # fmt: skip
def test_convs_left_float(text, convs):
    assert float_convs(text) == convs


def test_what_is_behind_them_is_integer_on_a_q_of_its_own():
    for text, values in ((stem(), ["a", "y"]), (mobile("s = Add (r, p) y = Conv (s, t)"), ["s", "y"])):
        assert nodes_of(plan_of(text), Kind.INTEGER) == ["Conv_y"]
        assert [v for v, _ in plan_of(text).quantized_values()] == values


def test_a_target_may_switch_it_off():
    assert float_convs(stem(), target=replace(ORT_CPU, hooks=Hooks())) == ""


# ---- pools on bytes, which are fast where an integer Conv made the layout channels-last ---------------------------


@pytest.mark.parametrize(("between", "fast"), [
    (f"p = {WIDE_POOL} (c)", True), (f"r = Relu (c) p = {WIDE_POOL} (r)", True),
    (f"s = Sigmoid (c) m = Mul (c, s) p = {WIDE_POOL} (m)", True), (f"h = HardSwish (c) p = {WIDE_POOL} (h)", True),
    (f"d = Conv <{CONV}> (c, f) a = Concat <axis = 1> (c, d) b = Slice (a, o, e, n) p = {WIDE_POOL} (b)", True),
    (f"q = {WIDE_POOL} (c) p = {WIDE_POOL} (q)", True), (f"l = LRN <size = 3> (c) p = {WIDE_POOL} (l)", False),
    (f"l = InstanceNormalization (c, one, one) p = {WIDE_POOL} (l)", False),
    (f"l = AveragePool <kernel_shape = [3,3], pads = [1,1,1,1]> (c) p = {WIDE_POOL} (l)", False),
    (f"i = {WIDE_POOL} (x) p = Add (c, i)", False),  # a pool of the input
], ids=["conv", "relu", "silu", "island", "concat", "pool", "lrn", "norm", "average pool", "input"])  # fmt: skip
def test_behind_an_integer_conv_a_pool_moves_bytes(between, fast):
    """One that stays float is held back from the Q behind it, or the session would hoist that above the pool."""
    weights = {"o": [0], "e": [8], "n": [1]} if "Slice" in between else None
    plan = plan_of(behind_stem(f"{between} y = Conv <{CONV}> (p, f)", channels=8), weights=weights)
    pool = "i" if "i = " in between else "p"
    assert f"MaxPool_{pool}" in nodes_of(plan, Kind.PASS_THROUGH if fast else Kind.FLOAT)
    if not fast:
        assert pool in plan.barriers
        assert pool == "i" or how(plan, "p", "Conv_y") is How.OWN
