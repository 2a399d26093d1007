"""Grids of activations, weights and biases; no file lets a pair of 8-bit products clip in int16."""

import copy
import math

import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from onnx import TensorProto, numpy_helper
from onnxruntime.quantization import QuantFormat, QuantType, quant_utils

import kenosis_ort
from kenosis_ort.graph.product_pairs import LARGEST_PAIR, PairOrder, can_clip, pair_order
from kenosis_ort.graph.qdq import integer_bounds, on_grid
from kenosis_ort.graph.walk import all_graphs
from kenosis_ort.plan import RangeLimit
from kenosis_ort.quantizer import grids
from kenosis_ort.quantizer.grids import ActivationParameters, absorbs, nudged_parameters, quantize_bias, quantize_weight
from kenosis_ort.quantizer.linear_layers import dynamic
from tests import models
from tests.clients.support import build, calibrated
from tests.flow.support import make
from tests.planning import parse

TINY, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)

floats32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
usual = st.floats(-1e4, 1e4, width=32)


@st.composite
def ranges(draw, values=usual):
    a, b = draw(values), draw(values)
    return min(a, b), max(a, b)


@st.composite
def limits(draw):
    """Relu, Clip with one bound, Clip with two: what the planner lets through holds 0."""
    low = draw(st.one_of(st.none(), st.just(0.0), st.floats(-100, 0, width=32)))
    high = draw(st.one_of(st.none(), st.just(6.0), st.floats(0, 100, width=32)))
    return RangeLimit("v", low, high)


def ends(p, *, signed):
    """Returns the least and the largest real value that the parameters can hold."""
    qmin, qmax = (-128, 127) if signed else (0, 255)
    return (qmin - p.zero_point) * p.scale, (qmax - p.zero_point) * p.scale


def is_valid(p, *, signed):
    bottom, top = ends(p, signed=signed)
    return float(np.float32(p.scale)) == p.scale and TINY <= p.scale < math.inf and bottom <= 0 <= top


@given(ranges(), st.booleans())
def test_without_a_limit_the_range_is_covered_to_half_a_step_and_no_step_is_wasted(range_, signed):
    """The scale is the width over 255: nothing coarser than the range asks for."""
    low, high = min(range_[0], 0.0), max(range_[1], 0.0)
    p = nudged_parameters(*range_, signed=signed)
    assert is_valid(p, signed=signed)
    bottom, top = ends(p, signed=signed)
    slack = 0.5 * p.scale * (1 + 1e-6) + 1e-6 * max(-bottom, top)
    assert (bottom <= low + slack, top >= high - slack) == (True, True)
    if high - low > 255 * TINY:
        assert p.scale == pytest.approx((high - low) / 255, rel=1e-6)


@given(ranges(floats32), st.booleans(), st.one_of(st.none(), limits()))
@example((-LARGEST, LARGEST), False, None)
@example((0.0, LARGEST), True, None)
@example((0.0, 1e-45), False, None)
@example((-1e-40, 0.0), True, None)
def test_zero_is_exact_whatever_the_range(range_, signed, limit):
    """From subnormal to the largest float32: real 0.0 is the integer zero point, the scale a positive float32."""
    assert is_valid(nudged_parameters(*range_, signed=signed, limit=limit), signed=signed)


@given(ranges(), st.booleans(), limits())
@example((0.0, 8.355), False, RangeLimit("v", 0.0, 8.355))  # by 255 and rounded to float32 it ends a hair outside
@example((-6.74, 6.51), True, RangeLimit("v", -6.74, 6.51))
@example((-1.0, 1.0), False, RangeLimit("v", -1.0, 1.0))
def test_the_activation_is_absorbed_whatever_was_calibrated(range_, signed, limit):
    p = nudged_parameters(*range_, signed=signed, limit=limit)
    tiny_bound = any(b is not None and 0 < abs(b) < 255 * TINY for b in (limit.low, limit.high))
    closed = limit.low == 0.0 and limit.high == 0.0
    assert tiny_bound or closed or absorbs(p.scale, p.zero_point, limit, integer_bounds(8, signed=signed))


