"""Bodies of If, Loop and Scan stay float where they cost the outputs more than the rest of the net; beside stock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import QuantType
from onnxruntime.quantization import quantize_static as stock

from kenosis_ort import QuantizationReport
from kenosis_ort.calibration.computed_feeds import Feeds
from kenosis_ort.flow.builder import BodyBuilder
from tests.flow.support import heavy, quality, quantized
from tests.models import Feed, FeedReader
from tests.planning import parse

MARGIN_DB = 0.3
LOOP = """g (float[N,32] x) => (float[N,16] y) {{
    n = Constant <value_int = {steps}> ()\n c = Constant <value = bool {{1}}> ()
    a = MatMul (x, w0)\n b = {act} (a)
    h = Loop (n, c, b) <body = step (int64 i, bool on, float[N,32] s) => (bool go, float[N,32] next) {{
        go = Identity (on)\n t = MatMul (s, w1)\n u = Add (t, b1)\n next = Tanh (u) }}>
    y = MatMul (h, w2) }}"""
GROWING = """g (float[N,32] x) => (float[N,16] y, float[T,N,16] each) {
    n = Constant <value_int = 5> ()\n c = Constant <value = bool {1}> ()\n a = MatMul (x, w0)
    h, each = Loop (n, c, a) <body = step (int64 i, bool on, float[N,32] s)
        => (bool go, float[N,32] next, float[N,16] o) {
        go = Identity (on)\n t = MatMul (s, w1)\n u = MatMul (x, w3)\n v = Add (t, u)\n next = Relu (v)
        o = MatMul (next, w4) }>
    y = MatMul (h, w2) }"""
SCAN = """g (float[12,N,32] x, float[N,32] h0, float[N,32] c0) => (float[12,N,16] y) {
    e = MatMul (x, w0)\n r = Relu (e)
    hT, cT, o = Scan <num_scan_inputs = 1, scan_input_directions = [1], scan_output_directions = [1],
        body = step (float[N,32] h, float[N,32] c, float[N,32] row)
        => (float[N,32] hn, float[N,32] cn, float[N,32] on) {
        u = MatMul (h, w1)\n v = MatMul (row, w3)\n t = Add (u, v)\n gate = Sigmoid (t)\n new = Tanh (t)
        cg = Mul (gate, c)\n cn = Add (cg, new)\n ct = Tanh (cn)\n hn = Mul (gate, ct)\n on = Identity (hn) }>
        (h0, c0, r)
    y = MatMul (o, w2) }"""
NESTED = """g (float[N,32] x, float q) => (float[N,16] y) {{
    a = MatMul (x, w0)\n b = {act} (a)\n half = Constant <value_float = 0.5> ()\n on = Greater (q, half)
    h = If (on) <
        then_branch = first () => (float[N,32] o1) {{ t1 = MatMul (b, w1)\n o1 = Relu (t1) }},
        else_branch = other () => (float[N,32] o2) {{
            less = Constant <value_float = 0.25> ()\n rare = Less (q, less)
            o2 = If (rare) <
                then_branch = second () => (float[N,32] o3) {{ t3 = MatMul (b, w3)\n o3 = Relu (t3) }},
                else_branch = third () => (float[N,32] o4) {{ t4 = MatMul (b, w5)\n o4 = Tanh (t4) }}> }}>
    y = MatMul (h, w2) }}"""
BRANCHING = """g (float[N,32] x) => (float[N,16] y) {
    n = Constant <value_int = 4> ()\n c = Constant <value = bool {1}> ()\n two = Constant <value_int = 2> ()
    a = MatMul (x, w0)\n b = Relu (a)
    h = Loop (n, c, b) <body = step (int64 i, bool on, float[N,32] s) => (bool go, float[N,32] next) {
        go = Identity (on)\n early = Less (i, two)
        next = If (early) <
            then_branch = first () => (float[N,32] o1) { t1 = MatMul (s, w1)\n o1 = Tanh (t1) },
            else_branch = other () => (float[N,32] o2) { t2 = MatMul (s, w3)\n o2 = Relu (t2) }> }>
    y = MatMul (h, w2) }"""
TEXTS = {
    "loop": LOOP.format(steps=4, act="Relu"),
    "long loop": LOOP.format(steps=12, act="Relu"),
    "growing": GROWING,
    "scan": SCAN,
    "nested": NESTED.format(act="Tanh"),
    "branching": BRANCHING,
}


def net(text: str, seed: int = 0) -> onnx.ModelProto:
    rng = np.random.default_rng(seed)
    weights = {f"w{i}": rng.normal(size=(32, 16 if i in (2, 4) else 32)) / 32**0.5 for i in range(6)}
    weights["b1"] = rng.normal(0, 0.1, 32)
    read = {name: value.astype(np.float32) for name, value in weights.items() if f" {name})" in text}
    return parse(text, read, opset=17)


def samples(model: onnx.ModelProto, count: int, seed: int) -> list[Feed]:
    """Samples of four rows and of different loudness; states are small, a number is between 0 and 1."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        feed = {}
        for value in model.graph.input:
            shape = [d.dim_value or 4 for d in value.type.tensor_type.shape.dim]
            drawn = rng.normal(size=shape) * rng.uniform(0.6, 1.4) * (1 if value.name == "x" else 0.1)
            feed[value.name] = np.asarray(drawn if shape else rng.uniform(), np.float32)
        found.append(feed)
    return found


