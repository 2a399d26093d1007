"""The canonical form: what is read from Q, Clip, DQ and annotations."""

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.formats.tensors import quantizers_of
from kenosis_ort.graph.qdq import annotate, declared_datatypes, integer_bounds, width_of
from tests.planning import parse


def model_of(low: int | None, high: int | None, *, weight: str = "") -> onnx.ModelProto:
    """x -> Q -> Clip -> DQ -> Conv with int8 weights behind DQ, and a data type said of the weights."""
    clip, clipped = ("", "q") if high is None else ("[clip] c = Clip (q, lo, hi)", "c")
    text = f"""(float[1,3,4,4] x) => (float[1,2,4,4] y) {{ q = QuantizeLinear (x, s, z) {clip}
        [dq] d = DequantizeLinear ({clipped}, s, z) wd = DequantizeLinear <axis = 0> (w, ws, wz) y = Conv (d, wd) }}"""
    constants = {
        "s": np.float32(0.1), "z": np.uint8(3), "lo": np.uint8(low or 0), "hi": np.uint8(high or 0),
        "w": np.int8([-7, 7, 0, 1, 2, -3]).reshape(2, 3, 1, 1), "ws": np.float32([0.5, 0.25]), "wz": np.int8([0, 0]),
    }  # fmt: skip
    model = parse(text, constants, opset=13, ir_version=8)
    if weight:
        annotate(model.graph, "w", weight)
    return model


@given(st.integers(2, 16), st.booleans(), st.booleans())
def test_a_width_and_its_bounds_are_the_same_fact(bits: int, signed: bool, narrow: bool) -> None:
    low, high = integer_bounds(bits, signed=signed, narrow=narrow)
    assert high - low == 2**bits - 1 - narrow
    assert width_of(low, high, signed=signed) == (bits, narrow)


@pytest.mark.parametrize(("low", "high"), [(1, 14), (0, 200), (-3, 7), (0, 0)])
def test_other_bounds_are_no_width(low: int, high: int) -> None:
    assert width_of(low, high, signed=low < 0) is None


@pytest.mark.parametrize(("high", "word", "bits", "weight_bits"), [
    (15, "INT4", 4, 4), (None, "", 8, 8), *((None, word, 8, 8) for word in ("UINT4", "FLOAT32", "INT12")),
])  # fmt: skip
def test_bits_are_read_from_clip_and_an_annotation_that_fits(high, word, bits, weight_bits):
    """Else the container counts."""
    activation, weight = quantizers_of(model_of(high and 0, high, weight=word))
    a, w = activation.quantizer, weight.quantizer
    assert (a.bits, a.signed, a.narrow, a.axis, a.zero_point, activation.real) == (bits, False, False, None, 3, "x")
    assert (activation.clip is None) == (high is None)
    assert (w.bits, w.signed, w.narrow, w.axis, w.scale.tolist()) == (weight_bits, True, True, 0, [0.5, 0.25])
    assert weight.constant is not None
    assert w.bounds == (1 - 2 ** (weight_bits - 1), 2 ** (weight_bits - 1) - 1)


def test_a_second_word_replaces_the_first() -> None:
    model = model_of(None, None, weight="INT4")
    annotate(model.graph, "w", "INT5")
    assert declared_datatypes(model.graph) == {"w": "INT5"}
