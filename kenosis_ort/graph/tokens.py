"""Names by which onnxruntime's graphs, messages and profiles are traced back to the nodes of a model.

Every node of a private copy is renamed to a token, so that a name in the optimized graph
(``kv#17#/MatMulAddFusion``, ``kv#17#_token_2``) tells its source node without doubt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import onnx

from kenosis_ort.graph.qdq import label_of, walk

_TOKEN: Final = re.compile(r"kv#(\d+)#")
# Source operator that a kernel executes, where the names differ by more than a prefix.
_BASE: Final = {
    "QGemm": "Gemm",
    "FusedGemm": "Gemm",
    "FusedConv": "Conv",
    "ConvInteger": "Conv",
    "FusedMatMul": "MatMul",
    "MatMulInteger": "MatMul",
    "MatMulIntegerToFloat": "MatMul",
    "MatMulNBits": "MatMul",
    "DynamicQuantizeMatMul": "MatMul",
    "NhwcMaxPool": "MaxPool",
    "QAttention": "Attention",
    "DynamicQuantizeLSTM": "LSTM",
}


@dataclass(frozen=True)
class Tagged:
    """A copy of a model whose nodes are named by tokens.

    Attributes:
        proto: The copy.
        labels: What the nodes are called in messages, in the order of `walk`.
        paths: The path of each node's body with the nodes' own names, in the same order.
    """

    proto: onnx.ModelProto
    labels: tuple[str, ...]
    paths: tuple[str, ...]


def token_of(text: str) -> int | None:
    """Returns the index of the source node that a name of the optimized graph comes from."""
    match = _TOKEN.search(text)
    return int(match.group(1)) if match else None


def tag(model: onnx.ModelProto) -> Tagged:
    """Copies a model and names its nodes by tokens."""
    proto = onnx.ModelProto()
    proto.CopyFrom(model)
    found = [(label_of(node), path, node) for _, path, node in walk(proto.graph) if node is not None]
    for index, (_, _, node) in enumerate(found):
        node.name = f"kv#{index}#"
    return Tagged(proto, tuple(label for label, _, _ in found), tuple(path for _, path, _ in found))


def told(message: str, labels: Sequence[str]) -> str:
    """Returns a message of the runtime with tokens replaced by what the nodes are called."""
    return _TOKEN.sub(lambda m: labels[int(m.group(1))], message)


def base_op(op_type: str) -> str:
    """Returns the source operator of a kernel type: ``QLinearConv`` -> ``Conv``."""
    return _BASE.get(op_type) or (op_type[7:] if op_type.startswith("QLinear") else op_type)
