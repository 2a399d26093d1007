from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from kenosis_ort.targets.ort_cpu.rewrites import pad_depthwise
from tests.graph.build import assert_same, model, ops, value
from tests.rewrite.forms import check, kernels_by_node, refused, rewritten, untouched

RNG = np.random.default_rng(0)


class Net:
    """A net built node by node; every call returns the value it made, named like its node."""

    def __init__(self, rng=RNG):
        self.rng, self.nodes, self.weights = rng, [], {}

    def op(self, kind, *inputs, name=None, **attributes):
        name = name or f"{kind.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, *shape):
        name = f"k{len(self.weights)}"
        self.weights[name] = (self.rng.normal(size=shape) * 0.5).astype(np.float32)
        return name

    def conv(self, x, outputs, inputs, *, kernel=1, group=1, bias=True, name=None):
        given = [self.constant(outputs, inputs // group, kernel, kernel)] + ([self.constant(outputs)] if bias else [])
        return self.op("Conv", x, *given, name=name, group=group, pads=[kernel // 2] * 4)

    def proto(self, y="y", *, outputs=None, **options):
        found = outputs or {y: 5}
        values = [value(name, ["N", channels, None, None]) for name, channels in found.items()]
        return model(self.nodes, [value("x", ["N", 4, 6, 7])], values, self.weights, **options)


X = {"x": RNG.normal(size=(2, 4, 6, 7)).astype(np.float32)}


def inverted_bottleneck(count, *, name="dw", middle=(), bias=True):
    """``x -> expand -> middle -> dw -> middle -> project -> y``."""
    net = Net()
    at = net.conv("x", count, 4, bias=bias, name="expand")
    for op in middle:
        at = net.op(op, at)
    at = net.conv(at, count, count, kernel=3, group=count, bias=bias, name=name)
    for op in middle:
        at = net.op(op, at)
    net.conv(at, 5, count, bias=bias, name="y")
    return net


def check_padded(proto, count, padded, **options):
    prepared = check(pad_depthwise, proto, X, ops(proto), **options)
    for node in prepared.proto.graph.node:
        group = next((a.i for a in node.attribute if a.name == "group"), 1)
        assert group in (1, padded)
    onnx.shape_inference.infer_shapes(prepared.proto, strict_mode=True, check_type=True)
    return prepared


UNARY = ["Relu", "Sigmoid", "HardSwish", "HardSigmoid", "Neg", "Erf", "Tanh", "Softplus", "Clip"]


@settings(deadline=None)
@given(
    count=st.sampled_from([17, 24, 30, 36, 40, 47, 50]),
    steps=st.lists(
        st.sampled_from(["unary", "dw", "constant", "scalar", "gate", "skip", "pool", "dense", "mean"]), max_size=6
    ),
    bias=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_net_of_channels(count, steps, bias, seed):
    rng = np.random.default_rng(seed)
    net = Net(rng)
    first = at = net.conv("x", count, 4, bias=bias)
    at = net.conv(at, count, count, kernel=3, group=count, bias=bias)
    for step in steps:
        if step == "unary":
            at = net.op(str(rng.choice(UNARY)), at)
        elif step == "dw":
            at = net.conv(at, count, count, kernel=3, group=count, bias=bias)
        elif step == "constant":
            shape = (count, 1, 1) if rng.random() < 0.5 else (1, count, 1, 1)
            at = net.op(str(rng.choice(["Add", "Mul", "PRelu"])), at, net.constant(*shape))
        elif step == "scalar":
            at = net.op("Add", at, net.constant())
        elif step == "gate":
            small = net.conv(net.op("GlobalAveragePool", at), 3, count)
            at = net.op("Mul", at, net.op("HardSigmoid", net.conv(small, count, 3)))
        elif step == "skip":
            at = net.op("Add", at, first)
        elif step == "pool":
            at = net.op("AveragePool", at, kernel_shape=[3, 3], pads=[1] * 4)
        elif step == "dense":
            at = net.conv(net.op("Relu", at), count, count, kernel=3, bias=bias)
        elif step == "mean":
            at = net.op("Mul", at, net.op("Sigmoid", net.op("ReduceMean", at, axes=[2, -1])))
    net.conv(at, 5, count, bias=bias, name="y")
    proto = net.proto()
    padded = -(-count // 16) * 16
    growth = padded / count
    if growth > 4 / 3:
        refused(pad_depthwise, proto, f"{count} channels would become {padded}")
    else:
        check_padded(proto, count, padded)


def test_what_is_stored():
    net = inverted_bottleneck(24)
    before = {k: v.copy() for k, v in net.weights.items()}
    prepared = check_padded(net.proto(), 24, 32)
    after = {i.name: numpy_helper.to_array(i) for i in prepared.proto.graph.initializer}
    assert sorted(after) == [*(f"k{i}_padded" for i in range(5)), "k5"], "a name goes with a shape"
    rows, rows_bias, depthwise, depthwise_bias, columns, columns_bias = (after[name] for name in sorted(after))
    for new, old in zip((rows, rows_bias, depthwise, depthwise_bias), list(before.values())[:4], strict=True):
        np.testing.assert_array_equal(new[:24], old)
        assert (new[24:] == old[:1]).all()
    inferred = {v.name: v.type.tensor_type.shape.dim for v in prepared.proto.graph.value_info}
    assert [inferred[name][1].dim_value for name in ("expand_padded", "dw_padded")] == [32, 32]
    assert not columns[:, 24:].any()
    np.testing.assert_array_equal(columns_bias, list(before.values())[5])


def test_two_depthwise_convs_of_one_set_are_padded_once():
    net = Net()
    at = net.conv("x", 24, 4)
    for name in ("a", "b"):
        at = net.conv(at, 24, 24, kernel=3, group=24, name=name)
    net.conv(at, 5, 24, name="y")
    assert check_padded(net.proto(), 24, 32).notes[-1].startswith("2 depthwise")


@pytest.mark.parametrize("count", [32, 12])
def test_other_counts_are_no_candidates(count):
    untouched(pad_depthwise, inverted_bottleneck(count).proto())


def test_every_node_that_changes_has_to_be_named():
    proto = inverted_bottleneck(24).proto()
    refused(pad_depthwise, proto, "'expand' carries its channels and is not to change", "dw", "y")
    untouched(pad_depthwise, proto, "expand", "y")
    assert_same(proto, rewritten(pad_depthwise, proto, "expand", "dw", "y").proto, X, rtol=1e-5)


def reaching(kind, *more, attributes=None, outputs=None):
    """A bottleneck whose depthwise output goes through a further operator."""
    net = inverted_bottleneck(24)
    net.op(kind, "dw", *more, name="z", **(attributes or {}))
    return net.proto(outputs=outputs or {"y": 5, "z": 24})


def with_constant(kind, shape):
    net = inverted_bottleneck(24)
    net.op(kind, "dw", net.constant(*shape), name="s")
    net.conv("s", 5, 24, name="z")
    return net.proto(outputs={"y": 5, "z": 5})


def variable_rows():
    net = inverted_bottleneck(24, bias=False)
    proto = net.proto()
    del proto.graph.initializer[0]
    proto.graph.input.append(value("k0", [24, 4, 1, 1]))
    return proto


def from_input():
    net = Net()
    net.conv("x", 24, 24, kernel=3, group=24, name="dw")
    net.conv("dw", 5, 24, name="y")
    proto = net.proto()
    proto.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 24
    return proto


def grouped():
    net = inverted_bottleneck(24)
    net.conv("dw", 6, 24, group=2, name="z")
    return net.proto(outputs={"y": 5, "z": 6})


def as_weights():
    net = inverted_bottleneck(24)
    net.op("Conv", "a", "dw", name="z")
    proto = net.proto(outputs={"y": 5, "z": 4})
    proto.graph.input.append(value("a", [1, 24, 9, 9]))
    return proto


def captured():
    net = inverted_bottleneck(24)
    branch = helper.make_graph([helper.make_node("Relu", ["dw"], ["t"])], "t", [], [value("t", None)])
    net.nodes.append(helper.make_node("If", ["flag"], ["z"], name="if", then_branch=branch, else_branch=branch))
    net.weights["flag"] = np.array(True)
    return net.proto(outputs={"y": 5, "z": 24})


@pytest.mark.parametrize(
    ("proto", "reason"),
    [
        (inverted_bottleneck(17).proto(), "17 channels would become 32"),
        (reaching("Relu"), "its channels reach 'z', which is needed as it is"),
        (from_input(), "its channels reach 'x', which is needed as it is"),
        (captured(), "needed as it is"),
        (reaching("Softmax", attributes={"axis": 1}), "'z' (Softmax) may need its channels as they are"),
        (reaching("Concat", "expand", attributes={"axis": 1}, outputs={"y": 5, "z": 48}), "'z' (Concat)"),
        (reaching("ReduceMean", attributes={"axes": [1]}), "'z' (ReduceMean)"),
        (grouped(), "'z' splits its channels into groups"),
        (as_weights(), "'z' takes its channels for weights"),
        (variable_rows(), "the weights of 'expand' are not constant"),
        (with_constant("Add", (24, 6, 7)), None),
        (with_constant("Add", (2, 24, 1, 1)), None),
    ],
)
def test_what_stays_and_why(proto, reason):
    if reason is None:  # any other axis of a constant may be as long as it likes
        check_padded(proto, 24, 32)
    else:
        refused(pad_depthwise, proto, reason)


def test_the_runtime_runs_it_in_integer():
    net = Net()
    at = net.op("Relu", net.conv("x", 16, 4, kernel=3, name="stem"))
    at = net.op("Relu", net.conv(at, 16, 16, kernel=3, name="dense"))
    at = net.op("Relu", net.conv(at, 24, 16, name="expand"))
    at = net.op("Relu", net.conv(at, 24, 24, kernel=3, group=24, name="dw"))
    net.conv(net.conv(at, 16, 24, name="project"), 5, 16, name="y")
    found = kernels_by_node(rewritten(pad_depthwise, net.proto()).proto)
    assert {found[name] for name in ("dense", "expand", "dw", "project")} == {"com.microsoft.QLinearConv"}
