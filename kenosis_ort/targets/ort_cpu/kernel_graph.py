"""The graph that the runtime's optimizer writes, indexed: its kernels, who makes and reads a value, what is in integer.

It is indexed as a protobuf, as `kenosis_ort.graph.qdq.SourceGraph` indexes the model that it was made of.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Final

import onnx
from onnx import TensorProto

from kenosis_ort.graph import walk
from kenosis_ort.graph.constants import base_op
from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.qdq import DQ, QDQ_OPS, Q, nodes_by_path, token_of
from kenosis_ort.graph.walk import rename_all
from kenosis_ort.targets.ort_cpu.work import DIRECT, PRODUCT, has_direct_kernel

_INTEGER_OPS: Final = frozenset(
    {"QGemm", "ConvInteger", "MatMulInteger", "MatMulIntegerToFloat", "MatMulNBits", "DynamicQuantizeMatMul",
     "QAttention", "DynamicQuantizeLSTM", "NhwcMaxPool"}
)  # fmt: skip
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

    def __init__(self, graphs: Sequence[onnx.GraphProto], known: Set[str]) -> None:
        self.nodes: list[KernelNode] = []
        self.producer: dict[str, KernelNode] = {}
        self.consumers: dict[str, list[KernelNode]] = {}
        self.initializers: dict[str, onnx.TensorProto] = {}
        self._quantized: set[str] = set()
        for number, graph in enumerate(graphs):
            if len(graphs) > 1:
                rename_all(graph, {name: f"{name}@{number}" for name in walk.all_names(graph) - known})
            self._add_graph(graph)

    def _add_graph(self, graph: onnx.GraphProto) -> None:
        for body, _, node in nodes_by_path(graph):
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
        is_integer = is_integer and proto.op_type not in QDQ_OPS
        node = KernelNode(proto, token_of(proto.name), _nchwc_value(proto), is_integer)
        self.nodes.append(node)
        for value in filter(None, proto.input):
            self.consumers.setdefault(value, []).append(node)
        self.producer.update(dict.fromkeys(filter(None, proto.output), node))
        if self._makes_quantized(proto, reads_quantized):
            self._quantized.update(v for v in proto.output if v)

    def _makes_quantized(self, proto: onnx.NodeProto, reads_quantized: bool) -> bool:
        if proto.op_type == "QGemm":
            return len(proto.input) > _QGEMM_OUTPUT_SCALE and bool(proto.input[_QGEMM_OUTPUT_SCALE])
        if proto.op_type == DQ or proto.op_type in _FLOAT_OUTPUT:
            return False
        if proto.op_type == "Cast":
            return walk.attribute_int(proto, "to", 0) in _QUANTIZED_TYPES
        return proto.op_type in (Q, "DynamicQuantizeLinear") or proto.op_type.startswith("QLinear") or reads_quantized

    def weight_dq(self, node: KernelNode) -> bool:
        """Whether a kernel reads the DequantizeLinear of an initializer: work repeated on every run."""
        makers = [self.producer.get(value) for value in node.proto.input[1:]]
        return any(m is not None and m.op_type == DQ and m.proto.input[0] in self.initializers for m in makers)

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
        groups = walk.attribute_int(node.proto, "group", 1)
        is_plain = weight.data_type == TensorProto.INT8 and not array_in(zero).any()
        return DIRECT if is_plain and has_direct_kernel(weight.dims[1] * groups, weight.dims[0], groups) else PRODUCT


def _nchwc_value(proto: onnx.NodeProto) -> str | None:
    if proto.domain != "com.microsoft.nchwc":
        return None
    name, found, _ = proto.name.rpartition("_nchwc")
    return name if found else None
