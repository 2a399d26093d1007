"""DeiT-tiny (Touvron et al. 2020) and a BERT-mini encoder (Turc et al. 2019: 4 layers of 256)."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from nets.builder import Net

LENGTH = 128
VOCABULARY = 30522
END = 1
"""The token that ends a sentence, or begins it: the massive one of nets with outliers."""


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


def t5_outliers() -> onnx.ModelProto:
    """A T5 encoder (1.1: gated) of 4 layers of 256 with what trained ones have: massive activations in the end token.

    In its row the 512 products between the linear layers are some hundred times those of other tokens, and four of them
    thousand times, as in the checkpoints that fail in float16.
    """
    n = Net(opset=17)
    width, heads, inner, told = 256, 4, 512, 16
    ids = n.input("input_ids", [1, "length"], dtype=TensorProto.INT64, axis=9)
    words = n.rng.normal(0, 1, (VOCABULARY, width))
    words[:, :told] = 0.0
    words[END, :told] = 240.0
    x = n.op("Gather", n.constant(words), ids)
    n.channels[x] = width
    nearness = n.op("Gather", n.constant(n.rng.normal(0, 0.5, (1, heads, LENGTH, LENGTH))), _places(n, ids), axis=2)
    nearness = n.op("Gather", nearness, _places(n, ids), axis=3)
    for _ in range(4):
        normal = _rms_norm(n, x)
        q, k, v = (_heads(n, n.linear(normal, width, gain=g, bias=False), heads) for g in (0.3, 0.3, 1.0))
        scores = n.op("Add", n.op("MatMul", q, n.transpose(k, 0, 1, 3, 2)), nearness)
        mixed = n.op("MatMul", n.op("Softmax", scores, axis=-1), v)
        x = n.op("Add", x, n.linear(_joined(n, mixed, width), width, bias=False))
        gate, up, down = (n.rng.normal(0, a**-0.5, (a, b)) for a, b in ((width, inner), (width, inner), (inner, width)))
        for weights in (gate, up):
            weights[:told] = 0.25 * n.rng.normal(0, 1, inner)
            weights[:told, :4] = 0.75
        down[:, :told] *= 0.01
        normal = _rms_norm(n, x)
        opened = n.gelu(n.op("MatMul", normal, n.constant(gate), channels=inner))
        inside = n.op("Mul", opened, n.op("MatMul", normal, n.constant(up), channels=inner))
        x = n.op("Add", x, n.op("MatMul", inside, n.constant(down), channels=width))
    return n.model(_rms_norm(n, x))


def llama_outliers() -> onnx.ModelProto:
    """A Llama of 4 layers of 256 whose first token is massive, as in Sun et al. 2024 (https://arxiv.org/abs/2402.17762).

    The gated product of its second layer has values a thousand times the others in that token, and writes them into two
    channels of the residual stream, where they stay.
    """
    n = Net(opset=17)
    width, heads, inner = 256, 4, 768
    ids = n.input("input_ids", [1, "length"], dtype=TensorProto.INT64, axis=9)
    words = n.rng.normal(0, 1, (VOCABULARY, width))
    words[:, 0] = 0.0
    words[END, 0] = 24.0
    x = n.op("Gather", n.constant(words), ids)
    n.channels[x] = width
    seen = np.triu(np.full((LENGTH, LENGTH), -1e9, np.float32), 1)
    mask = n.op("Gather", n.op("Gather", n.constant(seen), _places(n, ids), axis=0), _places(n, ids), axis=1)
    for layer in range(4):
        normal = _rms_norm(n, x)
        q, k, v = (_heads(n, n.linear(normal, width, bias=False), heads) for _ in range(3))
        scores = n.op("Mul", n.op("MatMul", q, n.transpose(k, 0, 1, 3, 2)), n.constant((width // heads) ** -0.5))
        mixed = n.op("MatMul", n.op("Softmax", n.op("Add", scores, mask), axis=-1), v)
        x = n.op("Add", x, n.linear(_joined(n, mixed, width), width, bias=False))
        gate, up, down = (n.rng.normal(0, a**-0.5, (a, b)) for a, b in ((width, inner), (width, inner), (inner, width)))
        gate[0], up[0] = 0.0, 0.0
        down[:, :2] *= 0.01
        if layer == 1:
            gate[0, :3], up[0, :3] = 3.0, 3.0
            down[:3] *= 0.01
            down[:3, :2] = 0.3
        normal = _rms_norm(n, x)
        opened = n.silu(n.op("MatMul", normal, n.constant(gate), channels=inner))
        inside = n.op("Mul", opened, n.op("MatMul", normal, n.constant(up), channels=inner))
        x = n.op("Add", x, n.op("MatMul", inside, n.constant(down), channels=width))
    return n.model(n.linear(_rms_norm(n, x), 1000, bias=False))


def _rms_norm(n: Net, x: str) -> str:
    """The norm in primitives, as exporters write it."""
    power = n.op("ReduceMean", n.op("Pow", x, n.constant(2.0)), axes=[-1])
    normal = n.op("Div", x, n.op("Sqrt", n.op("Add", power, n.constant(1e-6))))
    return n.op("Mul", n.constant(n.rng.uniform(0.7, 1.3, n.channels[x])), normal, channels=n.channels[x])


def _places(n: Net, ids: str) -> str:
    """The numbers of the tokens, from 0."""
    length = n.op("Gather", n.op("Shape", ids), n.constant(1, np.int64), axis=0)
    return n.op("Range", n.constant(0, np.int64), length, n.constant(1, np.int64))


def _heads(n: Net, x: str, heads: int) -> str:
    return n.transpose(n.reshape(x, [0, 0, heads, n.channels[x] // heads]), 0, 2, 1, 3)


def _joined(n: Net, x: str, width: int) -> str:
    joined = n.reshape(n.transpose(x, 0, 2, 1, 3), [0, 0, width])
    n.channels[joined] = width
    return joined
