from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from kenosis_ort.rewrite import average_pool_to_conv
from tests.graph.build import model, ops, run, value
from tests.rewrite.forms import check, refused, rewritten

RNG = np.random.default_rng(0)
VERSION = tuple(int(part) for part in ort.__version__.split(".")[:2])
MISCOUNTS = VERSION < (1, 25)  # the runtime's AveragePool of operator set 19 takes a wrong divisor where padding counts


def pool(kernel, size, *, channels=3, opset=17, **attributes):
    nodes = [helper.make_node("AveragePool", ["x"], ["y"], name="pool", kernel_shape=list(kernel), **attributes)]
    shape = ["N", channels, *size]
    return model(nodes, [value("x", shape)], [value("y", ["N", channels, *[None] * len(size)])], opset=opset)


def windows(length, kernel, stride, dilation, before, behind):
    return (length + before + behind - (kernel - 1) * dilation - 1) // stride + 1


@settings(deadline=None)
@given(
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilations=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    pads=st.tuples(*[st.integers(0, 3)] * 4),
    mode=st.sampled_from(["NOTSET", "NOTSET", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"]),
    size=st.tuples(st.integers(2, 9), st.integers(2, 9)),
    counted=st.booleans(),
    channels=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
def test_any_pool(kernel, strides, dilations, pads, mode, size, counted, channels, seed):
    rng = np.random.default_rng(seed)
    opset = 18 if counted and MISCOUNTS else 19
    if mode != "NOTSET" or opset < 19:
        dilations = (1, 1)
    pads = (0, 0, 0, 0) if mode != "NOTSET" else pads
    pads = tuple(min(pad, kernel[at % 2] - 1) for at, pad in enumerate(pads))  # the runtime takes no more
    counts = [windows(size[a], kernel[a], strides[a], dilations[a], pads[a], pads[a + 2]) for a in range(2)]
    if mode.startswith("SAME"):
        counts = [-(-size[a] // strides[a]) for a in range(2)]
        assume(all((counts[a] - 1) * strides[a] + kernel[a] >= size[a] for a in range(2)))
    assume(min(counts) > 0)
    assume(max(counts) > 1)
    attributes = {"strides": strides, "count_include_pad": int(counted)}
    attributes |= {"auto_pad": mode} if mode != "NOTSET" else {"pads": pads}
    attributes |= {"dilations": dilations} if mode == "NOTSET" and opset >= 19 else {}
    proto = pool(kernel, size, channels=channels, opset=opset, **attributes)
    x = {"x": rng.normal(size=(2, channels, *size)).astype(np.float32)}
    (expected,) = run(proto, x)
    if not np.isfinite(expected).all():
        refused(average_pool_to_conv, proto, "a window holds padding only")
        return
    prepared = rewritten(average_pool_to_conv, proto)
    if any("holds padding only" in note for note in prepared.notes):
        assert ops(prepared.proto) == ["AveragePool"]
        return
    found = ops(prepared.proto)
    assert found in (["Conv"], ["Conv", "Mul"])
    check(average_pool_to_conv, proto, x, found)
    if counted or not (any(pads) or mode.startswith("SAME")):
        assert found == ["Conv"]
    assert prepared.proto.graph.node[0].name == "pool"
    assert prepared.proto.graph.node[-1].output[0] == "y"


def test_the_border_map_of_the_usual_pool():
    prepared = rewritten(average_pool_to_conv, pool((3, 3), (4, 5), pads=[1, 1, 1, 1]))
    borders = {i.name: numpy_helper.to_array(i) for i in prepared.proto.graph.initializer}["pool_borders"]
    side = np.array([1.5, 1, 1, 1.5])[:, None] * np.array([1.5, 1, 1, 1, 1.5])
    np.testing.assert_array_equal(borders, side[None, None].astype(np.float32))


def test_without_a_border_nothing_has_to_be_known_of_the_picture():
    x = {"x": RNG.normal(size=(2, 3, 7, 6)).astype(np.float32)}
    check(average_pool_to_conv, pool((2, 2), ("H", "W"), strides=[2, 2]), x, ["Conv"])
    check(average_pool_to_conv, pool((3, 3), ("H", "W"), pads=[1] * 4, count_include_pad=1), x, ["Conv"])


def test_ceil_mode_that_adds_no_window():
    x = {"x": RNG.normal(size=(2, 3, 7, 7)).astype(np.float32)}
    check(average_pool_to_conv, pool((3, 3), (7, 7), strides=[2, 2], ceil_mode=1), x, ["Conv"])
    check(average_pool_to_conv, pool((3, 3), ("H", "W"), ceil_mode=1), x, ["Conv"])


@pytest.mark.parametrize(
    ("proto", "reason"),
    [
        (pool((3, 3), ("H", "W"), strides=[2, 2], ceil_mode=1), "ceil_mode may add a window"),
        (pool((3, 3), ("H", 4), pads=[1] * 4), "padding is not counted"),
        (pool((3, 3), ("H", 4), auto_pad="SAME_UPPER"), "depends on a height or width"),
        (pool((2,), (4,)), "'x' has 3 dimensions"),
        (pool((1, 1), (3, 3), strides=[3, 1], auto_pad="SAME_UPPER"), "padding is negative"),
    ],
)
def test_what_stays_and_why(proto, reason):
    refused(average_pool_to_conv, proto, reason)
