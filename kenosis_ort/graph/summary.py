"""What a model file holds, counted: nodes by operator, weights by type, inputs and outputs."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import onnx
from onnx import TensorProto

from kenosis_ort.graph.constants import QONNX_DOMAINS
from kenosis_ort.graph.load import INTEGER_KERNELS, load_model
from kenosis_ort.graph.outside import tensor_bytes, weight_bytes
from kenosis_ort.graph.walk import MAIN_DOMAINS, all_graphs

_BLOCKWISE = frozenset({"MatMulNBits", "GatherBlockQuantized"})


@dataclass(frozen=True)
class TensorSummary:
    """A graph input or output.

    Attributes:
        name: Its name.
        dtype: Its element type in numpy's words; ``sequence``, ``map`` or ``optional`` for what is no tensor.
        shape: Sizes; a name where one is symbolic, ``?`` where it is unknown; None without a rank.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...] | None


@dataclass(frozen=True)
class ModelSummary:
    """Summary of a model file.

    Attributes:
        path: The file; what messages call it for a model in memory.
        file_bytes: Bytes of the model, weights in files beside it included.
        ir_version: Version of the file format.
        opsets: Operator set versions by domain; the main domain is ``ai.onnx``.
        producer: Who wrote it, as it says itself.
        inputs: What has to be fed.
        outputs: What comes out.
        operators: Number of nodes by operator, bodies included, most frequent first.
        nodes: Number of nodes, bodies included.
        parameters: Number of weight elements.
        weight_bytes: Bytes of the weights.
        weight_types: Bytes of the weights by element type, largest first.
        quantization: ``float``, ``QDQ``, ``QOperator``, ``dynamic or integer kernels``, ``weights only``,
            ``QONNX`` or ``float16``.
    """

    path: str
    file_bytes: int
    ir_version: int
    opsets: Mapping[str, int]
    producer: str
    inputs: tuple[TensorSummary, ...]
    outputs: tuple[TensorSummary, ...]
    operators: Mapping[str, int]
    nodes: int
    parameters: int
    weight_bytes: int
    weight_types: Mapping[str, int]
    quantization: str

    @property
    def is_float(self) -> bool:
        """Whether nothing is quantized yet."""
        return self.quantization in ("float", "float16")

    def to_dict(self) -> dict[str, Any]:
        """The summary as plain data."""
        return asdict(self)


def summarize(source: str | os.PathLike[str] | onnx.ModelProto) -> ModelSummary:
    """Summary of a model: counts of nodes, weights, inputs and outputs.

    Raises:
        ModelLoadError: The file is no readable model.
    """
    loaded = load_model(source, ask_runtime=False)
    proto = loaded.proto
    nodes = [node for graph in all_graphs(proto.graph) for node in graph.node]
    operators = Counter(n.op_type if n.domain in MAIN_DOMAINS else f"{n.domain}.{n.op_type}" for n in nodes)
    weights = list(_weights(proto))
    types: Counter[str] = Counter()
    for weight in weights:
        types[TensorProto.DataType.Name(weight.data_type).lower()] += _bytes(weight)
    defaults = {i.name for i in proto.graph.initializer}
    return ModelSummary(
        path=loaded.name,
        file_bytes=loaded.file_bytes,
        ir_version=proto.ir_version,
        opsets={entry.domain or "ai.onnx": entry.version for entry in proto.opset_import},
        producer=f"{proto.producer_name} {proto.producer_version}".strip(),
        inputs=tuple(_tensor(v) for v in proto.graph.input if v.name not in defaults),
        outputs=tuple(_tensor(v) for v in proto.graph.output),
        operators=dict(operators.most_common()),
        nodes=len(nodes),
        parameters=sum(math.prod(w.dims) for w in weights),
        weight_bytes=weight_bytes(proto),
        weight_types=dict(types.most_common()),
        quantization=_quantization(nodes, defaults, types),
    )


def _quantization(nodes: list[onnx.NodeProto], constants: set[str], types: Counter[str]) -> str:
    ops = {node.op_type for node in nodes}
    if any(node.domain in QONNX_DOMAINS for node in nodes):
        return "QONNX"
    if any(op.startswith("QLinear") for op in ops):
        return "QOperator"
    if "DynamicQuantizeLinear" in ops or ops & INTEGER_KERNELS:
        return "dynamic or integer kernels"
    if any(n.op_type == "QuantizeLinear" and n.input[0] not in constants for n in nodes):
        return "QDQ"
    if ops & _BLOCKWISE or "DequantizeLinear" in ops:
        return "weights only"
    return "float16" if types.get("float16", 0) > types.get("float", 0) else "float"


def _weights(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    for graph in all_graphs(proto.graph):
        yield from graph.initializer
        for node in graph.node:
            if node.op_type == "Constant":
                yield from (a.t for a in node.attribute if a.type == onnx.AttributeProto.TENSOR)


def _bytes(tensor: onnx.TensorProto) -> int:
    if tensor.data_type == TensorProto.STRING:
        return sum(len(s) for s in tensor.string_data)
    return tensor_bytes(tensor) or 0


def _tensor(value: onnx.ValueInfoProto) -> TensorSummary:
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        return TensorSummary(value.name, (kind or "unknown").removesuffix("_type"), None)
    tensor = value.type.tensor_type
    name = TensorProto.DataType.Name(tensor.elem_type).lower() if tensor.elem_type else "unknown"
    if not tensor.HasField("shape"):
        return TensorSummary(value.name, name, None)
    sizes = tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in tensor.shape.dim)
    return TensorSummary(value.name, name, sizes)
