"""Small models of single inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

Input = tuple[str, int, Sequence[Any]]


def model_of(
    *inputs: Input, nodes: Any = None, constants: Any = (), outputs: Sequence[Any] = (("out", None, None),)
) -> onnx.ModelProto:
    """Returns a model; the first input goes through Identity where no nodes are given."""
    graph = helper.make_graph(
        nodes or [helper.make_node("Identity", [inputs[0][0]], ["out"])],
        "g",
        [helper.make_tensor_value_info(*i) for i in inputs],
        [
            helper.make_empty_tensor_value_info(name)
            if kind is None
            else helper.make_tensor_value_info(name, kind, shape)
            for name, kind, shape in outputs
        ],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def first_layer(
    channels: int, pixels: Any, *, folded: bool, size: int = 32, seed: int = 0, gamma: float = 1.0
) -> onnx.ModelProto:
    """A Conv and BatchNormalization trained, so to speak, on the given arrays, folded into one another or not."""
    from kenosis_ort.calibration.synthetic.stem import Stem

    rng = np.random.default_rng(seed)
    weight = rng.normal(0, 0.3, (channels, pixels[0].shape[1], 3, 3)).astype(np.float32)
    shape = ["N", *pixels[0].shape[1:]]
    zeros = np.zeros(channels, np.float32)
    conv = helper.make_node("Conv", ["image", "w", "b"], ["conv"], pads=[1, 1, 1, 1])
    norm = helper.make_node("BatchNormalization", ["conv", "gamma", "beta", "mean", "var"], ["norm"])
    relu = helper.make_node("Relu", ["norm"], ["out"])
    first = model_of(
        ("image", 1, shape),
        nodes=[conv, helper.make_node("Relu", ["conv"], ["out"])],
        constants=[("w", weight), ("b", zeros)],
    )
    values = np.concatenate(Stem(first, "image").respond(pixels), axis=1)
    mean, deviation = values.mean(axis=1), values.std(axis=1)
    gammas, betas = rng.uniform(0.7, 1.3, channels) * gamma, rng.normal(0, 0.5, channels)
    if not folded:
        named = {"gamma": gammas, "beta": betas, "mean": mean, "var": deviation**2}
        constants = [("w", weight), ("b", zeros), *((k, v.astype(np.float32)) for k, v in named.items())]
        return model_of(("image", 1, shape), nodes=[conv, norm, relu], constants=constants)
    factor = gammas / deviation
    constants = [
        ("w", (weight * factor[:, None, None, None]).astype(np.float32)),
        ("b", (betas - mean * factor).astype(np.float32)),
    ]
    nodes = [conv, helper.make_node("Relu", ["conv"], ["out"])]
    return model_of(("image", 1, shape), nodes=nodes, constants=constants)
