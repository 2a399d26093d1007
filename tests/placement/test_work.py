"""What a node does, counted by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.graph.view import GraphView
from kenosis_ort.rewrite.prepare import prepare
from kenosis_ort.targets import get_target
from kenosis_ort.targets.ort_cpu.work import _CLASSES, conv_work, linear_work, work_of
from kenosis_ort.targets.profile import Work
from tests import models


def viewed(model: onnx.ModelProto) -> GraphView:
    return GraphView(prepare(model, min_opset=13, max_opset=17, max_ir=10).proto)


def works(model: onnx.ModelProto) -> dict[str, Work | None]:
    view = viewed(model)
    return {str(node.name): work_of(view, node) for node in view.nodes}


def one_op(op: str, inputs: list[tuple[str, list]], constants: dict[str, object] | None = None, **attributes):
    net = models.Net()
    names = [net.input(name, shape) for name, shape in inputs]
    names += [net.const(value, name) for name, value in (constants or {}).items()]
    net.output(net.op(op, names, name="it", **attributes), None)
    return works(net.model())["it"]


def test_a_convolution():
    net = models.Net()
    y = net.conv(net.input("x", [2, 8, 10, 12]), 8, 20, k=3, stride=2, name="c")
    net.output(y, None)
    pixels = 2 * 5 * 6
    assert works(net.model())["c"] == Work(
        "conv-dense", pixels * 20 * 72, pixels * 32 * 72, pixels * 20, pixels * 3, pixels * 72, 20 * 72
    )


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


@given(
    pixels=st.integers(1, 500), read=st.integers(1, 40), written=st.integers(1, 40), groups=st.integers(1, 6),
    window=st.lists(st.integers(1, 5), min_size=1, max_size=3),
)  # fmt: skip
def test_kernels_never_do_less_than_the_arithmetic(pixels, read, written, groups, window):
    work = conv_work(pixels=pixels, inputs=read * groups, outputs=written * groups, groups=groups, window=window)
    assert work.products >= work.macs > 0
    assert work.elements == pixels * written * groups
    assert work.macs % work.elements == 0


@pytest.mark.parametrize(("op", "attributes"), [("MatMul", {}), ("Gemm", {}), ("Gemm", {"transB": 1})])
def test_linear_layers(op: str, attributes: dict):
    net = models.Net()
    shape = (24, 40) if attributes else (40, 24)
    y = net.op(op, [net.input("x", [3, 40]), net.weight(shape, name="w")], name="it", **attributes)
    net.output(y, None)
    assert works(net.model())["it"] == Work("linear", 3 * 40 * 24, 3 * 40 * 32, 3 * 24, 40 * 24, 0, 40 * 24)


def test_one_line_reads_its_weights_from_far_only_where_they_are_many():
    assert linear_work(lines=1, rows=64, columns=64).pieces == 0
    assert linear_work(lines=1, rows=1024, columns=1024).pieces == 1024 * 1024
    assert linear_work(lines=1, rows=64, columns=64).shape_class == "linear-one"


def test_a_product_of_activations():
    assert one_op("MatMul", [("a", [2, 5, 7]), ("b", [2, 7, 3])]) == Work("matmul", 2 * 5 * 7 * 3, 210, 30)


@pytest.mark.parametrize(("op", "attributes", "expected"), [
    ("Relu", {}, Work("clip", elements=2 * 4 * 36)),
    ("Sigmoid", {}, Work("sigmoid", elements=2 * 4 * 36)),
    ("GlobalAveragePool", {}, Work("global-pool", elements=2 * 4 * 36)),
    ("MaxPool", {"kernel_shape": [2, 3], "strides": [2, 2]}, Work("max-pool", 0, 6 * 48, 48, 6 * 48, 2 * 4 * 36)),
    ("AveragePool", {"kernel_shape": [2, 2]}, Work("average-pool", 0, 4 * 200, 200, 4 * 200, 2 * 4 * 36)),
    ("Softmax", {"axis": -1}, Work("softmax", elements=2 * 4 * 36, pieces=48)),
    ("Softmax", {"axis": 1}, Work("softmax", elements=2 * 4 * 36, pieces=72, reads=2 * 4 * 36)),
    ("SpaceToDepth", {"blocksize": 2}, Work("transpose", elements=2 * 4 * 36, reads=2 * 4 * 36)),
    ("DepthToSpace", {"blocksize": 2}, Work("transpose", elements=2 * 4 * 36, pieces=2 * 4 * 36)),
    ("Flatten", {}, Work("nothing")),
    ("Sin", {}, Work("other", elements=2 * 4 * 36)),
])  # fmt: skip
def test_other_operators(op: str, attributes: dict, expected: Work):
    assert one_op(op, [("x", [2, 4, 6, 6])], **attributes) == expected


def test_a_free_batch_counts_as_one_and_other_free_sizes_are_unknown():
    assert one_op("Relu", [("x", ["batch", 4])]) == Work("clip", elements=4)
    assert one_op("Relu", [("x", [1, "length"])]) is None


def test_a_recurrent_layer():
    net = models.Net()
    x = net.input("x", [6, 1, 10])
    w, r = net.weight((1, 4 * 8, 10), name="w"), net.weight((1, 4 * 8, 8), name="r")
    net.output(net.op("LSTM", [x, w, r], name="it", outputs=3, hidden_size=8), [6, 1, 1, 8])
    assert works(net.model())["it"].macs == 6 * 4 * 8 * (10 + 8)


def test_elements_of_values():
    net = models.Net()
    net.output(net.op("Relu", [net.input("x", ["n", 3, 5])]), None)
    view = viewed(net.model())
    assert math.prod(view.shape_of_one(view.inputs[0])) == 15


def test_every_class_has_a_cost():
    kernels = get_target("ort-cpu").costs.kernels
    others = {
        "conv-pointwise", "conv-dense", "conv-few-channels", "conv-depthwise", "conv-depthwise-odd", "conv-grouped",
        "conv-grouped-odd", "conv-transpose", "linear", "linear-one", "matmul", "recurrent", "nothing", "other",
        "max-pool", "average-pool", "global-pool", "softmax", "quantize", "dequantize", "channels-last", "blocked",
    }  # fmt: skip
    assert {*_CLASSES.values(), *others} == kernels.keys()


@pytest.mark.parametrize(("inputs", "outputs", "second"), [(64, 64, False), (62, 64, True), (64, 12, True)])
def test_what_the_direct_kernel_does_not_take_costs_what_the_second_one_does(inputs: int, outputs: int, second: bool):
    costs = get_target("ort-cpu").costs
    assert costs is not None
    for window in ((1, 1), (2, 2)):
        work = conv_work(pixels=100, inputs=inputs, outputs=outputs, window=window)
        assert work.second is second
        assert (costs.integer_us(work) == costs.shifted_us(work)) is second


def test_weights_that_are_used_once_come_from_near_caches_in_small_nets():
    costs = get_target("ort-cpu").costs
    assert costs is not None
    for lines, share in ((1, 0.5), (16, 1.0)):
        work = linear_work(lines=lines, rows=128, columns=640)
        cost = replace(costs.kernels[work.shape_class][0], fixed=0.0, element=0.0)
        assert cost.microseconds(work, cold=0.2) == pytest.approx(share * cost.microseconds(work))