@given(ranges(), st.booleans(), limits())
@example((-2.0, 8.0), False, RangeLimit("v", None, 6.0))
@example((-8.0, 2.0), True, RangeLimit("v", -6.0, None))
def test_inside_its_bounds_the_range_is_covered(range_, signed, limit):
    """What the activation lets through is representable to a step, where one bound alone could cost that much."""
    p = nudged_parameters(*range_, signed=signed, limit=limit)
    low = max(min(range_[0], 0.0), -math.inf if limit.low is None else limit.low)
    high = min(max(range_[1], 0.0), math.inf if limit.high is None else limit.high)
    bottom, top = ends(p, signed=signed)
    step = max(p.scale, (high - low) / 255) * (1 + 1e-5) + 1e-5 * max(-bottom, top)
    assert (bottom <= low + step, top >= high - step) == (True, True)


@pytest.mark.parametrize("signed", [False, True])
def test_a_dead_tensor(signed):
    """All zeros: stock's scale of 1 without bounds, and one that absorbs with them."""
    assert nudged_parameters(0.0, 0.0, signed=signed) == ActivationParameters(1.0, 0)
    for bounds in ((0.0, 6.0), (0.0, None), (None, 6.0), (-1.0, 0.0), (None, 0.0)):
        limit = RangeLimit("v", *bounds)
        p = nudged_parameters(0.0, 0.0, signed=signed, limit=limit)
        assert absorbs(p.scale, p.zero_point, limit, integer_bounds(8, signed=signed)), bounds


@pytest.mark.parametrize("range_", [(1.0, 0.0), (math.nan, 1.0), (0.0, math.inf), (-math.inf, 0.0)])
def test_what_is_no_range_is_an_error(range_):
    with pytest.raises(ValueError, match="not a range"):
        nudged_parameters(*range_, signed=False)


@given(ranges(), st.one_of(st.just((None, None)), st.just((-8.0, None)), ranges()))
def test_clamped_lies_inside_both(range_, bounds):
    assert grids.clamped(*range_, None) == range_
    low, high = grids.clamped(*range_, RangeLimit("v", *bounds))
    least, most = -math.inf if bounds[0] is None else bounds[0], math.inf if bounds[1] is None else bounds[1]
    assert least <= low <= high <= most
    overlap = max(range_[0], least), min(range_[1], most)
    if overlap[0] <= overlap[1]:
        assert (low, high) == overlap


# ---- weights ---------------------------------------------------------------------------------------------------------


HALF = 0.5 * (1 + 1e-9)


