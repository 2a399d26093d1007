"""Transposes that cancel across the nodes between them; orders of channels that Convs take in."""

import math

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st

from kenosis_ort.graph.shapes import infer_shapes
from kenosis_ort.rewrite import cancel_transposes, fold_channel_shuffle
from tests.graph.build import ready
from tests.models import Net, normal
from tests.rewrite.forms import check, ops, parse, refused, rewritten

LAST, FIRST = (0, 2, 3, 1), (0, 3, 1, 2)
PLAIN = ("Relu", "Sigmoid", "HardSwish", "Neg")


def moved(proto):
    """Numbers that Transposes move."""
    infer_shapes(proto)
    values = {v.name: v for v in (*proto.graph.value_info, *proto.graph.input, *proto.graph.output)}
    turned = [values[n.input[0]] for n in proto.graph.node if n.op_type == "Transpose"]
    return sum(math.prod(max(d.dim_value, 1) for d in v.type.tensor_type.shape.dim) for v in turned)


@given(data=st.data())
def test_any_net_of_transposes_computes_the_same_and_moves_no_more(data):
    size, batch = (2, 3, 4, 5), data.draw(st.sampled_from([2, "N"]))
    g = Net.over([batch, *size[1:]], opset=18)
    dims = {g.op("Transpose", ["x"], perm=LAST): tuple(size[a] for a in LAST)}
    for step in range(data.draw(st.integers(1, 9))):
        x, kind, more = data.draw(st.sampled_from([*dims][-2:])), data.draw(st.integers(0, 10)), {}
        shape, inputs, axis = list(dims[x]), [x], data.draw(st.integers(-4, 3))
        name = data.draw(st.sampled_from(PLAIN))
        if kind < 3:
            more["perm"] = data.draw(st.sampled_from([LAST, FIRST, (0, 1, 3, 2)]))
            name, shape = "Transpose", [shape[a] for a in more["perm"]]
        elif kind in (3, 4):  # with what is broadcast, or a value of its shape
            other = data.draw(st.sampled_from([name for name in dims if dims[name] == dims[x]]))
            rank = data.draw(st.integers(0, 4))
            kept = [s if data.draw(st.booleans()) else 1 for s in shape[4 - rank :]]
            constant = g.const(normal(tuple(kept), step))
            name, inputs = data.draw(st.sampled_from(["Add", "Mul", "PRelu"])), [x, constant]
            inputs = [x, other] if name != "PRelu" and data.draw(st.booleans()) else inputs
        elif kind == 5:
            name, inputs, more["axis"] = "Concat", [x, x], axis
            shape[axis] *= 2
        elif kind == 6:
            name, more["axis"] = "Softmax", axis
        elif kind in (7, 8):
            axes = sorted({axis % 4, data.draw(st.integers(0, 3))})
            inputs = [x, g.const(np.array(axes))] if data.draw(st.booleans()) else [x]
            name, more["keepdims"] = "ReduceMean", 1
            shape = [1 if a in axes or len(inputs) == 1 else s for a, s in enumerate(shape)]
        elif kind == 9:
            amounts, listed = data.draw(st.lists(st.integers(0, 1), min_size=8, max_size=8)), data.draw(st.booleans())
            amounts = [*amounts[1:4], *amounts[5:]] if listed else amounts
            axes = [1, 2, -1] if listed else [0, 1, 2, 3]
            name = "Pad"
            inputs = [x, g.const(np.array(amounts)), *(["", g.const(np.array(axes))] if listed else [])]
            for a, before, behind in zip(axes, amounts, amounts[len(axes) :], strict=False):
                shape[a] += before + behind
        if math.prod(shape) > 4000:
            continue
        dims[g.op(name, inputs, **more)] = tuple(shape)
    last = g.op("Relu", [g.op("Transpose", [[*dims][-1]], perm=FIRST)])
    model = g.of(last, *data.draw(st.sets(st.sampled_from([*dims]), max_size=2)))
    result = check(cancel_transposes, model, normal(size, 1), rtol=1e-4)
    assert moved(result.proto) <= moved(ready(model).proto)


