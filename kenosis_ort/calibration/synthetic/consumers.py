"""Who reads the values of a graph, also behind what passes their elements on, and what that says about a value."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.graph.constants import Is, constant_value, having
from kenosis_ort.graph.outside import array_in, is_outside
from kenosis_ort.graph.walk import attribute_int

_PASSING = having(Is.MOVE) | {"Cast", "Slice", "Clip", "Pad", "Concat", "Split", "Resize", "Gather"}
_SCALING = frozenset({"Sub", "Div", "Mul", "Add"})
_EMBEDDINGS = {"EmbedLayerNormalization": {0: 2, 1: 4}}  # index of the indices: index of their table
_STANDARD = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft"})


class Consumers:
    """The consumers of a graph's values.

    Args:
        proto: The model.

    Attributes:
        constants: Initializers and the values of Constant nodes, by name.
    """

    def __init__(self, proto: onnx.ModelProto) -> None:
        graph = proto.graph
        self.constants: dict[str, onnx.TensorProto] = {t.name: t for t in graph.initializer}
        self._of: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
        functions = {(f.domain, f.name) for f in proto.functions}
        foreign = (n.domain for n in graph.node if (n.domain, n.op_type) not in functions)
        self._foreign = {*foreign} - _STANDARD
        for node in graph.node:
            constant = constant_value(node) if node.op_type == "Constant" and node.output else None
            if constant is not None:
                self.constants[node.output[0]] = constant
            for index, name in enumerate(node.input):
                self._of.setdefault(name, []).append((node, index))

    def of(self, name: str) -> list[tuple[onnx.NodeProto, int]]:
        """The nodes that read a value, with the index of the input."""
        return self._of.get(name, [])

    def array(self, name: str) -> npt.NDArray[np.float64] | None:
        """The values of a constant of numbers, None for anything else."""
        tensor = self.constants.get(name)
        if tensor is None or tensor.data_type == tensor.STRING:
            return None
        if tensor.data_location == tensor.EXTERNAL and not is_outside(tensor):
            return None
        return array_in(tensor).astype(np.float64)

    def reached(self, name: str, also: frozenset[str] = frozenset()) -> Iterator[tuple[onnx.NodeProto, int]]:
        """Yields the consumers of a value, also behind nodes that pass its elements on and those named."""
        queue, seen = [name], {name}
        while queue:
            for node, index in self.of(queue.pop(0)):
                yield node, index
                passes = node.op_type in _PASSING and (index == 0 or node.op_type == "Concat")
                outputs = [out for out in node.output if out not in seen] if passes or node.op_type in also else []
                seen.update(outputs)
                queue += outputs

    def foreign_domain(self, name: str) -> str | None:
        """The domain of an operator that nobody here knows and that reads the value, None without one."""
        return next((node.domain for node, _ in self.reached(name) if node.domain in self._foreign), None)

    def rows(self, name: str, behind: frozenset[str] = frozenset({"Add", "Mul", "Where"})) -> int | None:
        """The smallest number of rows among the tables that a value indexes, also behind these operators."""
        found: list[int] = []
        for node, index in self.reached(name, behind):
            table, axis = None, 0
            if node.op_type in ("Gather", "GatherElements") and index == 1:
                table = self.constants.get(node.input[0])
                axis = attribute_int(node, "axis", 0)
            elif node.op_type in _EMBEDDINGS and index in _EMBEDDINGS[node.op_type]:
                position = _EMBEDDINGS[node.op_type][index]
                table = self.constants.get(node.input[position]) if position < len(node.input) else None
            if table is not None and len(table.dims) > 1:
                found.append(int(table.dims[axis]))
        return min(found, default=None)

    def conv_channels(self, name: str) -> int | None:
        """The number of channels of a two-dimensional Conv that reads the value."""
        for node, index in self.reached(name, _SCALING | {"BatchNormalization"}):
            weight = self.constants.get(node.input[1]) if node.op_type == "Conv" and index == 0 else None
            if weight is not None and len(weight.dims) == 4:
                return int(weight.dims[1]) * attribute_int(node, "group", 1)
        return None

    def features(self, name: str) -> int | None:
        """The number of rows of the first matrix that the value's last axis is multiplied with."""
        for node, index in self.reached(name, _SCALING | {"BatchNormalization", "LayerNormalization"}):
            is_product = index == 0 and node.op_type in ("MatMul", "Gemm") and len(node.input) > 1
            weight = self.constants.get(node.input[1]) if is_product else None
            if weight is not None and len(weight.dims) == 2:
                return int(weight.dims[1 if attribute_int(node, "transB", 0) else 0])
        return None

    def is_added(self, name: str) -> bool:
        """Whether a value is added to something before anything else is computed from it."""
        for node, _ in self.reached(name):
            if node.op_type in _SCALING or node.op_type in ("Where", "Equal", "Greater", "Less"):
                return node.op_type == "Add"
        return False

    def normalization(self, name: str) -> list[tuple[str, int, npt.NDArray[np.float64]]]:
        """The leading Sub, Div, Mul and Add with constants: operator, index of the value, constant."""
        found: list[tuple[str, int, npt.NDArray[np.float64]]] = []
        while True:
            for node, index in self.of(name):
                if node.op_type in _SCALING and len(node.input) == 2:
                    other = self.array(node.input[1 - index])
                    if other is not None and other.size:
                        found.append((node.op_type, index, other))
                        name = node.output[0]
                        break
                elif node.op_type in _PASSING and index == 0:
                    name = node.output[0]
                    break
            else:
                return found
