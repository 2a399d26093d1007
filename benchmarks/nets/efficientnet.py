"""EfficientNet-Lite4 (Tan and Le 2019, the Lite variant) as tf2onnx exports it: NHWC input, SAME padding, 224x224."""

from __future__ import annotations

import onnx

from nets.builder import Net

# expansion, channels, repeats, kernel, stride: width x 1.4 and depth x 1.8, first and last block not repeated
_BLOCKS = (
    (1, 24, 1, 3, 1), (6, 32, 4, 3, 2), (6, 56, 4, 5, 2), (6, 112, 6, 3, 2),
    (6, 160, 6, 5, 1), (6, 272, 8, 5, 2), (6, 448, 1, 3, 1),
)  # fmt: skip


def efficientnet_lite4() -> onnx.ModelProto:
    """Inverted residuals with Relu6, without squeeze-and-excite."""
    n = Net(opset=13)
    x = n.transpose(n.input("images", [1, 224, 224, 3]), 0, 3, 1, 2)
    n.channels[x] = 3

    def relu6(x: str) -> str:
        return n.clip(x, 0.0, 6.0)

    def same(k: int, stride: int) -> list[int]:  # of an even picture
        return [(k - stride) // 2] * 2 + [k - stride - (k - stride) // 2] * 2

    x = relu6(n.conv_norm(x, 32, 3, 2, pads=same(3, 2)))
    for expansion, out, repeats, k, first_stride in _BLOCKS:
        for i in range(repeats):
            stride, width = (1 if i else first_stride), n.channels[x]
            y = x if expansion == 1 else relu6(n.conv_norm(x, width * expansion))
            y = relu6(n.conv_norm(y, n.channels[y], k, stride, group=n.channels[y], pads=same(k, stride)))
            y = n.conv_norm(y, out, gain=0.7)
            x = n.op("Add", y, x) if stride == 1 and width == out else y
    x = n.average_pool(relu6(n.conv_norm(x, 1280)), 7, 1)
    x = n.op("Squeeze", x, n.constant([2, 3], "int64"))
    return n.model(n.linear(x, 1000))
