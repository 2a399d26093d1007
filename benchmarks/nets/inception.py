"""GoogLeNet (Szegedy et al. 2014, with LRN) and its BatchNormalization successor (Ioffe and Szegedy 2015)."""

from __future__ import annotations

import onnx

from nets.builder import Net

# 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool projection; and whether a pool follows
_V1 = (
    (64, 96, 128, 16, 32, 32, False), (128, 128, 192, 32, 96, 64, True), (192, 96, 208, 16, 48, 64, False),
    (160, 112, 224, 24, 64, 64, False), (128, 128, 256, 24, 64, 64, False), (112, 144, 288, 32, 64, 64, False),
    (256, 160, 320, 32, 128, 128, True), (256, 160, 320, 32, 128, 128, False), (384, 192, 384, 48, 128, 128, False),
)  # fmt: skip

# 1x1, 3x3 reduce, 3x3, double 3x3 reduce, double 3x3, pool projection; 0 where the module has stride 2
_V2 = (
    (64, 64, 64, 64, 96, 32), (64, 64, 96, 64, 96, 64), (0, 128, 160, 64, 96, 0),
    (224, 64, 96, 96, 128, 128), (192, 96, 128, 96, 128, 128), (160, 128, 160, 128, 160, 128),
    (96, 128, 192, 160, 192, 128), (0, 128, 192, 192, 256, 0),
    (352, 192, 320, 160, 224, 128), (352, 192, 320, 192, 224, 128),
)  # fmt: skip


def inception_v1() -> onnx.ModelProto:
    """Modules of four branches, two LocalResponseNormalizations in the stem."""
    n = Net()

    def lrn(x: str) -> str:
        return n.op("LRN", x, size=5, alpha=1e-4, beta=0.75, bias=1.0)

    tail = [0, 0, 1, 1]
    x = lrn(n.max_pool(n.conv_relu(n.input("x", [1, 3, 224, 224]), 64, 7, 2), pads=tail))
    x = n.max_pool(lrn(n.conv_relu(n.conv_relu(x, 64), 192, 3)), pads=tail)
    for one, three_in, three, five_in, five, projected, pooled in _V1:
        x = n.concat(
            n.conv_relu(x, one),
            n.conv_relu(n.conv_relu(x, three_in), three, 3),
            n.conv_relu(n.conv_relu(x, five_in), five, 5),
            n.conv_relu(n.max_pool(x, 3, 1, -1), projected),
        )
        x = n.max_pool(x, pads=tail) if pooled else x
    x = n.op("Dropout", n.average_pool(x, 7, 1))
    return n.model(n.gemm(n.reshape(x, [-1, 1024]), 1000))


def inception_v2() -> onnx.ModelProto:
    """Average pools whose padding does not count, BatchNormalization behind every Conv."""
    n = Net()
    tail = [0, 0, 1, 1]
    x = n.max_pool(n.conv_norm_relu(n.input("x", [1, 3, 224, 224]), 64, 7, 2), pads=tail)
    x = n.max_pool(n.conv_norm_relu(n.conv_norm_relu(x, 64), 192, 3), pads=tail)
    for i, (one, three_in, three, double_in, double, projected) in enumerate(_V2):
        stride = 1 if one else 2
        branches = [n.conv_norm_relu(x, one)] if one else []
        branches.append(n.conv_norm_relu(n.conv_norm_relu(x, three_in), three, 3, stride))
        y = n.conv_norm_relu(n.conv_norm_relu(x, double_in), double, 3)
        branches.append(n.conv_norm_relu(y, double, 3, stride))
        if one:
            pool = n.max_pool(x, 3, 1, -1) if i == len(_V2) - 1 else n.average_pool(x, 3, 1, -1)
            branches.append(n.conv_norm_relu(pool, projected))
        else:
            branches.append(n.max_pool(x, pads=tail))
        x = n.concat(*branches)
    return n.model(n.gemm(n.reshape(n.average_pool(x, 7, 1), [-1, 1024]), 1000))
