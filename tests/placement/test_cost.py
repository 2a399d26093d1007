"""Estimates of whole nets, and what is left in float by them."""

import dataclasses
import itertools
import math
from collections.abc import Mapping

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.graph.view import GraphView
from kenosis_ort.options import PlacementOptions
from kenosis_ort.placement.cost import CostEstimate, MinCut, estimate
from kenosis_ort.placement.planner import Planner, Regions, choose_regions
from kenosis_ort.plan import Kind, PlacementPlan
from kenosis_ort.targets import get_target
from kenosis_ort.targets.profile import CostTable, KernelCost
from tests import models
from tests.planning import parse, prepared

TARGET = get_target("ort-cpu")
assert TARGET.costs is not None
ORT = next(profile for profile in TARGET.profiles if profile.name == "amx").table(TARGET.costs)


def flat_table(**kernels: tuple[float, float | None]) -> CostTable:
    """A table of whole microseconds a call, for arithmetic by hand."""
    costs = {
        name.replace("_", "-"): (KernelCost(a * 1e3), None if b is None else KernelCost(b * 1e3))
        for name, (a, b) in {"other": (0.0, None), "nothing": (0.0, 0.0), **kernels}.items()
    }
    return dataclasses.replace(ORT, measured_on="nowhere", command="none", run=0.0, kernels=costs, error=1.2)


class Case:
    """A model, or an ONNX text, with its plan and the means to change it."""

    def __init__(self, model: onnx.ModelProto | str) -> None:
        self.view = GraphView(prepared(parse(model) if isinstance(model, str) else model))
        self.plan = self.replan({})

    def replan(self, keep: Mapping[str, str]) -> PlacementPlan:
        return Planner(self.view, TARGET, PlacementOptions(keep_float=dict(keep), protect_outputs="int8")).plan()

    def estimate(self, table: CostTable = ORT, plan: PlacementPlan | None = None) -> CostEstimate:
        return estimate(self.view, self.plan if plan is None else plan, table)

    def regions(self, table: CostTable = ORT) -> Regions:
        return choose_regions(self.view, self.plan, table, self.replan)


def chain(*widths: int, size: int = 16, slow: int = -1) -> onnx.ModelProto:
    """Conv and Relu pairs, one Conv of which may be depthwise."""
    net = models.Net()
    x = net.input("x", [1, widths[0], size, size])
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        x = net.op("Relu", [net.conv(x, a, b, groups=a if i == slow else 1, name=f"conv{i}")], name=f"relu{i}")
    return net.of(x)


def between(body: str, channels: int = 32, last: str = "[last] y = Relu (e)") -> str:
    """Two Convs, ``a`` and ``b``, with nodes from ``c`` to ``d`` between them, and what follows ``e``."""
    conv = "Conv <pads = [1,1,1,1]>"
    kernels = f"float[{channels},{channels},3,3]"
    return f"""(float[1,{channels},8,8] x) => (float[1,{channels},8,8] y) <{kernels} w, {kernels} v>
    {{ [a] c = {conv} (x, w) {body} [b] e = {conv} (d, v) {last} }}"""


def test_kernels_and_borders_on_both_sides_of_float_regions_add_up():
    case = Case(chain(32, 32, 32, 32))
    borders = {"quantize": (2, 2), "dequantize": (1, 1), "channels_last": (0.5, 0.5), "blocked": (0.25, 0.25)}
    table = flat_table(conv_dense=(10, 4), clip=(3, None), **borders)
    found, parted = case.estimate(table), case.estimate(table, case.replan({"conv1": "why not"}))
    assert found.borders_us == pytest.approx({"x": 2.5, "relu2_out": 1.5})
    assert (found.float_us, found.planned_us, found.speed) == pytest.approx((30, 16, 30 / 16))  # Relus cost nothing
    assert found.unknown == ()
    assert (parted.by_node["conv1"].kind, parted.by_node["conv1"].planned_us) == (Kind.FLOAT, 10)
    assert parted.borders_us == pytest.approx({"x": 2.5, "relu0_out": 1.75, "relu1_out": 2.75, "relu2_out": 1.5})


@pytest.mark.parametrize(("text", "costs"), [
    (between("[it] d = HardSwish (c)"), (0, 5)),
    ("(float[1,6,16] x) => (y) <float[16,16] w, float[16] b> { m = MatMul (x, w) [it] y = Add (m, b) }", (0, 0)),
    ("(float[1,6,16] x, float[1,6,16] b) => (y) <float[16,16] w> { m = MatMul (x, w) [it] y = Add (m, b) }", (5, 5)),
])  # fmt: skip
def test_what_a_float_kernel_takes_in_costs_nothing_beside_it_alone(text: str, costs: tuple[float, float]):
    found = Case(text).estimate(flat_table(conv_dense=(10, 4), hard_sigmoid=(5, None), add=(5, None), linear=(1, None)))
    assert (found.by_node["it"].float_us, found.by_node["it"].planned_us) == pytest.approx(costs)


