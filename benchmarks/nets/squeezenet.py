"""SqueezeNet 1.1 (Iandola et al. 2016) as torchvision exports it."""

from __future__ import annotations

import onnx

from nets.builder import Net

_FIRE = ((16, 64, False), (16, 64, True), (32, 128, False), (32, 128, True),
         (48, 192, False), (48, 192, False), (64, 256, False), (64, 256, False))  # fmt: skip


def squeezenet() -> onnx.ModelProto:
    """A strided 3x3 stem, fire modules, a Conv for the classifier."""
    n = Net()
    x = n.max_pool(n.conv_relu(n.input("x", [1, 3, 224, 224]), 64, 3, 2, pads=0))
    for squeeze, expand, pooled in _FIRE:
        s = n.conv_relu(x, squeeze)
        x = n.concat(n.conv_relu(s, expand), n.conv_relu(s, expand, 3))
        x = n.max_pool(x, pads=[0, 0, 1, 1]) if pooled else x
    return n.model(n.op("Flatten", n.op("GlobalAveragePool", n.conv_relu(x, 1000))))
