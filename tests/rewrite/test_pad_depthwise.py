from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

from kenosis_ort.targets.ort_cpu.rewrites import pad_depthwise
from kenosis_ort.verify import verify_fusion
from tests.models import Net, normal
from tests.planning import quantize
from tests.rewrite.forms import check, ops, refused, rewritten

X, SHAPE = normal((2, 4, 6, 7)), ("N", 4, 6, 7)


class Layers(Net):
    """Convs over few channels that keep height and width."""

    def constant(self, *shape):
        return self.const(self.rng.normal(size=shape) * 0.5, f"k{len(self.initializers)}")

    def layer(self, x, outputs, inputs, *, kernel=1, group=1, bias=True, name=None):
        given = [self.constant(outputs, inputs // group, kernel, kernel)] + ([self.constant(outputs)] if bias else [])
        return self.op("Conv", [x, *given], name=name, group=group, pads=[kernel // 2] * 4)

    def depthwise(self, x, count, **options):
        return self.layer(x, count, count, kernel=3, group=count, **options)


def inverted_bottleneck(count):
    """``x -> expand -> dw -> y``."""
    net = Layers.over(SHAPE)
    net.layer(net.depthwise(net.layer("x", count, 4, name="expand"), count, name="dw"), 5, count, name="y")
    return net


def check_padded(proto, count, padded, **options):
    prepared = check(pad_depthwise, proto, X, ops(proto), **options)
    for node in prepared.proto.graph.node:
        assert next((a.i for a in node.attribute if a.name == "group"), 1) in (1, padded)
    onnx.shape_inference.infer_shapes(prepared.proto, strict_mode=True, check_type=True)
    return prepared


UNARY = ["Relu", "Sigmoid", "HardSwish", "HardSigmoid", "Neg", "Erf", "Tanh", "Softplus", "Clip"]


@given(
    count=st.sampled_from([17, 24, 30, 36, 40, 47, 50]),
    steps=st.lists(
        st.sampled_from(["unary", "dw", "constant", "scalar", "gate", "skip", "pool", "dense", "mean"]), max_size=6
    ),
    bias=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_net_of_channels(count, steps, bias, seed):
    net = Layers.over(SHAPE, seed=seed)
    rng, first = net.rng, net.layer("x", count, 4, bias=bias)
    at = net.depthwise(first, count, bias=bias)
    for step in steps:
        if step == "unary":
            at = net.op(str(rng.choice(UNARY)), [at])
        elif step == "dw":
            at = net.depthwise(at, count, bias=bias)
        elif step == "constant":
            shape = (count, 1, 1) if rng.random() < 0.5 else (1, count, 1, 1)
            at = net.op(str(rng.choice(["Add", "Mul", "PRelu"])), [at, net.constant(*shape)])
        elif step == "scalar":
            at = net.op("Add", [at, net.constant()])
        elif step == "gate":
            small = net.layer(net.op("GlobalAveragePool", [at]), 3, count)
            at = net.op("Mul", [at, net.op("HardSigmoid", [net.layer(small, count, 3)])])
        elif step == "skip":
            at = net.op("Add", [at, first])
        elif step == "pool":
            at = net.op("AveragePool", [at], kernel_shape=[3, 3], pads=[1] * 4)
        elif step == "dense":
            at = net.layer(net.op("Relu", [at]), count, count, kernel=3, bias=bias)
        elif step == "mean":
            at = net.op("Mul", [at, net.op("Sigmoid", [net.op("ReduceMean", [at], axes=[2, -1])])])
    proto = net.of(net.layer(at, 5, count, bias=bias, name="y"))
    padded = -(-count // 16) * 16
    if padded / count > 4 / 3:
        refused(pad_depthwise, proto, f"{count} channels would become {padded}")
    else:
        check_padded(proto, count, padded)


def test_what_is_stored():
    net = inverted_bottleneck(24)
    before = [numpy_helper.to_array(tensor) for tensor in net.initializers]
    prepared = check_padded(net.of("y"), 24, 32)
    after = {i.name: numpy_helper.to_array(i) for i in prepared.proto.graph.initializer}
    assert sorted(after) == [*(f"k{i}_padded" for i in range(5)), "k5"], "a name goes with a shape"
    *rows, columns, columns_bias = (after[name] for name in sorted(after))
    for new, old in zip(rows, before[:4], strict=True):
        np.testing.assert_array_equal(new[:24], old)
        assert (new[24:] == old[:1]).all()
    inferred = {v.name: v.type.tensor_type.shape.dim for v in prepared.proto.graph.value_info}
    assert [inferred[name][1].dim_value for name in ("expand_padded", "dw_padded")] == [32, 32]
    assert not columns[:, 24:].any()
    np.testing.assert_array_equal(columns_bias, before[5])


def test_two_depthwise_convs_of_one_set_are_padded_once():
    net = Layers.over(SHAPE)
    at = net.depthwise(net.depthwise(net.layer("x", 24, 4), 24), 24)
    assert check_padded(net.of(net.layer(at, 5, 24)), 24, 32).notes[-1].startswith("2 depthwise")


def test_every_node_that_changes_has_to_be_named():
    proto = inverted_bottleneck(24).of("y")
    refused(pad_depthwise, proto, "'expand' carries its channels and is not to change", "dw", "y")
    refused(pad_depthwise, proto, None, "expand", "y")
    check(pad_depthwise, proto, X, ops(proto), "expand", "dw", "y")


@pytest.mark.parametrize("shape", [(24, 6, 7), (2, 24, 1, 1)])
def test_any_other_axis_of_a_constant_may_be_as_long_as_it_likes(shape):
    net = inverted_bottleneck(24)
    net.layer(net.op("Add", ["dw", net.constant(*shape)]), 5, 24, name="z")
    check_padded(net.of("y", "z"), 24, 32)


def test_the_runtime_runs_it_in_integer():
    net = Layers.over(SHAPE)
    at = net.op("Relu", [net.layer("x", 16, 4, kernel=3, name="stem")])
    at = net.op("Relu", [net.layer(at, 16, 16, kernel=3, name="dense")])
    at = net.op("Relu", [net.layer(at, 24, 16, name="expand")])
    at = net.op("Relu", [net.depthwise(at, 24, name="dw")])
    net.layer(net.layer(at, 16, 24, name="project"), 5, 16, name="y")
    outcome = quantize(rewritten(pad_depthwise, net.of("y")).proto)
    found = {k.node: k.kernel for k in verify_fusion(outcome.quantized, plan=outcome.plan).kernels}
    assert {found[name] for name in ("dense", "expand", "dw", "project")} == {"com.microsoft.QLinearConv"}
