"""ResNet-50: torchvision's, the ONNX model zoo's first version with Sum, and the pre-activation second version."""

from __future__ import annotations

import onnx

from nets.builder import Net

_LAYERS = (3, 4, 6, 3)


def resnet50() -> onnx.ModelProto:
    """He et al. 2015 as torchvision exports it: Add, the stride in the 3x3 Conv."""
    return _post_activation("Add", stride_first=False)


def resnet50_sum() -> onnx.ModelProto:
    """The same as Caffe2 exports it: Sum, the stride in the first 1x1 Conv, BatchNormalization left standing."""
    return _post_activation("Sum", stride_first=True)


def _post_activation(join: str, *, stride_first: bool) -> onnx.ModelProto:
    n = Net()
    x = n.max_pool(n.conv_norm_relu(n.input("x", [1, 3, 224, 224]), 64, 7, 2), 3, 2, -1)
    for stage, layers in enumerate(_LAYERS):
        width = 64 << stage
        for layer in range(layers):
            stride = 2 if stage and not layer else 1
            y = n.conv_norm_relu(x, width, 1, stride if stride_first else 1)
            y = n.conv_norm_relu(y, width, 3, 1 if stride_first else stride)
            y = n.conv_norm(y, 4 * width, gain=0.4)
            x = n.relu(n.op(join, y, x if layer else n.conv_norm(x, 4 * width, 1, stride)))
    return n.model(n.head(x))


def resnet50_v2() -> onnx.ModelProto:
    """He et al. 2016 as MXNet exports it: BatchNormalization in front of the Convs, one on the picture too."""
    n = Net()
    x = n.norm(n.input("data", [1, 3, 224, 224]))
    x = n.max_pool(n.conv_norm_relu(x, 64, 7, 2), 3, 2, -1)
    for stage, layers in enumerate(_LAYERS):
        width = 64 << stage
        for layer in range(layers):
            stride = 2 if stage and not layer else 1
            a = n.relu(n.norm(x))
            shortcut = x if layer else n.conv(a, 4 * width, 1, stride, bias=False)
            y = n.relu(n.norm(n.conv(a, width, bias=False)))
            y = n.relu(n.norm(n.conv(y, width, 3, stride, bias=False)))
            x = n.op("Add", n.conv(y, 4 * width, bias=False), shortcut)
    return n.model(n.head(n.relu(n.norm(x))))
