"""The same grid in int8 and in uint8: integers and zero point moved by 128 stand for the same reals.

Some kernels take unsigned activations alone; QONNX' tools want signed integers around a zero point of 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import onnx

from kenosis_ort.formats.draft import Draft, forget_types
from kenosis_ort.formats.from_qdq import is_dequantize, is_quantize
from kenosis_ort.formats.model import annotate, datatypes_said
from kenosis_ort.graph.walk import MAIN_DOMAINS

_WEIGHTED: Final = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_HALF: Final = 128


def to_unsigned(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns the model with uint8 for int8 in activations, and in constants that meet them in other operators.

    Args:
        model: A private canonical model; it is changed.
    """
    return _Mover(model, signed=False).move()


def to_signed(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns the model with int8 for uint8 in activations whose zero point is 128.

    Args:
        model: A private canonical model; it is changed.
    """
    return _Mover(model, signed=True).move()


class _Mover(Draft):
    def __init__(self, model: onnx.ModelProto, *, signed: bool) -> None:
        super().__init__(model)
        self._signed = signed
        self._moved: dict[str, str] = {}
        self._readers = self.read_by()
        self._pinned = self.pinned()
        self._makers = {name: node for node in self.graph.node for name in node.output if name}

    def move(self) -> onnx.ModelProto:
        """Returns the model."""
        tensors: set[str] = set()
        said = datatypes_said(self.graph)
        for node in self.graph.node:
            if is_quantize(node) and self._is_to_move(node):
                names = set(self._integers(node))
                if not names & self._pinned and all(self._keeps_pairs(name) for name in names):
                    tensors |= names
                    self._move(node, 2)
            elif node.op_type == "Clip" and node.output[0] in tensors:
                for at in range(1, len(node.input)):
                    self._move(node, at)
            elif is_dequantize(node) and (node.input[0] in tensors or self._is_operand(node)):
                if node.input[0] not in tensors:
                    width = said.get(node.input[0])
                    self._move(node, 0)
                    if width is not None:
                        annotate(self.graph, node.input[0], "UINT8")
                self._move(node, 2)
            self.nodes.append(node)
        forget_types(self.graph, tensors)
        return self.finish()

    def _is_to_move(self, node: onnx.NodeProto) -> bool:
        """Tells whether the integers of a Q or DQ are of the type to leave."""
        zero_point = self.array(node.input[2]) if len(node.input) > 2 else None
        if zero_point is None:
            return False
        return (
            zero_point.dtype == np.uint8 and bool((zero_point == _HALF).all())
            if self._signed
            else zero_point.dtype == np.int8
        )

    def _keeps_pairs(self, name: str) -> bool:
        """Tells whether DQ and Clip alone read integers."""
        return all(
            is_dequantize(r) or (r.op_type == "Clip" and r.domain in MAIN_DOMAINS and list(r.input).count(name) == 1)
            for r in self._readers.get(name, [])
        )

    def _is_operand(self, node: onnx.NodeProto) -> bool:
        """Tells whether a DQ reads a constant that meets quantized data in an operator without weights."""
        if self._signed or not self.is_constant(node.input[0]) or not self._is_to_move(node):
            return False
        value = node.output[0]
        readers = self._readers.get(value, [])
        operands = {n for r in readers for n in r.input if n != value}
        meets = any(n in self._makers and is_dequantize(self._makers[n]) for n in operands)
        return meets and not any(r.op_type in _WEIGHTED for r in readers) and value not in self._pinned

    def _integers(self, node: onnx.NodeProto) -> Iterator[str]:
        """Yields the integers that a Q writes, and those of the Clips behind it."""
        stack = [node.output[0]]
        while stack:
            name = stack.pop()
            yield name
            stack += [r.output[0] for r in self._readers.get(name, []) if r.op_type == "Clip" and r.input[0] == name]

    def _move(self, node: onnx.NodeProto, at: int) -> None:
        """Makes a node read a constant of the other type."""
        name = node.input[at]
        if not name:
            return
        if name not in self._moved:
            moved = np.asarray(self.array(name)).astype(np.int64) + (-_HALF if self._signed else _HALF)
            kind = (np.int8, "signed") if self._signed else (np.uint8, "unsigned")
            self._moved[name] = self.constant(moved.astype(kind[0]), f"{name}_{kind[1]}")
        node.input[at] = self._moved[name]
