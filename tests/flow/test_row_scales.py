"""Massive tokens: a T5-shaped net that one range for all tokens cannot serve, through the public call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import QuantFormat, QuantType
from onnxruntime.quantization import quantize_static as stock

from kenosis_ort import QuantizationReport, Recipe
from tests.flow.support import quantized, run, sqnr_db
from tests.models import Feed, FeedReader, Net

WIDTH, INNER, WORDS, END, TOLD = 64, 256, 50, 1, 8


def t5(seed: int = 0, layers: int = 2, length: int | str = "length") -> onnx.ModelProto:
    """Feed-forward layers of T5: norm without mean, gated, no bias; one token excites all inner products."""
    net = Net(seed=seed)
    words = net.rng.normal(0, 1, (WORDS, WIDTH))
    words[:, :TOLD] = 0.0
    words[END, :TOLD] = 200.0
    x = net.op("Gather", [net.const(words), net.input("ids", [1, length], onnx.TensorProto.INT64)])

    def normal(x: str) -> str:
        square = net.op("ReduceMean", [net.op("Mul", [x, x])], axes=[-1])
        return net.op("Div", [x, net.op("Sqrt", [net.op("Add", [square, net.const(1e-6)])])])

    for _ in range(layers):
        gate, up, down = (
            net.rng.normal(0, a**-0.5, (a, b)) for a, b in ((WIDTH, INNER), (WIDTH, INNER), (INNER, WIDTH))
        )
        for weights in (gate, up):
            weights[:TOLD] = 0.5 * net.rng.normal(0, 1, INNER)
        down[:, :TOLD] = 0.0
        gate, up = (net.op("MatMul", [normal(x), net.const(weights)]) for weights in (gate, up))
        inside = net.op("Mul", [net.op("Relu", [gate]), up])
        x = net.op("Add", [x, net.op("MatMul", [inside, net.const(down)])])
    net.output(net.op("MatMul", [normal(x), net.const(net.rng.normal(0, WIDTH**-0.5, (WIDTH, 8)))]), [1, length, 8])
    return net.model()


def sentences(count: int, seed: int = 0) -> list[Feed]:
    rng = np.random.default_rng(seed)
    found = [rng.integers(2, WORDS, (1, int(rng.integers(8, 20)))) for _ in range(count)]
    for ids in found:
        ids[0, -1] = END
    return [{"ids": ids} for ids in found]


def quality(model: onnx.ModelProto, out: Path) -> float:
    """Returns the SQNR in dB of the tokens before the last, on sentences that are new."""
    test = sentences(8, seed=9)
    want, got = ([each[0][:, :-1] for each in run(m, test)] for m in (model, out))
    return sqnr_db(np.concatenate(want, axis=1), np.concatenate(got, axis=1))


def outcome(report: QuantizationReport) -> Any:
    return next(p for p in report.passes if p.name == "row_scales")


@pytest.fixture(scope="module")
def net() -> onnx.ModelProto:
    return t5()


def test_a_massive_token_costs_the_others_nothing(net: onnx.ModelProto, tmp_path: Path) -> None:
    """Measured: -4.8 dB by stock, 14.5 dB with every other pass, 29.3 dB."""
    source, by_stock = tmp_path / "float.onnx", tmp_path / "stock.onnx"
    onnx.save(net, source)
    stock(
        source, by_stock, FeedReader(sentences(16)), quant_format=QuantFormat.QDQ, per_channel=True,
        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
    )  # fmt: skip
    without = quantized(net, tmp_path / "without.onnx", sentences(16), recipe=Recipe(row_scales=False))
    assert "row_scales" not in {p.name for p in without.passes}
    report = quantized(net, tmp_path / "out.onnx", sentences(16), recipe="fast", evidence="full")
    assert outcome(report).kept
    assert outcome(report).error_after < 0.5 * outcome(report).error_before
    assert any("Rows brought to one size" in note for note in report.notes)
    found = {name: quality(net, tmp_path / f"{name}.onnx") for name in ("stock", "without", "out")}
    assert found["out"] > 26.0
    assert found["out"] > found["without"] + 8.0
    assert found["out"] > found["stock"] + 15.0
    heavy = [k for k in report.fusion.kernels if k.op_type in ("MatMul", "Gemm")]
    assert heavy
    assert all(k.integer for k in heavy)


@pytest.mark.parametrize("recipe", ["accurate", "strict"])
def test_with_the_passes_behind_it(net: onnx.ModelProto, tmp_path: Path, recipe: str) -> None:
    report = quantized(net, tmp_path / "out.onnx", sentences(16), recipe=recipe)
    assert outcome(report).kept
    assert not report.warnings
    assert quality(net, tmp_path / "out.onnx") > 26.0


def test_nothing_is_done_where_tokens_are_alike(net: onnx.ModelProto, tmp_path: Path) -> None:
    calm = [{"ids": np.where(feed["ids"] == END, 2, feed["ids"])} for feed in sentences(16)]
    report = quantized(net, tmp_path / "out.onnx", calm, recipe="fast")
    assert not outcome(report).kept
    made = onnx.load(tmp_path / "out.onnx")
    assert not any(node.op_type == "ReduceMax" for node in made.graph.node)


def test_not_for_runtimes_that_take_nets_whole(tmp_path: Path) -> None:
    feeds = [{"ids": feed["ids"][:, -8:]} for feed in sentences(16)]
    report = quantized(t5(length=8), tmp_path / "out.onnx", feeds, recipe="fast", target="qnn", verify=False)
    assert "no float node" in outcome(report).reason
