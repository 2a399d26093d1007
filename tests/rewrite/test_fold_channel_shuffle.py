from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kenosis_ort.rewrite import fold_channel_shuffle
from tests import models
from tests.graph.build import assert_same, ops
from tests.planning import quantize
from tests.rewrite.forms import check, refused, rewritten, untouched
from tests.targets.qdq import kernels as runtime_kernels

SIDE = 4
MOVED = ["Reshape", "Transpose", "Reshape"]


class Net(models.Net):
    """Adds grouped Convs and shuffles; every node is named after its output."""

    def layer(self, x, inputs, outputs, *, group=1, k=1, bias=True):
        operands = [x, self.weight((outputs, inputs // group, k, k)), *([self.weight((outputs,))] if bias else [])]
        return self.op("Conv", operands, group=group, kernel_shape=[k, k], pads=[k // 2] * 4)

    def shuffle(self, x, channels, groups, *, size=SIDE, flat=False, batch=0):
        inner = [size * size] if flat else [size, size]
        shape = np.array([batch, groups, channels // groups, *inner], np.int64)
        y = self.op("Reshape", [x, self.const(shape)])
        y = self.op("Transpose", [y], perm=[0, 2, 1, *range(3, 3 + len(inner))])
        return self.op("Reshape", [y, self.const(np.array([batch, channels, size, size], np.int64))])

    def split(self, x, count):
        outs = [f"{x}_part{at}" for at in range(count)]
        self.nodes.append(onnx.helper.make_node("Split", [x], outs, name=f"{x}_split", axis=1))
        return outs

    def picture(self, channels, batch="N"):
        return self.input("x", [batch, channels, SIDE, SIDE])


def picture(channels, batch=2, seed=0):
    return {"x": np.random.default_rng(seed).normal(size=(batch, channels, SIDE, SIDE)).astype(np.float32)}


@settings(deadline=None)
@given(
    groups=st.sampled_from([(1, 1), (1, 2), (2, 1), (4, 4), (2, 4), (4, 2), (8, 1), (1, 8), (8, 8)]),
    shuffled=st.sampled_from([2, 3, 4, 6]),
    way=st.lists(st.sampled_from(["Relu", "depthwise", "MaxPool", "HardSwish", "Clip"]), max_size=3),
    split=st.integers(0, 3),
    flat=st.booleans(),
    bias=st.booleans(),
    gathered=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_every_shuffle_between_convs_computes_the_same(groups, shuffled, way, split, flat, bias, gathered, seed):
    net = Net(seed=seed)
    c = 24

    def step(x, kind):
        if kind == "depthwise":
            return net.layer(x, c, c, group=c, k=3, bias=bias)
        if kind == "MaxPool":
            return net.op(kind, [x], kernel_shape=[3, 3], pads=[1] * 4)
        return net.op(kind, [x, net.const(0.0), net.const(1.0)] if kind == "Clip" else [x])

    y = net.layer(net.picture(8), 8, c, group=groups[0], bias=bias)
    for kind in way[:split]:
        y = step(y, kind)
    order = np.random.default_rng(seed).permutation(c)
    y = net.op("Gather", [y, net.const(order)], axis=1) if gathered else net.shuffle(y, c, shuffled, flat=flat)
    for kind in way[split:]:
        y = step(y, kind)
    net.output(net.layer(y, c, 8, group=groups[1], bias=bias))
    proto = net.model()
    result = rewritten(fold_channel_shuffle, proto).proto
    onnx.checker.check_model(result)
    assert_same(proto, result, picture(8, seed=seed), rtol=1e-5)
    found, folded = ops(result), min(groups) <= 4
    assert found == [op for op in ops(proto) if op not in ("Gather", *MOVED)] if folded else "Gather" in found
    assert not set(MOVED) & set(found)


@pytest.mark.parametrize(
    ("before", "behind", "expected"),
    [(1, 1, (1, 1)), (4, 1, (4, 1)), (1, 4, (1, 4)), (2, 4, (2, 1)), (4, 2, (1, 2)), (8, 4, (8, 1))],
)
def test_the_side_that_costs_less_changes(before, behind, expected):
    net = Net()
    y = net.shuffle(net.layer(net.picture(16), 16, 16, group=before), 16, 4)
    net.output(net.layer(y, 16, 16, group=behind))
    found = check(fold_channel_shuffle, net.model(), picture(16), ["Conv", "Conv"]).proto
    assert tuple(onnx.helper.get_node_attr_value(node, "group") for node in found.graph.node) == expected


def halves(net, x, spelling, c):
    """The even and the odd channels, as exporters write them."""
    if spelling == "split":
        return net.split(net.shuffle(x, c, 2), 2)
    if spelling == "slice":
        y, h = net.shuffle(x, c, 2), c // 2
        bounds = ((0, h), (h, c))
        return [net.op("Slice", [y, *(net.const(np.array([v])) for v in (low, high, 1))]) for low, high in bounds]
    y = net.op("Reshape", [x, net.const(np.array([-1, 2, SIDE * SIDE]))])
    y = net.op("Transpose", [y], perm=[1, 0, 2])
    y = net.op("Reshape", [y, net.const(np.array([2, -1, c // 2, SIDE, SIDE]))])
    return [net.op("Gather", [y, net.const(np.array(at))], axis=0) for at in range(2)]


@pytest.mark.parametrize("spelling", ["split", "slice", "gather"])
@pytest.mark.parametrize("batch", [1, "N"])
def test_shuffles_that_hand_out_halves_become_gathers(spelling, batch):
    net = Net()
    x = net.picture(8, batch)
    x = net.op("Concat", [net.layer(x, 8, 6), net.layer(x, 8, 6)], axis=1)
    left, right = halves(net, x, spelling, 12)
    net.output(net.op("Concat", [left, net.layer(right, 6, 6)], axis=1))
    proto = net.model()
    expected = ["Conv", "Conv", "Concat", "Gather", "Conv", "Gather", "Concat"]
    result = check(fold_channel_shuffle, proto, picture(8, 1 if batch == 1 else 3), expected)
    assert not {n.name for n in proto.graph.node if n.op_type in MOVED} & {n.name for n in result.proto.graph.node}


def test_what_else_needs_the_order_keeps_it():
    for where in ("before", "behind"):
        net = Net()
        y = net.layer(net.picture(8), 8, 8)
        z = net.shuffle(y, 8, 2)
        net.output(net.layer(z, 8, 8))
        net.output(net.op("Softmax", [y if where == "before" else z], axis=1))
        expected = ["Conv", "Conv", "Softmax"]
        check(fold_channel_shuffle, net.model(), picture(8), sorted(expected, key=expected.index))


def between_softmaxes(*, spelled_out, conv=True):
    net = Net()
    y = net.layer(net.picture(8), 8, 8) if conv else net.picture(8)
    y = net.op("Softmax", [y], axis=1)
    y = net.shuffle(y, 8, 2) if spelled_out else net.op("Gather", [y, net.const(np.arange(8)[::-1].copy())], axis=1)
    net.output(net.op("Softmax", [y], axis=1))
    return net.model()


def test_a_shuffle_without_a_conv_to_take_it_becomes_a_gather_behind_named_convs_only():
    proto = between_softmaxes(spelled_out=True)
    check(fold_channel_shuffle, proto, picture(8), ["Conv", "Softmax", "Gather", "Softmax"])
    untouched(fold_channel_shuffle, between_softmaxes(spelled_out=True, conv=False))
    net = Net()
    y = net.layer(net.op("Softmax", [net.shuffle(net.layer(net.picture(8), 8, 8), 8, 2)], axis=1), 8, 8)
    net.output(y)
    refused(fold_channel_shuffle, net.model(), "no Conv makes", net.nodes[-1].name)


def test_a_gather_that_stays_says_why():
    refused(fold_channel_shuffle, between_softmaxes(spelled_out=False), "needs the order of channels")


def test_other_moves_are_no_shuffles():
    net = Net()
    y = net.layer(net.picture(8), 8, 8)
    net.output(net.layer(net.op("Transpose", [y], perm=[0, 1, 3, 2]), 8, 8))
    untouched(fold_channel_shuffle, net.model())
    net = Net()
    y = net.op("Reshape", [net.layer(net.picture(8), 8, 8), net.const(np.array([0, 0, -1]))])
    net.output(net.op("Transpose", [y], perm=[0, 2, 1]))
    untouched(fold_channel_shuffle, net.model())


def test_the_runtime_runs_integer_convs_and_two_transposes():
    net = Net()
    y = net.op("Relu", [net.layer(net.picture(16), 16, 32, group=4)])
    y = net.layer(net.shuffle(y, 32, 4), 32, 32, group=32, k=3)
    net.output(net.op("Relu", [net.layer(y, 32, 32, group=4)]))
    proto = net.model()
    found = [k.op_type for k in runtime_kernels(quantize(rewritten(fold_channel_shuffle, proto).proto).quantized)]
    assert (found.count("QLinearConv"), found.count("Transpose"), found.count("Reshape")) == (3, 2, 0)
