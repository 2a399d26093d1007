"""MobileNetV2 (Sandler et al. 2018) and MobileNetV3-Large (Howard et al. 2019) as torchvision exports them."""

from __future__ import annotations

from collections.abc import Callable

import onnx

from nets.builder import Net

_V2 = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))

_V3 = (
    (3, 16, 16, False, False, 1), (3, 64, 24, False, False, 2), (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2), (5, 120, 40, True, False, 1), (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2), (3, 200, 80, False, True, 1), (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1), (3, 480, 112, True, True, 1), (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2), (5, 960, 160, True, True, 1), (5, 960, 160, True, True, 1),
)  # fmt: skip
_V3_SQUEEZE = {72: 24, 120: 32, 480: 120, 672: 168, 960: 240}


def mobilenet_v2() -> onnx.ModelProto:
    """Inverted residuals with Relu6."""
    n = Net()

    def relu6(x: str) -> str:
        return n.clip(x, 0.0, 6.0)

    x = relu6(n.conv_norm(n.input("x", [1, 3, 224, 224]), 32, 3, 2))
    for expansion, out, repeats, first_stride in _V2:
        for i in range(repeats):
            stride, width = (1 if i else first_stride), n.channels[x]
            y = x if expansion == 1 else relu6(n.conv_norm(x, width * expansion))
            y = relu6(n.conv_norm(y, n.channels[y], 3, stride, group=n.channels[y]))
            y = n.conv_norm(y, out, gain=0.7)
            x = n.op("Add", x, y) if stride == 1 and width == out else y
    return n.model(n.head(relu6(n.conv_norm(x, 1280))))


def mobilenet_v3() -> onnx.ModelProto:
    """HardSwish as one operator (operator set 14 and later), squeeze-and-excite with HardSigmoid."""
    n = Net()
    return _large(n, lambda x: n.op("HardSwish", x))


def mobilenet_v3_primitive() -> onnx.ModelProto:
    """The same net with HardSwish as Add, Clip, Mul and Div, as Paddle and older exporters write it."""
    n = Net(opset=13)

    def hard_swish(x: str) -> str:
        gate = n.clip(n.op("Add", x, n.constant(3.0)), 0.0, 6.0)
        return n.op("Div", n.op("Mul", x, gate), n.constant(6.0))

    return _large(n, hard_swish)


def _large(n: Net, hard_swish: Callable[[str], str]) -> onnx.ModelProto:
    x = hard_swish(n.conv_norm(n.input("x", [1, 3, 224, 224]), 16, 3, 2))
    for k, expanded, out, squeezed, swish, stride in _V3:
        act = hard_swish if swish else n.relu
        width = n.channels[x]
        y = x if expanded == width else act(n.conv_norm(x, expanded))
        y = act(n.conv_norm(y, expanded, k, stride, group=expanded))
        if squeezed:
            gate = n.conv_relu(n.op("GlobalAveragePool", y), _V3_SQUEEZE[expanded])
            y = n.op("Mul", n.op("HardSigmoid", n.conv(gate, expanded), alpha=1 / 6, beta=0.5), y)
        y = n.conv_norm(y, out, gain=0.7)
        x = n.op("Add", y, x) if stride == 1 and width == out else y
    x = n.op("Flatten", n.op("GlobalAveragePool", hard_swish(n.conv_norm(x, 960))))
    return n.model(n.gemm(hard_swish(n.gemm(x, 1280)), 1000))
