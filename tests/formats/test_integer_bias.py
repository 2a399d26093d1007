"""Whole biases under which every sum of products gives the output that the unrounded bias gives."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kenosis_ort.formats.integer_bias import Outputs, fit


def integers(sums: Any, step: float, shift: float, outputs: Outputs) -> Any:
    whole = np.rint((sums + shift) * step / outputs.scale) + outputs.zero_point
    return np.clip(whole, outputs.low, outputs.high)


@given(
    coarse=st.floats(0.001, 2.0),
    bits=st.integers(2, 4),
    signed=st.booleans(),
    factor=st.sampled_from([1, 16]),
    seed=st.integers(0, 2**16),
)
def test_what_is_called_exact_is_so_for_every_sum(coarse, bits, signed, factor, seed):
    rng = np.random.default_rng(seed)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    outputs = Outputs(0.1, int(rng.integers(low, high)), low, high)
    step = coarse * 0.1 * rng.uniform(0.5, 1.5, 6)
    bias = rng.normal(size=6) * 0.3
    reach = rng.integers(1, 400, 6)
    found = fit(step, bias, reach, factor, outputs)
    for channel in np.nonzero(found.exact)[0]:
        sums = np.arange(-reach[channel], reach[channel] + 1)
        expected = integers(sums, step[channel], bias[channel] / step[channel], outputs)
        actual = integers(sums, found.step[channel], found.bias[channel] / factor, outputs)
        np.testing.assert_array_equal(actual, expected)


def test_few_bits_are_nearly_always_exact_and_rounding_alone_is_not():
    rng = np.random.default_rng(0)
    outputs = Outputs(0.1, 0, 0, 15)
    step, bias, reach = rng.uniform(0.001, 0.08, 200), rng.normal(size=200) * 0.3, np.full(200, 3000)
    found = fit(step, bias, reach, 16, outputs)
    assert found.exact.mean() > 0.97
    assert np.abs(np.log(found.step / step)).max() < 0.1
    sums = np.arange(-3000, 3001)
    rounded = [
        np.array_equal(integers(sums, s, b / s, outputs), integers(sums, s, round(b / s), outputs))
        for s, b in zip(step, bias, strict=True)
    ]
    assert np.mean(rounded) < 0.6


def test_a_bias_on_the_grid_stays_as_it_is():
    found = fit(np.array([0.5, 0.25]), np.array([3.0, -2.0]), np.array([10, 10]), 1, Outputs(0.1, 0, 0, 15))
    np.testing.assert_array_equal(found.bias, [6, -8])
    np.testing.assert_array_equal(found.step, [0.5, 0.25])
    assert found.exact.all()


def test_without_quantized_outputs_the_bias_is_rounded():
    found = fit(np.array([0.5]), np.array([0.3]), np.array([10]), 4, None)
    assert found.bias[0] == 2
    assert not found.exact[0]
