"""A net on which each stage of the pipeline matters, for `ablation.py`: random weights, and what trained nets bring.

Each peculiarity is one that files of trained nets have: pruned channels that are all zero but for a bias, channels that
weight decay has all but killed, bounds of a hard tanh, a value with two readers, a second input that carries the size
of the original picture, and boxes beside scores. No net has all of them; this one has, so that one table shows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

SIDE, CHANNELS, CLASSES = 32, 16, 10


def feeds(count: int, seed: int = 0) -> list[dict[str, npt.NDArray[np.float32]]]:
    """Returns smooth pictures from 0 to 255, and the size of the picture that each was made from."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        coarse = rng.uniform(0, 255, (1, 3, SIDE // 4, SIDE // 4)).repeat(4, axis=2).repeat(4, axis=3)
        picture = np.clip(coarse + rng.normal(0, 12, coarse.shape), 0, 255).astype(np.float32)
        size = rng.choice([240.0, 480.0, 720.0, 1080.0, 2160.0], (1, 2)).astype(np.float32)
        found.append({"image": picture, "image_shape": size})
    return found


def build(seed: int = 0) -> onnx.ModelProto:
    """Returns the net: scores (1, 10), and a box (1, 4) in pixels of the original picture."""
    rng = np.random.default_rng(seed)
    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []

    def constant(name: str, values: Any) -> str:
        constants.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def node(op_type: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op_type, list(inputs), [f"{name}_out"], name=name, **attributes))
        return f"{name}_out"

    def layer(op_type: str, x: str, name: str, shape: tuple[int, ...], scale: float, **attributes: Any) -> str:
        weights = rng.normal(0, scale * (2 / np.prod(shape[1:])) ** 0.5, shape)
        bias = rng.normal(0, 0.3, shape[0])
        if name == "body":
            weights[:3], bias[:3] = 0.0, (0.35, -0.8, 0.6)  # pruned: they say the same everywhere
            weights[3:6], bias[3:6] = weights[3:6] * 1e-9, (0.7, -0.4, 0.9)  # all but dead
        parts = (("weights", weights), ("bias", bias))
        names = [constant(f"{name}_{part}", values.astype(np.float32)) for part, values in parts]
        return node(op_type, [x, *names], name, **attributes)

    def conv(x: str, name: str, channels: int, scale: float = 1.0, **attributes: Any) -> str:
        return layer("Conv", x, name, (CHANNELS, channels, 3, 3), scale, pads=[1] * 4, **attributes)

    x = node("Relu", [conv("image", "stem", 3, strides=[2, 2])], "relu")
    bounds = [constant("low", np.float32(-1)), constant("high", np.float32(1))]
    x = skip = node("Clip", [conv(x, "body", CHANNELS, 1 / 120), *bounds], "hard_tanh")
    x = conv(x, "gate", CHANNELS)
    x = node("Mul", [x, node("Sigmoid", [x], "sigmoid")], "silu")  # two readers
    x = node("Add", [conv(x, "mix", CHANNELS), skip], "residual")
    size = node("Mul", ["image_shape", constant("inverse", np.float32(1 / SIDE))], "factor")
    share = node("Reciprocal", [size], "share")
    context = node("Tanh", [layer("Gemm", share, "context", (CHANNELS, 2), 10.0, transB=1)], "bounded")
    context = node("Unsqueeze", [context, constant("last_axes", np.array([2, 3]))], "spread")
    x = node("Mul", [conv(x, "last", CHANNELS), context], "conditioned")
    x = node("Flatten", [node("GlobalAveragePool", [x], "pool")], "flat")
    scores = layer("Gemm", x, "scores", (CLASSES, CHANNELS), 2.0, transB=1)
    corners = layer("Gemm", x, "corners", (4, CHANNELS), 0.5, transB=1)
    node("Mul", [node("Exp", [corners], "grown"), node("Concat", [size, size], "sizes", axis=1)], "box")
    graph = helper.make_graph(
        nodes,
        "hard_net",
        [
            helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, SIDE, SIDE]),
            helper.make_tensor_value_info("image_shape", TensorProto.FLOAT, [1, 2]),
        ],
        [
            helper.make_tensor_value_info(scores, TensorProto.FLOAT, [1, CLASSES]),
            helper.make_tensor_value_info("box_out", TensorProto.FLOAT, [1, 4]),
        ],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.checker.check_model(model)
    return model
