"""First Convs over few channels: cut into blocks, or filled up with channels of zeros."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kenosis_ort.targets.ort_cpu import rewrites
from kenosis_ort.targets.ort_cpu.rewrites import pad_stem_channels, space_to_depth_stem
from tests.models import Net, normal
from tests.rewrite.forms import check, ops, refused, rewritten


def stem(kernel, size, *, channels=3, strides=(2, 2), bias=True, seed=0, **attributes):
    g = Net.over(["N", channels, *size], seed=seed)
    weights = [g.const(g.rng.normal(size=(4, channels, *kernel)), "w"), *([g.rng.normal(size=4)] if bias else [])]
    return g.of(g.op("Conv", ["x", *weights], name="stem", strides=strides, **attributes))


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
    assert (conv.name, conv.output[0]) == ("stem", "stem")
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
    assert (attributes.get("kernel_shape"), attributes.get("pads")) == (new_kernel, new_pads)


def test_values_and_batch_are_kept():
    prepared = rewritten(space_to_depth_stem, stem((3, 3), (8, 8)), keep_values=["x", "stem"])
    assert ops(prepared.proto) == ["SpaceToDepth", "Conv"]
    (inner,) = prepared.proto.graph.value_info
    dims = inner.type.tensor_type.shape.dim
    assert (dims[0].dim_param, [d.dim_value for d in dims[1:]]) == ("N", [12, 4, 4])


@given(
    kernel=st.tuples(st.integers(1, 5), st.integers(2, 5)),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    pads=st.tuples(*[st.integers(0, 3)] * 4),
    dilation=st.integers(1, 2),
    channels=st.sampled_from([1, 2, 3, 5, 6, 7]),
    seed=st.integers(0, 2**16),
)
def test_any_stem_filled_up(kernel, strides, pads, dilation, channels, seed):
    form = {"strides": strides, "pads": pads, "dilations": [dilation] * 2}
    proto = stem(kernel, ("H", "W"), channels=channels, bias=False, seed=seed, **form)
    prepared = check(pad_stem_channels, proto, normal((2, channels, 9, 11), seed), "Pad Conv")
    conv = prepared.proto.graph.node[1]
    assert (conv.name, conv.output[0], conv.input[1]) == ("stem", "stem", "w_padded")
    (inner,) = prepared.proto.graph.value_info
    assert inner.type.tensor_type.shape.dim[1].dim_value == (4 if channels < 4 else 8)


def test_what_space_to_depth_takes_is_no_candidate_any_more():
    cut = rewritten(space_to_depth_stem, stem((3, 3), (8, 8))).proto
    assert ops(rewritten(pad_stem_channels, cut).proto) == ["SpaceToDepth", "Conv"]
    refused(pad_stem_channels, stem((3, 3), ("H", "W")), None, "other")
