"""Operators without an integer form: norms, recurrent nets, Einsum, embeddings in int8."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from onnx import TensorProto

from .qdq import QdqGraph, build, compute_ops, conv_then, op_types, quantized_weights

Make = Callable[[QdqGraph, str], str]


def _ones(g: QdqGraph, count: int, size: int) -> list[str]:
    return [g.const(np.ones(size, np.float32)) for _ in range(count)]


NORMS: dict[str, Make] = {
    "LayerNormalization": lambda g, x: g.op("LayerNormalization", x, *_ones(g, 2, 12)),
    "InstanceNormalization": lambda g, x: g.op("InstanceNormalization", x, *_ones(g, 2, 16)),
    "BatchNormalization": lambda g, x: g.op("BatchNormalization", x, *_ones(g, 4, 16)),
    "LRN": lambda g, x: g.op("LRN", x, size=5),
    "LpNormalization": lambda g, x: g.op("LpNormalization", x, axis=1, p=2),
}


@pytest.mark.parametrize("name", NORMS)
def test_rule_norms_float(name: str) -> None:
    same = build(lambda g: g.q(NORMS[name](g, g.act_input())))
    assert op_types(same) == ["QuantizeLinear", "DequantizeLinear", name, "QuantizeLinear", "DequantizeLinear"]


def test_rule_bn_unfolded_float() -> None:
    """A BatchNormalization between Conv and Q makes the Conv float; with a Q on the Conv it is a float island."""
    deferred = conv_then(lambda g, c: g.relu_q(g.op("Relu", NORMS["BatchNormalization"](g, c))))
    island = conv_then(lambda g, c: g.relu_q(g.op("Relu", NORMS["BatchNormalization"](g, g.q(c)))))
    assert compute_ops(deferred) == ["BatchNormalization", "Conv"]
    assert compute_ops(island) == ["BatchNormalization", "QLinearConv"]


@pytest.mark.parametrize(("op_type", "gates"), [("LSTM", 4), ("GRU", 3)])
@pytest.mark.parametrize("weight", ["dq", "float"])
def test_rule_lstm_float(op_type: str, gates: int, weight: str) -> None:
    """Float; DQ weights are dequantized on every run, float ones are left alone."""

    def make(g: QdqGraph) -> str:
        arrays = [g.random(1, gates * 4, 8), g.random(1, gates * 4, 4)]
        weights = [g.dq_weight(a, axis=None) if weight == "dq" else g.const(a) for a in arrays]
        return g.q(g.op(op_type, g.act_input((5, 1, 8)), *weights, hidden_size=4))

    model = build(make)
    assert compute_ops(model) == [op_type]
    assert quantized_weights(model) == (2 if weight == "dq" else 0)


def test_rule_einsum_float() -> None:
    model = build(lambda g: g.q(g.op("Einsum", g.act_input((4, 8)), g.act_input((8, 4)), equation="ij,jk->ik")))
    assert compute_ops(model) == ["Einsum"]


@pytest.mark.parametrize("op_type", ["TopK", "CumSum", "GridSample"])
def test_rule_other_ops_float(op_type: str) -> None:
    def make(g: QdqGraph) -> str:
        x = g.act_input()
        if op_type == "TopK":
            return g.q(g.ops("TopK", x, g.ints(3), count=2, axis=1)[0])
        if op_type == "CumSum":
            return g.q(g.op("CumSum", x, g.const(np.array(1, np.int64))))
        return g.q(g.op("GridSample", x, g.const(np.zeros((1, 4, 4, 2), np.float32))))

    model = build(make)
    assert op_types(model) == ["QuantizeLinear", "DequantizeLinear", op_type, "QuantizeLinear", "DequantizeLinear"]


@pytest.mark.parametrize("table", ["quantized", "dequantized", "float"])
def test_rule_embedding_gather(table: str) -> None:
    """A quantized embedding table is read in bytes only with a Q of the same parameters behind the Gather; without
    that Q the whole table is dequantized on every run."""

    def make(g: QdqGraph) -> str:
        rows = g.random(50, 8)
        ids = g.input((1, 5), TensorProto.INT64)
        value = g.op("Gather", g.const(rows) if table == "float" else g.dq_constant(rows), ids)
        return g.q(value) if table == "quantized" else value

    expected = {
        "quantized": ["Gather", "DequantizeLinear"],
        "dequantized": ["DequantizeLinear", "Gather"],
        "float": ["Gather"],
    }
    assert op_types(build(make)) == expected[table]
