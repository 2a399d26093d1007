"""Which quantized values need a barrier before their Q, so that the session leaves the float node before it alone."""

from __future__ import annotations

from collections.abc import Sequence

from kenosis_ort.graph.onnx_ir import ir
from kenosis_ort.plan import Decision, How
from kenosis_ort.targets.model import Placed

_FLOAT_WEIGHT_OPS = ("Conv", "ConvTranspose", "Gemm")  # whose float weights the session may quantize
_MERGED = ("Relu", "Clip", "BatchNormalization", "Add", "Mul")  # into the Conv, Gemm or MatMul before them
_MAY_VANISH = frozenset(
    {"Identity", "Dropout", "Cast", "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Expand",
     "Concat", "Pad", "Relu", "Clip", "Add", "Sub", "Mul", "Div"}
)  # fmt: skip
"""Operators that the session drops or merges into a Clip where they do nothing."""


def find_barriers(placed: Placed) -> tuple[str, ...]:
    """Returns the quantized values whose Q must not touch the float node before it.

    The session would quantize the float weights of such a node (rule float-weight-silently-quantized), or
    fail to match an integer Gemm or MatMul whose output feeds Q and float nodes alike, and then dequantize
    its weights on every run. Runtimes before 1.24 refuse a graph input, Clip and Q in a row.
    """
    return tuple(_Finder(placed).find())


class _Finder:
    """Looks for barriers in a placement."""

    def __init__(self, placed: Placed) -> None:
        self.placed, self.view = placed, placed.view

    def find(self) -> list[str]:
        found = []
        for name, value in self.placed.quantized.items():
            if self._clips_an_input(value):
                found.append(name)
                continue
            node = self._float_source(value)
            if node is None:
                continue
            if self._is_integer(node) or (str(node.name) in self.placed.biased):
                if self._branches(value, node) or any(d.how is How.FLOAT for d in self._reads(name)):
                    found.append(name)
            elif node.op_type == "MaxPool" or self._reads_dq(node):
                found.append(name)
        return found

    def _clips_an_input(self, value: ir.Value) -> bool:
        """Tells whether a value is a float Clip of a graph input, perhaps behind operators that the session drops."""
        node = value.producer()
        if node is None or node.op_type != "Clip" or str(node.name) in self.placed.absorbed:
            return False
        while node is not None and node.op_type in _MAY_VANISH:
            data = [v for v in node.inputs if v is not None and not self.view.is_constant(v)]
            reads = [d for d in self._reads(str(data[0].name)) if d.edge.consumer == str(node.name)] if data else []
            if len(data) != 1 or any(d.how is not How.FLOAT for d in reads):
                return False
            node = data[0].producer()
        return node is None

    def _branches(self, value: ir.Value, source: ir.Node) -> bool:
        """Tells whether anything else reads what lies between a node and a value behind it."""
        node = value.producer()
        while node is not None and node is not source:
            data = next(v for v in node.inputs if v is not None and not self.view.is_constant(v))
            if self.view.sole_consumer(data) is None:
                return True
            node = data.producer()
        return False

    def _reads_dq(self, node: ir.Node) -> bool:
        first = node.inputs[0]
        return first is not None and any(
            d.edge.consumer == str(node.name) and d.edge.index == 0 and d.how is How.DEQUANTIZED
            for d in self._reads(str(first.name))
        )

    def _float_source(self, value: ir.Value) -> ir.Node | None:
        """Returns the heavy float node behind a value, looking through what the session merges into it."""
        node = value.producer()
        while node is not None and str(node.name) not in self.placed.absorbed and self._merges_into_producer(node):
            if str(node.name) in self.placed.biased:
                return node
            data = [v for v in node.inputs if v is not None and not self.view.is_constant(v)]
            node = data[0].producer() if len(data) == 1 else None
        if node is None or str(node.name) in self.placed.absorbed:
            return None
        if self._is_integer(node):
            return node if str(node.name) in self.placed.float_output else None
        if str(node.name) in self.placed.insisted:
            return None
        return node if node.op_type in (*_FLOAT_WEIGHT_OPS, "MatMul", "MaxPool") else None

    def _merges_into_producer(self, node: ir.Node) -> bool:
        """Tells whether the session may merge a float node into the Conv, Gemm or MatMul before it."""
        return not self._is_integer(node) and node.op_type in _MERGED

    def _is_integer(self, node: ir.Node) -> bool:
        return str(node.name) in self.placed.integer

    def _reads(self, value: str) -> Sequence[Decision]:
        return self.placed.decisions.get(value, ())
