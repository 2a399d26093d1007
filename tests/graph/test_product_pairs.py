"""Quantized numbers: which products kernels add in int16, bit for bit, and which constants 8 bits hold exactly."""

import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st
from onnx.parser import parse_node

from kenosis_ort.graph.product_pairs import PairOrder, can_clip, pair_order, pair_orders, pair_sums
from kenosis_ort.graph.qdq import exact_grid
from tests.graph.build import net
from tests.models import session
from tests.processor import SATURATES


def computed(interface, body, x, constants):
    """What the runtime's own choice of kernels computes."""
    return session(net(f"({interface}) {{ {body} }}", constants)).run(None, {"x": x})[0]


def expected(columns, rows, pairs=True):
    """Products (n, K) x (m, K), their pairs added in int16 as ``vpmaddubsw`` does."""
    a, b = (np.pad(v.astype(np.int64), [(0, 0), (0, columns.shape[1] % 2)]) for v in (columns, rows))
    sums = (a[:, None, :] * b[None, :, :]).reshape(len(a), len(b), -1, 2).sum(-1)
    return (np.clip(sums, -(2**15), 2**15 - 1) if pairs and SATURATES else sums).sum(-1)


def windows(x, kernel, group, groups):
    """Im2col of one group in the order (kernel, channel): shape (positions, K); valid windows, stride 1."""
    channels, rank = x.shape[1] // groups, len(kernel)
    part = x[0, group * channels : (group + 1) * channels]
    view = np.lib.stride_tricks.sliding_window_view(part, kernel, axis=tuple(range(1, part.ndim)))
    turned = view.transpose(*range(1, 1 + 2 * rank), 0)
    return turned.reshape(int(np.prod(turned.shape[:rank])), -1)


LARGE = st.integers(0, 2**32 - 1)


@given(m=st.integers(1, 9), k=st.integers(1, 70), n=st.integers(1, 40), seed=LARGE)
def test_products_of_matrices_add_neighbours_along_k(m, k, n, seed):
    rng = np.random.default_rng(seed)
    x, w = rng.integers(180, 256, (m, k), np.uint8), rng.integers(-128, 128, (k, n), np.int8)
    found = computed(f"uint8{[m, k]} x) => (int32[] y", "y = MatMulInteger(x, w)", x, {"w": w})
    np.testing.assert_array_equal(found, expected(x, w.T))


