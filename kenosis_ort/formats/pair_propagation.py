"""Q and DQ on both sides of operators that only move values about or choose among them.

A quantizer behind MaxPool, Flatten, Transpose and their like gives what it gives in front of them, and what leaves them
is on the grid that went in. The runtime runs them on integers only between a DQ and a Q of the same parameters, and the
layer in front of them or behind them only where such a pair touches it. So pairs are repeated: in front of the
operators, behind the layer whose values they move, and behind them, in front of the layer that reads them.
"""

from __future__ import annotations

from typing import Final, TypeGuard

import numpy as np
import onnx

from kenosis_ort.formats.draft import Draft
from kenosis_ort.formats.from_qdq import is_dequantize, is_quantize
from kenosis_ort.graph.walk import MAIN_DOMAINS

_DATA_MOVEMENT: Final = frozenset(
    {"DepthToSpace", "Flatten", "MaxPool", "Reshape", "Slice", "SpaceToDepth", "Squeeze", "Transpose", "Unsqueeze"}
)
_LAYERS: Final = frozenset({"Conv", "Gemm", "MatMul"})
_SOURCES: Final = frozenset({*_LAYERS, "Add", "BatchNormalization", "Div", "Mul", "Sub"})


def carry_pairs(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its pairs repeated around operators that move values.

    Args:
        model: A private canonical model, its nodes in order; it is changed.
    """
    return _Behind(_PairsBefore(model).write()).write()


def is_data_movement(node: onnx.NodeProto | None) -> TypeGuard[onnx.NodeProto]:
    """Whether a node only moves the values of its first input about or chooses among them."""
    return node is not None and node.op_type in _DATA_MOVEMENT and node.domain in MAIN_DOMAINS and len(node.output) == 1


class _Carrier(Draft):
    def __init__(self, model: onnx.ModelProto) -> None:
        super().__init__(model)
        self._old = list(model.graph.node)
        self._makers = {name: node for node in self._old for name in node.output if name}
        self._readers = self.read_by()
        self._pinned = self.pinned()

    def _is_private(self, value: str) -> bool:
        return len(self._readers.get(value, [])) == 1 and value not in self._pinned

    def _is_plain(self, node: onnx.NodeProto) -> bool:
        """Whether a Q or DQ has one constant scale and a zero point."""
        scale = self.array(node.input[1])
        return scale is not None and scale.size == 1 and len(node.input) > 2 and self.is_constant(node.input[2])


class _PairsBefore(_Carrier):
    """Repeats pairs in front of operators, behind the layer whose values they move."""

    def write(self) -> onnx.ModelProto:
        for node in self._old:
            if is_quantize(node) and self._is_plain(node):
                self._repeat(node)
        extra: dict[str, list[onnx.NodeProto]] = {}
        for new in self.nodes:
            extra.setdefault(self._behind[new.name], []).append(new)
        ordered: list[onnx.NodeProto] = []
        for node in self._old:
            if node.name not in self._gone:
                ordered += [node, *extra.get(node.name, ())]
        return self.finish(ordered)

    def __init__(self, model: onnx.ModelProto) -> None:
        super().__init__(model)
        self._behind: dict[str, str] = {}
        self._gone: set[str] = set()

    def _repeat(self, quantize: onnx.NodeProto) -> None:
        """Puts a copy of Q, Clip and DQ behind the layer from which operators bring the values that a Q reads."""
        value, passed = quantize.input[0], []
        while self._is_private(value) and (maker := self._makers.get(value)) is not None:
            if not (is_data_movement(maker) or (maker.op_type == "Relu" and self._is_bounded(quantize))):
                break
            passed.append(maker)
            value = maker.input[0]
        source = self._makers.get(value)
        first = next((node for node in reversed(passed) if node.op_type != "Relu"), None)
        if first is None or source is None or source.op_type not in _SOURCES or not self._is_private(value):
            return
        clip = self._clip(quantize)
        if clip is None and any(not is_dequantize(r) for r in self._readers.get(quantize.output[0], [])):
            return
        base, start = quantize.name, len(self.nodes)
        integers = self.add("QuantizeLinear", [value, *quantize.input[1:]], base)
        if clip is not None:
            integers = self.add("Clip", [integers, *clip.input[1:]], base)
        real = self.add("DequantizeLinear", [integers, *quantize.input[1:]], base)
        for node in self.nodes[start:]:
            self._behind[node.name] = source.name
        for node in passed:  # a Relu is what the quantizer's range says now
            if node.op_type == "Relu":
                self._gone.add(node.name)
        chain = [node for node in reversed(passed) if node.op_type != "Relu"]
        for node in chain:
            node.input[0] = real
            real = node.output[0]
        quantize.input[0] = real

    def _is_bounded(self, quantize: onnx.NodeProto) -> bool:
        """Whether no integer of a Q represents a value below zero."""
        zero = np.asarray(self.array(quantize.input[2]))
        clip = self._clip(quantize)
        low = self.array(clip.input[1]) if clip is not None and clip.input[1] else None
        return bool((zero <= (np.iinfo(zero.dtype).min if low is None else low)).all())

    def _clip(self, quantize: onnx.NodeProto) -> onnx.NodeProto | None:
        readers = self._readers.get(quantize.output[0], [])
        return readers[0] if len(readers) == 1 and readers[0].op_type == "Clip" and len(readers[0].input) > 1 else None


class _Behind(_Carrier):
    """Repeats pairs behind operators, in front of the layer that reads what they move."""

    def write(self) -> onnx.ModelProto:
        grids: dict[str, list[str]] = {}
        moved: list[onnx.NodeProto] = []
        for node in self._old:
            if is_dequantize(node) and self._is_plain(node) and not self.is_constant(node.input[0]):
                grids[node.output[0]] = list(node.input[1:3])
            elif is_data_movement(node) and node.input[0] in grids:
                grids[node.output[0]] = grids[node.input[0]]
                moved.append(node)
        wanted: set[str] = set()
        for node in reversed(moved):
            value = node.output[0]
            readers = self._readers.get(value, [])
            if any(self._profits(r, value) or (is_data_movement(r) and r.output[0] in wanted) for r in readers):
                wanted.add(value)
        for node in self._old:
            self.nodes.append(node)
            value = node.output[0] if node.output else ""
            if value not in wanted or any(is_quantize(r) for r in self._readers.get(value, [])):
                continue
            node.output[0] = self.fresh(f"{value}_moved")
            integers = self.add("QuantizeLinear", [node.output[0], *grids[value]], value)
            self.add("DequantizeLinear", [integers, *grids[value]], value, output=value)
        return self.finish()

    def _profits(self, node: onnx.NodeProto, value: str) -> bool:
        """Whether a node can run on integers where the value is one of a DQ."""
        if is_quantize(node):
            return True
        if node.op_type in ("Add", "Concat", "Mul"):
            return all(is_dequantize(self._makers[n]) for n in node.input if n != value and n in self._makers)
        weight = self._makers.get(node.input[1]) if node.op_type in _LAYERS and node.input[0] == value else None
        return weight is not None and is_dequantize(weight)
