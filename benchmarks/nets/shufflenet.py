"""ShuffleNet v1 (Zhang et al. 2017) with four groups, as Caffe2 exports it."""

from __future__ import annotations

import onnx

from nets.builder import Net

_GROUPS = 4
_STAGES = ((272, 4), (544, 8), (1088, 4))


def shufflenet() -> onnx.ModelProto:
    """Grouped 1x1 Convs; the channel shuffle is Reshape, Transpose, Reshape; average pools do not count padding."""
    n = Net()
    x = n.max_pool(n.conv_norm_relu(n.input("x", [1, 3, 224, 224]), 24, 3, 2), 3, 2, -1)
    side = 56
    for stage, (width, units) in enumerate(_STAGES):
        for unit in range(units):
            stride = 1 if unit else 2
            out = width if unit else width - n.channels[x]
            y = n.conv_norm_relu(x, width // 4, group=_GROUPS if stage or unit else 1)
            y = _shuffle(n, y, side)
            y = n.conv_norm(y, width // 4, 3, stride, group=width // 4)
            y = n.conv_norm(y, out, group=_GROUPS)
            x = n.relu(n.op("Add", x, y) if unit else n.concat(n.average_pool(x, 3, 2, -1), y))
            side = side if unit else side // 2
    return n.model(n.gemm(n.reshape(n.average_pool(x, 7, 1), [-1, n.channels[x]]), 1000))


def _shuffle(n: Net, x: str, side: int) -> str:
    c = n.channels[x]
    split = n.reshape(x, [0, _GROUPS, c // _GROUPS, side, side])
    return n.reshape(n.transpose(split, 0, 2, 1, 3, 4), [0, c, side, side])
