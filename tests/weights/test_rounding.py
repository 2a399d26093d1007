"""Rounding in blocks by what a layer's output changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kenosis_ort.weights.blocks import find_grid, fitted_steps, relative_error, round_in_blocks


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([16, 32]), st.integers(20, 70), st.integers(1, 6), st.booleans())
def test_samples_never_make_a_layer_worse_than_rounding_to_nearest(
    seed: int, block: int, rows: int, columns: int, symmetric: bool
):
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((rows, columns))
    data = rng.standard_normal((3 * rows, rows)) @ rng.standard_normal((rows, rows)) * np.exp(rng.standard_normal(rows))
    moments = data.T @ data / len(data)
    found, grid = round_in_blocks(matrix, 4, block, moments, symmetric=symmetric)
    assert ((found >= 0) & (found <= 15) & (found == np.rint(found))).all()
    assert (grid.scale > 0).all()
    assert (grid.scale == grid.scale.astype(np.float32)).all()
    plain = find_grid(matrix, 4, block, symmetric=symmetric)
    nearest = relative_error(matrix, plain.nearest(matrix), plain, moments)
    assert relative_error(matrix, found, grid, moments) <= 1.05 * nearest


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([16, 32]), st.integers(20, 70))
def test_fitted_steps_are_the_best_for_their_integers(seed: int, block: int, rows: int):
    rng = np.random.default_rng(seed)
    matrix, data = rng.standard_normal((rows, 3)), rng.standard_normal((4 * rows, rows))
    hessian = data.T @ data / len(data)
    grid = find_grid(matrix, 4, block, symmetric=False)
    integers = grid.nearest(matrix)
    best = replace(grid, scale=fitted_steps(matrix, integers, hessian, grid))
    assume((best.scale != grid.scale).any(axis=0).all())  # a column keeps its own steps where one were not positive
    error = relative_error(matrix, integers, best, hessian)
    assert error <= relative_error(matrix, integers, grid, hessian) * (1 + 1e-9)
    for change in (0.999, 1.001):
        moved = best.scale.copy()
        moved[rng.integers(len(moved))] *= change
        assert error <= relative_error(matrix, integers, replace(best, scale=moved), hessian) * (1 + 1e-5)
