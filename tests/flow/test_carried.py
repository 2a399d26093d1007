"""Changed weights: ranges follow from those by channel, and candidates are patched."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort import Recipe
from kenosis_ort.accuracy.channel_statistics import channel_statistics
from kenosis_ort.calibration.collector import Points, collect
from kenosis_ort.calibration.statistics import ChannelRange, Rescaling, TensorStatistics
from kenosis_ort.flow.builder import Builder
from kenosis_ort.flow.tables import RewrittenNet, following_table
from kenosis_ort.graph.live import LiveGraph
from kenosis_ort.passes import State
from kenosis_ort.passes.contract import Build
from kenosis_ort.passes.equalize_layers import Equalization, equalize, values_for_equalization
from kenosis_ort.passes.smooth import SmoothQuant, smooth, values_for_smoothing
from tests import models, planning
from tests.flow.support import initializers, quality, quantized
from tests.flow.test_tables import FEEDS, MODEL, depthwise, run, transformer

# ---- what is collected on the changed model says the same -----------------------------------------------------


def pooled() -> tuple[onnx.ModelProto, list[models.Feed]]:
    """Conv, Relu, pool, Flatten, Gemm: channels become several features each."""
    rng = np.random.default_rng(2)
    weight = rng.normal(0, 0.3, (8, 3, 3, 3)) * np.exp(rng.normal(0, 1.5, 8))[:, None, None, None]
    text = """net (float[1,3,8,8] x) => (float[1,4] y) <float[8,3,3,3] w, float[128,4] g> {
        c = Conv <pads = [1,1,1,1]> (x, w)  a = LeakyRelu (c)
        p = MaxPool <kernel_shape = [2,2], strides = [2,2]> (a)  f = Flatten (p)  y = Gemm (f, g) }"""
    model = planning.parse(text, {"w": weight})
    return model, models.feeds(model, 30, seed=1)


EQUALIZE = equalize, values_for_equalization, Equalization()
SMOOTH = smooth, values_for_smoothing, SmoothQuant()


@pytest.mark.parametrize(("net", "rule", "how"), [
    (lambda: (MODEL, FEEDS), EQUALIZE, {}), (pooled, EQUALIZE, {}), (depthwise, EQUALIZE, {}),
    *((transformer, SMOOTH, {"insert": insert}) for insert in (False, True)),
])  # fmt: skip
def test_ranges_that_follow_are_those_that_a_sweep_finds(net: Any, rule: Any, how: dict[str, bool]) -> None:
    (model, feeds), (change, values, each) = net(), rule
    model = planning.prepared(model)
    found = change(model, peaks=channel_statistics(model, feeds, values(LiveGraph(model), **how)), **how)
    before, asked = ([name for node in m.graph.node for name in node.output] for m in (model, found.model))
    nodes, insert = {node.name for node in model.graph.node}, how.get("insert", False)
    channels = each.scaled(LiveGraph(model), nodes=nodes, insert=insert)
    table = collect(model, feeds, Points(before, channels=channels, threads=1))
    nets = RewrittenNet(model, model, before), RewrittenNet(found.model, found.model, asked)
    carried = following_table(table, *nets, found.rescaled, lambda *_: pytest.fail("all ranges follow"), None)
    seen = collect(found.model, feeds, Points(asked, threads=1))
    assert carried.tensors.keys() == seen.tensors.keys()
    for name in seen.tensors:
        assert carried.range_of(name) == pytest.approx(seen.range_of(name), rel=1e-4, abs=1e-5), name
    assert any(np.ptp(each.factors) > 0.1 for each in found.rescaled.values())
    moved = [n for n in table.tensors if table.range_of(n) != pytest.approx(seen.range_of(n), rel=1e-3, abs=1e-3)]
    assert set(moved) <= found.rescaled.keys()


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0, 3), st.floats(0.1, 4)), min_size=1, max_size=6))
def test_a_range_by_channel(channels: list[tuple[float, float, float]]) -> None:
    low, width, factors = (np.array(column) for column in zip(*channels, strict=True))
    known = TensorStatistics(low.min(), (low + width).max(), 3, channels=ChannelRange(1, 4, low, low + width))
    found = Rescaling(-3, factors).of(known)
    assert (found.low, found.high) == ((low * factors).min(), ((low + width) * factors).max())
    cut = Rescaling(1, factors, low, low=0.0).of(known)
    assert cut.low == 0.0
    assert cut.high == pytest.approx((width * factors).max())
    assert Rescaling(2, factors).of(known) is None
    assert Rescaling(1, np.append(factors, 1.0)).of(known) is None
    padded = Rescaling(1, factors[:-1]).of(known)
    assert padded.channels.high[-1] == (low + width)[-1]


def test_a_pass_that_tells_nothing_of_values_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It scales channels, and does not say which."""
    told = State.with_weights
    monkeypatch.setattr(State, "with_weights", lambda state, model, notes, _: told(state, model, notes, {}))
    (model, feeds), out = transformer(), tmp_path / "out.onnx"
    report = run(out, feeds[:24], model, recipe=Recipe(ranges="minmax", bias_correction=False, row_scales=False))
    assert [p.name for p in report.passes if p.kept] == ["smooth"]
    assert quality(model, out, feeds[:8]) > 30


