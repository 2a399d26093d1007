"""Weights rounded so that a layer's outputs are closest, on the grid that they have."""

from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.graph.live import LiveGraph
from kenosis_ort.graph.view import GraphView
from kenosis_ort.passes import round_weights as rounding
from kenosis_ort.passes.contract import materialize
from kenosis_ort.passes.input_moments import InputMoments
from kenosis_ort.passes.layers import layers
from kenosis_ort.passes.round_weights import Grid, learn_rounding
from tests import models, planning
from tests.flow.support import changed
from tests.models import Feed, Net
from tests.passes.support import array, first, noise


def smooth_feeds(model: onnx.ModelProto, count: int, seed: int = 0) -> list[Feed]:
    """Inputs whose neighbouring pixels and channels go together: only then do errors of weights add up."""
    mix = np.random.default_rng(7).normal(size=(24, 24)) * 0.5 ** np.arange(24)[:, None]
    out = []
    for x in (feed["x"] for feed in models.feeds(model, count, seed=seed)):
        if x.ndim == 4:
            for axis in (2, 3):
                x = np.cumsum(x, axis) / np.sqrt(x.shape[axis])
        mixed = x + 0.5 * x.mean(axis=1, keepdims=True) if x.ndim == 4 else x @ mix
        out.append({"x": mixed.astype(np.float32)})
    return out