@st.composite
def weights(draw):
    """Weights of one to four axes with channels of very different magnitude, and the channel axis or None."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    axis = draw(st.one_of(st.none(), st.integers(0, len(shape) - 1)))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    spread = 10.0 ** rng.uniform(-6, 3, shape[-1])
    values = (rng.normal(0, 1, shape) * spread).astype(np.float32)
    if draw(st.booleans()):
        values[..., 0] = 0.0
    return values, axis


def steps(q):
    shape = () if q.axis is None else [-1 if axis == q.axis else 1 for axis in range(q.values.ndim)]
    return q.scale.astype(np.float64).reshape(shape)


@given(weights(), st.booleans(), st.sampled_from([1, 3, 7]))
def test_half_a_step_of_error_symmetric_in_the_whole_range_block_by_block(made, reduce_range, block):
    values, axis = made
    top = 64 if reduce_range else 127
    q = quantize_weight(values, axis=axis, reduce_range=reduce_range)
    assert (q.values.shape, q.values.dtype, q.scale.dtype) == (values.shape, np.int8, np.float32)
    assert q.scale.shape == (() if axis is None else (values.shape[axis],))
    assert (np.abs(q.values * steps(q) - values.astype(np.float64)) <= steps(q) * (HALF + 1e-5)).all()
    assert ((q.values[values == 0.0] == 0).all(), (q.scale > 0).all()) == (True, True)
    mirrored = quantize_weight(-values, axis=axis, reduce_range=reduce_range)
    np.testing.assert_equal((mirrored.values, mirrored.scale), (-q.values, q.scale))
    others = None if axis is None else tuple(i for i in range(values.ndim) if i != axis)
    largest = np.asarray(np.abs(q.values.astype(np.int64)).max(axis=others))
    assert (largest <= top).all()
    assert (largest[np.asarray(np.abs(values).max(axis=others) > top * TINY)] == top).all()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kenosis_ort.quantizer.grids._BLOCK", block)
        parts = quantize_weight(values, axis=axis, reduce_range=reduce_range)
    np.testing.assert_equal((parts.values, parts.scale), (q.values, q.scale))


@given(weights(), st.floats(1e-6, 1.0), st.floats(0.0, 1e6), st.integers(0, 2**16))
def test_widening_keeps_the_bias_in_int32(made, input_scale, size, seed):
    """Near-dead channels have tiny weights and a bias that is not: their scale grows until the bias fits."""
    values, axis = made
    channels = values.shape[-1 if axis is None else axis]
    scale = float(np.float32(input_scale))
    bias = np.random.default_rng(seed).normal(0, size, channels)
    q = quantize_weight(values, axis=axis, biases=[(scale, bias), (scale, -bias)])
    grid = float(scale) * q.scale.astype(np.float64)
    assert (np.abs(bias / grid) <= 2**30 * (1 + 1e-6)).all()
    b = quantize_bias(bias, input_scale=scale, weight_scale=q.scale)
    assert (np.abs(b.values * b.scale.astype(np.float64) - bias) <= b.scale * (0.5 + 1e-6)).all()
    assert (np.abs(q.values * steps(q) - values.astype(np.float64)) <= steps(q) * (HALF + 1e-5)).all()


def test_a_dead_channel_has_the_scale_of_the_largest_and_a_dead_weight_one():
    """With a scale of 1 the bias of a dead channel would be rounded to whole steps of the input."""
    q = quantize_weight(np.array([[0.0, 0.0], [0.01, -0.02], [1.27, 0.5]], np.float32), axis=0)
    np.testing.assert_allclose(q.scale, [0.01, 0.02 / 127, 0.01], rtol=1e-6)
    assert not q.values[0].any()
    dead = quantize_weight(np.zeros((2, 3), np.float32), axis=0)
    np.testing.assert_array_equal(dead.scale, [1.0, 1.0])
    assert not dead.values.any()
    assert quantize_weight(np.zeros((0, 3), np.float32), axis=None).values.shape == (0, 3)


@pytest.mark.parametrize("bits", [2, 4])
def test_of_few_bits_some_weights_are_clipped_where_that_costs_less(bits):
    weight, top = models.normal((4, 256)), 2 ** (bits - 1) - 1
    q = quantize_weight(weight, axis=0, bits=bits)
    plain = np.abs(weight).max(axis=1, keepdims=True) / top
    errors = [np.square(on_grid(weight, step, 0, -top, top) * step - weight).sum() for step in (steps(q), plain)]
    assert errors[0] < 0.9 * errors[1]


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_an_error(broken):
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize_weight(np.array([1.0, broken], np.float32), axis=None)


# ---- bias -------------------------------------------------------------------------------------------------------


@given(
    st.floats(2**-20, 100, width=32), st.lists(st.floats(2**-20, 1, width=32), min_size=1, max_size=5),
    st.sampled_from([1.0, 0.5, -2.0]), st.booleans(), st.integers(0, 2**16),
)  # fmt: skip
def test_the_bias_lies_on_the_product_of_the_scales(input_scale, weight_scales, beta, per_channel, seed):
    """The grid is exactly the float32 product that the runtime's kernels compute; the error half a step of it."""
    scales = np.array(weight_scales, np.float32)
    weight_scale = scales if per_channel else scales[0].reshape(())
    grid = np.float32(input_scale) * weight_scale
    steps = np.random.default_rng(seed).uniform(-(2.0**30), 2.0**30, scales.size)
    bias = (steps * grid / beta).astype(np.float32)
    q = quantize_bias(bias, input_scale=input_scale, weight_scale=weight_scale, beta=beta)
    assert (q.scale.dtype, q.scale.shape, q.values.dtype) == (np.float32, weight_scale.shape, np.int32)
    np.testing.assert_array_equal(q.scale, grid)
    error = np.abs(q.values * grid.astype(np.float64) - bias.astype(np.float64) * beta)
    assert (error <= grid * (0.5 + 1e-9)).all()