def test_layers_that_get_a_bias_for_correction_are_planned_with_it(tmp_path: Path) -> None:
    text = """(float[1,16] x) => (float[1,4] y) {
        [first] a = Gemm <transB = 1> (x, w)  b = Tanh (a)  [second] y = Gemm <transB = 1> (b, v) }"""
    model = planning.parse(text, {"w": models.normal((8, 16), 0), "v": models.normal((4, 8), 1)})
    report = quantized(model, tmp_path / "out.onnx", models.feeds(model, 16), recipe="fast")
    assert report.plan.integer_nodes() == ("first", "second")
    assert {"w_bias_quantized", "v_bias_quantized"} <= initializers(tmp_path / "out.onnx").keys()


# ---- a candidate with other ranges or biases is a copy of the model made last, and equals one made anew ---------


def dead_channel() -> onnx.ModelProto:
    """A Conv whose first channel has weights so small that its bias widens their scale, by that of the input."""
    weight = np.random.default_rng(1).normal(0, 0.2, (4, 4, 3, 3))
    weight[0] = 1e-12
    text = """net (float[1,4,8,8] x) => (float[1,4,8,8] y) <float[4,4,3,3] w, float[4,4,3,3] dead, float[4] bias> {
        c = Conv <pads = [1,1,1,1]> (x, w)  r = Relu (c)  y = Conv <pads = [1,1,1,1]> (r, dead, bias) }"""
    return planning.parse(text, {"dead": weight, "bias": [3.0] * 4})


def shared_bias() -> onnx.ModelProto:
    """Two Convs with one weight and one bias, which are one bias in integers too where their inputs share a scale."""
    text = """net (float[1,4,8,8] x) => (float[1,4,8,8] y, float[1,4,8,8] z)
        <float[4,4,1,1] s, float[4] b, float[4,4,3,3] v, float[4,4,3,3] w> {
        c = Conv <pads = [1,1,1,1]> (x, v)  r = Relu (c)  d = Conv (r, s, b)  y = Relu (d)
        e = Conv <pads = [1,1,1,1]> (x, w)  t = Relu (e)  f = Conv (t, s, b)  z = Relu (f) }"""
    return planning.parse(text, {"b": [0.1, -0.2, 0.3, 0.05]})


PATCHED: dict[str, Any] = {
    "dead_channel": dead_channel, "shared_bias": shared_bias,
    **{n: models.ALL[n] for n in ("residual_block", "concat_net", "mlp", "transformer_block", "net_with_if")},
}  # fmt: skip
EXTRA = {"AddQDQPairToWeight": True}, {"DedicatedQDQPair": True}, {"QuantizeBias": False}
CASES = [*((net, {}) for net in PATCHED), *((net, extra) for extra in EXTRA for net in [*PATCHED][:4])]


@pytest.mark.filterwarnings("ignore:output .* keeps only")  # of the dead channel
@pytest.mark.parametrize(("net", "extra"), CASES)
def test_a_patched_model_equals_one_made_anew(tmp_path: Path, monkeypatch: Any, net: str, extra: Any) -> None:
    """By the ranges asked for and by others; ``counts`` tells how many were made anew, and patched."""
    counts = {"anew": 0, "patched": 0}
    quantize, rng = Builder.quantize, np.random.default_rng(0)

    def made(builder: Builder, table: Any, *how: Any) -> Build:
        found = quantize(builder, table, *how)
        for number in range(4):
            wider = rng.uniform(0.3, 3.0, (len(table.tensors), 2)) if number else np.ones((len(table.tensors), 2))
            ranges = {n: tuple(map(float, table.range_of(n) * by)) for n, by in zip(table.tensors, wider, strict=True)}
            if number == 2:  # values that had scales of their own have the same one
                ranges = dict.fromkeys(ranges, (-1.0, 4.0))
            given = table.with_ranges(ranges)
            latest = builder._latest
            patched = quantize(builder, given, *how)
            counts["patched" if builder._latest is latest else "anew"] += 1
            anew = quantize(replace(builder), given, *how)
            assert patched.plan == anew.plan
            files = [each.quantized.SerializeToString(deterministic=True) for each in (patched, anew)]
            assert files[0] == files[1]
        return found

    monkeypatch.setattr(Builder, "quantize", made)
    model, recipe = PATCHED[net](), "plain" if net == "shared_bias" else "fast"  # which gives each layer its own bias
    quantized(model, tmp_path / "out.onnx", feeds=models.feeds(model, 16), recipe=recipe, extra_options=extra)
    assert counts["patched"], "none was made so"
    assert counts["anew"] or net in models.ALL or "QuantizeBias" in extra, "more than numbers follows the ranges"