@pytest.mark.parametrize("step", [
    "Softmax(t)", "LogSoftmax<axis = 1>(t)", "Concat<axis = -1>(t, t)", "Clip(t, low, high)", "PRelu(t, slope)",
    "Sub(slope, t)", "Pad(t, four)", "Pad(t, two, , axes)", "ReduceMax<keepdims = 1>(t, axes)", "ReduceMean(t)",
    "ReduceSum<keepdims = 1>(t, axes)",
])  # fmt: skip
def test_each_kind_of_step_between_two_of_them(step):
    text = f"""(float[1,4,5,6] x) => (float y) <float low = {{-0.5}}, float high = {{0.5}}, float[4] slope,
        int64[2] axes = {{1,-1}}, int64[4] two = {{0,1,2,3}}, int64[8] four = {{0,1,2,0,0,0,1,3}}> {{
        t = Transpose<perm = [0,2,3,1]>(x) s = {step} u = Transpose<perm = [0,3,1,2]>(s) y = Softplus(u) }}"""
    operator = step.partition("(")[0].partition("<")[0]
    check(cancel_transposes, parse(text, opset=18), normal((1, 4, 5, 6)), f"{operator} Softplus")


def test_a_transpose_is_put_where_another_order_is_needed():
    text = """(float[1,4,5,6] x) => (float[1,6,5,4] y, float[1,5,6,4] r) {
        t = Transpose<perm = [0,2,3,1]>(x) r = Relu(t) s = Sigmoid(r)
        u = Transpose<perm = [0,3,1,2]>(s) v = Transpose<perm = [0,3,1,2]>(r)
        a = Add(u, v) y = Transpose<perm = [0,3,2,1]>(a) }"""
    check(cancel_transposes, parse(text), normal((1, 4, 5, 6)), "Relu Transpose Sigmoid Add Transpose")
    kept = rewritten(cancel_transposes, parse(text), keep_values=["s", "t", "u"])
    assert ops(kept.proto) == [node.op_type for node in parse(text).graph.node]


def test_what_comes_from_elsewhere_is_transposed_where_it_is_small():
    text = """(float[1,4,5,6] x, float[1,h,w,4] z) => (float[1,4,5,6] y) {{
        t = Transpose<perm = [0,2,3,1]>(x) k = Sigmoid(z) {} u = Transpose<perm = [0,3,1,2]>(m) y = Softplus(u) }}"""
    x, gate, whole = normal((1, 4, 5, 6)), normal((1, 1, 1, 4)), normal((1, 5, 6, 4))
    once, often = parse(text.format("m = Mul(t, k)")), parse(text.format("c = Cos(z) d = Sin(z) m = Sum(c, d, t, k)"))
    for z in (gate, whole):
        check(cancel_transposes, once, {"x": x, "z": z}, "Sigmoid Transpose Mul Softplus")
    for model, z in ((once, gate), (once, whole), (often, whole)):
        for value, dims in zip(model.graph.input, (x.shape, z.shape), strict=True):
            value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, onnx.TensorProto.FLOAT, dims))
    check(cancel_transposes, once, {"x": x, "z": whole}, "Sigmoid Transpose Mul Softplus")
    check(cancel_transposes, often, {"x": x, "z": whole}, "Transpose Sigmoid Cos Sin Sum Transpose Softplus")


def test_an_order_that_undoes_itself_within_a_square():
    text = """(float[1,4,5,5] x) => (float y) <float[4,4,1,1] w> {
        t = Transpose<perm = [0,1,3,2]>(x) s = Sigmoid(t) u = Transpose<perm = [0,1,3,2]>(s)
        a = Sub(s, u) v = Transpose<perm = [0,1,3,2]>(a) y = Conv(v, w) }"""
    check(cancel_transposes, parse(text), normal((1, 4, 5, 5)), "Sigmoid Transpose Sub Conv")


# ---- channel shuffles ------------------------------------------------------------------------------------------------


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
    proto, x = net.of(net.op("Concat", [left, net.layer(right, 6, 6)], axis=1)), picture(8, 1 if batch == 1 else 3)
    result = check(fold_channel_shuffle, proto, x, "Conv Conv Concat Gather Conv Gather Concat")
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