def test_unknown_shapes_are_told():
    case = Case("(float[1,16,h,w] x) => (y) <float[16,16,1,1] k> { [c] c = Conv (x, k) [r] y = Relu (c) }")
    assert set(case.estimate().unknown) == {"c", "r"}
    assert case.regions().keep_float == {}


@pytest.mark.parametrize(("model", "gains"), [
    (models.mlp(layers=6), False), (chain(*[64] * 6), True), (models.mlp(n_in=512, hidden=512), True),
])  # fmt: skip
def test_nets_that_gain_stay_integer_and_microsecond_nets_are_left_in_float(model: onnx.ModelProto, gains: bool):
    case = Case(model)
    regions = case.regions()
    assert regions.whole_net is not gains
    if gains:
        assert regions.plan is case.plan
        assert regions.keep_float == {}
        assert regions.cost.speed > 1.3
    else:
        assert regions.cost.speed * ORT.error < 1
        assert "0." in regions.reason


@pytest.mark.parametrize(("stem_us", "prefix"), [(9.0, set()), (11.0, set()), (20.0, {"conv0"})])
def test_a_prefix_is_left_in_float_only_for_a_clear_gain(stem_us: float, prefix: set[str]):
    table = flat_table(conv_few_channels=(10, stem_us), conv_dense=(10, 3), quantize=(0.5, 0.5))
    regions = Case(chain(3, 32, 64, 64, 64)).regions(table)
    assert set(regions.keep_float) == prefix
    assert not regions.whole_net
    if prefix:
        assert regions.plan.by_node["conv0"].kind is Kind.FLOAT
        assert regions.cost.planned_us < regions.all_integer.planned_us
        assert "first 1 of 4" in regions.reason


def test_two_nodes_are_left_in_float_together_where_neither_would_be_alone():
    borders = {"quantize": (60, 60), "dequantize": (60, 60), "channels_last": (0, 0), "blocked": (0, 0)}
    case = Case(chain(*[32] * 5, slow=1))
    regions = case.regions(flat_table(conv_dense=(100, 40), conv_depthwise=(100, 240), **borders))
    assert set(regions.keep_float) == {"conv0", "conv1"}
    assert "first 2 of 4" in regions.reason


@pytest.mark.parametrize(("integer_us", "whole_net"), [(11, False), (13, True)])
def test_a_loss_has_to_be_more_than_the_tables_error(integer_us: float, whole_net: bool):
    regions = Case(chain(32, 32)).regions(flat_table(conv_dense=(10, integer_us)))
    assert (regions.whole_net, regions.keep_float) == (whole_net, {})


def test_a_region_within_a_net_is_left_in_float_for_a_clear_gain():
    case = Case(chain(*[32] * 6, slow=2))
    kernels = {"conv_dense": (10, 4), "quantize": (0.5, 0.5), "dequantize": (0.5, 0.5), "channels_last": (0, 0)}
    regions = case.regions(flat_table(conv_depthwise=(10, 60), blocked=(0, 0), **kernels))
    assert set(regions.keep_float) == {"conv2"}
    assert regions.cost.planned_us == pytest.approx(4 * 4 + 10 + 4 * 0.5)
    assert case.regions(flat_table(conv_depthwise=(10, 12), blocked=(0, 0), **kernels)).keep_float == {}


def test_what_float_kernels_take_in_costs_nothing():
    last = "[sum] s = Add (e, d) [act] r = Relu (s) [last] y = Sigmoid (r)"
    text = between("[gate] g = Sigmoid (c) [silu] d = Mul (c, g)", 16, last)
    found = Case(text).estimate(plan=PlacementPlan(TARGET.name))
    assert {cost.node for cost in found.nodes if cost.float_us == 0} == {"gate", "sum", "act"}
    assert (found.planned_us, found.borders_us) == (pytest.approx(found.float_us), {})


# ---- the cheapest parting against all partings ----------------------------------------------------------------------


_COST = st.integers(0, 9)
_PAIR = st.tuples(st.integers(0, 5), st.integers(0, 5), _COST | st.just(math.inf))  # what may not be parted


@given(st.lists(st.tuples(_COST | st.just(math.inf), _COST), min_size=1, max_size=6), st.lists(_PAIR, max_size=12))
def test_no_parting_is_cheaper(sides: list[tuple[float, int]], pairs: list[tuple[int, int, float]]) -> None:
    pairs = [p for p in pairs if p[0] < len(sides) and p[1] < len(sides) and p[0] != p[1]]

    def total(here: set[int]) -> float:
        own = sum(costs[0] if thing in here else costs[1] for thing, costs in enumerate(sides))
        return own + sum(cost for a, b, cost in pairs if a in here and b not in here)

    cut: MinCut[int] = MinCut()
    for thing, (here, there) in enumerate(sides):
        cut.cost(thing, here=here, there=there)
    for a, b, cost in pairs:
        cut.part(a, b, cost)
    things = range(len(sides))
    subsets = itertools.chain.from_iterable(itertools.combinations(things, n) for n in range(len(sides) + 1))
    found = cut.solve()
    assert total(found) == min(total(set(subset)) for subset in subsets)