def one_layer(kind: str, *, groups: int = 1, stride: int = 1, pads: int = 1, dilation: int = 1, seed: int = 0) -> Any:
    net = Net(seed=seed)
    if kind == "gemm":
        y = net.gemm(net.input("x", ["n", 24]), 24, 8, name="a")
    elif kind == "matmul":
        y = net.linear(net.input("x", ["n", 5, 24]), 24, 8, name="a")
    else:
        inputs = [net.input("x", ["n", 8, 9, 11]), net.weight((8, 8 // groups, 3, 3), name="a_w"), np.zeros(8)]
        how = {"group": groups, "strides": [stride] * 2, "dilations": [dilation] * 2, "pads": [pads] * 4}
        y = net.op("ConvTranspose" if kind == "transposed" else "Conv", inputs, name="a", **how)
    return planning.prepared(net.of(y))


def dequantized(model: onnx.ModelProto, outcome: planning.Outcome) -> onnx.ModelProto:
    """The float model with the quantized model's weights."""
    stored = outcome.quantized.graph.initializer
    axis = next(d.axis for d in outcome.plan.decisions if d.edge.value == "a_w")
    integers, scale = array(stored, "a_w_quantized"), array(stored, "a_w_scale")
    shape = [-1 if at == axis else 1 for at in range(integers.ndim)]
    return changed(planning.prepared(model), a_w=lambda _: integers * scale.reshape(shape))


def learned(outcome: planning.Outcome, feeds: list[Feed], **options: Any) -> Any:
    return learn_rounding(outcome.model, outcome.quantized, feeds, **options)


@pytest.mark.parametrize(("kind", "options"), [
    ("conv", {}), ("conv", {"groups": 2}), ("conv", {"groups": 8}), ("gemm", {}), ("matmul", {}),
])  # fmt: skip
def test_outputs_get_closer_and_the_grid_is_kept(kind: str, options: dict[str, int]) -> None:
    model = one_layer(kind, **options)
    (layer,), stored = layers(LiveGraph(model)), array(model.graph.initializer, "a_w")
    np.testing.assert_array_equal(layer.stored(layer.canonical(stored)), stored)
    fit, held_out = smooth_feeds(model, 100 if kind == "gemm" else 24), smooth_feeds(model, 20, seed=1)
    before = planning.quantize(model, feeds=fit)
    rounded = learned(before, fit)
    fine = materialize(before.model, rounded)
    after = planning.quantize(fine, feeds=fit)
    assert [*rounded] == ["a"]
    np.testing.assert_allclose(*(array(o.quantized.graph.initializer, "a_w_scale") for o in (after, before)), rtol=2e-7)
    # The float weights lie on the grid: quantizing them loses nothing more.
    assert noise(fine, dequantized(fine, after), held_out) < 1e-9
    plain, closer = (noise(model, dequantized(o.model, o), held_out) for o in (before, after))
    assert closer < plain


def test_too_few_samples_shared_weights_and_nodes_not_named_change_nothing() -> None:
    net = Net()
    y = net.op("Relu", [net.conv(net.input("x", ["n", 8, 6, 6]), 8, 8, name="a")])
    shared = planning.prepared(net.of(net.op("Conv", [y, "a_w"], name="b", pads=[1, 1, 1, 1])))
    for model, count, options in ((one_layer("gemm"), 8, {}), (one_layer("conv"), 4, {"nodes": ()}), (shared, 4, {})):
        feeds = smooth_feeds(model, count)
        assert learned(planning.quantize(model, feeds=feeds), feeds, **options) == {}


@given(
    kind=st.sampled_from(["conv", "transposed"]), groups=st.sampled_from([1, 2, 8]), stride=st.integers(1, 2),
    pads=st.integers(0, 2), dilation=st.integers(1, 2), seed=st.integers(0, 999),
)  # fmt: skip
def test_rows_times_weights_are_the_layers_outputs(kind, groups, stride, pads, dilation, seed):
    """The energy of a layer's outputs is that of its moments under its weights, summed over output channels."""
    if kind == "transposed":
        stride, pads, dilation = 3, 0, 1  # taps do not overlap, so the energies of taps add up
    model = one_layer(kind, groups=groups, stride=stride, pads=pads, dilation=dilation, seed=seed)
    layer, feeds = next(layers(LiveGraph(model))), models.feeds(model, 1, seed=seed)
    moments = InputMoments(layer, 1)
    moments.add(feeds[0]["x"])
    weight = layer.canonical(array(model.graph.initializer, "a_w"))
    np.testing.assert_array_equal(layer.stored(weight), array(model.graph.initializer, "a_w"))
    energy, moments_of = 0.0, moments._products / moments.rows
    for at in range(8):
        rows = weight[at].T if kind == "transposed" else weight[at].reshape(1, -1)
        energy += float(np.einsum("rc,cd,rd->", rows, moments_of[at // (8 // groups)], rows)) * moments.rows
    (output,) = first(model, feeds)
    assert energy == pytest.approx(float((output**2).sum()), rel=1e-4)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(2, 12), st.booleans(), st.integers(0, 10**6))
def test_groups_are_rounded_together_as_each_alone(groups, rows, columns, paired, seed):
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(groups, 3 * columns, columns)) * rng.uniform(0.1, 3, (groups, 1, columns))
    moments = inputs.transpose(0, 2, 1) @ inputs + 0.01 * np.eye(columns)
    targets = rng.normal(0, 60, (groups, rows, columns))
    nearest = np.clip(np.rint(targets), -127, 127)
    neighbour = None
    if paired:  # the last of an odd number has none
        nearest = np.clip(nearest, -64, 64)
        order = rng.permutation(columns)
        neighbour = np.full(columns, -1)
        for a, b in zip(order[::2], order[1::2], strict=False):
            neighbour[[a, b]] = b, a
    limits = Grid(-127.0, 127.0, neighbour=neighbour)
    found = rounding._round(targets, nearest, moments, limits)
    for at in range(groups):
        alone = rounding._round(targets[at : at + 1], nearest[at : at + 1], moments[at : at + 1], limits)
        assert np.array_equal(found[at], alone[0])
    if neighbour is not None:
        other = np.where(neighbour >= 0, found[:, :, neighbour], 0)
        assert np.abs(np.where(np.sign(found) == np.sign(other), found + other, 0)).max() <= 128
        decides = np.abs(nearest) == np.abs(nearest).max(axis=2, keepdims=True)
        assert np.array_equal(found[decides], nearest[decides])
    errors = [np.einsum("grc,gcd,grd->", each, moments, each) for each in (found - targets, nearest - targets)]
    assert errors[0] <= errors[1] * (1 + 1e-9)


@pytest.mark.parametrize("way", [rounding.pass_on, partial(rounding.descend, sweeps=4)])
def test_a_grid_that_is_moved_and_stretched_takes_its_weights_along(way: Any) -> None:
    inputs, targets = models.normal((2, 24, 8)), models.normal((2, 8, 5), 1, 40).astype(np.float64)
    hessian, nearest = inputs.transpose(0, 2, 1) @ inputs.astype(np.float64), np.clip(np.rint(targets), -127, 127)
    fixed, zero, scale = np.zeros(targets.shape, bool), np.full((2, 8, 5), 9.0), np.full((2, 8, 5), 0.5)
    plain = way(targets, nearest, fixed, hessian, Grid(-127, 127))
    moved = way(0.5 * targets, nearest + 9, fixed, hessian, Grid(-118, 136, scale, zero))
    np.testing.assert_array_equal(moved, plain + 9)


def test_a_conv_of_no_groups_is_no_layer() -> None:
    """No kernel runs it, but the runtime loads it, and a net may hold it where nothing runs."""
    text = "(float[1,2,4,4] x) => (float[1,2,4,4] y) <float[2,2,1,1] w> { y = Conv<group = 0>(x, w) }"
    assert not list(layers(GraphView(planning.parse(text, checked=False))))
