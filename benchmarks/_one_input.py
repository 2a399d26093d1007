"""Layers that share an input, apart and as one wider layer whose output is split: what joining them would gain.

Nets of the runtime's own quantized operators. Both forms compute the same bits; they are what a rewrite would turn into
each other, with the best that could be hoped for: one scale for all parts, as a Split in integers demands.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from _session import session
from onnx import TensorProto, helper, numpy_helper

CASES = {
    "Inception 28x28, 192 to 64, 96, 16": (28, 192, [64, 96, 16], 1),
    "Inception 14x14, 512 to 160, 112, 24": (14, 512, [160, 112, 24], 1),
    "Inception 7x7, 832 to 384, 192, 48": (7, 832, [384, 192, 48], 1),
    "Fire 56x56, 16 to 64, 64": (56, 16, [64, 64], 1),
    "CSP 56x56, 64 to 32, 32": (56, 64, [32, 32], 1),
    "CSP 28x28, 128 to 64, 64": (28, 128, [64, 64], 1),
    "CSP 14x14, 256 to 128, 128": (14, 256, [128, 128], 1),
    "3x3 at 28x28, 64 to 32, 32": (28, 64, [32, 32], 3),
    "narrow 28x28, 32 to 16, 16": (28, 32, [16, 16], 1),
    "narrow 14x14, 64 to 8, 8": (14, 64, [8, 8], 1),
    "QKV 197 tokens, 192 to 192, 192, 192": (0, 192, [192, 192, 192], 197),
    "QKV 128 tokens, 256 to 256, 256, 256": (0, 256, [256, 256, 256], 128),
    "QKV 1 token, 768 to 768, 768, 768": (0, 768, [768, 768, 768], 1),
}
"""Size of the picture, channels read, those written by each layer, window; size 0: a linear layer over so many rows."""


class _Net:
    """One net of quantized operators."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.held: dict[str, Any] = {"s": np.float32(0.05), "z": np.uint8(110)}

    def layer(self, x: str, inputs: int, outputs: Sequence[int], window: int, *, linear: bool) -> str:
        """Adds a layer; its weights are those of layers of ``outputs`` each, one behind the other."""
        name = f"l{len(self.nodes)}"
        total, kernel = sum(outputs), () if linear else (window, window)
        weights = self.rng.integers(-100, 100, (total, inputs, *kernel)).astype(np.int8)
        self.held |= {f"{name}w": weights.T.copy() if linear else weights, f"{name}b": np.zeros(total, np.int32)}
        self.held |= {f"{name}s": np.full(total, 1e-3, np.float32), f"{name}z": np.zeros(total, np.int8)}
        read = [x, "s", "z", f"{name}w", f"{name}s", f"{name}z"]
        if linear:
            made = helper.make_node("QGemm", [*read, f"{name}b", "s", "z"], [name], domain="com.microsoft")
        else:
            made = helper.make_node("QLinearConv", [*read, "s", "z", f"{name}b"], [name], pads=[window // 2] * 4)
        self.nodes.append(made)
        return name

    def split(self, x: str, sizes: Sequence[int]) -> list[str]:
        self.held["sizes"] = np.array(sizes, np.int64)
        names = [f"part{i}" for i in range(len(sizes))]
        self.nodes.append(helper.make_node("Split", [x, "sizes"], names, axis=1))
        return names

    def model(self, shape: Sequence[int], ends: Sequence[str]) -> bytes:
        x = helper.make_tensor_value_info("x", TensorProto.UINT8, shape)
        outputs = [helper.make_tensor_value_info(end, TensorProto.UINT8, None) for end in ends]
        stored = [numpy_helper.from_array(np.asarray(value), name) for name, value in self.held.items()]
        graph = helper.make_graph(self.nodes, "joined", [x], outputs, stored)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())


def _net(size: int, inputs: int, outputs: Sequence[int], window: int, *, joined: bool) -> tuple[bytes, list[int]]:
    net, linear = _Net(), size == 0
    shape = [window, inputs] if linear else [1, inputs, size, size]
    first = net.layer("x", inputs, [inputs], 1, linear=linear)
    if joined:
        parts = net.split(net.layer(first, inputs, outputs, window, linear=linear), outputs)
    else:
        parts = [net.layer(first, inputs, [count], window, linear=linear) for count in outputs]
    ends = [net.layer(part, count, [64], 1, linear=linear) for part, count in zip(parts, outputs, strict=True)]
    return net.model(shape, ends), shape


def rows(rounds: int, seconds: float) -> Iterator[str]:
    """Yields a line a case: processor time of both forms, the least over rounds of fresh sessions."""
    for name, (size, inputs, outputs, window) in CASES.items():
        made = [_net(size, inputs, outputs, window, joined=joined) for joined in (False, True)]
        feed = {"x": np.random.default_rng(1).integers(0, 255, made[0][1]).astype(np.uint8)}
        least = [np.inf, np.inf]
        for _ in range(rounds):
            runners = [session(model) for model, _ in made]
            for index, runner in enumerate(runners):
                times, end = [], time.thread_time() + seconds
                runner.run(None, feed)
                while time.thread_time() < end:
                    start = time.thread_time()
                    runner.run(None, feed)
                    times.append(time.thread_time() - start)
                least[index] = min(least[index], float(np.median(times)))
        apart, joined = (1e6 * t for t in least)
        yield f"{name:38s} apart {apart:7.1f} us   joined {joined:7.1f} us   gain {apart / joined:5.2f}"
