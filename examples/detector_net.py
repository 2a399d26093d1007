"""A tiny detector of squares, discs and crosses for `detector.py`: its images, its training, its ONNX file.

Grey 32x32 images with one to three shapes on a noisy ground; the net says for each of 8x8 cells whether the centre of
a shape lies in it, which, and how large it is. Like detectors of the PP-YOLOE kind it takes a second input,
``scale_factor`` (height, width), by which its boxes are divided to get back to the original image's pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import train_digits as nn
from onnx import TensorProto, helper, numpy_helper

Array = nn.Array
Truth = npt.NDArray[np.float32]  # (objects, 5): class, x0, y0, x1, y1 in pixels of the 32x32 image

SIZE, STRIDE, CLASSES = 32, 4, 3
CELLS = SIZE // STRIDE
SIZES = (6, 14)  # smallest and largest shape, in pixels
UNIT = 10.0  # pixels; sizes are learned as log(size / UNIT)


def draw(count: int, seed: int) -> tuple[Array, list[Truth]]:
    """Returns images (N, 1, 32, 32) from 0 to 1, and the shapes in them."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:SIZE, :SIZE] + 0.5
    images = rng.uniform(0.1, 0.4, (count, 1, 1, 1)) + rng.normal(0, 0.05, (count, 1, SIZE, SIZE))
    truths = []
    for image in images[:, 0]:
        found: list[tuple[float, ...]] = []
        for _ in range(rng.integers(1, 4)):
            kind, size = int(rng.integers(CLASSES)), rng.uniform(*SIZES)
            cx, cy = rng.uniform(size / 2, SIZE - size / 2, 2)
            if any(abs(cx - (b[1] + b[3]) / 2) + abs(cy - (b[2] + b[4]) / 2) < 14 for b in found):
                continue  # shapes may touch, not hide each other
            u, v = np.abs(x - cx) * 2 / size, np.abs(y - cy) * 2 / size
            inside = (np.maximum(u, v) < 1, np.hypot(u, v) < 1, (np.maximum(u, v) < 1) & (np.minimum(u, v) < 0.35))
            image[inside[kind]] += rng.uniform(0.3, 0.5)
            found.append((kind, cx - size / 2, cy - size / 2, cx + size / 2, cy + size / 2))
        truths.append(np.array(found, np.float32))
    return np.clip(images, 0, 1).astype(np.float32), truths


def build(rng: np.random.Generator) -> list[nn.Layer]:
    """Returns the untrained net: input (N, 32, 32, 1), output (N, 8, 8, 7): three scores, x, y, width, height."""
    layers: list[nn.Layer] = []
    for channels_in, channels_out in ((1, 16), (16, 32), (32, 32)):
        layers += [nn.Conv(channels_in, channels_out, rng), nn.BatchNorm(channels_out), nn.Relu()]
        if channels_out != channels_in:
            layers.append(nn.MaxPool())
    return [*layers, nn.Conv(32, 32, rng), nn.BatchNorm(32), nn.Relu(), nn.Conv(32, CLASSES + 4, rng)]


def targets(truths: Sequence[Truth]) -> tuple[Array, Array]:
    """Returns what the net should say (N, 8, 8, 7), and which cells hold a centre (N, 8, 8)."""
    wanted = np.zeros((len(truths), CELLS, CELLS, CLASSES + 4), np.float32)
    held = np.zeros(wanted.shape[:3], np.float32)
    for i, truth in enumerate(truths):
        for kind, x0, y0, x1, y1 in truth:
            cx, cy = (x0 + x1) / 2 / STRIDE, (y0 + y1) / 2 / STRIDE
            row, column = int(cy), int(cx)
            held[i, row, column] = wanted[i, row, column, int(kind)] = 1
            wanted[i, row, column, CLASSES:] = cx % 1, cy % 1, np.log((x1 - x0) / UNIT), np.log((y1 - y0) / UNIT)
    return wanted, held


