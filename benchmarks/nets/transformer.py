"""DeiT-tiny (Touvron et al. 2020) and a BERT-mini encoder (Turc et al. 2019: 4 layers of 256)."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from nets.builder import Net

LENGTH = 128
VOCABULARY = 30522


def deit_tiny() -> onnx.ModelProto:
    """12 layers of 192 at operator set 17: packed queries, keys and values, LayerNormalization in front."""
    n = Net(opset=17)
    width, heads, places = 192, 3, 197
    x = n.conv(n.input("x", [1, 3, 224, 224]), width, 16, 16, pads=0)
    x = n.transpose(n.reshape(x, [1, width, 196]), 0, 2, 1)
    x = n.op("Concat", n.constant(n.rng.normal(0, 1, (1, 1, width))), x, channels=width, axis=1)
    x = n.op("Add", x, n.constant(n.rng.normal(0, 0.3, (1, places, width))))
    for _ in range(12):
        packed = n.reshape(n.linear(n.layer_norm(x), 3 * width), [1, places, 3, heads, width // heads])
        packed = n.transpose(packed, 2, 0, 3, 1, 4)
        q, k, v = (n.op("Gather", packed, n.constant(i, np.int64), axis=0) for i in range(3))
        scores = n.op("MatMul", n.op("Mul", q, n.constant((width // heads) ** -0.5)), n.transpose(k, 0, 1, 3, 2))
        mixed = n.op("MatMul", n.op("Softmax", scores, axis=-1), v)
        mixed = n.reshape(n.transpose(mixed, 0, 2, 1, 3), [1, places, width])
        n.channels[mixed] = width
        x = n.op("Add", x, n.linear(mixed, width, gain=0.5), channels=width)
        hidden = n.gelu(n.linear(n.layer_norm(x), 4 * width))
        x = n.op("Add", x, n.linear(hidden, width, gain=0.5), channels=width)
    token = n.op("Gather", n.layer_norm(x), n.constant(0, np.int64), channels=width, axis=1)
    return n.model(n.gemm(token, 1000))


def bert_mini() -> onnx.ModelProto:
    """4 layers of 256 over 128 tokens at operator set 13: norms in primitives, an additive mask of -10000."""
    n = Net(opset=13)
    width, heads = 256, 4
    ids, mask, segments = (
        n.input(name, [1, LENGTH], dtype=TensorProto.INT64, axis=9)
        for name in ("input_ids", "attention_mask", "token_type_ids")
    )
    axes = n.constant([1, 2], np.int64)
    present = n.op("Cast", n.op("Unsqueeze", mask, axes), to=TensorProto.FLOAT)
    hidden_mask = n.op("Mul", n.op("Sub", n.constant(1.0), present), n.constant(-10000.0))
    words = n.constant(n.rng.normal(0, 1, (VOCABULARY, width)))
    kinds, places = (n.constant(n.rng.normal(0, 0.3, shape)) for shape in ((2, width), (1, LENGTH, width)))
    x = n.op("Add", n.op("Gather", words, ids), n.op("Gather", kinds, segments))
    x = n.op("Add", x, places, channels=width)
    x = n.layer_norm(x, epsilon=1e-12)

    def split(x: str) -> str:
        return n.transpose(n.reshape(x, [1, LENGTH, heads, width // heads]), 0, 2, 1, 3)

    for _ in range(4):
        q, k, v = split(n.linear(x, width)), n.linear(x, width), split(n.linear(x, width))
        k = n.transpose(n.reshape(k, [1, LENGTH, heads, width // heads]), 0, 2, 3, 1)
        scores = n.op("Div", n.op("MatMul", q, k), n.constant((width // heads) ** 0.5))
        mixed = n.op("MatMul", n.op("Softmax", n.op("Add", scores, hidden_mask), axis=-1), v)
        mixed = n.reshape(n.transpose(mixed, 0, 2, 1, 3), [1, LENGTH, width])
        n.channels[mixed] = width
        x = n.layer_norm(n.op("Add", n.linear(mixed, width), x, channels=width), epsilon=1e-12)
        hidden = n.gelu(n.linear(x, 4 * width))
        x = n.layer_norm(n.op("Add", n.linear(hidden, width), x, channels=width), epsilon=1e-12)
    first = n.op("Gather", x, n.constant(0, np.int64), channels=width, axis=1)
    return n.model(x, n.op("Tanh", n.gemm(first, width)))
