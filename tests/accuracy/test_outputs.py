"""Comparison of the outputs of two models."""

import math

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kenosis_ort.accuracy.outputs import compare_outputs, sqnr_db
from kenosis_ort.errors import VerificationError
from tests.planning import parse
from tests.targets.qdq import QdqGraph, random_feeds

finite = hnp.arrays(np.float32, hnp.array_shapes(max_dims=3, max_side=5), elements=st.floats(-100, 100, width=32))


@given(finite, st.floats(0.0009765625, 0.5, width=32))
def test_sqnr_of_equal_and_of_scaled_signals(x: np.ndarray, error: float) -> None:
    assert sqnr_db(x, x) == math.inf
    if np.any(x):
        assert sqnr_db(x, x.astype(np.float64) * (1 + error)) == pytest.approx(-20 * math.log10(error), abs=1e-3)


def test_sqnr_edge_cases() -> None:
    zero, one = np.zeros(3), np.ones(3)
    assert sqnr_db(zero, zero) == math.inf
    assert sqnr_db(zero, one) == -math.inf
    assert sqnr_db(np.zeros((0, 4)), np.zeros((0, 4))) == math.inf
    masked = np.array([1.0, -math.inf, math.nan])
    assert sqnr_db(masked, masked.copy()) == math.inf
    assert sqnr_db(masked, np.array([1.0, 0.0, math.nan])) == -math.inf
    with pytest.raises(ValueError, match="shapes differ"):
        sqnr_db(zero, np.ones(4))


def _net(quantized: bool) -> onnx.ModelProto:
    g = QdqGraph(seed=3)
    x = g.input((4, 32))
    return g.model(g.gemm(g.q(x) if quantized else x, weight="dq" if quantized else "float"))


def test_compare_outputs() -> None:
    reference, quantized = _net(False), _net(True)
    name = quantized.graph.output[0].name
    reference.graph.node[-1].output[0] = reference.graph.output[0].name = name
    feeds = [random_feeds(reference, seed) for seed in range(4)]
    (found,) = compare_outputs(reference, quantized, iter(feeds))
    assert (found.name, found.elements) == (name, 4 * 4 * 16)
    assert 25 < found.sqnr_db < 60
    assert 0.99 < found.cosine < 1
    assert (found.agreement or 0) > 0.8
    assert 0 < found.max_abs < 0.5
    (same,) = compare_outputs(reference, reference.SerializeToString(), feeds)
    assert (same.sqnr_db, same.equal, same.max_abs, same.agreement) == (math.inf, 1.0, 0.0, 1.0)


@pytest.mark.parametrize(("shape", "agreement"), [((1, 2, 2), 0.5), ((1, 2, 1, 2), 0.0)], ids=["rows", "maps"])
def test_the_largest_is_sought_among_the_last_or_among_channels(shape: tuple[int, ...], agreement: float) -> None:
    def adds(values: list[float]) -> onnx.ModelProto:
        held = np.array(values, np.float32).reshape(shape)
        return parse(f"(float{list(shape)} x) => (y) {{ y = Add (x, s) }}", {"s": held})

    (found,) = compare_outputs(adds([1, 2, 3, 4]), adds([4, 5, 3, 1]), [{"x": np.zeros(shape, np.float32)}])
    assert found.agreement == agreement


def test_samples_with_another_number_of_rows_are_counted_and_not_compared() -> None:
    def positive(shift: float) -> onnx.ModelProto:
        text = """(float[n] x) => (float[m] y, int64[1] k) {
            z = Add (x, s)  zero = Sub (s, s)  keep = Greater (z, zero)  y = Compress (z, keep)  k = Shape (y) }"""
        return parse(text, {"s": np.float32(shift)})

    feeds = [{"x": np.float32([1, 2, 3])}, {"x": np.float32([-0.05, 2, 3])}]
    values, count = compare_outputs(positive(0.0), positive(0.1), feeds)
    assert (values.skipped, values.samples, values.elements) == (1, 2, 3)
    assert 20 < values.sqnr_db < 40
    assert (count.skipped, count.floating, count.equal) == (0, False, 0.5)


def test_compare_outputs_refuses_other_outputs_and_bad_samples() -> None:
    reference = _net(False)
    with pytest.raises(VerificationError, match="no output"):
        compare_outputs(reference, _net(True), [])
    with pytest.raises(VerificationError, match="sample 0"):
        compare_outputs(reference, reference, [{"nothing": np.zeros(3)}])
