"""Nets whose layers are in bodies of control flow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
Values = Sequence[onnx.ValueInfoProto]


class Part:
    """Grows the nodes of one graph; names begin with a tag, so that they are unique over bodies."""

    def __init__(self, tag: str, rng: np.random.Generator, *, stored: bool = True) -> None:
        self.tag, self.rng, self.stored = tag, rng, stored
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def const(self, array: np.ndarray) -> str:
        name = f"{self.tag}k{len(self.nodes) + len(self.weights)}"
        tensor = numpy_helper.from_array(np.asarray(array), name)
        if self.stored:
            self.weights.append(tensor)
        else:  # as exporters write them in bodies
            self.nodes.append(helper.make_node("Constant", [], [name], name=f"n_{name}", value=tensor))
        return name

    def op(self, op_type: str, *inputs: str, outputs: int = 1, **attributes: object) -> str:
        names = [f"{self.tag}v{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(
            helper.make_node(op_type, inputs, names, name=f"{self.tag}{op_type}{len(self.nodes)}", **attributes)
        )
        return names[0]

    def normal(self, *shape: int) -> str:
        fan_in = int(np.prod(shape[1:])) if len(shape) > 2 else shape[0]
        return self.const((self.rng.normal(size=shape) * (2 / fan_in) ** 0.5).astype(np.float32))

    def conv(self, x: str, channels: int, out: int) -> str:
        return self.op("Relu", self.op("Conv", x, self.normal(out, channels, 3, 3), self.normal(out), pads=[1] * 4))

    def head(self, x: str, channels: int, out: int) -> str:
        y = self.op("Flatten", self.op("GlobalAveragePool", x))
        return self.op("Gemm", y, self.normal(channels, out), self.normal(out))

    def graph(self, name: str, outputs: Values, inputs: Values = ()) -> onnx.GraphProto:
        return helper.make_graph(self.nodes, name, inputs, outputs, self.weights)

    def model(self, inputs: Values, outputs: Values) -> onnx.ModelProto:
        return helper.make_model(
            self.graph("net", outputs, inputs), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
        )


def value(name: str, kind: int, shape: list[int | str] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def two_rates(*, stored: bool = False, outside: bool = False, nested: bool = False) -> onnx.ModelProto:
    """An If on a sample rate with a whole net in both branches, as in voice activity detectors.

    Args:
        stored: Weights are initializers of the branches, else Constant nodes.
        outside: A Conv in front of the If, whose Relu the branches read, and a weight that both read.
        nested: Another If in the first branch.
    """
    rng = np.random.default_rng(0)
    main = Part("m", rng)
    x, channels = ("x", 3) if not outside else (main.conv("x", 3, 16), 16)
    shared = main.normal(16, channels, 3, 3) if outside else ""
    branches = []
    for tag in ("then", "else"):
        part = Part(tag, rng, stored=stored)
        y = part.op("Relu", part.op("Conv", x, shared, pads=[1] * 4)) if outside else part.conv(x, channels, 16)
        if nested and tag == "then":
            y = inner_if(part, y, rng)
        y = part.head(part.conv(y, 16, 16), 16, 8)
        branches.append(part.graph(tag, [value(y, FLOAT, ["N", 8])]))
    condition = main.op("Equal", "rate", main.const(np.array(16000, np.int64)))
    y = main.op("If", condition, then_branch=branches[0], else_branch=branches[1])
    return main.model([value("x", FLOAT, ["N", 3, 16, 16]), value("rate", INT64, [])], [value(y, FLOAT, ["N", 8])])


def inner_if(part: Part, x: str, rng: np.random.Generator) -> str:
    """An If that takes its first branch where the mean is positive."""
    made = []
    for tag in ("inner", "other"):
        inner = Part(f"{part.tag}{tag}", rng)
        y = inner.conv(x, 16, 16)
        made.append(inner.graph(tag, [value(y, FLOAT, None)]))
    mean = part.op("ReduceMean", x, keepdims=0)
    condition = part.op("Greater", mean, part.const(np.array(0, np.float32)))
    return part.op("If", condition, then_branch=made[0], else_branch=made[1])


def loop(steps: int | None = None) -> onnx.ModelProto:
    """A Loop around MatMuls whose state grows with the iterations; a weight and a bias are outside.

    Args:
        steps: A constant number of iterations; None reads it from an input.
    """
    rng = np.random.default_rng(0)
    main, body = Part("m", rng), Part("b", rng)
    outer, bias = main.normal(32, 24), main.normal(32, 32)
    y = body.op("Add", body.op("Relu", body.op("MatMul", "state", body.normal(32, 32))), "x")
    grown = body.op("Mul", y, body.const(np.array(1.2, np.float32)))
    scanned = body.op("MatMul", body.op("Add", y, body.op("MatMul", "x", bias)), outer)
    going = body.op("Identity", "go")
    graph = body.graph(
        "body",
        [value(going, BOOL, []), value(grown, FLOAT, None), value(scanned, FLOAT, None)],
        [value("i", INT64, []), value("go", BOOL, []), value("state", FLOAT, None)],
    )
    count = "n" if steps is None else main.const(np.array(steps, np.int64))
    main.op("Loop", count, "", "x", outputs=2, body=graph)
    final, each = main.nodes[-1].output
    inputs = [value("x", FLOAT, ["N", 32])] + ([value("n", INT64, [])] if steps is None else [])
    return main.model(inputs, [value(final, FLOAT, ["N", 32]), value(each, FLOAT, ["T", "N", 24])])


def scan() -> onnx.ModelProto:
    """A Scan over the rows of a matrix, backwards, with a recurrent layer."""
    rng = np.random.default_rng(0)
    main, body = Part("m", rng), Part("b", rng)
    new = body.op(
        "Tanh",
        body.op("Add", body.op("MatMul", "row", body.normal(24, 24)), body.op("MatMul", "h", body.normal(24, 24))),
    )
    graph = body.graph(
        "body",
        [value(new, FLOAT, [1, 24]), value(body.op("Identity", new), FLOAT, [1, 24])],
        [value("h", FLOAT, [1, 24]), value("row", FLOAT, [1, 24])],
    )
    main.op("Scan", main.const(np.zeros((1, 24), np.float32)), "x", outputs=2, body=graph, num_scan_inputs=1,
            scan_input_axes=[1], scan_input_directions=[1])  # fmt: skip
    final, each = main.nodes[-1].output
    return main.model([value("x", FLOAT, [1, 6, 24])], [value(final, FLOAT, [1, 24]), value(each, FLOAT, ["T", 1, 24])])
