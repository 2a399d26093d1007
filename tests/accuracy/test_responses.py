"""The means behind an activation: what is computed here equals what the runtime computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, parser

from kenosis_ort.accuracy.channel_statistics import Response, activation_behind, clip_bounds
from kenosis_ort.graph.constants import GraphIndex

ACTIVATIONS = {
    "none": ("z = Mul (v, two)", (-np.inf, np.inf)),
    "relu": ("z = Relu (v)", (0.0, np.inf)),
    "clip": ("z = Clip (v, low, high)", (-0.5, 1.5)),
    "low only": ("z = Clip (v, low)", (-0.5, np.inf)),
    "high only": ("z = Clip (v, , high)", (-np.inf, 1.5)),
    "other": ("z = Sigmoid (v)", None),
}


def net(line: str) -> onnx.ModelProto:
    model: onnx.ModelProto = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]> g (float[N,3,4,5] x) => (float[N,3,4,5] y)
        <float low = {{-0.5}}, float high = {{1.5}}, float two = {{2.0}}>
        {{ v = Identity (x)  {line}  y = Identity (z) }}"""
    )
    return model


def response(line: str) -> Response:
    model = net(line)
    index = GraphIndex(model)
    return Response(model, index, activation_behind(index, "v"), 4, 1, 1)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_bounds(name: str) -> None:
    line, bounds = ACTIVATIONS[name]
    index = GraphIndex(net(line))
    assert clip_bounds(index, activation_behind(index, "v").nodes) == bounds


def test_bounds_of_an_old_clip() -> None:
    node = helper.make_node("Clip", ["v"], ["z"], min=-1.0, max=6.0)
    assert clip_bounds(GraphIndex(net("z = Relu (v)")), [node]) == (-1.0, 6.0)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([n for n, (_, bounds) in ACTIVATIONS.items() if bounds]), st.integers(0, 99))
def test_computed_here_as_by_the_runtime(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    line = ACTIVATIONS[name][0]
    ours, model = response(line), net(line)
    index = GraphIndex(model)
    runtimes: Any = Response.__new__(Response)
    runtimes._axis, runtimes._rank, runtimes._over, runtimes._bounds = 1, 4, (2, 3), None
    runtimes._session = runtimes._opened(model, index, activation_behind(index, "v"), 1)
    array = rng.normal(0, 2, (2, 3, 4, 5)).astype(np.float32)
    for shift in (np.zeros(3), rng.normal(0, 1, 3)):
        assert np.allclose(ours.means(array, shift), runtimes.means(array, shift), atol=1e-5)


def test_a_shift_moves_the_mean_behind_to_where_it_should_be() -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.normal(0, 1, (1, 3, 4, 5)).astype(np.float32) for _ in range(64)]
    found = response("z = Relu (v)")
    true = np.array([0.3, 0.0, -0.2])
    expected = np.concatenate([found.means(a, true) for a in arrays])
    shift = found.shift_for(arrays, expected)
    assert np.allclose(shift, true, atol=0.05)