def train(images: Array, truths: Sequence[Truth], *, epochs: int, seed: int = 0) -> list[nn.Layer]:
    """Returns the trained net: Adam, binary cross-entropy for scores, squared error for boxes where there is one."""
    rng = np.random.default_rng(seed)
    net, batch, step = build(rng), 32, 0
    pixels, (wanted, held) = images.transpose(0, 2, 3, 1), targets(truths)
    steps = epochs * (len(images) // batch)
    for _ in range(epochs):
        order = rng.permutation(len(images))
        for start in range(0, len(images) - batch + 1, batch):
            chosen = order[start : start + batch]
            grad = nn.run(net, pixels[chosen], training=True)
            grad[..., :CLASSES] = 1 / (1 + np.exp(-grad[..., :CLASSES]))
            grad -= wanted[chosen]
            grad[..., CLASSES:] *= held[chosen][..., None]
            nn.run_back(net, grad / np.float32(batch))
            step += 1
            rate = 3e-3 * (1 + np.cos(np.pi * step / steps)) / 2
            for parameter in (p for layer in net for p in layer.parameters()):
                parameter.adam(step, rate, decay=1e-3)
    return net


def export(net: Sequence[nn.Layer]) -> onnx.ModelProto:
    """Returns the net as ONNX.

    Inputs ``image`` (N, 1, 32, 32) and ``scale_factor`` (N, 2); outputs ``scores`` (N, 3, 64) and ``boxes`` (N, 64, 4),
    corners in pixels of the original image.
    """
    nodes: list[onnx.NodeProto] = []
    weights: list[TensorProto] = []

    def emit(op: str, inputs: Sequence[str], out: str, *arrays: npt.ArrayLike, **attributes: Any) -> str:
        names = [f"{out}.{i}" for i in range(len(arrays))]
        for name, array in zip(names, arrays, strict=True):
            whole = np.issubdtype(np.asarray(array).dtype, np.integer)
            weights.append(numpy_helper.from_array(np.array(array, np.int64 if whole else np.float32), name))
        nodes.append(helper.make_node(op, [*inputs, *names], [out], out, **attributes))
        return out

    value = "image"
    for i, layer in enumerate(net):
        if isinstance(layer, nn.Conv):
            fan_in, channels = layer.weight.value.shape
            weight = layer.weight.value.reshape(3, 3, fan_in // 9, channels).transpose(3, 2, 0, 1)
            value = emit("Conv", [value], f"conv{i}", weight, kernel_shape=[3, 3], pads=[1] * 4)
        elif isinstance(layer, nn.BatchNorm):
            statistics = (layer.gain.value, layer.shift.value, layer.mean, layer.variance)
            value = emit("BatchNormalization", [value], f"norm{i}", *statistics)
        elif isinstance(layer, nn.Relu):
            value = emit("Relu", [value], f"relu{i}")
        else:
            value = emit("MaxPool", [value], f"pool{i}", kernel_shape=[2, 2], strides=[2, 2])
    flat = emit("Reshape", [value], "flat", [0, CLASSES + 4, CELLS**2])
    emit("Sigmoid", [emit("Slice", [flat], "logits", [0], [CLASSES], [1])], "scores")
    grid = np.stack(np.meshgrid(np.arange(CELLS), np.arange(CELLS))).reshape(1, 2, -1).astype(np.float32)
    offset = emit("Add", [emit("Slice", [flat], "xy", [CLASSES], [CLASSES + 2], [1])], "cells", grid)
    centre = emit("Mul", [offset], "centre", np.float32(STRIDE))
    half = emit(
        "Mul", [emit("Exp", [emit("Slice", [flat], "wh", [CLASSES + 2], [99], [1])], "ratio")], "half", UNIT / 2
    )
    corners = [emit("Sub", [centre, half], "low"), emit("Add", [centre, half], "high")]
    rows = emit("Transpose", [emit("Concat", corners, "corners", axis=1)], "rows", perm=[0, 2, 1])
    flipped = emit("Gather", ["scale_factor"], "scale_xyxy", [1, 0, 1, 0], axis=1)  # height, width -> x, y, x, y
    emit("Div", [rows, emit("Unsqueeze", [flipped], "scale_row", [1])], "boxes")
    shapes: dict[str, list[str | int]] = {"image": ["n", 1, SIZE, SIZE], "scale_factor": ["n", 2]}
    results: dict[str, list[str | int]] = {"scores": ["n", CLASSES, CELLS**2], "boxes": ["n", CELLS**2, 4]}
    inputs, outputs = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in group.items()]
        for group in (shapes, results)
    )
    graph = helper.make_graph(nodes, "tiny_detector", inputs, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], producer_name="detector_net")
    model.ir_version = 8
    onnx.checker.check_model(model, full_check=True)
    return model
