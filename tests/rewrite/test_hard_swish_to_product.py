"""HardSwish as an integer product, its division in the weights behind it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kenosis_ort.rewrite import hard_swish_to_product
from tests import planning
from tests.rewrite.forms import check, refused, rewritten, untouched

CONV = "kernel_shape = [3,3], pads = [1,1,1,1]"
CHAIN = f"c = Conv <{CONV}> (x, w)\n h = HardSwish (c)\n y = Conv (h, u)"


def parse(text: str, **options: Any) -> onnx.ModelProto:
    """Returns the model of a text, its nodes named as preparation would."""
    proto = planning.parse(text, **options)
    for node in proto.graph.node:
        node.name = f"{node.op_type}_{node.output[0]}"
    return proto


def net(body: str, outputs: str = "y") -> str:
    return f"""net (float[2,3,8,8] x) => ({outputs})
    <float[16,3,3,3] w, float[16,16,1,1] u, float[16] b, float[16,1,3,3] d, float[16,10] m> {{ {body} }}"""


def feed(seed: int = 0, spread: float = 4.0) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).normal(0, spread, (2, 3, 8, 8)).astype(np.float32)}


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16), spread=st.floats(0.01, 30.0))
def test_the_outputs_are_the_same(seed: int, spread: float) -> None:
    expected = ["Conv", "Add", "Clip", "Mul", "Conv"]
    check(hard_swish_to_product, parse(net(CHAIN), seed=seed), feed(seed, spread), expected)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16), alpha=st.floats(0.05, 2.0), beta=st.floats(-0.5, 1.5), first=st.booleans())
def test_a_product_with_its_own_gate(seed: int, alpha: float, beta: float, first: bool) -> None:
    product = "h = Mul (c, g)" if first else "h = Mul (g, c)"
    gate = f"g = HardSigmoid <alpha = {alpha:f}, beta = {beta:f}> (c)"
    text = net(f"c = Conv <{CONV}> (x, w)\n {gate}\n {product}\n y = Conv (h, u)")
    check(hard_swish_to_product, parse(text, seed=seed), feed(seed), ["Conv", "Add", "Clip", "Mul", "Conv"])


def test_the_gate_of_another_value_stays() -> None:
    text = net(f"c = Conv <{CONV}> (x, w)\n g = HardSigmoid (c)\n a = Abs (c)\n h = Mul (a, g)\n y = Conv (h, u)")
    untouched(hard_swish_to_product, parse(text))


@pytest.mark.parametrize(
    ("behind", "expected"),
    [
        (f"y = Conv <{CONV}, group = 16> (h, d, b)", ["Conv"]),
        ("p = GlobalAveragePool (h)\n f = Flatten (p)\n y = MatMul (f, m)", ["GlobalAveragePool", "Flatten", "MatMul"]),
        ("p = GlobalAveragePool (h)\n f = Flatten (p)\n y = Gemm (f, m)", ["GlobalAveragePool", "Flatten", "Gemm"]),
        (
            "p = GlobalAveragePool (h)\n e = Conv (p, u, b)\n g = Sigmoid (e)\n s = Mul (h, g)\n y = Conv (s, u)",
            ["GlobalAveragePool", "Conv", "Sigmoid", "Mul", "Conv"],
        ),
        ("z = Conv (h, u)\n y = Conv (h, u, b)", ["Conv", "Conv"]),
    ],
    ids=["depthwise", "matmul", "gemm", "squeeze-excite", "two layers, shared weights"],
)
def test_what_may_be_behind_it(behind: str, expected: list[str]) -> None:
    outputs = "y, z" if "z =" in behind else "y"
    text = net(f"c = Conv <{CONV}> (x, w)\n h = HardSwish (c)\n {behind}", outputs)
    check(hard_swish_to_product, parse(text), feed(), ["Conv", "Add", "Clip", "Mul", *expected])


@pytest.mark.parametrize(
    ("behind", "reason"),
    [
        ("s = Add (h, c)\n y = Conv (s, u)", "does not keep a factor"),
        ("s = Mul (h, h)\n y = Conv (s, u)", "does not keep a factor"),
        ("p = GlobalAveragePool (h)\n s = Mul (h, p)\n y = Conv (s, u)", "multiplies it with what comes from it"),
        ("s = Sigmoid (h)\n y = Conv (s, u)", "does not keep a factor"),
        ("t = Conv (h, u)\n y = Mul (h, t)", "is needed as it is"),
        ("k = Abs (u)\n y = Conv (h, k)", "are not constant"),
    ],
    ids=["sum", "square", "its own pool", "sigmoid", "output", "computed weights"],
)
def test_what_may_not(behind: str, reason: str) -> None:
    text = net(f"c = Conv <{CONV}> (x, w)\n h = HardSwish (c)\n {behind}")
    refused(hard_swish_to_product, parse(text), reason)


def test_layers_that_are_not_named_keep_their_weights() -> None:
    prepared = rewritten(hard_swish_to_product, parse(net(CHAIN)), "HardSwish_h")
    assert any("'Conv_y' is not to change" in note for note in prepared.notes)
