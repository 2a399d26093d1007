"""A candidate with other ranges or biases is a copy of the model made last, and equals one made anew, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from kenosis_ort.flow.builder import Builder
from kenosis_ort.passes.contract import Build
from tests import models
from tests.flow.support import quantized
from tests.models import Net


def dead_channel() -> onnx.ModelProto:
    """A Conv whose first channel has weights so small that its bias widens their scale, by that of the input."""
    net = Net(seed=1)
    x = net.op("Relu", [net.conv(net.input("x", [1, 4, 8, 8]), 4, 4)])
    weight = net.rng.normal(0, 0.2, (4, 4, 3, 3)).astype(np.float32)
    weight[0] = 1e-12
    inputs = [x, net.const(weight, "dead"), net.const(np.full(4, 3.0, np.float32), "bias")]
    net.output(net.op("Conv", inputs, pads=[1, 1, 1, 1]), [1, 4, 8, 8])
    return net.model()


def shared_bias() -> onnx.ModelProto:
    """Two Convs with one weight and one bias, which are one bias in integers too where their inputs share a scale."""
    net = Net(seed=2)
    x = net.input("x", [1, 4, 8, 8])
    constants = [net.const(net.rng.normal(0, 0.2, shape).astype(np.float32)) for shape in ((4, 4, 1, 1), (4,))]
    ends = [net.op("Conv", [net.op("Relu", [net.conv(x, 4, 4)]), *constants]) for _ in range(2)]
    for end in ends:
        net.output(net.op("Relu", [end]), [1, 4, 8, 8])
    return net.model()


NETS: dict[str, Callable[[], onnx.ModelProto]] = {
    **models.ALL,
    "dead_channel": dead_channel,
    "shared_bias": shared_bias,
}


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many models were made anew, and patched, by the ranges asked for and by others; all equal ones made anew."""
    counts = {"anew": 0, "patched": 0}
    quantize, rng = Builder.quantize, np.random.default_rng(0)

    def made(builder: Builder, table: Any, *how: Any) -> Build:
        found = quantize(builder, table, *how)
        for number in range(4):
            wider = rng.uniform(0.3, 3.0, (len(table.tensors), 2)) if number else np.ones((len(table.tensors), 2))
            ends = {n: table.range_of(n) for n in table.tensors}
            ranges = {
                n: (float(low * a), float(high * b))
                for (n, (low, high)), (a, b) in zip(ends.items(), wider, strict=True)
            }
            if number == 2:  # values that had scales of their own have the same one
                ranges = dict.fromkeys(ranges, (-1.0, 4.0))
            given = table.with_ranges(ranges)
            latest = list(builder._latest)
            patched = quantize(builder, given, *how)
            counts["patched" if builder._latest == latest else "anew"] += 1
            anew = quantize(replace(builder), given, *how)
            assert patched.plan == anew.plan
            assert patched.quantized.SerializeToString(deterministic=True) == anew.quantized.SerializeToString(
                deterministic=True
            )
        return found

    monkeypatch.setattr(Builder, "quantize", made)
    return counts


@pytest.mark.filterwarnings("ignore:output .* keeps only")  # of the dead channel
@pytest.mark.parametrize(
    "extra", [{}, {"AddQDQPairToWeight": True}, {"DedicatedQDQPair": True}, {"QuantizeBias": False}], ids=str
)
@pytest.mark.parametrize(
    "net", ["residual_block", "concat_net", "mlp", "transformer_block", "net_with_if", "dead_channel", "shared_bias"]
)
def test_a_patched_model_equals_one_made_anew(
    net: str, extra: dict[str, Any], tmp_path: Path, compared: dict[str, int]
) -> None:
    model, recipe = NETS[net](), "plain" if net == "shared_bias" else "fast"  # which gives each layer a bias of its own
    quantized(model, tmp_path / "out.onnx", feeds=models.feeds(model, 16), recipe=recipe, extra_options=extra)
    assert compared["patched"], "none was made so"
    assert compared["anew"] or net in models.ALL or "QuantizeBias" in extra, (
        "more than numbers follows the ranges there"
    )
