"""Every row of the table of precisions, asked of the installed runtime."""

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from docs.generate.precisions import PRECISIONS, Runs
from tests.targets.qdq import VERSION, QdqGraph, compute_ops, random_feeds, run

K, N, BLOCK = 64, 32, 32
SINCE_1_32 = {"int16-activations/2": "MatMulNBits", "blocked-int8-weights/0": "MatMul"}
"""What onnxruntime 1.32 does otherwise: a MatMul of 16-bit values takes blocks of 8 bits, and float8 loads."""


def _model(make, *, opset=21, out=TensorProto.FLOAT, **options):
    graph = QdqGraph(opset=opset, **options)
    model = graph.model(make(graph))
    model.graph.output[0].type.tensor_type.elem_type = out
    return model


def _constant(g, values, elem_type, shape):
    name = f"low_{len(g.net.initializers)}"
    g.net.initializers.append(helper.make_tensor(name, elem_type, shape, np.asarray(values).ravel().tolist()))
    return name


def _weight(g, elem_type, *, block, scale=np.float32):
    """A (K, N) weight behind DQ with a scale by block of rows, or by column where ``block`` is None."""
    shape = (N,) if block is None else (K // block, N)
    top = {TensorProto.INT4: 7, TensorProto.INT8: 127}[elem_type]
    values = _constant(g, np.random.default_rng(0).integers(-top, top + 1, (K, N)), elem_type, (K, N))
    grid = g.const(np.full(shape, 0.01, scale)), _constant(g, np.zeros(shape, int), elem_type, shape)
    attributes = {"axis": 1} if block is None else {"axis": 0, "block_size": block}
    return g.op("DequantizeLinear", values, *grid, **attributes)


def _pair(g, value, elem_type):
    scale, zero = g.const(np.float32(0.5)), _constant(g, [0], elem_type, ())
    return g.op("DequantizeLinear", g.op("QuantizeLinear", value, scale, zero), scale, zero)


def _matmul(g, elem_type, *, act=None, block=BLOCK, op="MatMul", x=TensorProto.FLOAT):
    value = g.input((4, K), x)
    weight = _weight(g, elem_type, block=block, scale=np.float16 if x == TensorProto.FLOAT16 else np.float32)
    y = g.op(op, g.q(value, act=act) if act else value, weight)
    return g.q(y, act=act) if act else y


def _conv_int4_weight(g, act):
    weight = _constant(g, np.random.default_rng(0).integers(-7, 8, (16, 16, 3, 3)), TensorProto.INT4, (16, 16, 3, 3))
    scale = g.const(np.full(16, 0.02, np.float32))
    x = g.q(g.input(), act=act) if act else g.input()
    y = g.op("Conv", x, g.op("DequantizeLinear", weight, scale, axis=0), kernel_shape=[3, 3], pads=[1] * 4)
    return g.q(y, act=act) if act else y


def _int16_weight(g):
    return g.op("DequantizeLinear", g.const(np.ones((K, N), np.int16)), g.const(np.float32(0.01)))


def _float16_pairs(g, op):
    scale, zero, low = g.const(np.float16(0.02)), g.const(np.uint8(128)), g.const(np.int8(0))

    def pair(x):
        return g.op("DequantizeLinear", g.op("QuantizeLinear", x, scale, zero), scale, zero)

    weight = g.const(np.ones((16, 16, 3, 3) if op == "Conv" else (12, 16), np.int8))
    x = pair(g.input((1, 16, 12, 12), TensorProto.FLOAT16))
    return pair(g.op(op, x, g.op("DequantizeLinear", weight, scale, low)))


def _float16_ends(g):
    x = g.op("Cast", g.input((1, 16, 12, 12), TensorProto.FLOAT16), to=TensorProto.FLOAT)
    return g.op("Cast", g.q(g.conv(g.q(x))), to=TensorProto.FLOAT16)


CASES = {
    f"{key}/{number}": (key, model)
    for key, models in {
        "int16-activations": [
            _model(lambda g: g.q(g.conv(g.q(g.input()))), act=np.uint16),
            _model(lambda g: g.q(g.gemm(g.q(g.input((4, 32))))), act=np.int16),
            _model(lambda g: g.q(g.matmul(g.q(g.input((4, 32))))), act=np.uint16),
        ],
        "int16-weights": [_model(lambda g: g.q(g.op("MatMul", g.q(g.input((4, K))), _int16_weight(g))))],
        "int4-activations": [
            _model(lambda g: _pair(g, g.conv(_pair(g, g.input(), TensorProto.UINT4)), TensorProto.UINT4))],
        "int4-weights-int8-activations": [
            _model(lambda g, b=block: _matmul(g, TensorProto.INT4, act=np.uint8, block=b)) for block in (None, BLOCK)],
        "int4-conv": [_model(lambda g, a=act: _conv_int4_weight(g, a)) for act in (None, np.uint8)],
        "int4-weights": [
            *(_model(lambda g, b=block: _matmul(g, TensorProto.INT4, block=b)) for block in (None, 16, BLOCK)),
            _model(lambda g: _matmul(g, TensorProto.INT4, op="Gemm")),
        ],
        "int8-weights": [_model(lambda g, b=block: _matmul(g, TensorProto.INT8, block=b)) for block in (None, BLOCK)],
        "blocked-int8-weights": [_model(lambda g: _matmul(g, TensorProto.INT8, act=np.uint8))],
        "float16-qdq": [
            _model(lambda g, o=op: _float16_pairs(g, o), out=TensorProto.FLOAT16) for op in ("Conv", "MatMul")],
        "float16-inputs": [_model(_float16_ends, out=TensorProto.FLOAT16)],
        "float16-int4-weights": [
            _model(lambda g: _matmul(g, TensorProto.INT4, x=TensorProto.FLOAT16), out=TensorProto.FLOAT16)],
    }.items()
    for number, model in enumerate(models)
}  # fmt: skip


@pytest.mark.since("1.31")
@pytest.mark.parametrize("case", CASES)
def test_row(case):
    key, model = CASES[case]
    (row,) = (row for row in PRECISIONS if row.key == key)
    since = SINCE_1_32.get(case) if VERSION >= (1, 32) else None
    if row.runs is Runs.FAILS and since is None:
        with pytest.raises(Exception, match=r"invalid|was false"):
            run(model, random_feeds(model))
        return
    assert set(compute_ops(model)) - {"Cast"} <= set((since or row.kernel).split(", "))
    fast, plain = run(model, random_feeds(model))[0], run(model, random_feeds(model), optimize=False)[0]
    noise = float(np.square(fast.astype(np.float64) - plain).sum())
    assert noise < 1e-3 * float(np.square(plain.astype(np.float64)).sum())


@pytest.mark.since("1.31")
def test_float8_activations_do_not_load_or_run_in_float():
    kind = TensorProto.FLOAT8E4M3FN

    def make(g):
        values, zero = _constant(g, np.ones((K, N)), kind, (K, N)), _constant(g, [0], kind, ())
        weight = g.op("DequantizeLinear", values, g.const(np.float32(1)), zero)
        return _pair(g, g.op("MatMul", _pair(g, g.input((4, K)), kind), weight), kind)

    if VERSION >= (1, 32):
        assert compute_ops(_model(make)) == ["MatMul"]
        return
    with pytest.raises((ort_errors.InvalidGraph, ort_errors.NotImplemented)):
        compute_ops(_model(make))


@pytest.mark.since("1.31")
def test_matmul_n_bits_computes_in_integers():
    """The kernel takes 8-bit blocks of activations (accuracy level 4): not the float product to the last digits."""
    _, model = CASES["int8-weights/1"]
    fast, plain = run(model, random_feeds(model))[0], run(model, random_feeds(model), optimize=False)[0]
    assert 1e-7 < float(np.square(fast - plain).sum() / np.square(plain).sum()) < 1e-3


def test_refusals_say_what_to_do():
    for row in PRECISIONS:
        assert row.offered is False or row.runs is Runs.INTEGER
        assert (len(row.reason) > 30, row.reason[-1] == ".") == (True, False)
