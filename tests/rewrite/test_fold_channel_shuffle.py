import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.rewrite import fold_channel_shuffle
from tests.models import Net, normal
from tests.rewrite.forms import check, ops, parse, refused

SIDE = 4
MOVED = ["Reshape", "Transpose", "Reshape"]


class Shuffled(Net):
    """Adds grouped Convs and shuffles."""

    @classmethod
    def of_channels(cls, channels, batch="N", **options):
        return cls.over([batch, channels, SIDE, SIDE], **options)

    def layer(self, x, inputs, outputs, *, group=1, k=1, bias=True):
        operands = [x, self.weight((outputs, inputs // group, k, k)), *([self.weight((outputs,))] if bias else [])]
        return self.op("Conv", operands, group=group, kernel_shape=[k, k], pads=[k // 2] * 4)

    def shuffle(self, x, channels, groups, *, flat=False):
        inner = [SIDE * SIDE] if flat else [SIDE, SIDE]
        y = self.op("Reshape", [x, [0, groups, channels // groups, *inner]])
        y = self.op("Transpose", [y], perm=[0, 2, 1, *range(3, 3 + len(inner))])
        return self.op("Reshape", [y, [0, channels, SIDE, SIDE]])


def picture(channels, batch=2, seed=0):
    return normal((batch, channels, SIDE, SIDE), seed)


@given(
    groups=st.sampled_from([(1, 1), (1, 2), (2, 1), (4, 4), (2, 4), (4, 2), (8, 1), (1, 8), (8, 8)]),
    shuffled=st.sampled_from([2, 3, 4, 6]),
    way=st.lists(st.sampled_from(["Relu", "depthwise", "MaxPool", "HardSwish", "Clip"]), max_size=3),
    split=st.integers(0, 3), flat=st.booleans(), bias=st.booleans(), gathered=st.booleans(), also=st.booleans(),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_every_shuffle_between_convs_computes_the_same(groups, shuffled, way, split, flat, bias, gathered, also, seed):
    net, c = Shuffled.of_channels(8, seed=seed), 24

    def step(x, kind):
        if kind == "depthwise":
            return net.layer(x, c, c, group=c, k=3, bias=bias)
        if kind == "MaxPool":
            return net.op(kind, [x], kernel_shape=[3, 3], pads=[1] * 4)
        return net.op(kind, [x, 0.0, 1.0] if kind == "Clip" else [x])

    y = net.layer("x", 8, c, group=groups[0], bias=bias)
    for kind in way[:split]:
        y = step(y, kind)
    order = np.random.default_rng(seed).permutation(c)
    y = net.op("Gather", [y, order], axis=1) if gathered else net.shuffle(y, c, shuffled, flat=flat)
    for kind in way[split:]:
        y = step(y, kind)
    proto = net.of(net.layer(y, c, 8, group=groups[1], bias=bias), *[y] * also)
    found = ops(check(fold_channel_shuffle, proto, picture(8, seed=seed)).proto)
    if also:
        return  # what the Conv reads is needed as it is
    folded = min(groups) <= 4
    assert found == [op for op in ops(proto) if op not in ("Gather", *MOVED)] if folded else "Gather" in found
    assert not set(MOVED) & set(found)


@pytest.mark.parametrize(("before", "behind", "expected"), [
    (1, 1, (1, 1)), (4, 1, (4, 1)), (1, 4, (1, 4)), (2, 4, (2, 1)), (4, 2, (1, 2)), (8, 4, (8, 1)),
])  # fmt: skip
def test_the_side_that_costs_less_changes(before, behind, expected):
    net = Shuffled.of_channels(16)
    y = net.shuffle(net.layer("x", 16, 16, group=before), 16, 4)
    found = check(fold_channel_shuffle, net.of(net.layer(y, 16, 16, group=behind)), picture(16), "Conv Conv").proto
    assert tuple(onnx.helper.get_node_attr_value(node, "group") for node in found.graph.node) == expected


def halves(net, x, spelling, c):
    """The even and the odd channels, as exporters write them."""
    if spelling == "split":
        first = net.op("Split", [net.shuffle(x, c, 2)], name="split", outputs=2, axis=1)
        return [first, f"{first}_1"]
    if spelling == "slice":
        y, h = net.shuffle(x, c, 2), c // 2
        return [net.op("Slice", [y, [low], [high], [1]]) for low, high in ((0, h), (h, c))]
    y = net.op("Transpose", [net.op("Reshape", [x, [-1, 2, SIDE * SIDE]])], perm=[1, 0, 2])
    y = net.op("Reshape", [y, [2, -1, c // 2, SIDE, SIDE]])
    return [net.op("Gather", [y, at]) for at in range(2)]


@pytest.mark.parametrize("spelling", ["split", "slice", "gather"])
@pytest.mark.parametrize("batch", [1, "N"])
def test_shuffles_that_hand_out_halves_become_gathers(spelling, batch):
    net = Shuffled.of_channels(8, batch)
    both = net.op("Concat", [net.layer("x", 8, 6), net.layer("x", 8, 6)], axis=1)
    left, right = halves(net, both, spelling, 12)
    proto = net.of(net.op("Concat", [left, net.layer(right, 6, 6)], axis=1))
    result = check(
        fold_channel_shuffle, proto, picture(8, 1 if batch == 1 else 3), "Conv Conv Concat Gather Conv Gather Concat"
    )
    assert not {n.name for n in proto.graph.node if n.op_type in MOVED} & {n.name for n in result.proto.graph.node}


def between_softmaxes(*, spelled_out=True, conv=True):
    net = Shuffled.of_channels(8)
    y = net.op("Softmax", [net.layer("x", 8, 8) if conv else "x"], axis=1)
    y = net.shuffle(y, 8, 2) if spelled_out else net.op("Gather", [y, np.arange(8)[::-1].copy()], axis=1)
    return net.of(net.op("Softmax", [y], axis=1))


def test_a_shuffle_without_a_conv_to_take_it_becomes_a_gather_behind_named_convs_only():
    check(fold_channel_shuffle, between_softmaxes(), picture(8), "Conv Softmax Gather Softmax")
    refused(fold_channel_shuffle, between_softmaxes(conv=False), None)
    refused(fold_channel_shuffle, between_softmaxes(spelled_out=False), "needs the order of channels")
    net = Shuffled.of_channels(8)
    y = net.layer(net.op("Softmax", [net.shuffle(net.layer("x", 8, 8), 8, 2)], axis=1), 8, 8)
    refused(fold_channel_shuffle, net.of(y), "no Conv makes", y)


@pytest.mark.parametrize("moves", [
    "t = Transpose<perm = [0,1,3,2]>(c) y = Conv(t, w)", "r = Reshape(c, rows) y = Transpose<perm = [0,2,1]>(r)",
])  # fmt: skip
def test_other_moves_are_no_shuffles(moves):
    text = f"(float[N,8,4,4] x) => (y) <float[8,8,1,1] w, int64[3] rows> {{ c = Conv(x, w) {moves} }}"
    refused(fold_channel_shuffle, parse(text, {"rows": [0, 0, -1]}), None)