def worst(model: onnx.ModelProto, out: Path, feeds: list[Feed]) -> float:
    return min(quality(model, out, feeds, output=i) for i in range(len(model.graph.output)))


def made(model: onnx.ModelProto, folder: Path, **options: Any) -> QuantizationReport:
    return quantized(model, folder / "out.onnx", samples(model, 24, seed=1), **options)


def notes_of(report: QuantizationReport) -> list[str]:
    return [note for note in report.notes if "stays float: in integers it costs the outputs" in note]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", TEXTS)
def test_never_below_the_best_of_stock(tmp_path: Path, name: str, seed: int) -> None:
    model = net(TEXTS[name], seed)
    onnx.save(model, tmp_path / "float.onnx")
    unseen = samples(model, 24, seed=1000 + seed)
    best = -np.inf
    u8 = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8, "per_channel": True}
    for said in ({}, {**u8, "reduce_range": True}):
        stock(tmp_path / "float.onnx", tmp_path / "stock.onnx", FeedReader(samples(model, 24, seed=1)), **said)
        best = max(best, worst(model, tmp_path / "stock.onnx", unseen))
    assert best > 15  # stock's file is worth a comparison
    for recipe in ("fast", "plain"):
        made(model, tmp_path, recipe=recipe)
        assert worst(model, tmp_path / "out.onnx", unseen) > best - MARGIN_DB


def test_the_report_says_what_a_body_would_cost(tmp_path: Path) -> None:
    report = made(net(TEXTS["long loop"]), tmp_path, recipe="fast")
    (note,) = notes_of(report)
    assert note.startswith("The body of 'Loop_h' stays float: in integers it costs the outputs ")
    assert note.endswith(" dB on 12 samples.")
    layers = heavy(report)
    assert sorted(layers.values()) == [False, True, True]
    inside = next(node for node, integer in layers.items() if not integer)
    assert "it is in the body of 'Loop_h': in integers it costs" in report.plan.explain(inside)
    undone = [p for p in report.passes if "; in the body of 'Loop_h'" in p.reason]
    assert undone
    assert not any(p.kept for p in undone)
    assert all(p.reason.endswith(", which stays float") for p in undone)
    assert len([p for p in report.passes if p.name == "ranges"]) == 2  # of the body and, anew, of the net


def test_a_caller_may_insist_on_bodies_in_integers(tmp_path: Path) -> None:
    report = made(net(TEXTS["long loop"]), tmp_path, extra_options={"EnableSubgraph": True})
    assert all(heavy(report).values())
    assert notes_of(report) == []


def test_of_two_bodies_the_one_that_costs_little_runs_in_integers(tmp_path: Path) -> None:
    """The first loop's result hardly counts beside the second's."""
    loop = LOOP.format(steps=4, act="Relu")
    second = """    h2 = Loop (n, c, k) <body = two (int64 i2, bool on2, float[N,32] s2)
        => (bool go2, float[N,32] next2) {{
        go2 = Identity (on2)\n t2 = MatMul (s2, w3)\n next2 = Tanh (t2) }}>
    y = MatMul (h2, w2) }}""".format()
    text = loop.replace("    y = MatMul (h, w2) }", "    little = Constant <value_float = 0.003> ()\n"
                        "    g0 = Mul (h, little)\n    k = Add (b, g0)\n" + second)  # fmt: skip
    report = made(net(text), tmp_path)
    (note,) = notes_of(report)
    assert note.startswith("The body of 'Loop_h2' stays float")
    assert {name for name, integer in heavy(report).items() if not integer} == {"MatMul_t2"}


def test_bodies_are_tried_with_ranges_of_other_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch that few samples take has ranges that the next sample leaves; its own samples do not show that."""
    model = net(NESTED.format(act="Relu"), seed=2)
    seen: list[int] = []
    real = BodyBuilder.seeing

    def counted(self: BodyBuilder, outer: Feeds) -> BodyBuilder:
        seen.append(len(list(outer())))
        return real(self, outer)

    monkeypatch.setattr(BodyBuilder, "seeing", counted)
    made(model, tmp_path, recipe="fast")
    assert max(seen) == 12  # of 24
    out, unseen = tmp_path / "out.onnx", samples(model, 24, seed=1002)
    ours = worst(model, out, unseen)
    made(model, tmp_path, recipe="fast", extra_options={"EnableSubgraph": False})
    assert ours > worst(model, out, unseen) - 4
