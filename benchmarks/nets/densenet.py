"""DenseNet-121 (Huang et al. 2016) as the ONNX model zoo has it."""

from __future__ import annotations

import onnx

from nets.builder import Net

_BLOCKS = (6, 12, 24, 16)
_GROWTH = 32


def densenet121() -> onnx.ModelProto:
    """BatchNormalization and Relu behind Concat, average pools between the dense blocks."""
    n = Net()

    def norm_relu(x: str) -> str:
        return n.relu(n.norm(x))

    x = n.max_pool(n.conv_norm_relu(n.input("x", [1, 3, 224, 224]), 64, 7, 2), 3, 2, -1)
    for block, layers in enumerate(_BLOCKS):
        for _ in range(layers):
            y = n.conv(norm_relu(x), 4 * _GROWTH, bias=False)
            x = n.concat(x, n.conv(norm_relu(y), _GROWTH, 3, bias=False))
        if block < len(_BLOCKS) - 1:
            x = n.average_pool(n.conv(norm_relu(x), n.channels[x] // 2, bias=False), 2, 2)
    return n.model(n.head(norm_relu(x)))
