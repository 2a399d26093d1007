"""Small models of single inputs."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import helper

from kenosis_ort.calibration.synthetic.stem import Stem
from tests.planning import parse

Input = tuple[str, int, Sequence[Any]]


def model_of(*inputs: Input, nodes: Any = None) -> onnx.ModelProto:
    """A model whose first input goes through Identity where no nodes are given."""
    graph = helper.make_graph(
        nodes or [helper.make_node("Identity", [inputs[0][0]], ["out"])],
        "g",
        [helper.make_tensor_value_info(*i) for i in inputs],
        [helper.make_empty_tensor_value_info("out")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def first_layer(
    channels: int, pixels: Any, *, folded: bool, size: int = 32, seed: int = 0, gamma: float = 1.0
) -> onnx.ModelProto:
    """A Conv and BatchNormalization trained, so to speak, on the given arrays, folded into one another or not."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(0, 0.3, (channels, pixels[0].shape[1], 3, 3)).astype(np.float32)
    zeros = np.zeros(channels, np.float32)
    shape = ",".join(map(str, pixels[0].shape[1:]))
    head, conv = f"g (float[N,{shape}] image) => (float out)", "[conv] conv = Conv <pads = [1, 1, 1, 1]> (image, w, b)"
    plain = partial(parse, f"{head} {{ {conv}  out = Relu (conv) }}", checked=False)
    values = np.concatenate(Stem(plain({"w": weight, "b": zeros}), "image").respond(pixels), axis=1)
    mean, deviation = values.mean(axis=1), values.std(axis=1)
    gammas, betas = rng.uniform(0.7, 1.3, channels) * gamma, rng.normal(0, 0.5, channels)
    if not folded:
        named = {"gamma": gammas, "beta": betas, "mean": mean, "var": deviation**2, "w": weight, "b": zeros}
        norm = "norm = BatchNormalization (conv, gamma, beta, mean, var)"
        constants = {name: value.astype(np.float32) for name, value in named.items()}
        return parse(f"{head} {{ {conv}  {norm}  out = Relu (norm) }}", constants, checked=False)
    factor = gammas / deviation
    scaled = weight * factor[:, None, None, None], betas - mean * factor
    return plain({name: value.astype(np.float32) for name, value in zip("wb", scaled, strict=True)})