def test_a_bias_beyond_int32_saturates():
    """Only where the caller forbids the widening of weights (`QDQDisableWeightAdjustForInt32Bias`)."""
    q = quantize_bias(np.array([1e9, -1e9]), input_scale=1e-3, weight_scale=np.float32(1e-3).reshape(()))
    np.testing.assert_array_equal(q.values, [2**31 - 1, -(2**31)])


# ---- 4 bits, also on runtimes whose own quantizer looks for types that onnx dropped ----------------------------------


TABLES = ("ONNX_TYPE_TO_NP_TYPE", "ONNX_INT_TYPE_RANGE", "ONNX_INT_TYPE_SYMMETRIC_RANGE", "ONNX_INT_TYPE_REDUCED_RANGE")


@pytest.mark.parametrize(
    ("weight_type", "dtype"), [(QuantType.QInt4, TensorProto.INT4), (QuantType.QUInt4, TensorProto.UINT4)]
)
def test_weights_are_four_bit_and_close(weight_type, dtype, tmp_path):
    tables = {name: copy.deepcopy(getattr(quant_utils, name)) for name in TABLES}
    made = make(models.conv_relu_chain(2), tmp_path, weight_type=weight_type, per_channel=False)
    (stored,) = (tensor for tensor in made.written.graph.initializer if tensor.name == "conv0_w_quantized")
    assert (stored.data_type, made.report.plan.by_node["conv0"].rule) == (dtype, "caller-types")
    values, scale, zero = (np.float32(made.held[f"conv0_w_{part}"]) for part in ("quantized", "scale", "zero_point"))
    (weight,) = (tensor for tensor in made.model.graph.initializer if tensor.name == "conv0_w")
    np.testing.assert_allclose((values - zero) * scale, numpy_helper.to_array(weight), atol=0.51 * float(scale))
    assert {name: getattr(quant_utils, name) for name in TABLES} == tables


# ---- products of 8 bits, by whichever road a file is made -----------------------------------------------------------


ORDERS = [PairOrder((0, 2, 1), 1), PairOrder((1, 0, 2), 1), PairOrder((0, 1, 2), 2), PairOrder((2, 0, 1), 1)]


def clipping_layers(model):
    """Names of the layers with int8 weights whose pairs can clip; of QDQ, QOperator and dynamic forms."""
    graphs = list(all_graphs(model.graph))
    tensors = {t.name: t for graph in graphs for t in graph.initializer}
    found = []
    for graph in graphs:
        makers = {n.output[0]: n for n in graph.node if n.op_type == "DequantizeLinear"}
        for node in graph.node:
            for stored in (tensors.get(makers[n].input[0] if n in makers else n) for n in node.input):
                if stored is not None and stored.data_type == TensorProto.INT8 and len(stored.dims) > 1:
                    order = pair_order(node, tuple(stored.dims))
                    if order is not None and can_clip(numpy_helper.to_array(stored), order).any():
                        found.append(node.name)
    return found


