"""A model as it is on disk or in memory, its external data left to the runtime, and sessions of it.

Names by which onnxruntime's graphs, messages and profiles are traced back to the nodes of a model.

Every node of a private copy is renamed to a token, so that a name in the optimized graph
(``kv#17#/MatMulAddFusion``, ``kv#17#_token_2``) tells its source node without doubt.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx

from kenosis_ort.errors import ModelLoadError
from kenosis_ort.graph.external_data import (
    read_external_data,
    uses_external_data,
    with_weights_on_disk,
    write_external_data,
)
from kenosis_ort.graph.load import parse_model
from kenosis_ort.graph.outside import refers_outside, weight_bytes
from kenosis_ort.graph.qdq import label_of, walk
from kenosis_ort.graph.save import store_model
from kenosis_ort.runtime.session import MAPPED_FROM, Session, open_session
from kenosis_ort.storage.scratch import Scratch

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
    """The index of the source node that a name of the optimized graph comes from."""
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


def with_labels(message: str, labels: Sequence[str]) -> str:
    """A message of the runtime with tokens replaced by what the nodes are called."""
    return _TOKEN.sub(lambda m: labels[int(m.group(1))], message)


def base_op(op_type: str) -> str:
    """The source operator of a kernel type: ``QLinearConv`` -> ``Conv``."""
    return _BASE.get(op_type) or (op_type[7:] if op_type.startswith("QLinear") else op_type)


@dataclass(frozen=True)
class LoadedSource:
    """The model under proof.

    Attributes:
        proto: The model, external data not read. For a `ModelProto` argument the caller's object: not changed.
        folder: Folder of external data, None if there is none.
        name: For messages.
    """

    proto: onnx.ModelProto
    folder: Path | None
    name: str


def read_source(model: str | os.PathLike[str] | bytes | onnx.ModelProto) -> LoadedSource:
    """Reads a model without its external data.

    Raises:
        ModelLoadError: Missing file, or not an ONNX model.
    """
    if isinstance(model, onnx.ModelProto):
        return LoadedSource(model, None, "the model")
    name, folder = "the model", None
    if isinstance(model, bytes):
        proto = parse_model(model)
    else:
        path = Path(os.fspath(model))
        name, folder = str(path), path.resolve().parent
        proto = parse_model(path)
    if not proto.graph.node:
        raise ModelLoadError("the model has no nodes", where=name, fix="give an ONNX model")
    return LoadedSource(proto, folder if uses_external_data(proto) else None, name)


@contextmanager
def tagged_file(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto, change: Callable[[onnx.ModelProto], None] | None = None
) -> Iterator[tuple[LoadedSource, Tagged, Path]]:
    """A model, its copy named by tokens, and that copy as one file with its weights inside, for as long as it is asked.

    Args:
        model: Path, serialized model or `ModelProto`. Not changed.
        change: What is done to the copy before it is written, in place.

    Raises:
        ModelLoadError: Missing file, or not an ONNX model.
    """
    source = read_source(model)
    tagged = tag(source.proto)
    if change is not None:
        change(tagged.proto)
    if source.folder is not None:
        read_external_data(tagged.proto, source.folder / "model.onnx")
    with Scratch("verify") as folder:
        store_model(tagged.proto, folder / "model.onnx", external_data=False)
        yield source, tagged, folder / "model.onnx"


def mapped(source: LoadedSource, folder: Path) -> LoadedSource:
    """The source with its weights in a file, so that copies of the model do not copy them; small ones as is.

    Args:
        source: The model.
        folder: An existing folder; to be kept as long as the result is in use.
    """
    if source.folder is not None or weight_bytes(source.proto) < MAPPED_FROM:
        return source
    if refers_outside(source.proto):
        return LoadedSource(with_weights_on_disk(source.proto, folder / "weights.bin"), None, source.name)
    return LoadedSource(write_external_data(source.proto, folder / "weights.bin"), folder, source.name)


def open_source(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    *,
    custom_op_libraries: Sequence[str] = (),
    threads: int = 1,
) -> Session:
    """Opens a model at full optimization.

    Raises:
        ModelLoadError: Missing file, or not an ONNX model.
        VerificationError: The runtime refuses the model.
    """
    source = read_source(model)
    return open_session(
        source.proto,
        threads=threads,
        custom_op_libraries=custom_op_libraries,
        folder=source.folder,
        name=source.name,
    )
