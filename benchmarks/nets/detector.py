"""A detector of PP-YOLOE+'s kind (Xu et al. 2022), size s, with SiLU throughout, at 320x320.

CSP-ResNet backbone, CSP path aggregation neck, a head of two branches by level with effective squeeze-and-excite and
the distribution of box sides, decoded in the graph. Inputs are the picture and by how much it was scaled.
"""

from __future__ import annotations

import numpy as np
import onnx

from nets.builder import Net

SIDE = 320
_CLASSES = 80
_BINS = 17
_WIDTHS = (32, 64, 128, 256, 512)
_DEPTHS = (1, 2, 2, 1)


class _Detector(Net):
    def conv_act(self, x: str, out: int, k: int = 1, stride: int = 1) -> str:
        return self.silu(self.conv_norm(x, out, k, stride))

    def block(self, x: str, *, shortcut: bool) -> str:
        """A 3x3 Conv and a re-parameterized one."""
        y = self.conv_act(self.conv_act(x, self.channels[x], 3), self.channels[x], 3)
        return self.op("Add", x, y) if shortcut else y

    def gate(self, x: str) -> str:
        """Effective squeeze-and-excite."""
        mean = self.op("ReduceMean", x, axes=[2, 3], keepdims=1)
        return self.op("Mul", x, self.op("HardSigmoid", self.conv(mean, self.channels[x]), alpha=0.2, beta=0.5))

    def stage(self, x: str, out: int, depth: int) -> str:
        """A stage of the backbone, of stride 2."""
        mid = (self.channels[x] + out) // 2
        x = self.conv_act(x, mid, 3, 2)
        left, right = self.conv_act(x, mid // 2), self.conv_act(x, mid // 2)
        for _ in range(depth):
            right = self.block(right, shortcut=True)
        return self.conv_act(self.gate(self.concat(left, right)), out)

    def neck_stage(self, x: str, out: int, *, pooled: bool = False) -> str:
        left, right = self.conv_act(x, out // 2), self.conv_act(x, out // 2)
        right = self.block(right, shortcut=False)
        if pooled:
            pools = [self.max_pool(right, k, 1, -1) for k in (5, 9, 13)]
            right = self.conv_act(self.concat(right, *pools), out // 2)
        return self.conv_act(self.concat(left, right), out)

    def twice(self, x: str) -> str:
        scales = self.constant([1.0, 1.0, 2.0, 2.0])
        return self.op(
            "Resize", x, "", scales, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"
        )

    def excited(self, x: str, mean: str) -> str:
        weight = self.op("Sigmoid", self.conv(mean, self.channels[x]))
        return self.conv_act(self.op("Mul", x, weight), self.channels[x])


def detector() -> onnx.ModelProto:
    """Outputs ``boxes [1, 2100, 4]`` in pixels of the original picture and ``scores [1, 80, 2100]``."""
    n = _Detector()
    x = n.input("image", [1, 3, SIDE, SIDE])
    scale = n.input("scale_factor", [1, 2])
    x = n.conv_act(n.conv_act(n.conv_act(x, 16, 3, 2), 16, 3), _WIDTHS[0], 3)
    features = []
    for width, depth in zip(_WIDTHS[1:], _DEPTHS, strict=True):
        x = n.stage(x, width, depth)
        features.append(x)
    scores, boxes = _head(n, _neck(n, features[1:]))
    return n.model(_decode(n, boxes, scale), scores)


def _neck(n: _Detector, features: list[str]) -> list[str]:
    low, mid, high = features
    high = n.neck_stage(high, 384, pooled=True)
    mid = n.neck_stage(n.concat(n.twice(n.conv_act(high, 192)), mid), 192)
    low = n.neck_stage(n.concat(n.twice(n.conv_act(mid, 96)), low), 96)
    mid = n.neck_stage(n.concat(n.conv_act(low, 96, 3, 2), mid), 192)
    high = n.neck_stage(n.concat(n.conv_act(mid, 192, 3, 2), high), 384)
    return [high, mid, low]


def _head(n: _Detector, levels: list[str]) -> tuple[str, str]:
    scores, sides = [], []
    bins = np.arange(_BINS, dtype=np.float32).reshape(1, _BINS, 1, 1)
    for level, x in enumerate(levels):
        places = (SIDE >> (5 - level)) ** 2
        mean = n.op("GlobalAveragePool", x)
        score = n.conv(n.op("Add", n.excited(x, mean), x), _CLASSES, 3)
        score = n.op("Sigmoid", n.op("Sub", score, n.constant(np.full((1, _CLASSES, 1, 1), 3.0))))
        scores.append(n.reshape(score, [0, _CLASSES, places]))
        side = n.reshape(n.conv(n.excited(x, mean), 4 * _BINS, 3), [0, 4, _BINS, places])
        side = n.op("Softmax", n.transpose(side, 0, 2, 1, 3), axis=1)
        side = n.op("Conv", side, n.constant(bins), channels=1, kernel_shape=[1, 1])
        sides.append(n.reshape(side, [0, 4, places]))
    return n.op("Concat", *scores, axis=2), n.op("Concat", *sides, axis=2)


def _decode(n: _Detector, sides: str, scale: str) -> str:
    """Returns boxes from the distances of their sides to the places of the levels."""
    points, strides = [], []
    for level in range(3):
        stride = 32 >> level
        along = np.arange(SIDE // stride) + 0.5
        points.append(np.stack([*np.meshgrid(along, along)], axis=-1).reshape(-1, 2))
        strides.append(np.full((len(points[-1]), 1), float(stride)))
    anchor = n.constant(np.concatenate(points)[None])
    left_top, right_bottom = n.ops("Split", [n.transpose(sides, 0, 2, 1)], 2, axis=2)
    corners = n.op("Concat", n.op("Sub", anchor, left_top), n.op("Add", anchor, right_bottom), axis=2)
    pixels = n.op("Mul", corners, n.constant(np.concatenate(strides)[None]))
    y_scale, x_scale = n.ops("Split", [scale], 2, axis=1)
    factors = n.op("Concat", x_scale, y_scale, x_scale, y_scale, axis=1)
    return n.op("Div", pixels, n.reshape(factors, [-1, 1, 4]))