@pytest.mark.parametrize("zero_point", [0, -1])
@pytest.mark.parametrize(("groups", "inputs", "outputs", "kernel"), [
    (1, 3, 8, (3, 3)), (1, 8, 16, (1, 1)), (1, 5, 7, (3,)), (1, 4, 8, (2, 2, 2)), (2, 6, 8, (3, 3)), (4, 4, 8, (3, 3)),
    (1, 1, 1, (3, 3)), (8, 8, 8, (3, 3)), (16, 16, 16, (5,)), (1, 1, 4, (4,)),
])  # fmt: skip
def test_convolutions_add_neighbours_in_kernel_then_channel_order(groups, inputs, outputs, kernel, zero_point):
    rng = np.random.default_rng(outputs * 31 + len(kernel))
    shape = (outputs, inputs // groups, *kernel)
    x = rng.integers(180, 256, (1, inputs, *(k + 3 for k in kernel)), np.uint8)
    w = rng.integers(-127, 128, shape, np.int8)
    step = np.float32(2.0 ** max(0, int(np.ceil(np.log2(255 * 128 * w[0].size / 120)))))  # leaves 8 bits of the sums
    constants = {"w": w, "s": np.float32(1), "z": np.uint8(0), "v": np.int8(zero_point), "t": step, "u": np.uint8(128)}
    text = f"y = QLinearConv<group = {groups}>(x, s, z, w, s, v, t, u)"
    y = computed(f"uint8{list(x.shape)} x) => (uint8[] y", text, x, constants)
    order = pair_order(parse_node(f"y = Conv<group = {groups}>(x, w)"), shape)
    per_group, sums = outputs // groups, []
    for group in range(groups):
        columns = windows(x, kernel, group, groups)
        stored = w[group * per_group : (group + 1) * per_group].transpose(0, *range(2, w.ndim), 1)
        rows = stored.reshape(per_group, -1)
        offset = columns.astype(np.int64).sum(axis=1)[:, None] * zero_point
        sums.append((expected(columns, rows, pairs=order is not None) - offset).T)
    found = np.concatenate(sums).reshape(y.shape)
    np.testing.assert_array_equal(y, np.clip(np.rint(found / step) + 128, 0, 255))


@given(shape=st.tuples(*[st.integers(1, 5)] * 4), groups=st.integers(1, 3), seed=LARGE)
def test_pairs_are_a_permutation_of_the_weights(shape, groups, seed):
    w = np.random.default_rng(seed).integers(-128, 128, shape, np.int8)
    for order in [PairOrder((0, 2, 3, 1), 1), PairOrder((0, 1, 3, 2), 3), PairOrder((1, 0, 2, 3), 2)]:
        pairs = order.pairs(w)
        assert pairs.shape[-1] == 2
        np.testing.assert_array_equal(order.tensor(pairs, w.shape), w)
        high, low = pair_sums(w, order)
        assert int(high.sum() + low.sum()) == int(w.astype(np.int64).sum())


@pytest.mark.parametrize(("op", "shape", "groups", "pairs"), [
    ("Conv", (2, 3, 2, 2), 1, {(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11), (3, 4), (9, 10)}),
    ("Conv", (2, 4, 2, 2), 1, {(i, i + 1) for i in range(0, 16, 2)}),
    ("Conv", (6, 3, 1), 2, {(0, 1)}), ("Conv", (4, 1, 3, 3), 4, set()), ("Gemm", (5, 2), 1, {(0, 1), (2, 3)}),
])  # fmt: skip
def test_of_odd_channels_filled_up_both_orders_count(op, shape, groups, pairs):
    node = parse_node(f"y = {op}{f'<group = {groups}>' if op == 'Conv' else ''}(x, w)")
    size = int(np.prod(shape[1:])) if op == "Conv" else shape[0]
    found = set()
    for pair in itertools.combinations(range(size), 2):
        row = np.zeros(size, np.int8)
        row[list(pair)] = 127
        w = np.zeros(shape, np.int8)
        if op == "Conv":  # positions in the order (kernel, channel)
            w[0] = row.reshape(*shape[2:], shape[1]).transpose(-1, *range(len(shape) - 2))
        else:
            w[:, 0] = row
        if any(can_clip(w, order).any() for order in pair_orders(node, shape, even_channels=True)):
            found.add(pair)
    assert found == pairs


def test_a_pair_can_clip_above_128_and_below_minus_128():
    order = pair_order(parse_node("y = MatMul(x, w)"), (2, 6))
    w = np.array([[64, 65, 127, -64, -65, -128], [64, 64, -128, -64, -64, -1]], np.int8)
    np.testing.assert_array_equal(can_clip(w, order)[:, 0], [False, True, False, False, True, True])


@pytest.mark.parametrize(("call", "shape", "axes"), [
    ("MatMul", (7,), (0,)), ("MatMul", (4, 6), (1, 0)), ("MatMul", (2, 4, 6), (0, 2, 1)), ("Gemm", (4, 6), (1, 0)),
    ("Gemm<transB = 1>", (6, 4), (0, 1)), ("Conv", (8, 4, 3, 3), (0, 2, 3, 1)),
    ("Conv<group = 8>", (8, 1, 3, 3), None), ("Conv<group = 8>", (16, 1, 3, 3), (0, 2, 3, 1)),
    ("ConvTranspose", (8, 4, 3, 3), None), ("Gather", (8, 4), None),
])  # fmt: skip
def test_order_by_operator(call, shape, axes):
    order = pair_order(parse_node(f"y = {call}(x, w)"), shape)
    assert (order.axes if order else None) == axes


# ---- constants that 8 bits hold exactly ------------------------------------------------------------------------------


@given(
    multiples=st.lists(st.integers(-120, 135), min_size=1, max_size=30),
    step=st.floats(1e-6, 1e6, allow_nan=False, allow_infinity=False),
)
def test_multiples_of_any_step_are_found(multiples, step):
    values = (np.array(multiples) * step).astype(np.float32)
    found = exact_grid(values)
    np.testing.assert_allclose(found.multiples * found.step, values, rtol=0, atol=1e-5 * float(np.abs(values).max()))
    assert found.low == min(int(found.multiples.min()), 0)
    assert max(int(found.multiples.max()), 0) - found.low <= 255


@pytest.mark.parametrize(("values", "step", "multiples"), [
    ([[1.0, 1.5], [2.25, 1.0]], 0.25, [[4, 6], [9, 4]]), ([0.0] * 3, None, [0, 0, 0])
])  # fmt: skip
def test_the_step_is_the_coarsest_one(values, step, multiples):
    found = exact_grid(np.array(values, np.float32))
    assert (found.step if step else None, found.low, found.multiples.tolist()) == (step, 0, multiples)


@pytest.mark.parametrize("values", [
    [1.0, np.pi], [0.001, 1.0], [-1.0, 255.0], list(range(257)), [np.nan], [np.inf, 1.0], [],
], ids=["irrational", "too fine", "too wide", "too many", "nan", "inf", "empty"])  # fmt: skip
def test_others_have_none(values):
    assert exact_grid(np.array(values, np.float32)) is None
