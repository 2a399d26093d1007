"""Nets whose layers are in bodies of control flow."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.models import Net

INT64, BOOL = TensorProto.INT64, TensorProto.BOOL


def layer(net: Net, x: str, channels: int, out: int) -> str:
    return net.op("Relu", [net.op("Conv", [x, net.weight((out, channels, 3, 3)), np.zeros(out)], pads=[1] * 4)])


def two_rates(*, stored: bool = False, outside: bool = False, nested: bool = False) -> onnx.ModelProto:
    """An If on a sample rate with a whole net in both branches, as in voice activity detectors.

    Args:
        stored: Weights are initializers of the branches, else Constant nodes.
        outside: A Conv in front of the If, whose Relu the branches read, and a weight that both read.
        nested: Another If in the first branch.
    """
    main = Net(tag="m_")
    x, channels = main.input("x", ["N", 3, 16, 16]), 16 if outside else 3
    main.input("rate", [], INT64)
    x = layer(main, x, 3, 16) if outside else x
    shared = main.weight((16, channels, 3, 3)) if outside else ""
    branches = []
    for tag in ("then", "else"):
        part = Net(tag=f"{tag}_", seed=main.rng, stored=stored)
        y = part.op("Relu", [part.op("Conv", [x, shared], pads=[1] * 4)]) if outside else layer(part, x, channels, 16)
        if nested and tag == "then":
            y = inner_if(part, y)
        y = part.op("Flatten", [part.op("GlobalAveragePool", [layer(part, y, 16, 16)])])
        part.output(part.op("Gemm", [y, part.weight((16, 8)), part.rng.normal(size=8)]), ["N", 8])
        branches.append(part.graph(tag))
    condition = main.op("Equal", ["rate", np.array(16000, np.int64)])
    main.output(main.op("If", [condition], then_branch=branches[0], else_branch=branches[1]), ["N", 8])
    return main.model(ir_version=8)


def inner_if(part: Net, x: str) -> str:
    """An If that takes its first branch where the mean is positive."""
    made = []
    for tag in ("inner", "other"):
        inner = Net(tag=f"{part.tag}{tag}_", seed=part.rng)
        inner.output(layer(inner, x, 16, 16))
        made.append(inner.graph(tag))
    condition = part.op("Greater", [part.op("ReduceMean", [x], keepdims=0), np.array(0, np.float32)])
    return part.op("If", [condition], then_branch=made[0], else_branch=made[1])


def loop(steps: int | None = None) -> onnx.ModelProto:
    """A Loop around MatMuls whose state grows with the iterations; a weight and a bias are outside.

    Args:
        steps: A constant number of iterations; None reads it from an input.
    """
    main, body = Net(tag="m_"), Net(tag="b_", seed=1)
    main.input("x", ["N", 32])
    outer, bias = main.weight((32, 24)), main.weight((32, 32))
    for name, kind in (("i", INT64), ("go", BOOL)):
        body.input(name, [], kind)
    body.inputs.append(helper.make_tensor_value_info("state", TensorProto.FLOAT, None))
    y = body.op("Relu", [body.op("MatMul", ["state", body.weight((32, 32))])])
    y = body.op("Add", [y, "x"])
    grown = body.op("Mul", [y, 1.2])
    scanned = body.op("MatMul", [body.op("Add", [y, body.op("MatMul", ["x", bias])]), outer])
    body.output(body.op("Identity", ["go"]), [], BOOL)
    body.output(grown)
    body.output(scanned)
    count = main.input("n", [], INT64) if steps is None else main.const(np.array(steps, np.int64))
    main.op("Loop", [count, "", "x"], outputs=2, body=body.graph())
    for name, shape in zip(main.nodes[-1].output, (["N", 32], ["T", "N", 24]), strict=True):
        main.output(name, shape)
    return main.model(ir_version=8)


def scan() -> onnx.ModelProto:
    """A Scan over the rows of a matrix, backwards, with a recurrent layer."""
    main, body = Net(tag="m_"), Net(tag="b_", seed=1)
    main.input("x", [1, 6, 24])
    products = [body.op("MatMul", [body.input(name, [1, 24]), body.weight((24, 24))]) for name in ("h", "row")]
    new = body.op("Tanh", [body.op("Add", products)])
    for name in (new, body.op("Identity", [new])):
        body.output(name, [1, 24])
    main.op("Scan", [np.zeros((1, 24)), "x"], outputs=2, body=body.graph(), num_scan_inputs=1, scan_input_axes=[1],
            scan_input_directions=[1])  # fmt: skip
    for name, shape in zip(main.nodes[-1].output, ([1, 24], ["T", 1, 24]), strict=True):
        main.output(name, shape)
    return main.model(ir_version=8)
