"""What nodes do, what nets cost by the table, what is left float by it, and which kernel Convs are laid out for."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st
from onnx import numpy_helper
from onnxruntime.quantization import QuantType

from kenosis_ort import preview
from kenosis_ort.placement.cost import NetCosts
from kenosis_ort.placement.planner import Planner
from kenosis_ort.placement.regions import MinCut, choose_regions
from kenosis_ort.plan import Kind, PlacementOptions
from kenosis_ort.targets import get_target
from kenosis_ort.targets.ort_cpu.work import CLASSES, conv_work, linear_work, work_of
from kenosis_ort.targets.profile import KernelCost, Work
from tests import models
from tests.flow.support import changed, make, proof, run
from tests.planning import view_of


def work(text):
    """The work of the only node of a net."""
    view = view_of(text)
    return work_of(view, view.nodes[0])


LINEAR = Work("linear", 3 * 40 * 24, 3 * 40 * 32, 3 * 24, 40 * 24, 0, 40 * 24)


@pytest.mark.parametrize(("text", "expected"), [
    ("(float[2,8,10,12] x) => (y) <float[20,8,3,3] w> { y = Conv <pads = [1,1,1,1], strides = [2,2]> (x, w) }",
     Work("conv-dense", 60 * 20 * 72, 60 * 32 * 72, 60 * 20, 60 * 3, 60 * 72, 20 * 72)),
    ("(float[3,40] x) => (y) <float[40,24] w> { y = MatMul (x, w) }", LINEAR),
    ("(float[3,40] x) => (y) <float[40,24] w> { y = Gemm (x, w) }", LINEAR),
    ("(float[3,40] x) => (y) <float[24,40] w> { y = Gemm <transB = 1> (x, w) }", LINEAR),
    ("(float[2,5,7] a, float[2,7,3] b) => (y) { y = MatMul (a, b) }", Work("matmul", 2 * 5 * 7 * 3, 210, 30)),
    ("(float[6,1,10] x) => (y) <float[1,32,10] w, float[1,32,8] r> { y = LSTM <hidden_size = 8> (x, w, r) }",
     Work("recurrent", 6 * 32 * 18, 6 * 32 * 18, 6 * 8, 32 * 18)),
    ("(float[batch,4] x) => (y) { y = Relu (x) }", Work("clip", elements=4)),  # one of them
    ("(float[1,length] x) => (y) { y = Relu (x) }", None),  # of an unknown size
])  # fmt: skip
def test_products_and_free_sizes(text, expected):
    assert work(text) == expected


@pytest.mark.parametrize(("inputs", "outputs", "groups", "window", "stride", "name"), [
    (64, 64, 1, (1, 1), 1, "conv-pointwise"), (64, 64, 1, (1, 1), 2, "conv-dense"),
    (64, 64, 1, (3, 3), 1, "conv-dense"), (64, 64, 1, (5,), 1, "conv-dense"), (96, 96, 96, (3, 3), 1, "conv-depthwise"),
    (3, 64, 1, (3, 3), 1, "conv-few-channels"), (1, 64, 1, (10, 4), 1, "conv-dense"),
    (72, 72, 72, (3, 3), 1, "conv-depthwise-odd"), (8, 16, 8, (3, 3), 1, "conv-grouped-odd"),
    (64, 64, 4, (1, 1), 1, "conv-grouped"), (64, 32, 4, (1, 1), 1, "conv-grouped-odd"),
    (32, 64, 4, (1, 1), 1, "conv-grouped-odd"),
])  # fmt: skip
def test_classes_of_convolutions(inputs, outputs, groups, window, stride, name):
    work = conv_work(pixels=49, inputs=inputs, outputs=outputs, groups=groups, window=window, stride=stride)
    assert (work.shape_class, name in get_target("ort-cpu").costs.profile.kernels) == (name, True)


@pytest.mark.parametrize(("channels", "groups", "size", "k", "stride", "ratio"), [
    (240, 30, 7, 3, 2, 1.25), (64, 8, 14, 5, 2, 1.18), (32, 4, 7, 3, 2, 1.12), (128, 16, 7, 3, 1, 1.11),
    (32, 4, 28, 3, 1, 0.65), (16, 2, 56, 5, 1, 0.59), (64, 8, 28, 1, 1, 0.41),
])  # fmt: skip
def test_grouped_convolutions_of_few_channels_cost_what_was_measured(channels, groups, size, k, stride, ratio):
    """Float by integer as timed with AVX512-VNNI, each relative to dense Convs there."""
    costs, wide = get_target("ort-cpu").costs, {"inputs": channels, "outputs": channels, "groups": groups}
    work = conv_work(pixels=size**2, **wide, window=(k, k), stride=stride)
    assert costs.float_us(work) / costs.integer_us(work) == pytest.approx(ratio, rel=0.25)


@given(
    pixels=st.integers(1, 500), read=st.integers(1, 40), written=st.integers(1, 40), groups=st.integers(1, 6),
    window=st.lists(st.integers(1, 5), min_size=1, max_size=3),
)  # fmt: skip
def test_kernels_never_do_less_than_the_arithmetic(pixels, read, written, groups, window):
    work = conv_work(pixels=pixels, inputs=read * groups, outputs=written * groups, groups=groups, window=window)
    assert work.products >= work.macs > 0
    assert (work.elements, work.macs % work.elements) == (pixels * written * groups, 0)


def test_one_line_reads_its_weights_from_far_only_where_they_are_many():
    small, large = (linear_work(lines=1, rows=size, columns=size) for size in (64, 1024))
    assert (small.shape_class, small.pieces, large.pieces) == ("linear-one", 0, 1024 * 1024)


@pytest.mark.parametrize(("op", "expected"), [
    ("Relu", Work("clip", elements=2 * 4 * 36)), ("Sigmoid", Work("sigmoid", elements=2 * 4 * 36)),
    ("GlobalAveragePool", Work("global-pool", elements=2 * 4 * 36)),
    ("MaxPool <kernel_shape = [2,3], strides = [2,2]>", Work("max-pool", 0, 6 * 48, 48, 6 * 48, 2 * 4 * 36)),
    ("AveragePool <kernel_shape = [2,2]>", Work("average-pool", 0, 4 * 200, 200, 4 * 200, 2 * 4 * 36)),
    ("Softmax <axis = -1>", Work("softmax", elements=2 * 4 * 36, pieces=48)),
    ("Softmax <axis = 1>", Work("softmax", elements=2 * 4 * 36, pieces=72, reads=2 * 4 * 36)),
    ("SpaceToDepth <blocksize = 2>", Work("transpose", elements=2 * 4 * 36, reads=2 * 4 * 36)),
    ("DepthToSpace <blocksize = 2>", Work("transpose", elements=2 * 4 * 36, pieces=2 * 4 * 36)),
    ("Flatten", Work("nothing")), ("Sin", Work("other", elements=2 * 4 * 36)),
])  # fmt: skip
def test_other_operators(op, expected):
    assert work(f"(float[2,4,6,6] x) => (y) {{ y = {op} (x) }}") == expected


def test_every_class_has_a_cost():
    borders = {"nothing", "other", "quantize", "dequantize", "channels-last", "blocked"}
    assert {*CLASSES.values(), *borders} < get_target("ort-cpu").costs.profile.kernels.keys()


@pytest.mark.parametrize(("inputs", "outputs", "second"), [(64, 64, False), (62, 64, True), (64, 12, True)])
def test_what_the_direct_kernel_does_not_take_costs_what_the_second_one_does(inputs, outputs, second):
    costs = get_target("ort-cpu").costs
    for window in ((1, 1), (2, 2)):
        work = conv_work(pixels=100, inputs=inputs, outputs=outputs, window=window)
        assert (work.second, costs.integer_us(work) == costs.shifted_us(work)) == (second, second)


def test_weights_that_are_used_once_come_from_near_caches_in_small_nets():
    costs = get_target("ort-cpu").costs
    for lines, cold, share in ((1, 0.2, 0.5), (1, 0.7, 0.7), (16, 0.2, 1.0)):
        work = linear_work(lines=lines, rows=128, columns=640)
        cost = replace(costs.profile.kernels[work.shape_class][0], fixed=0.0, weight=7.0)
        assert cost.microseconds(work, cold) == pytest.approx(share * cost.microseconds(work))


# ---- estimates of whole nets ----------------------------------------------------------------------------------------


TARGET = get_target("ort-cpu")
ORT = next(profile for profile in TARGET.profiles if profile.name == "amx").table(TARGET.costs)


def flat_table(**kernels):
    """A table of whole microseconds a call, for arithmetic by hand."""
    costs = {
        name.replace("_", "-"): (KernelCost(a * 1e3), None if b is None else KernelCost(b * 1e3))
        for name, (a, b) in {"other": (0.0, None), "nothing": (0.0, 0.0), **kernels}.items()
    }
    return replace(ORT, profile=replace(ORT.profile, run=0.0, kernels=costs, error=1.2))


class Case:
    """A model, or an ONNX text, with its plan and the means to change it."""

    def __init__(self, model):
        self.view = view_of(model)
        self.plan = self.replan({})

    def replan(self, keep):
        return Planner(self.view, TARGET, PlacementOptions(keep_float=dict(keep), protect_outputs="int8")).plan()

    def estimate(self, table=ORT, plan=None):
        return NetCosts(self.view, table).estimate(self.plan if plan is None else plan)

    def regions(self, table=ORT):
        return choose_regions(self.view, self.plan, table, self.replan)


def chain(*widths, size=16, slow=-1):
    """Conv and Relu pairs, one Conv of which may be depthwise."""
    net = models.Net()
    x = net.input("x", [1, widths[0], size, size])
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        x = net.op("Relu", [net.conv(x, a, b, groups=a if i == slow else 1, name=f"conv{i}")], name=f"relu{i}")
    return net.of(x)


def between(body, channels=32, last="[last] y = Relu (e)"):
    """Two Convs, ``a`` and ``b``, with nodes from ``c`` to ``d`` between them, and what follows ``e``."""
    conv, kernels = "Conv <pads = [1,1,1,1]>", f"float[{channels},{channels},3,3]"
    return f"""(float[1,{channels},8,8] x) => (float[1,{channels},8,8] y) <{kernels} w, {kernels} v>
    {{ [a] c = {conv} (x, w) {body} [b] e = {conv} (d, v) {last} }}"""


def test_kernels_and_borders_on_both_sides_of_float_regions_add_up():
    case = Case(chain(32, 32, 32, 32))
    borders = {"quantize": (2, 2), "dequantize": (1, 1), "channels_last": (0.5, 0.5), "blocked": (0.25, 0.25)}
    table = flat_table(conv_dense=(10, 4), clip=(3, None), **borders)
    found, parted = case.estimate(table), case.estimate(table, case.replan({"conv1": "why not"}))
    assert found.borders_us == pytest.approx({"x": 2.5, "relu2_out": 1.5})
    assert (found.float_us, found.planned_us, found.speed) == pytest.approx((30.5, 16, 30.5 / 16))  # Relus cost nothing
    own = parted.by_node["conv1"]
    assert (found.unknown, own.kind, own.planned_us) == ((), Kind.FLOAT, 10)
    assert parted.borders_us == pytest.approx({"x": 2.5, "relu0_out": 1.75, "relu1_out": 2.75, "relu2_out": 1.5})


@pytest.mark.parametrize(("text", "costs"), [
    (between("[it] d = HardSwish (c)"), (0, 5)),
    ("(float[1,6,16] x) => (y) <float[16,16] w, float[16] b> { m = MatMul (x, w) [it] y = Add (m, b) }", (0, 0)),
    ("(float[1,6,16] x, float[1,6,16] b) => (y) <float[16,16] w> { m = MatMul (x, w) [it] y = Add (m, b) }", (5, 5)),
])  # fmt: skip
def test_what_a_float_kernel_takes_in_costs_nothing_beside_it_alone(text, costs):
    found = Case(text).estimate(flat_table(conv_dense=(10, 4), hard_sigmoid=(5, None), add=(5, None), linear=(1, None)))
    assert (found.by_node["it"].float_us, found.by_node["it"].planned_us) == pytest.approx(costs)


@pytest.mark.parametrize(
    ("body", "changes"),
    [
        ("[d] d = Relu (c)", ["x", "y"]),
        ("[s] s = Sigmoid (c) [d] d = Mul (c, s)", ["c", "d", "x", "y"]),  # one kernel, which reads rows
        ("[p] p = Add (c, c) [d] d = Mul (p, p)", ["x", "y"]),
        ("[s] s = Softmax (c) [d] d = Add (s, c)", ["c", "d", "x", "y"]),  # c is read in rows, and d so written
    ],
)
def test_a_float_net_pays_for_values_that_change_between_blocks_and_rows(body, changes):
    net = NetCosts(Case(between(body)).view, ORT)
    assert sorted(value.name for value in net.laid_out) == changes
    assert sum(net.in_float.values()) > sum(us for name, us in net.float_us.items() if name not in net.fused)
    if "Sigmoid" in body:  # one kernel, which takes as long as the Sigmoid
        assert (net.in_float["s"], net.in_float["d"]) == (0, net.float_us["s"]) != (0, net.float_us["d"])


@pytest.mark.parametrize(("channels", "blocked"), [(32, True), (24, False)])
def test_channels_joined_stay_in_blocks_where_each_part_fills_them(channels, blocked):
    net = models.Net()
    x = net.input("x", [1, 32, 8, 8])
    parts = [net.conv(x, 32, channels, name=f"conv{i}") for i in range(2)]
    found = NetCosts(Case(net.of(net.op("Relu", [net.op("Concat", parts, axis=1, name="join")], name="r"))).view, ORT)
    assert any(node.name == "join" for node in found.blocked) is blocked


def test_unknown_shapes_are_told():
    case = Case("(float[1,16,h,w] x) => (y) <float[16,16,1,1] k> { [c] c = Conv (x, k) [r] y = Relu (c) }")
    assert (set(case.estimate().unknown), case.regions().keep_float) == ({"c", "r"}, {})


@pytest.mark.parametrize(("model", "gains"), [
    (models.mlp(layers=6), False), (chain(*[64] * 6), True), (models.mlp(n_in=512, hidden=512), True),
])  # fmt: skip
def test_nets_that_gain_stay_integer_and_microsecond_nets_are_left_in_float(model, gains):
    case = Case(model)
    regions = case.regions()
    assert (regions.whole_net, regions.cost.speed > 1.3) == (not gains, gains)
    if gains:
        assert (regions.plan is case.plan, regions.keep_float) == (True, {})
    else:
        assert (regions.cost.speed * ORT.profile.error < 1, "0." in regions.reason) == (True, True)


@pytest.mark.parametrize(("stem_us", "prefix"), [(9.0, set()), (11.0, set()), (20.0, {"conv0"})])
def test_a_prefix_is_left_in_float_only_for_a_clear_gain(stem_us, prefix):
    table = flat_table(conv_few_channels=(10, stem_us), conv_dense=(10, 3), quantize=(0.5, 0.5))
    regions = Case(chain(3, 32, 64, 64, 64)).regions(table)
    assert (set(regions.keep_float), regions.whole_net) == (prefix, False)
    if prefix:
        assert regions.cost.planned_us < regions.all_integer.planned_us
        assert (regions.plan.by_node["conv0"].kind, "first 1 of 4" in regions.reason) == (Kind.FLOAT, True)


def test_two_nodes_are_left_in_float_together_where_neither_would_be_alone():
    borders = {"quantize": (60, 60), "dequantize": (60, 60), "channels_last": (0, 0), "blocked": (0, 0)}
    case = Case(chain(*[32] * 5, slow=1))
    regions = case.regions(flat_table(conv_dense=(100, 40), conv_depthwise=(100, 240), **borders))
    assert (set(regions.keep_float), "first 2 of 4" in regions.reason) == ({"conv0", "conv1"}, True)


@pytest.mark.parametrize(("integer_us", "whole_net"), [(11, False), (13, True)])
def test_a_loss_has_to_be_more_than_the_tables_error(integer_us, whole_net):
    regions = Case(chain(32, 32)).regions(flat_table(conv_dense=(10, integer_us)))
    assert (regions.whole_net, regions.keep_float) == (whole_net, {})


def test_a_region_within_a_net_is_left_in_float_for_a_clear_gain():
    case = Case(chain(*[32] * 6, slow=2))
    kernels = {"conv_dense": (10, 4), "quantize": (0.5, 0.5), "dequantize": (0.5, 0.5), "channels_last": (0, 0)}
    regions = case.regions(flat_table(conv_depthwise=(10, 60), blocked=(0, 0), **kernels))
    assert (set(regions.keep_float), regions.cost.planned_us) == ({"conv2"}, pytest.approx(4 * 4 + 10 + 4 * 0.5))
    assert case.regions(flat_table(conv_depthwise=(10, 12), blocked=(0, 0), **kernels)).keep_float == {}


# ---- the cheapest parting against all partings ----------------------------------------------------------------------


_COST = st.integers(0, 9)
_PAIR = st.tuples(st.integers(0, 5), st.integers(0, 5), _COST | st.just(math.inf))  # what may not be parted


@given(st.lists(st.tuples(_COST | st.just(math.inf), _COST), min_size=1, max_size=6), st.lists(_PAIR, max_size=12))
def test_no_parting_is_cheaper(sides, pairs):
    pairs = [p for p in pairs if p[0] < len(sides) and p[1] < len(sides) and p[0] != p[1]]

    def total(here):
        own = sum(costs[0] if thing in here else costs[1] for thing, costs in enumerate(sides))
        return own + sum(cost for a, b, cost in pairs if a in here and b not in here)

    cut = MinCut()
    for thing, (here, there) in enumerate(sides):
        cut.cost(thing, here=here, there=there)
    for a, b, cost in pairs:
        cut.part(a, b, cost)
    subsets = (itertools.compress(range(len(sides)), chosen) for chosen in itertools.product((0, 1), repeat=len(sides)))
    assert total(cut.solve()) == min(total(set(subset)) for subset in subsets)


# ---- which Convs get weights that select the matrix product ---------------------------------------------------------


def net_of_convs(size=12):
    """A small stem, a deep Conv, a depthwise one and a narrow one."""
    net = models.Net()
    y = net.op("Relu", [net.conv(net.input("x", [1, 3, size, size]), 3, 64, name="stem")], name="r0")
    y = net.op("Relu", [net.conv(y, 64, 64, name="deep")], name="r1")
    y = net.op("Conv", [y, net.weight((64, 1, 3, 3), name="dw")], name="depthwise", group=64, pads=[1] * 4)
    y = net.op("Relu", [net.conv(y, 64, 16, name="narrow")], name="r2")
    return net.of(net.gemm(net.op("Flatten", [y], name="flat"), 16 * size * size, 64, name="head"))


def on_tiles(folder, model=None, **options):
    return make(model or net_of_convs(), folder, tune="model", host="amx", **options)


def zero_points(model):
    held = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    makers = {n.output[0]: n for n in model.graph.node}
    layers = [n for n in model.graph.node if n.op_type in ("Conv", "Gemm") and n.input[1] in makers]
    return {n.name: set(np.ravel(held[makers[n.input[1]].input[2]]).tolist()) for n in layers}


def test_deep_convs_alone_are_shifted(tmp_path):
    made = on_tiles(tmp_path, protect_outputs="int8")
    report, found = made.report, zero_points(made.written)
    assert (found.pop("deep"), set().union(*found.values())) == ({-1}, {0})
    assert "matrix product" in report.plan.explain("deep")
    assert (any("zero point -1" in note for note in report.notes), report.left_float()) == (True, ())
    assert all(k.integer for k in proof(report).kernels if k.op_type == "Conv")


@pytest.mark.parametrize(("size", "shifted"), [(112, {"deep"}), (160, set())])
def test_pictures_beyond_near_caches_stay_on_the_direct_kernel(size, shifted):
    plan = preview(net_of_convs(size), tune="model", host="amx")
    assert {d.edge.consumer for d in plan.decisions if d.zero_point} == shifted


@pytest.mark.parametrize("options", [{}, {"per_channel": False}, {"reduce_range": True}])
def test_the_same_results_to_the_bit(tmp_path, options):
    made = on_tiles(tmp_path, **options)
    raised = dict.fromkeys(("deep_w_quantized", "deep_w_zero_point"), lambda w: w + np.int8(1))
    without = changed(made.written, **raised)  # the same weights, stored as they are
    assert zero_points(without)["deep"] == {0}
    assert np.array_equal(run(made.written, made.feeds), run(without, made.feeds))


@pytest.mark.parametrize("options", [
    {"TensorQuantOverrides": {"deep_w": [{"symmetric": True, "reduce_range": True}]}},
    {"TensorQuantOverrides": {"deep_w": [{"quant_type": QuantType.QUInt8}]}}, {"WeightSymmetric": False},
    {"MinimumRealRange": 0.01},
], ids=["range", "type", "asymmetric", "least range"])  # fmt: skip
def test_what_the_caller_says_of_weights_is_kept_and_the_report_is_true(tmp_path, options):
    made = on_tiles(tmp_path, extra_options=options)
    assert zero_points(made.written)["deep"] != {-1}
    assert all(d.zero_point == 0 for d in made.report.plan.decisions)
    assert not any("zero point -1" in note for note in made.report.notes)
