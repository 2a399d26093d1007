"""Grids of weights in blocks, and what rounding by second moments gains on them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from kenosis_ort.weights.blocks import block_of, find_grid, fitted_steps, pack, relative_error, round_in_blocks

SIZES = {"rows": st.integers(1, 70), "columns": st.integers(1, 5), "seed": st.integers(0, 999)}
KINDS = {"block": st.sampled_from([16, 32, 64]), "bits": st.sampled_from([4, 8]), "symmetric": st.booleans()}


def matrix_of(rows: int, columns: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_t(3, (rows, columns)) * 10.0 ** rng.integers(-4, 4) + rng.normal() * 1e-3


@given(**SIZES, **KINDS)
def test_the_error_is_no_more_than_that_of_the_whole_range_and_what_is_packed_is_what_was_meant(
    rows: int, columns: int, seed: int, block: int, bits: int, symmetric: bool
):
    matrix = matrix_of(rows, columns, seed)
    grid = find_grid(matrix, bits, block, symmetric=symmetric)
    integers = grid.nearest(matrix)
    assert (integers.min() >= 0, integers.max() <= 2**bits - 1, (grid.scale > 0).all()) == (True, True, True)
    assert ((grid.zero >= 0) & (grid.zero <= grid.top) & (grid.zero == np.rint(grid.zero))).all()
    starts = np.arange(0, rows, block)
    off = np.add.reduceat((grid.real(integers) - matrix) ** 2, starts)
    span = np.maximum.reduceat(np.abs(matrix), starts)
    steps = 2.0 * span / (2**bits - 2)  # of a grid that is symmetric and clips nothing
    count = np.diff(starts, append=rows)[:, None]
    assert (off <= count * steps**2 * 1.001 + 1e-30).all()
    packed, scales, zeros = pack(integers, grid)
    blocks = len(starts)
    assert packed.shape == (columns, blocks, block * bits // 8)
    assert scales.shape == (columns, blocks)
    if bits == 4:
        packed = np.stack([packed & 15, packed >> 4], axis=-1)
        zeros = np.stack([zeros & 15, zeros >> 4], axis=-1).reshape(columns, -1)[:, :blocks]
    back = packed.reshape(columns, blocks * block)[:, :rows].T.astype(np.float64)
    np.testing.assert_array_equal(back, integers)
    np.testing.assert_array_equal(zeros.T, grid.zero)
    np.testing.assert_array_equal(scales.T, grid.scale.astype(np.float32))


@given(rows=st.integers(8, 80), columns=st.integers(1, 6), seed=st.integers(0, 999), **KINDS)
@example(rows=8, columns=1, seed=306, block=16, bits=4, symmetric=False)
def test_rounding_by_moments_never_loses(rows: int, columns: int, seed: int, block: int, bits: int, symmetric: bool):
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(rows, columns))
    x = rng.normal(size=(4 * rows, rows)) @ rng.normal(size=(rows, rows)) * np.exp(rng.normal(size=rows))
    moments = x.T @ x / len(x)
    found, grid = round_in_blocks(matrix, bits, block, moments, symmetric=symmetric)
    assert ((found >= 0) & (found <= grid.top) & (found == np.rint(found))).all()
    assert ((grid.scale > 0) & (grid.scale == grid.scale.astype(np.float32))).all()
    damped = moments + np.eye(rows) * 0.01 * np.trace(moments) / rows
    after, before = (relative_error(matrix, v, grid, damped) for v in (found, grid.nearest(matrix)))
    assert after <= before * (1 + 1e-9)
    plain = find_grid(matrix, bits, block, symmetric=symmetric)
    assert after <= relative_error(matrix, plain.nearest(matrix), plain, damped) * (1 + 1e-9)


def test_rounding_by_moments_gains_where_inputs_go_together():
    rng = np.random.default_rng(0)
    matrix, mix = rng.normal(size=(96, 32)), rng.normal(size=(96, 96))
    x = rng.normal(size=(1000, 96)) @ mix * np.exp(rng.normal(size=96))
    moments = x.T @ x / len(x)
    plain, moved = (relative_error(matrix, *round_in_blocks(matrix, 4, 32, m), moments) for m in (None, moments))
    assert moved < 0.5 * plain


def test_inputs_that_are_always_zero_round_to_nearest():
    matrix = np.random.default_rng(0).normal(size=(32, 4))
    found, grid = round_in_blocks(matrix, 4, 16, np.zeros((32, 32)))
    np.testing.assert_array_equal(found, grid.nearest(matrix))


@pytest.mark.parametrize(("rows", "block"), [(16, 16), (17, 16), (31, 16), (32, 32), (100, 64), (128, 128), (999, 128)])
def test_blocks_are_powers_of_two_that_the_matrix_fills(rows: int, block: int):
    assert block_of(rows, 128) == block


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
