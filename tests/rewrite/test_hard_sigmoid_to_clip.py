"""HardSigmoid behind a layer as a Clip that vanishes into its requantization."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kenosis_ort.rewrite import hard_sigmoid_to_clip
from tests import planning
from tests.rewrite.forms import check, refused


def parse(text: str, **options: Any) -> onnx.ModelProto:
    """Returns the model of a text, its nodes named as preparation would."""
    proto = planning.parse(text, **options)
    for node in proto.graph.node:
        node.name = f"{node.op_type}_{node.output[0]}"
    return proto


def net(body: str, outputs: str = "y") -> str:
    return f"""net (float[2,8,6,6] x) => ({outputs})
    <float[8,8,1,1] w, float[8,8,1,1] u, float[8] b, float[8,5] m, float[5,8] n, float[5] e> {{ {body} }}"""


def feed(seed: int = 0) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).normal(0, 3, (2, 8, 6, 6)).astype(np.float32)}


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**16),
    alpha=st.floats(0.1, 3.0),  # of a gate that is all but closed next to nothing is left to compare
    beta=st.floats(-0.5, 1.5),
    bias=st.booleans(),
)
def test_the_outputs_are_the_same(seed: int, alpha: float, beta: float, bias: bool) -> None:
    operands = "x, w, b" if bias else "x, w"
    text = net(f"c = Conv ({operands})\n g = HardSigmoid <alpha = {alpha:f}, beta = {beta:f}> (c)\n y = Mul (x, g)")
    check(hard_sigmoid_to_clip, parse(text, seed=seed), feed(seed), ["Conv", "Clip", "Mul"])


@pytest.mark.parametrize("layer", ["Gemm (f, m, e)", "Gemm (f, m)", "Gemm <transB = 1> (f, n, e)"])
def test_behind_gemm(layer: str) -> None:
    text = net(f"p = GlobalAveragePool (x)\n f = Flatten (p)\n c = {layer}\n y = HardSigmoid (c)")
    check(hard_sigmoid_to_clip, parse(text), feed(), ["GlobalAveragePool", "Flatten", "Gemm", "Clip"])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("k = Abs (w)\n c = Conv (x, k)\n y = HardSigmoid (c)", "are not constant"),
        ("c = Conv (x, w)\n y = HardSigmoid <alpha = -0.1> (c)", "not positive"),
        (
            "p = GlobalAveragePool (x)\n f = Flatten (p)\n c = Gemm <alpha = 2.0> (f, m)\n y = HardSigmoid (c)",
            "factors of its own",
        ),
    ],
    ids=["computed weights", "falling", "gemm factors"],
)
def test_what_stays(body: str, reason: str) -> None:
    refused(hard_sigmoid_to_clip, parse(net(body)), reason)
