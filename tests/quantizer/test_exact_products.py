"""No file lets a pair of 8-bit products clip in int16, by whichever road it is made."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper
from onnxruntime.quantization import QuantFormat, QuantType

import kenosis_ort
from kenosis_ort import Recipe
from kenosis_ort.graph.product_pairs import LARGEST_PAIR, PairOrder, can_clip, pair_order
from kenosis_ort.graph.walk import all_graphs
from kenosis_ort.quantizer.grids import quantize_weight
from kenosis_ort.quantizer.linear_layers import dynamic
from tests import models
from tests.clients.test_quantizer import build, ranges
from tests.flow.support import make
from tests.planning import parse

ORDERS = [PairOrder((0, 2, 1), 1), PairOrder((1, 0, 2), 1), PairOrder((0, 1, 2), 2), PairOrder((2, 0, 1), 1)]


def clipping_layers(model: onnx.ModelProto) -> list[str]:
    """Names of the layers with int8 weights whose pairs can clip; of QDQ, QOperator and dynamic forms."""
    graphs = list(all_graphs(model.graph))
    tensors = {t.name: t for graph in graphs for t in graph.initializer}
    found = []
    for graph in graphs:
        makers = {n.output[0]: n for n in graph.node if n.op_type == "DequantizeLinear"}
        for node in graph.node:
            names = [makers[n].input[0] if n in makers else n for n in node.input]
            for name in names:
                stored = tensors.get(name)
                order = None if stored is None else pair_order(node, tuple(stored.dims))
                if order is None or stored is None or stored.data_type != onnx.TensorProto.INT8 or not stored.dims:
                    continue
                if len(stored.dims) > 1 and can_clip(numpy_helper.to_array(stored), order).any():
                    found.append(node.name)
    return found


@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 5)),
    axis=st.sampled_from([None, 0, 1, 2]),
    picked=st.sets(st.sampled_from(range(len(ORDERS))), max_size=3),
    zero_point=st.sampled_from([0, -1]),
    one_sign=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_no_pair_clips_and_the_error_is_half_a_step(shape, axis, picked, zero_point, one_sign, seed):
    rng = np.random.default_rng(seed)
    weight = rng.normal(0, 1, shape).astype(np.float32) * np.float32(10.0 ** rng.uniform(-3, 3))
    weight = np.abs(weight) if one_sign else weight
    orders = [ORDERS[i] for i in sorted(picked)]
    q = quantize_weight(weight, axis=axis, zero_point=zero_point, orders=orders, largest_pair=LARGEST_PAIR)
    assert not any(can_clip(q.values, order).any() for order in orders)
    step = q.scale.astype(np.float64).reshape([-1 if i == axis else 1 for i in range(3)] if axis is not None else ())
    error = np.abs((q.values.astype(np.float64) - zero_point) * step - weight) / step
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
    {"recipe": Recipe(rounding="learned")}, {"recipe": "fast"}, {"recipe": "accurate"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("net", ["residual_block", "mobile_block", "transformer_block", "net_with_if"])
def test_files_of_quantize_static(net: str, options: dict[str, Any], tmp_path: Path) -> None:
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


def test_every_rank_group_and_reader(tmp_path: Path) -> None:
    made = make(parse(READERS), tmp_path, protect_outputs="int8")
    assert len(made.report.plan.integer_nodes()) >= 8
    assert clipping_layers(made.written) == []
    assert made.db() > 25


@pytest.mark.parametrize("reduce_range", [False, True])
def test_the_quantizer_that_a_client_builds(reduce_range: bool, tmp_path: Path) -> None:
    model = models.residual_block()
    feeds = models.feeds(model, 4)
    made = build(kenosis_ort.QDQQuantizer, model, ranges(model, feeds, tmp_path), reduce_range=reduce_range)
    assert clipping_layers(made.model.model) == []
    largest = max(np.abs(numpy_helper.to_array(t).astype(int)).max() for t in made.model.model.graph.initializer
                  if t.name.endswith("w_quantized"))  # fmt: skip
    assert (largest <= 64) == reduce_range


@pytest.mark.parametrize("make", [models.mlp, models.transformer_block])
def test_dynamic_forms(make: Callable[..., onnx.ModelProto]) -> None:
    model = dynamic(make(n_in=48, hidden=64, n_out=32) if make is models.mlp else make(tokens=6, width=32))
    assert model is not None
    assert clipping_layers(model) == []