@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 5)), axis=st.sampled_from([None, 0, 1, 2]),
    picked=st.sets(st.sampled_from(range(len(ORDERS))), max_size=3), zero_point=st.sampled_from([0, -1]),
    one_sign=st.booleans(), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_no_pair_clips_and_the_error_is_half_a_step(shape, axis, picked, zero_point, one_sign, seed):
    rng = np.random.default_rng(seed)
    weight = rng.normal(0, 1, shape).astype(np.float32) * np.float32(10.0 ** rng.uniform(-3, 3))
    weight = np.abs(weight) if one_sign else weight
    orders = [ORDERS[i] for i in sorted(picked)]
    q = quantize_weight(weight, axis=axis, zero_point=zero_point, orders=orders, largest_pair=LARGEST_PAIR)
    assert not any(can_clip(q.values, order).any() for order in orders)
    error = np.abs((q.values.astype(np.float64) - zero_point) * steps(q) - weight) / steps(q)
    assert (error <= 0.5 + 1e-4).mean() > 0.9  # a few are lowered by one where both of a pair were rounded up
    assert error.max() <= 1.5 + 1e-4 - 0.5 * zero_point
    free = quantize_weight(weight, axis=axis, zero_point=zero_point)
    ratio = q.scale.astype(np.float64) / free.scale
    assert (ratio >= 1 - 1e-6).all()
    if axis is not None and not all(axis in order.row_axes() for order in orders):
        return  # pairs across channels: one bound for all
    assert (ratio <= 2 * 127 / (128 + 2 * zero_point) + 1e-6).all()  # 7 bits at the worst


@pytest.mark.parametrize("options", [
    {}, {"per_channel": False}, {"reduce_range": False}, {"activation_type": QuantType.QInt8},
    {"quant_format": QuantFormat.QOperator}, {"host": "amx", "tune": "model"}, {"rewrites": False},
    {"extra_options": {"MinimumRealRange": 0.01}}, {"extra_options": {"AddQDQPairToWeight": False}},
    {"recipe": kenosis_ort.Recipe(rounding="learned")}, {"recipe": "fast"}, {"recipe": "accurate"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("net", ["residual_block", "mobile_block", "transformer_block", "net_with_if"])
def test_files_of_quantize_static(net, options, tmp_path):
    assert clipping_layers(make(models.ALL[net](), tmp_path, **options).written) == []


READERS = """(float[1,3,8,8] x) => (float[64,16] y) <float[8,3,3,3] odd, float[16,2,3,3] groups, float[32,1,3,3] twice,
    float[64,32,3] line, float[16,64,1,1,1] cube, float[16,16] shared, int64[3] flat = {1, 32, 64},
    int64[5] deep = {1, 64, 4, 4, 4}, int64[2] rows = {64, 16}> {
    a = Conv <pads = [1,1,1,1]> (x, odd)  ar = Relu (a)  b = Conv <group = 4, pads = [1,1,1,1]> (ar, groups)
    br = Relu (b)  c = Conv <group = 16, pads = [1,1,1,1]> (br, twice)  cr = Relu (c)  d = Reshape (cr, flat)
    e = Conv <pads = [1,1]> (d, line)  er = Relu (e)  f = Reshape (er, deep)  g = Conv (f, cube)  gr = Relu (g)
    h = Reshape (gr, rows)  i = Gemm (h, shared)  ir = Relu (i)  j = Gemm <transB = 1> (ir, shared)  jr = Relu (j)
    y = MatMul (jr, shared) }"""
"""Convs of one to three axes, grouped ones, and a weight that layers read in different order."""


def test_every_rank_group_and_reader(tmp_path):
    made = make(parse(READERS), tmp_path, protect_outputs="int8")
    assert len(made.report.plan.integer_nodes()) >= 8
    assert clipping_layers(made.written) == []
    assert made.db() > 25


@pytest.mark.parametrize("reduce_range", [False, True])
def test_the_quantizer_that_a_client_builds(reduce_range, tmp_path):
    model, _, known = calibrated(models.residual_block(), tmp_path)
    made = build(kenosis_ort.QDQQuantizer, model, known, reduce_range=reduce_range)
    assert clipping_layers(made.model.model) == []
    weights = [t for t in made.model.model.graph.initializer if t.name.endswith("w_quantized")]
    assert (max(np.abs(numpy_helper.to_array(t).astype(int)).max() for t in weights) <= 64) == reduce_range


@pytest.mark.parametrize("model", [models.mlp(n_in=48, hidden=64, n_out=32), models.transformer_block(width=32)])
def test_dynamic_forms(model):
    assert clipping_layers(dynamic(model)) == []
