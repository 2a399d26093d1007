"""The linear part in front of a model, up to the first BatchNormalization or the first layer with a bias.

What the model says about that point - the running statistics, or the size of a folded bias - tells the scale of the
input: it is measured there with trial inputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort

from kenosis_ort.calibration.session import ObservedModel, SessionSettings, run
from kenosis_ort.calibration.synthetic.consumers import Consumers
from kenosis_ort.graph.operators import HEAVY, Is, having

Doubles = npt.NDArray[np.float64]

_LINEAR = having(Is.MOVE) | frozenset(
    {"Conv", "MatMul", "Gemm", "Add", "Sub", "Mul", "Div", "Cast", "Slice", "Concat", "Pad", "AveragePool", "Split",
     "Constant"}
)  # fmt: skip


@dataclass(frozen=True)
class FrontPoint:
    """A point behind the linear front.

    Attributes:
        tensor: Its name.
        axis: Of the channels.
        mean: Running mean of each channel; None without BatchNormalization.
        deviation: Running standard deviation of each channel; None without.
        bias: Size of each channel's bias; zeros where there is none.
    """

    tensor: str
    axis: int
    mean: Doubles | None
    deviation: Doubles | None
    bias: Doubles


class Front:
    """The front of a model behind one input, ready to run; `point` is None where there is none.

    Args:
        proto: The model.
        name: The input.
    """

    def __init__(self, proto: onnx.ModelProto, name: str) -> None:
        self.name = name
        self.point, self._nodes = _find(proto, name, Consumers(proto))
        self._session: ort.InferenceSession | None = None
        if self.point is not None:
            part = _cut(proto, name, self.point.tensor, self._nodes)
            with ObservedModel(part, SessionSettings(threads=1, optimize=False)) as model:
                self._session = model.session([self.point.tensor])

    def respond(self, arrays: Iterable[npt.NDArray[np.generic]]) -> list[Doubles]:
        """Returns what arrives at the point for each input, of shape (channels, positions)."""
        assert self.point is not None
        assert self._session is not None
        out: list[Doubles] = []
        for index, array in enumerate(arrays):
            (values,) = run(self._session, [self.point.tensor], {self.name: array}, index)
            moved = np.moveaxis(np.asarray(values, np.float64), self.point.axis, 0)
            out.append(moved.reshape(moved.shape[0], -1))
        return out


def _find(proto: onnx.ModelProto, name: str, consumers: Consumers) -> tuple[FrontPoint | None, list[onnx.NodeProto]]:
    linear, heavy = {name}, set[str]()
    nodes: list[onnx.NodeProto] = []
    biased: FrontPoint | None = None
    for node in proto.graph.node:
        if not any(i in linear for i in node.input):
            continue
        if node.op_type == "BatchNormalization" and node.input[0] in heavy:
            mean, variance = consumers.array(node.input[3]), consumers.array(node.input[4])
            if mean is not None and variance is not None:
                zero = np.zeros_like(mean)
                return FrontPoint(node.input[0], 1, mean, np.sqrt(np.maximum(variance, 1e-12)), zero), nodes
        if node.op_type not in _LINEAR or not all(not i or i in linear or i in consumers.constants for i in node.input):
            continue
        linear.update(node.output)
        nodes.append(node)
        if node.op_type in HEAVY or any(i in heavy for i in node.input):
            heavy.update(node.output)
        if biased is None and node.op_type in HEAVY:
            biased = _biased(node, consumers)
    return biased, nodes


def _biased(node: onnx.NodeProto, consumers: Consumers) -> FrontPoint | None:
    output, bias, axis = node.output[0], consumers.array(node.input[2]) if len(node.input) > 2 else None, 1
    if node.op_type == "MatMul":
        axis = -1
        for child, index in consumers.of(output):
            added = consumers.array(child.input[1 - index]) if child.op_type == "Add" else None
            if added is not None and added.ndim == 1:
                output, bias = child.output[0], added
    weight = consumers.constants.get(node.input[1])
    if weight is None:
        return None
    channels = int(weight.dims[0] if node.op_type == "Conv" else weight.dims[-1])
    return FrontPoint(output, axis, None, None, np.zeros(channels) if bias is None else np.abs(bias.reshape(-1)))


def _cut(proto: onnx.ModelProto, name: str, tensor: str, nodes: list[onnx.NodeProto]) -> onnx.ModelProto:
    """Returns the part of a model that computes a tensor from one input."""
    needed, kept = {tensor}, []
    made = {output: node for node in proto.graph.node for output in node.output if node.op_type == "Constant"}
    for node in reversed(nodes):
        if needed.intersection(node.output):
            kept.append(node)
            needed.update(node.input)
    kept += [made[i] for i in sorted(needed & made.keys())]
    part = onnx.ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import)
    part.graph.name = "front"
    part.graph.node.extend(reversed(kept))
    part.graph.initializer.extend(t for t in proto.graph.initializer if t.name in needed)
    part.graph.input.extend(v for v in proto.graph.input if v.name == name)
    part.graph.output.append(onnx.ValueInfoProto(name=tensor))
    return part
