"""Steps of arithmetic as one scale and shift."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from kenosis_ort.rewrite.channel_affine import affine_step

numbers = st.floats(-8, 8).filter(lambda x: abs(x) > 1e-3)
COMPUTE = {"Mul": np.multiply, "Add": np.add, "Sub": np.subtract, "Div": np.divide}


@given(st.lists(st.tuples(st.sampled_from(list(COMPUTE)), numbers, st.booleans()), max_size=6), numbers)
def test_a_row_of_steps_is_one_scale_and_shift(steps, x):
    scale, shift, want = np.ones(1), np.zeros(1), np.array([x])
    reach = 1.0 + abs(x)
    for op, number, swapped in steps:
        constant = np.array([number])
        node = helper.make_node(op, ["c", "v"] if swapped else ["v", "c"], ["y"])
        found = affine_step(node, "v", scale, shift, constant)
        if op == "Div" and swapped:
            assert found is None
            return
        assert found is not None
        scale, shift = found
        want = COMPUTE[op](constant, want) if swapped else COMPUTE[op](want, constant)
        reach = max(reach, abs(scale[0] * x), abs(shift[0]), abs(want[0]))
    np.testing.assert_allclose(scale * x + shift, want, rtol=1e-9, atol=1e-9 * reach)
