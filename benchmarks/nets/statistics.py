"""Running statistics of BatchNormalization that match what the nodes see, and folding as exporters do it.

Random weights with made-up statistics do not normalize: in depth the activations grow, die or lose all variation
between samples, and quantization errors say little. Here every BatchNormalization gets mean and variance of its own
input over a batch. One run finds all of them: each node is replaced by its primitives over the batch, which normalize
with the very statistics that they give out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from _session import session
from onnx import helper, numpy_helper

_EPSILON = 1e-5


def settle(model: onnx.ModelProto, batch: Mapping[str, Any]) -> onnx.ModelProto:
    """Returns the model with the batch's statistics in its BatchNormalizations.

    Args:
        model: A net whose nodes work on any batch size, whatever its inputs declare.
        batch: One feed of several samples.
    """
    norms = [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    if not norms:
        return model
    found = _observe(model, norms, batch)
    settled = onnx.ModelProto()
    settled.CopyFrom(model)
    stored = {tensor.name: tensor for tensor in settled.graph.initializer}
    for node in norms:
        for name, values in zip(node.input[3:5], found[node.name], strict=True):
            stored[name].CopyFrom(numpy_helper.from_array(values.reshape(-1).astype(np.float32), name))
    return settled


def _observe(model: onnx.ModelProto, norms: list[onnx.NodeProto], batch: Mapping[str, Any]) -> dict[str, Any]:
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    graph = probe.graph
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        nodes += _primitives(node) if node.op_type == "BatchNormalization" else [node]
    del graph.node[:], graph.output[:], graph.value_info[:]
    graph.node.extend(nodes)
    graph.initializer.append(numpy_helper.from_array(np.float32(_EPSILON), "epsilon"))
    for value in graph.input:
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    wanted = [f"{node.name}_{what}" for node in norms for what in ("mean", "variance")]
    graph.output.extend(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in wanted)
    values = session(probe).run(wanted, dict(batch))
    return {node.name: (values[2 * i], values[2 * i + 1]) for i, node in enumerate(norms)}


def _primitives(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    x, scale, shift = node.input[:3]
    n = node.name
    shape = f"{n}_by_channel"
    return [
        helper.make_node("ReduceMean", [x], [f"{n}_mean"], axes=[0, 2, 3]),
        helper.make_node("Sub", [x, f"{n}_mean"], [f"{n}_centred"]),
        helper.make_node("Mul", [f"{n}_centred"] * 2, [f"{n}_square"]),
        helper.make_node("ReduceMean", [f"{n}_square"], [f"{n}_variance"], axes=[0, 2, 3]),
        helper.make_node("Add", [f"{n}_variance", "epsilon"], [f"{n}_safe"]),
        helper.make_node("Sqrt", [f"{n}_safe"], [f"{n}_deviation"]),
        helper.make_node("Div", [f"{n}_centred", f"{n}_deviation"], [f"{n}_normal"]),
        helper.make_node("Constant", [], [shape], value_ints=[1, -1, 1, 1]),
        helper.make_node("Reshape", [scale, shape], [f"{n}_scale"]),
        helper.make_node("Reshape", [shift, shape], [f"{n}_shift"]),
        helper.make_node("Mul", [f"{n}_normal", f"{n}_scale"], [f"{n}_scaled"]),
        helper.make_node("Add", [f"{n}_scaled", f"{n}_shift"], [node.output[0]]),
    ]


def fold(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns the model with each BatchNormalization behind a Conv folded into it, as PyTorch's exporter does."""
    folded = onnx.ModelProto()
    folded.CopyFrom(model)
    graph = folded.graph
    stored = {tensor.name: tensor for tensor in graph.initializer}
    makers = {node.output[0]: node for node in graph.node}
    kept: list[onnx.NodeProto] = []
    for node in graph.node:
        conv = makers.get(node.input[0]) if node.op_type == "BatchNormalization" else None
        if conv is None or conv.op_type != "Conv" or len(conv.input) != 2:
            kept.append(node)
            continue
        gamma, beta, mean, variance = (
            numpy_helper.to_array(stored[name]).astype(np.float64) for name in node.input[1:]
        )
        scale = gamma / np.sqrt(variance + _EPSILON)
        weight = numpy_helper.to_array(stored[conv.input[1]]).astype(np.float64) * scale[:, None, None, None]
        stored[conv.input[1]].CopyFrom(numpy_helper.from_array(weight.astype(np.float32), conv.input[1]))
        stored[node.input[2]].CopyFrom(numpy_helper.from_array((beta - mean * scale).astype(np.float32), node.input[2]))
        conv.input.append(node.input[2])
        conv.output[0] = node.output[0]
    del graph.node[:], graph.value_info[:]
    graph.node.extend(kept)
    read = {name for node in kept for name in node.input}
    used = [tensor for tensor in graph.initializer if tensor.name in read]
    del graph.initializer[:]
    graph.initializer.extend(used)
    onnx.checker.check_model(folded)
    return folded
