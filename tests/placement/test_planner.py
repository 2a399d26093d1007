"""What is decided for whole blocks, edge by edge: the plan as the user reads it. Those of shared nets are golden."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kenosis_ort.graph.view import GraphView
from kenosis_ort.options import PlacementOptions
from kenosis_ort.placement.planner import Planner
from kenosis_ort.plan import EdgeRole, How, Kind, PlacementPlan, RangeLimit
from kenosis_ort.targets.ort_cpu import ORT_CPU
from tests import models
from tests.placement.build import how, nodes_of, pairs
from tests.planning import parse, plan_of, prepared

POOL = "MaxPool <kernel_shape = [2,2], strides = [2,2]>"


def net(body: str, outputs: str = "y") -> str:
    """A net over a picture, with the weights of 1x1 Convs: a, b, d, e, h of 16, 4, 8, 12, 2 channels to 4."""
    weights = "float[4,16,1,1] a, float[4,4,1,1] b, float[4,8,1,1] d, float[4,12,1,1] e, float[4,2,1,1] h, float[8,4] m"
    return f"net (float[1,16,8,8] x) => ({outputs}) <{weights}> {{ {body} }}"


def matrices(body: str, outputs: str = "y, z") -> str:
    return f"net (float[2,3,4] x) => ({outputs}) <float[4,4] w, float[4,4] v> {{ p = MatMul (x, w) {body} }}"


def decision(plan: PlacementPlan, value: str, consumer: str) -> Any:
    (found,) = (d for d in plan.decisions if d.edge.value == value and d.edge.consumer == consumer)
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


BLOCKS: dict[str, Block] = {
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
        net("p = Conv (x, a) c = Concat <axis = 1> (p, p) y = Conv (c, d)"), values="p:c"
    ),
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
        matrices("y = Tanh (p) r = Relu (p) z = MatMul (r, v)"), barriers=("r",)
    ),
    "nothing is planned for a model without anchors": Block(
        "net (float[1,3] x) => (y) { s = Sigmoid (x) y = Add (s, x) }", {Kind.FLOAT: "Sigmoid_s Add_y"}
    ),
    "a dead end and an unused input do no harm": Block(
        "net (float[1,16,8,8] x, float[1,2] unused) => (y) <float[4,16,1,1] w> { d = Tanh (x) y = Conv (x, w) }",
        {Kind.INTEGER: "Conv_y"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name: str) -> None:
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
def test_producers_of_a_concat_share_its_scale_where_the_ranges_allow(ranges: Any, relu: str | None) -> None:
    """Shared with a signed branch, the Relu could not vanish: the range of the Concat reaches below 0."""
    assert pairs(plan_of(FAN_IN, ranges=ranges)) == {"x": None, "r": relu, "q": "c", "c": None, "y": None}


def test_one_plan_does_for_all_ranges_that_share_scales_alike() -> None:
    wide, wider = ({"r": (0.0, 2.0), "q": (0.0, top), "c": (0.0, top)} for top in (3.0, 3.5))
    view, finished = GraphView(prepared(parse(FAN_IN))), []
    planner = Planner(view, ORT_CPU, PlacementOptions(), lambda plan: (finished.append(plan), plan)[1])
    plans = [planner.plan(ranges) for ranges in (None, wide, wider, SIGNED, wide, None)]
    assert len(finished) == 3
    assert plans[1] is plans[2] is plans[4]
    for plan, ranges in zip(plans, (None, wide, wider, SIGNED), strict=False):
        assert plan == Planner(view, ORT_CPU, PlacementOptions()).plan(ranges)


def test_before_calibration_every_value_that_may_need_a_range_is_named() -> None:
    late = plan_of(FAN_IN, ranges=SIGNED)
    assert set(pairs(plan_of(FAN_IN))) >= {d.provider or v for v, d in late.quantized_values()}


# ---- layers -----------------------------------------------------------------------------------------------------


def test_a_weight_that_two_orientations_share_is_per_tensor() -> None:
    text = "net (float[2,4] x) => (y, z) <float[4,4] w> { y = Gemm <transB = 1> (x, w) z = Gemm (x, w) }"
    for plan in (plan_of(text), plan_of(models.mlp(), per_channel=False)):
        assert {d.axis for d in plan.decisions if d.role is EdgeRole.WEIGHT} == {None}


# ---- what stays float ---------------------------------------------------------------------------------------------


def test_float_heads_are_told_so_and_get_no_dequantized_weights() -> None:
    plan = plan_of(models.two_input_detector(), protect_outputs="float", protect_inputs=False)
    assert "protected-input" not in {node.rule for node in plan.nodes}
    assert how(plan, "detections_out", "") is How.FLOAT
    for head in ("box_head", "score_head"):
        assert (plan.by_node[head].kind, plan.by_node[head].rule) == (Kind.FLOAT, "output-protection")
        assert decision(plan, f"{head}_w", head).how is How.FLOAT
    assert plan.barriers == (), "no Q behind them"


def test_an_excluded_conv_between_integer_ones_gets_a_barrier_and_a_first_one_needs_none() -> None:
    """Without it the session quantizes its float weights (rule float-weight-silently-quantized)."""
    plan = plan_of(models.conv_relu_chain(6), nodes_to_exclude=frozenset({"conv2"}))
    assert plan.by_node["conv2"].rule == "caller-excluded"
    assert how(plan, "relu1_out", "conv2") is How.DEQUANTIZED
    assert plan.barriers == ("relu3_out",)
    assert decision(plan, "conv2_w", "conv2").how is How.FLOAT
    first = plan_of(models.conv_relu_chain(6), nodes_to_exclude=frozenset({"conv0"}))
    assert (how(first, "x", "conv0"), first.barriers) == (How.FLOAT, ())
