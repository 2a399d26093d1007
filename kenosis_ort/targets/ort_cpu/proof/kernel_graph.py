"""The optimized graph, indexed: which kernels there are and which of them work on quantized data."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import onnx
from onnx import TensorProto

from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.qdq import DQ, QDQ_OPS, Q, walk
from kenosis_ort.graph.source import base_op, token_of
from kenosis_ort.targets.ort_cpu.work import DIRECT, PRODUCT, has_direct_kernel

_INTEGER_OPS: Final = frozenset(
    {
        "QGemm",
        "ConvInteger",
        "MatMulInteger",
        "MatMulIntegerToFloat",
        "MatMulNBits",
        "DynamicQuantizeMatMul",
        "QAttention",
        "DynamicQuantizeLSTM",
        "NhwcMaxPool",
    }
)
_FLOAT_OUTPUT: Final = frozenset(
    {"ConvInteger", "MatMulInteger", "MatMulIntegerToFloat", "MatMulNBits", "DynamicQuantizeMatMul", "QAttention",
     "DynamicQuantizeLSTM", "Shape", "Size", "ArgMax", "ArgMin", "NonZero"}
)  # fmt: skip
_QUANTIZED_TYPES: Final = frozenset(
    {TensorProto.UINT8, TensorProto.INT8, TensorProto.UINT16, TensorProto.INT16, TensorProto.UINT4, TensorProto.INT4}
)
# What the optimizer adds on its own: never the kernel of a source node unless it carries the node's token.
LAYOUT_OPS: Final = frozenset(
    {"Transpose", "Reshape", "ReorderInput", "ReorderOutput", "Cast", "Squeeze", "Unsqueeze", "Identity", Q, DQ}
)
_QGEMM_OUTPUT_SCALE: Final = 7
_WEIGHT: Final = 3
_WEIGHT_ZERO: Final = 5


@dataclass(frozen=True, eq=False)
class KernelNode:
    """One node of the optimized graph.

    Attributes:
        proto: The node.
        token: Index of the source node in its name, or in the runtime's name of its output; None if there is none.
        nchwc_value: Value after which an NCHWc kernel is named, else None.
        integer: It works on quantized data.
    """

    proto: onnx.NodeProto
    token: int | None
    nchwc_value: str | None
    integer: bool

    @property
    def op_type(self) -> str:
        return self.proto.op_type

    @property
    def label(self) -> str:
        """Operator type with its domain unless that is the default one."""
        return f"{self.proto.domain}.{self.op_type}" if self.proto.domain not in ("", "ai.onnx") else self.op_type

    @property
    def base(self) -> str:
        """Operator type of the source node that this kernel executes."""
        return base_op(self.op_type)


class KernelGraph:
    """Indexes the optimized graph with all its bodies. Linear in its size.

    Args:
        graphs: The optimized graph, or those of the pieces of a model. With several, values are renamed in place.
        known: Names of the model's values; all others are the runtime's and may be the same in several pieces.
    """

    def __init__(self, graphs: Sequence[onnx.GraphProto], known: Collection[str]) -> None:
        self.nodes: list[KernelNode] = []
        self.producer: dict[str, KernelNode] = {}
        self.consumers: dict[str, list[KernelNode]] = {}
        self.initializers: dict[str, onnx.TensorProto] = {}
        self._quantized: set[str] = set()
        for number, graph in enumerate(graphs):
            if len(graphs) > 1:
                _separate(graph, known, f"@{number}")
            self._add_graph(graph)

    def _add_graph(self, graph: onnx.GraphProto) -> None:
        for body, _, node in walk(graph):
            if node is None:
                self.initializers.update((i.name, i) for i in body.initializer)
                self._quantized.update(i.name for i in body.initializer if i.data_type in _QUANTIZED_TYPES)
                self._quantized.update(i.name for i in body.input if i.type.tensor_type.elem_type in _QUANTIZED_TYPES)
            else:
                self._add(node)

    def _add(self, proto: onnx.NodeProto) -> None:
        first = next((v for v in proto.input if v), "")
        reads_quantized = first in self._quantized
        is_integer = proto.op_type in _INTEGER_OPS or proto.op_type.startswith("QLinear") or reads_quantized
        if proto.op_type in QDQ_OPS:
            is_integer = False
        node = KernelNode(proto, token_of(proto.name), _nchwc_value(proto), is_integer)
        self.nodes.append(node)
        for value in proto.input:
            if value:
                self.consumers.setdefault(value, []).append(node)
        for value in proto.output:
            if value:
                self.producer[value] = node
        if self._makes_quantized(proto, reads_quantized):
            self._quantized.update(v for v in proto.output if v)

    def _makes_quantized(self, proto: onnx.NodeProto, reads_quantized: bool) -> bool:
        if proto.op_type == "QGemm":
            return len(proto.input) > _QGEMM_OUTPUT_SCALE and bool(proto.input[_QGEMM_OUTPUT_SCALE])
        if proto.op_type == DQ or proto.op_type in _FLOAT_OUTPUT:
            return False
        if proto.op_type == "Cast":
            return next((a.i for a in proto.attribute if a.name == "to"), 0) in _QUANTIZED_TYPES
        return proto.op_type in (Q, "DynamicQuantizeLinear") or proto.op_type.startswith("QLinear") or reads_quantized

    def weight_dq(self, node: KernelNode) -> bool:
        """Whether a kernel reads the DequantizeLinear of an initializer: work repeated on every run."""
        for value in node.proto.input[1:]:
            maker = self.producer.get(value)
            if maker is not None and maker.op_type == DQ and maker.proto.input[0] in self.initializers:
                return True
        return False

    def conv_kernel(self, node: KernelNode) -> str:
        """The one of the two kernels behind QLinearConv that runs, by its stored weights; empty where it is not known.

        Args:
            node: Of this graph, on an x86-64 processor.
        """
        if node.op_type != "QLinearConv":
            return ""
        weight, zero = (self.initializers.get(node.proto.input[index]) for index in (_WEIGHT, _WEIGHT_ZERO))
        if weight is None or zero is None or zero.data_location == onnx.TensorProto.EXTERNAL:
            return ""
        groups = next((a.i for a in node.proto.attribute if a.name == "group"), 1)
        is_plain = weight.data_type == TensorProto.INT8 and not array_in(zero).any()
        return DIRECT if is_plain and has_direct_kernel(weight.dims[1] * groups, weight.dims[0], groups) else PRODUCT


def _separate(graph: onnx.GraphProto, known: Collection[str], suffix: str) -> None:
    """Makes the names that the runtime invented for one piece its own."""
    for body, _, node in walk(graph):
        if node is None:
            for initializer in body.initializer:
                if initializer.name not in known:
                    initializer.name += suffix
        else:
            for values in (node.input, node.output):
                values[:] = [v if not v or v in known else v + suffix for v in values]


def _nchwc_value(proto: onnx.NodeProto) -> str | None:
    if proto.domain != "com.microsoft.nchwc":
        return None
    name, found, _ = proto.name.rpartition("_nchwc")
    return name if found else None
