"""What a node does, counted by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.targets import get_target
from kenosis_ort.targets.ort_cpu.work import CLASSES, conv_work, linear_work, work_of
from kenosis_ort.targets.profile import Work
from tests.placement.build import view_of


def work(text: str) -> Work | None:
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
    ("(float[batch,4] x) => (y) { y = Relu (x) }", Work("clip", elements=4)),  # one of them
    ("(float[1,length] x) => (y) { y = Relu (x) }", None),  # of an unknown size
])  # fmt: skip
def test_products_and_free_sizes(text: str, expected: Work | None):
    assert work(text) == expected


@pytest.mark.parametrize(("arguments", "name"), [
    ({"inputs": 64, "outputs": 64}, "conv-pointwise"),
    ({"inputs": 64, "outputs": 64, "stride": 2}, "conv-dense"),
    ({"inputs": 64, "outputs": 64, "window": (3, 3)}, "conv-dense"),
    ({"inputs": 64, "outputs": 64, "window": (5,)}, "conv-dense"),
    ({"inputs": 3, "outputs": 64, "window": (3, 3)}, "conv-few-channels"),
    ({"inputs": 1, "outputs": 64, "window": (10, 4)}, "conv-dense"),
    ({"inputs": 96, "outputs": 96, "groups": 96, "window": (3, 3)}, "conv-depthwise"),
    ({"inputs": 72, "outputs": 72, "groups": 72, "window": (3, 3)}, "conv-depthwise-odd"),
    ({"inputs": 8, "outputs": 16, "groups": 8, "window": (3, 3)}, "conv-grouped-odd"),
    ({"inputs": 64, "outputs": 64, "groups": 4}, "conv-grouped"),
    ({"inputs": 64, "outputs": 32, "groups": 4}, "conv-grouped-odd"),
    ({"inputs": 32, "outputs": 64, "groups": 4}, "conv-grouped-odd"),
])  # fmt: skip
def test_classes_of_convolutions(arguments: dict, name: str):
    assert conv_work(pixels=49, **arguments).shape_class == name
    assert name in get_target("ort-cpu").costs.kernels


@given(
    pixels=st.integers(1, 500), read=st.integers(1, 40), written=st.integers(1, 40), groups=st.integers(1, 6),
    window=st.lists(st.integers(1, 5), min_size=1, max_size=3),
)  # fmt: skip
def test_kernels_never_do_less_than_the_arithmetic(pixels, read, written, groups, window):
    work = conv_work(pixels=pixels, inputs=read * groups, outputs=written * groups, groups=groups, window=window)
    assert work.products >= work.macs > 0
    assert work.elements == pixels * written * groups
    assert work.macs % work.elements == 0


def test_one_line_reads_its_weights_from_far_only_where_they_are_many():
    assert linear_work(lines=1, rows=64, columns=64).pieces == 0
    assert linear_work(lines=1, rows=1024, columns=1024).pieces == 1024 * 1024
    assert linear_work(lines=1, rows=64, columns=64).shape_class == "linear-one"


@pytest.mark.parametrize(("op", "expected"), [
    ("Relu", Work("clip", elements=2 * 4 * 36)),
    ("Sigmoid", Work("sigmoid", elements=2 * 4 * 36)),
    ("GlobalAveragePool", Work("global-pool", elements=2 * 4 * 36)),
    ("MaxPool <kernel_shape = [2,3], strides = [2,2]>", Work("max-pool", 0, 6 * 48, 48, 6 * 48, 2 * 4 * 36)),
    ("AveragePool <kernel_shape = [2,2]>", Work("average-pool", 0, 4 * 200, 200, 4 * 200, 2 * 4 * 36)),
    ("Softmax <axis = -1>", Work("softmax", elements=2 * 4 * 36, pieces=48)),
    ("Softmax <axis = 1>", Work("softmax", elements=2 * 4 * 36, pieces=72, reads=2 * 4 * 36)),
    ("SpaceToDepth <blocksize = 2>", Work("transpose", elements=2 * 4 * 36, reads=2 * 4 * 36)),
    ("DepthToSpace <blocksize = 2>", Work("transpose", elements=2 * 4 * 36, pieces=2 * 4 * 36)),
    ("Flatten", Work("nothing")),
    ("Sin", Work("other", elements=2 * 4 * 36)),
])  # fmt: skip
def test_other_operators(op: str, expected: Work):
    assert work(f"(float[2,4,6,6] x) => (y) {{ y = {op} (x) }}") == expected


def test_a_recurrent_layer():
    found = work("""(float[6,1,10] x) => (float[6,1,1,8] y) <float[1,32,10] w, float[1,32,8] r>
        { y = LSTM <hidden_size = 8> (x, w, r) }""")
    assert found.macs == 6 * 4 * 8 * (10 + 8)


def test_every_class_has_a_cost():
    borders = {"nothing", "other", "quantize", "dequantize", "channels-last", "blocked"}
    assert {*CLASSES.values(), *borders} < get_target("ort-cpu").costs.kernels.keys()


@pytest.mark.parametrize(("inputs", "outputs", "second"), [(64, 64, False), (62, 64, True), (64, 12, True)])
def test_what_the_direct_kernel_does_not_take_costs_what_the_second_one_does(inputs: int, outputs: int, second: bool):
    costs = get_target("ort-cpu").costs
    for window in ((1, 1), (2, 2)):
        work = conv_work(pixels=100, inputs=inputs, outputs=outputs, window=window)
        assert work.second is second
        assert (costs.integer_us(work) == costs.shifted_us(work)) is second


def test_weights_that_are_used_once_come_from_near_caches_in_small_nets():
    costs = get_target("ort-cpu").costs
    for lines, cold, share in ((1, 0.2, 0.5), (1, 0.7, 0.7), (16, 0.2, 1.0)):
        work = linear_work(lines=lines, rows=128, columns=640)
        cost = replace(costs.kernels[work.shape_class][0], fixed=0.0, weight=7.0)
        assert cost.microseconds(work, cold) == pytest.approx(share * cost.microseconds(work))
