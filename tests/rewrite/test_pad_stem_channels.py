from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from kenosis_ort.targets.ort_cpu.rewrites import pad_stem_channels, space_to_depth_stem
from tests.graph.build import model, ops, value
from tests.rewrite.forms import check, refused, rewritten, untouched

RNG = np.random.default_rng(0)


def stem(kernel, *, channels=3, outputs=4, group=1, rank=4, rng=RNG, **attributes):
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
def test_any_stem(kernel, strides, pads, dilation, channels, seed):
    rng = np.random.default_rng(seed)
    proto = stem(kernel, channels=channels, rng=rng, strides=strides, pads=pads, dilations=[dilation] * 2)
    x = rng.normal(size=(2, channels, 9, 11)).astype(np.float32)
    prepared = check(pad_stem_channels, proto, {"x": x}, ["Pad", "Conv"])
    conv = prepared.proto.graph.node[1]
    assert (conv.name, conv.output[0], conv.input[1]) == ("stem", "y", "w_padded")
    (inner,) = prepared.proto.graph.value_info
    assert inner.type.tensor_type.shape.dim[1].dim_value == (4 if channels < 4 else 8)


def test_what_space_to_depth_takes_is_no_candidate_any_more():
    proto = stem((3, 3), strides=[2, 2])
    for dim, size in zip(proto.graph.input[0].type.tensor_type.shape.dim[2:], (8, 8), strict=True):
        dim.dim_value = size
    cut = rewritten(space_to_depth_stem, proto).proto
    assert ops(rewritten(pad_stem_channels, cut).proto) == ["SpaceToDepth", "Conv"]


def test_other_convs_are_no_candidates():
    untouched(pad_stem_channels, stem((3, 3), channels=4))
    untouched(pad_stem_channels, stem((3, 3), channels=9))
    untouched(pad_stem_channels, stem((3, 3), channels=6, group=2))
    untouched(pad_stem_channels, stem((3,), rank=3))
    untouched(pad_stem_channels, stem((3, 3)), "other")


def variable_weights():
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], name="stem")]
    return model(nodes, [value("x", [1, 3, 8, 8]), value("w", [4, 3, 3, 3])], [value("y", [1, 4, 6, 6])])


def without_rank(proto):
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    return proto


@pytest.mark.parametrize(
    ("proto", "reason"),
    [
        (variable_weights(), "weights are not constant"),
        (without_rank(stem((3, 3))), "rank of 'x' is not known"),
    ],
)
def test_what_stays_and_why(proto, reason):
    refused(pad_stem_channels, proto, reason)
