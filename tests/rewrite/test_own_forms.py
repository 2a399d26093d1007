"""Forms of the target's own: first Convs over few channels, and depthwise Convs filled up to whole blocks."""

from unittest import mock

import onnx
import pytest
from hypothesis import assume, given, strategies as st

from kenosis_ort.targets.ort_cpu import rewrites
from kenosis_ort.targets.ort_cpu.rewrites import pad_depthwise, pad_stem_channels, space_to_depth_stem
from kenosis_ort.verify import verify_fusion
from tests.models import Net, normal
from tests.planning import quantize
from tests.rewrite.forms import check, ops, refused, rewritten


def stem(kernel, size, *, channels=3, strides=(2, 2), bias=True, seed=0, **attributes):
    g = Net.over(["N", channels, *size], seed=seed)
    weights = [g.const(g.rng.normal(size=(4, channels, *kernel)), "w"), *([g.rng.normal(size=4)] if bias else [])]
    return g.of(g.op("Conv", ["x", *weights], name="stem", strides=strides, **attributes))


@given(
    block=st.sampled_from([2, 2, 2, 3, 4]), kernel=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    blocks=st.tuples(st.integers(1, 7), st.integers(1, 7)), pads=st.tuples(*[st.integers(0, 5)] * 4),
    mode=st.sampled_from(["NOTSET", "NOTSET", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"]),
    channels=st.sampled_from([1, 2, 3, 5]), bias=st.booleans(), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_any_stem_cut(block, kernel, blocks, pads, mode, channels, bias, seed):
    size = [block * n for n in blocks]
    given_pads = pads if mode == "NOTSET" else (0, 0, 0, 0)
    if mode.startswith("SAME"):
        assume(all((blocks[a] - 1) * block + kernel[a] >= size[a] for a in range(2)))
    else:
        assume(all(size[a] + given_pads[a] + given_pads[a + 2] >= kernel[a] for a in range(2)))
    form = {"pads": pads} if mode == "NOTSET" else {"auto_pad": mode}
    form |= {"strides": (block, block), "kernel_shape": kernel}
    proto = stem(kernel, size, channels=channels, bias=bias, seed=seed, **form)
    with mock.patch.multiple(rewrites, _BLOCKS=(2, 3, 4), _LARGEST_GROWTH=1000):  # exact whether or not it pays
        prepared = check(space_to_depth_stem, proto, normal((2, channels, *size), seed), "SpaceToDepth Conv")
    conv = prepared.proto.graph.node[1]
    assert not {a.name for a in conv.attribute} & {"strides", "auto_pad", "group"}
    assert min([0, *next((a.ints for a in conv.attribute if a.name == "pads"), [])]) >= 0


@pytest.mark.parametrize(("kernel", "pads", "new_kernel", "new_pads"), [
    ((3, 3), (1, 1, 1, 1), (2, 2), (1, 1, 0, 0)), ((3, 3), (0, 0, 1, 1), (2, 2), (0, 0, 1, 1)),
    ((7, 7), (3, 3, 3, 3), (4, 4), (2, 2, 1, 1)), ((6, 6), (2, 2, 2, 2), (3, 3), (1, 1, 1, 1)),
    ((2, 2), (0, 0, 0, 0), (1, 1), None), ((7, 3), (3, 0, 2, 0), (4, 2), (2, 0, 1, 0)),
])  # fmt: skip
def test_the_new_window_is_the_smallest(kernel, pads, new_kernel, new_pads):
    prepared = rewritten(space_to_depth_stem, stem(kernel, (8, 8), pads=pads))
    attributes = {a.name: tuple(a.ints) for a in prepared.proto.graph.node[1].attribute}
    assert (attributes.get("kernel_shape"), attributes.get("pads")) == (new_kernel, new_pads)


@given(
    kernel=st.tuples(st.integers(1, 5), st.integers(2, 5)), strides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    pads=st.tuples(*[st.integers(0, 3)] * 4), dilation=st.integers(1, 2), channels=st.sampled_from([1, 2, 3, 5, 6, 7]),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_any_stem_filled_up(kernel, strides, pads, dilation, channels, seed):
    form = {"strides": strides, "pads": pads, "dilations": [dilation] * 2}
    proto = stem(kernel, ("H", "W"), channels=channels, bias=False, seed=seed, **form)
    prepared = check(pad_stem_channels, proto, normal((2, channels, 9, 11), seed), "Pad Conv")
    (inner,) = prepared.proto.graph.value_info
    found = prepared.proto.graph.node[1].input[1], inner.type.tensor_type.shape.dim[1].dim_value
    assert found == ("w_padded", 4 if channels < 4 else 8)


# ---- depthwise Convs, and all that carries their channels ------------------------------------------------------------


X, SHAPE = normal((2, 4, 6, 7)), ("N", 4, 6, 7)


class Layers(Net):
    """Convs over few channels that keep height and width."""

    bias = True

    def constant(self, *shape):
        return self.const(self.rng.normal(size=shape) * 0.5, f"k{len(self.initializers)}")

    def layer(self, x, outputs, inputs, *, kernel=1, group=1, name=None):
        given = [self.constant(outputs, inputs // group, kernel, kernel)] + [self.constant(outputs)] * self.bias
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
STEPS = {
    "unary": lambda net, at, n, first: net.op(str(net.rng.choice(UNARY)), [at]),
    "dw": lambda net, at, n, first: net.depthwise(at, n),
    "constant": lambda net, at, n, first: net.op(
        str(net.rng.choice(["Add", "Mul", "PRelu"])), [at, net.constant(*([1] * int(net.rng.integers(2))), n, 1, 1)]),
    "scalar": lambda net, at, n, first: net.op(
        "Max", [net.constant(), at, net.layer(net.op("GlobalAveragePool", [at]), n, n)]),
    "gate": lambda net, at, n, first: net.op("Mul", [at, net.op(
        "HardSigmoid", [net.layer(net.layer(net.op("GlobalAveragePool", [at]), 3, n), n, 3)])]),
    "skip": lambda net, at, n, first: net.op("Add", [at, first]),
    "pool": lambda net, at, n, first: net.op("AveragePool", [at], kernel_shape=[3, 3], pads=[1] * 4),
    "dense": lambda net, at, n, first: net.layer(net.op("Relu", [at]), n, n, kernel=3),
    "mean": lambda net, at, n, first: net.op(
        "Mul", [at, net.op("Sigmoid", [net.op("ReduceMean", [at], axes=[2, -1])])]),
}  # fmt: skip


@given(
    count=st.sampled_from([17, 24, 30, 36, 40, 47, 50]), steps=st.lists(st.sampled_from([*STEPS]), max_size=6),
    bias=st.booleans(), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_any_net_of_channels(count, steps, bias, seed):
    net = Layers.over(SHAPE, seed=seed)
    net.bias = bias
    at = first = net.layer("x", count, 4)
    for step in ("dw", *steps):
        at = STEPS[step](net, at, count, first)
    proto = net.of(net.layer(at, 5, count, name="y"))
    padded = -(-count // 16) * 16
    if padded / count > 4 / 3:
        refused(pad_depthwise, proto, f"{count} channels would become {padded}")
    else:
        check_padded(proto, count, padded)


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
    net, at = Layers.over(SHAPE), "x"
    for name, *sizes, kernel, group in (
        ("stem", 16, 4, 3, 1), ("dense", 16, 16, 3, 1), ("expand", 24, 16, 1, 1), ("dw", 24, 24, 3, 24)
    ):  # fmt: skip
        at = net.op("Relu", [net.layer(at, *sizes, name=name, kernel=kernel, group=group)])
    net.layer(net.layer(at, 16, 24, name="project"), 5, 16, name="y")
    outcome = quantize(rewritten(pad_depthwise, net.of("y")).proto)
    found = {k.node: k.kernel for k in verify_fusion(outcome.quantized, plan=outcome.plan).kernels}
    assert {found[name] for name in ("dense", "expand", "dw", "project")} == {"com.microsoft.QLinearConv"}
