"""Padding of windows, pools as Convs, means as pools, LRN as a pool."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kenosis_ort.rewrite import average_pool_to_conv, fold_padding, lrn_to_pool, pool_from_mean
from tests.graph.build import run
from tests.models import Net, normal
from tests.rewrite.forms import check, ops, refused, rewritten

VERSION = tuple(int(part) for part in ort.__version__.split(".")[:2])
MISCOUNTS = VERSION < (1, 25)  # the runtime's AveragePool of operator set 19 takes a wrong divisor where padding counts


def pool(kernel, size, *, channels=3, opset=17, **attributes):
    g = Net.over(["N", channels, *size], opset=opset)
    return g.of(g.op("AveragePool", ["x"], name="pool", kernel_shape=kernel, **attributes))


@given(
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)), strides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilations=st.tuples(st.integers(1, 2), st.integers(1, 2)), pads=st.tuples(*[st.integers(0, 3)] * 4),
    mode=st.sampled_from(["NOTSET", "NOTSET", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"]),
    size=st.tuples(st.integers(2, 9), st.integers(2, 9)), counted=st.booleans(), channels=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_any_pool(kernel, strides, dilations, pads, mode, size, counted, channels, seed):
    opset, padded = 18 if counted and MISCOUNTS else 19, mode == "NOTSET"
    dilations = dilations if padded and opset >= 19 else (1, 1)
    pads = tuple(min(pad, kernel[at % 2] - 1) for at, pad in enumerate(pads)) if padded else (0,) * 4
    reach = [(kernel[a] - 1) * dilations[a] + 1 for a in range(2)]
    counts = [(size[a] + pads[a] + pads[a + 2] - reach[a]) // strides[a] + 1 for a in range(2)]
    if mode.startswith("SAME"):
        counts = [-(-size[a] // strides[a]) for a in range(2)]
        assume(all((counts[a] - 1) * strides[a] + kernel[a] >= size[a] for a in range(2)))
    assume(min(counts) > 0)
    assume(max(counts) > 1)
    form = {"pads": pads, **({"dilations": dilations} if opset >= 19 else {})} if padded else {"auto_pad": mode}
    proto = pool(kernel, size, channels=channels, opset=opset, strides=strides, count_include_pad=int(counted), **form)
    x = normal((2, channels, *size), seed)
    if not np.isfinite(run(proto, {"x": x})[0]).all():
        refused(average_pool_to_conv, proto, "a window holds padding only")
        return
    prepared = rewritten(average_pool_to_conv, proto)
    if any("holds padding only" in note for note in prepared.notes):
        assert ops(prepared.proto) == ["AveragePool"]
        return
    found = ops(prepared.proto)
    assert found == ["Conv"] or (found == ["Conv", "Mul"] and not counted and (any(pads) or mode.startswith("SAME")))
    check(average_pool_to_conv, proto, x, found)


@given(
    operator=st.sampled_from(["Conv", "MaxPool"]), size=st.lists(st.integers(3, 7), min_size=1, max_size=3),
    zeros=st.tuples(*[st.integers(0, 2)] * 6), own=st.tuples(*[st.integers(0, 1)] * 6), kernel=st.integers(1, 4),
    stride=st.integers(1, 2), dilation=st.integers(1, 2), front=st.sampled_from(["Relu", "Clip", "Identity"]),
    form=st.sampled_from(["all axes", "some axes", "a number"]), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_any_pad_of_zeros(operator, size, zeros, own, kernel, stride, dilation, front, form, seed):
    rank, is_pool = len(size), operator == "MaxPool"
    dilation = 1 if is_pool else dilation
    before, behind, own = zeros[:rank], zeros[3 : 3 + rank], [min(pad, kernel - 1) for pad in own[: 2 * rank]]
    assume((np.add(size, before) + behind + own[:rank] + own[rank:] > (kernel - 1) * dilation).all())
    g = Net.over(["N", 2, *size], opset=18, seed=seed)
    x = g.op(front, ["x", g.const(np.float32(0.0))] if front == "Clip" else ["x"])
    listed = form == "some axes"
    amounts = [*before, *behind] if listed else [0, 0, *before, 0, 0, *behind]
    more = [g.const(np.float32(0.0))] if form == "a number" else []
    more = ["", g.const(np.arange(-rank, 0))] if listed else more
    y = g.op("Pad", [x, g.const(np.array(amounts)), *more])
    inputs = [y] if is_pool else [y, g.weight((3, 2, *[kernel] * rank))]
    form = {"kernel_shape": [kernel] * rank, "strides": [stride] * rank, "dilations": [dilation] * rank, "pads": own}
    model = g.of(g.op(operator, inputs, **form))
    total = [p + q for p, q in zip(own, (*before, *behind), strict=True)]
    if is_pool and (front == "Identity" or max(total) >= kernel):
        refused(fold_padding, model, "may be negative" if front == "Identity" else "padding alone")
        return
    found = check(fold_padding, model, normal((2, 2, *size), seed), f"{front} {operator}").proto
    assert next(list(a.ints) for a in found.graph.node[-1].attribute if a.name == "pads") == total


@pytest.mark.parametrize("proto", [
    pool((2, 2), ("H", "W"), strides=[2, 2]),  # without a border nothing has to be known of the picture
    pool((3, 3), ("H", "W"), pads=[1] * 4, count_include_pad=1),
    pool((3, 3), (7, 7), strides=[2, 2], ceil_mode=1),  # adds no window
    pool((3, 3), ("H", "W"), ceil_mode=1),
])  # fmt: skip
def test_pools_that_need_no_map(proto):
    check(average_pool_to_conv, proto, normal((2, 3, 7, 7)), "Conv")


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 9), st.integers(1, 9)),
    axes=st.permutations([2, 3]), negative=st.tuples(st.booleans(), st.booleans()),
    keepdims=st.sampled_from([None, 0, 1]), opset=st.sampled_from([13, 17, 18, 21]),
    magnitude=st.sampled_from([1e-3, 1.0, 1e5, 1e30]), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_every_mean_computes_the_same(shape, axes, negative, keepdims, opset, magnitude, seed):
    g = Net.over(shape, opset=opset)
    axes = [axis - 4 if flip else axis for axis, flip in zip(axes, negative, strict=True)]
    y = g.mean("x", axes, **({} if keepdims is None else {"keepdims": keepdims}))
    x = (np.random.default_rng(seed).uniform(0.1, 1, shape) * magnitude).astype(np.float32)
    assert check(pool_from_mean, g.of(y), x, "GlobalAveragePool" + " Flatten" * (keepdims == 0)).nodes == {}


def test_names_stay_unique():
    g = Net.over(["batch", 3, "h", 7])
    first = g.mean("x", [2, 3], keepdims=0)
    proto = g.of(g.op("Relu", [first], name=f"{first}_Flatten"), first)
    result = check(pool_from_mean, proto, np.ones((2, 3, 4, 7), np.float32), "GlobalAveragePool Flatten Relu").proto
    assert [node.name for node in result.graph.node] == [first, f"{first}_Flatten_1", f"{first}_Flatten"]


def test_computed_axes_stay():
    g = Net.over([1, 2, 4, 4], opset=18)
    axes = g.op("Cast", [g.op("ReduceMax", ["x"], keepdims=0)], to=onnx.TensorProto.INT64)
    g.output(g.op("ReduceMean", ["x", g.op("Unsqueeze", [axes, [0]])]), [1, "c", "h", "w"])
    refused(pool_from_mean, g.of(), "are computed")


FRONT = "Mul Unsqueeze AveragePool Squeeze Mul Add"
POWERS = {0.25: " Sqrt Sqrt", 0.5: " Sqrt", 0.75: " Sqrt Sqrt Mul", 1.0: "", 1.3: " Pow"}


def by_definition(x, size, alpha, beta, bias):
    """The runtime's own operator adds and takes away squares as its window moves, and so loses digits of small ones."""
    beside = size // 2
    padded = np.pad(x.astype(np.float64) ** 2, ((0, 0), (beside, beside), (0, 0), (0, 0)))
    total = sum(padded[:, at : at + x.shape[1]] for at in range(size))
    return x / (bias + alpha / size * total) ** beta


@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4)),
    size=st.sampled_from([1, 3, 5, 7, 11]), alpha=st.sampled_from([1e-4, 1e-2, 1.5]),
    beta=st.sampled_from(list(POWERS)), bias=st.sampled_from([0.5, 1.0, 2.0]), symbolic=st.booleans(),
    magnitude=st.sampled_from([1e-2, 1.0, 1e3]), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_every_window_computes_the_same(shape, size, alpha, beta, bias, symbolic, magnitude, seed):
    g = Net.over(["n", shape[1], "h", "w"] if symbolic else shape)
    given = {"alpha": alpha, "beta": beta, "bias": bias}
    left_out = {"alpha": 1e-4, "beta": 0.75, "bias": 1.0}
    proto = g.of(g.op("LRN", ["x"], size=size, **dict(given.items() - left_out.items())))
    x = normal(shape, seed, magnitude)
    result = check(lrn_to_pool, proto, x, f"{FRONT}{POWERS[beta]} Div", rtol=1e-2)
    exact = by_definition(x, size, alpha, beta, bias)
    (y,) = run(result.proto, {"x": x})
    assert np.abs(y - exact).max() <= 1e-5 * np.abs(exact).max()
