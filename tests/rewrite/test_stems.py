"""First Convs over few channels: cut into blocks, or filled up with channels of zeros."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx import helper

from kenosis_ort.targets.ort_cpu import rewrites
from kenosis_ort.targets.ort_cpu.rewrites import pad_stem_channels, space_to_depth_stem
from tests.graph.build import model, ops, value
from tests.rewrite.forms import check, refused, rewritten, untouched

RNG = np.random.default_rng(0)


def stem(kernel, size, *, channels=3, outputs=4, strides=(2, 2), bias=True, rng=RNG, group=1, **attributes):
    weights = {"w": rng.normal(size=(outputs, channels // group, *kernel)).astype(np.float32)}
    if bias:
        weights["d"] = rng.normal(size=outputs).astype(np.float32)
    attributes |= {"strides": strides} if strides else {}
    attributes |= {"group": group} if group != 1 else {}
    nodes = [helper.make_node("Conv", ["x", *weights], ["y"], name="stem", **attributes)]
    return model(nodes, [value("x", ["N", channels, *size])], [value("y", [None] * 4)], weights)


@settings(deadline=None)
@given(
    block=st.sampled_from([2, 2, 2, 3, 4]),
    kernel=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    blocks=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    pads=st.tuples(*[st.integers(0, 5)] * 4),
    mode=st.sampled_from(["NOTSET", "NOTSET", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"]),
    channels=st.sampled_from([1, 2, 3, 5]),
    bias=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_stem_cut(block, kernel, blocks, pads, mode, channels, bias, seed):
    rng = np.random.default_rng(seed)
    size = [block * n for n in blocks]
    given_pads = pads if mode == "NOTSET" else (0, 0, 0, 0)
    if mode.startswith("SAME"):
        assume(all((blocks[a] - 1) * block + kernel[a] >= size[a] for a in range(2)))
    else:
        assume(all(size[a] + given_pads[a] + given_pads[a + 2] >= kernel[a] for a in range(2)))
    attributes = {"pads": list(pads)} if mode == "NOTSET" else {"auto_pad": mode}
    proto = stem(
        kernel, size, channels=channels, strides=(block, block), bias=bias, rng=rng, kernel_shape=kernel, **attributes
    )
    x = rng.normal(size=(2, channels, *size)).astype(np.float32)
    with mock.patch.multiple(rewrites, _BLOCKS=(2, 3, 4), _LARGEST_GROWTH=1000):  # exact whether or not it pays
        prepared = check(space_to_depth_stem, proto, {"x": x}, ["SpaceToDepth", "Conv"])
    conv = prepared.proto.graph.node[1]
    assert (conv.name, conv.output[0]) == ("stem", "y")
    assert not {a.name for a in conv.attribute} & {"strides", "auto_pad", "group"}
    assert min([0, *next((a.ints for a in conv.attribute if a.name == "pads"), [])]) >= 0


@pytest.mark.parametrize(
    ("kernel", "pads", "new_kernel", "new_pads"),
    [
        ((3, 3), (1, 1, 1, 1), (2, 2), (1, 1, 0, 0)),
        ((3, 3), (0, 0, 1, 1), (2, 2), (0, 0, 1, 1)),
        ((7, 7), (3, 3, 3, 3), (4, 4), (2, 2, 1, 1)),
        ((6, 6), (2, 2, 2, 2), (3, 3), (1, 1, 1, 1)),
        ((2, 2), (0, 0, 0, 0), (1, 1), None),
        ((7, 3), (3, 0, 2, 0), (4, 2), (2, 0, 1, 0)),
    ],
)
def test_the_new_window_is_the_smallest(kernel, pads, new_kernel, new_pads):
    prepared = rewritten(space_to_depth_stem, stem(kernel, (8, 8), pads=pads))
    attributes = {a.name: tuple(a.ints) for a in prepared.proto.graph.node[1].attribute}
    assert attributes.get("kernel_shape") == new_kernel
    assert attributes.get("pads") == new_pads


def test_values_and_batch_are_kept():
    prepared = rewritten(space_to_depth_stem, stem((3, 3), (8, 8)), keep_values=["x", "y"])
    assert ops(prepared.proto) == ["SpaceToDepth", "Conv"]
    (inner,) = prepared.proto.graph.value_info
    dims = inner.type.tensor_type.shape.dim
    assert (dims[0].dim_param, [d.dim_value for d in dims[1:]]) == ("N", [12, 4, 4])


@pytest.mark.parametrize(
    "proto",
    [
        stem((3, 3), (8, 8), strides=None),
        stem((3, 3), (8, 8), channels=4),
        stem((3, 3), (8, 8), channels=9),
        stem((3, 3), (8, 8), channels=6, group=2),
    ],
    ids=["stride-1", "four-channels", "many-channels", "groups"],
)
def test_other_convs_are_not_cut(proto):
    untouched(space_to_depth_stem, proto)


def variable_weights():
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], name="stem", strides=[2, 2])]
    return model(nodes, [value("x", [1, 3, 8, 8]), value("w", [4, 3, 3, 3])], [value("y", [1, 4, 3, 3])])


def without_rank(proto):
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    return proto


@pytest.mark.parametrize(
    ("proto", "reason"),
    [
        (variable_weights(), "weights are not constant"),
        (stem((3, 3), (15, 15), strides=(5, 5)), "its stride is 5 x 5"),
        (stem((3, 3), (9, 9), strides=(3, 3)), "its stride is 3 x 3"),
        (stem((3, 3), ("H", 8), auto_pad="SAME_UPPER"), "depends on a height or width"),
        (without_rank(stem((3, 3), (8, 8))), "rank of 'x' is not known"),
    ],
)
def test_what_is_not_cut_and_why(proto, reason):
    refused(space_to_depth_stem, proto, reason)


def stem_to_pad(kernel, *, channels=3, outputs=4, group=1, rank=4, rng=RNG, **attributes):
    weights = {"w": rng.normal(size=(outputs, channels // group, *kernel)).astype(np.float32)}
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], name="stem", group=group, **attributes)]
    outer = ["N", channels, *["H", "W"][: rank - 2]]
    return model(nodes, [value("x", outer)], [value("y", [None] * rank)], weights)


@settings(deadline=None)
@given(
    kernel=st.tuples(st.integers(1, 5), st.integers(2, 5)),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    pads=st.tuples(*[st.integers(0, 3)] * 4),
    dilation=st.integers(1, 2),
    channels=st.sampled_from([1, 2, 3, 5, 6, 7]),
    seed=st.integers(0, 2**16),
)
def test_any_stem_filled_up(kernel, strides, pads, dilation, channels, seed):
    rng = np.random.default_rng(seed)
    proto = stem_to_pad(kernel, channels=channels, rng=rng, strides=strides, pads=pads, dilations=[dilation] * 2)
    x = rng.normal(size=(2, channels, 9, 11)).astype(np.float32)
    prepared = check(pad_stem_channels, proto, {"x": x}, ["Pad", "Conv"])
    conv = prepared.proto.graph.node[1]
    assert (conv.name, conv.output[0], conv.input[1]) == ("stem", "y", "w_padded")
    (inner,) = prepared.proto.graph.value_info
    assert inner.type.tensor_type.shape.dim[1].dim_value == (4 if channels < 4 else 8)


def test_what_space_to_depth_takes_is_no_candidate_any_more():
    proto = stem_to_pad((3, 3), strides=[2, 2])
    for dim, size in zip(proto.graph.input[0].type.tensor_type.shape.dim[2:], (8, 8), strict=True):
        dim.dim_value = size
    cut = rewritten(space_to_depth_stem, proto).proto
    assert ops(rewritten(pad_stem_channels, cut).proto) == ["SpaceToDepth", "Conv"]


def test_other_convs_are_not_filled_up():
    untouched(pad_stem_channels, stem_to_pad((3, 3), channels=4))
    untouched(pad_stem_channels, stem_to_pad((3, 3), channels=9))
    untouched(pad_stem_channels, stem_to_pad((3, 3), channels=6, group=2))
    untouched(pad_stem_channels, stem_to_pad((3,), rank=3))
    untouched(pad_stem_channels, stem_to_pad((3, 3)), "other")


def variable_stem_to_pad():
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], name="stem")]
    return model(nodes, [value("x", [1, 3, 8, 8]), value("w", [4, 3, 3, 3])], [value("y", [1, 4, 6, 6])])


@pytest.mark.parametrize(
    ("proto", "reason"),
    [
        (variable_stem_to_pad(), "weights are not constant"),
        (without_rank(stem_to_pad((3, 3))), "rank of 'x' is not known"),
    ],
)
def test_what_is_not_filled_up_and_why(proto, reason):
    refused(pad_stem_channels, proto, reason)
