"""Work against the number of nodes: no function is called more than in proportion to them."""

from __future__ import annotations

import cProfile
import pstats
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kenosis_ort import quantize_static
from tests.models import FeedReader, Net

FEW = 400
"""Calls up to which nothing is said about their growth."""
MOST = 2.6
"""Times as many calls for twice the nodes; four where each node looks at all others."""


def residual(count: int) -> Any:
    net = Net()
    value = net.input("x", [1, 4, 4, 4])
    for at in range(count):
        made = net.conv(value, 4, 4, name=f"conv{at}")
        value = net.op("Relu", [net.op("Add", [made, value], name=f"add{at}")], name=f"relu{at}")
    net.output(value, [1, 4, 4, 4])
    return net.model("residual")


def concat(count: int) -> Any:
    net = Net()
    x = net.input("x", [1, 4, 4, 4])
    made = [net.op("Relu", [net.conv(x, 4, 4, name=f"conv{at}")], name=f"relu{at}") for at in range(count)]
    net.output(net.op("Concat", made, name="concat", axis=1), [1, 4 * count, 4, 4])
    return net.model("concat")


def transformer(count: int) -> Any:
    net = Net()
    value = net.input("x", [1, 4, 8])
    heads, wide = net.const(np.array([1, 4, 2, 4]), "heads"), net.const(np.array([1, 4, 8]), "wide")

    def linear(value: str, name: str) -> str:
        weight = net.const(np.random.default_rng(0).normal(0, 0.3, (8, 8)).astype(np.float32), f"{name}_weight")
        return net.op("MatMul", [value, weight], name=name)

    for at in range(count):
        q, k, v = (
            net.op("Transpose", [net.op("Reshape", [linear(value, f"{part}{at}"), heads], name=f"{part}r{at}")], perm=p)
            for part, p in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3]))
        )
        scores = net.op("Softmax", [net.op("MatMul", [q, k], name=f"scores{at}")], name=f"softmax{at}", axis=-1)
        mixed = net.op("Transpose", [net.op("MatMul", [scores, v], name=f"mixed{at}")], perm=[0, 2, 1, 3])
        out = linear(net.op("Reshape", [mixed, wide], name=f"back{at}"), f"out{at}")
        value = net.op("Relu", [net.op("Add", [out, value], name=f"sum{at}")], name=f"relu{at}")
    net.output(value, [1, 4, 8])
    return net.model("transformer")


def calls(model: Any, folder: Path) -> Counter[str]:
    """Calls of each function by file and name; of a generator, its steps."""
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    feeds = [{"x": np.random.default_rng(at).normal(0, 0.1, shape).astype(np.float32)} for at in range(2)]
    profile = cProfile.Profile()
    with profile:
        quantize_static(model, folder / "out.onnx", FeedReader(feeds), promise=False)
    found: Counter[str] = Counter()
    for (file, line, name), (_, count, *_) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        found[f"{file}:{line if 'kenosis_ort' in file else ''}:{name}"] += count
    return found


@pytest.mark.parametrize(("make", "count"), [(residual, 16), (concat, 24), (transformer, 6)])
def test_twice_the_nodes_take_twice_the_calls(tmp_path: Path, make: Any, count: int) -> None:
    calls(make(2), tmp_path)  # imports
    once, twice = calls(make(count), tmp_path), calls(make(2 * count), tmp_path)
    grown = {name: (once[name], many) for name, many in twice.items() if many > FEW + MOST * once[name]}
    assert grown == {}
