"""Weights outside of the protobuf: tensors wherever their bytes lie.

A model of several gigabytes is not read into memory. Its large initializers keep name, type and shape and say where
their bytes lie: in the model's own external data, or, for weights made on the way, in a file of the call's own
(`Store`). The reference is spelled as ONNX spells external data, relative to the root of the file system, so
that the runtime maps it from there; a token of this process tells it from what a model file says, which is never
followed unchecked. `array_in` reads a tensor wherever it lies,
and copies are safe for models over protobuf's 2 GiB limit.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

ROOT: Final = "/"
"""The folder that references are relative to."""
IS_POSSIBLE: Final = os.name == "posix"
"""Elsewhere files have no common root, and weights are read into memory."""

_TOKEN: Final = f"kenosis-{secrets.token_hex(16)}"
_ALIGNMENT: Final = 4096  # the runtime maps a file by pages
_LEAST: Final = 2**16  # bytes; a smaller tensor costs more to look up than to hold
_PIECE: Final = 2**24
PLAIN: Final = frozenset(
    {
        TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BOOL,
        TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64,
        TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64,
    }
)  # fmt: skip
"""Data types that numpy has."""

STORE: ContextVar[Store | None] = ContextVar("weights on disk", default=None)


def is_outside(tensor: TensorProto) -> bool:
    """Whether a tensor refers to bytes on disk that this process put or checked there."""
    return tensor.data_location == TensorProto.EXTERNAL and any(
        entry.key == "checksum" and entry.value == _TOKEN for entry in tensor.external_data
    )


def refers_outside(model: onnx.ModelProto) -> bool:
    """Whether a model has initializers on disk."""
    return any(is_outside(tensor) for tensor in model.graph.initializer)


def refer(tensor: TensorProto, path: str, offset: int, length: int) -> None:
    """Makes a tensor refer to bytes of a file, in place; its former content is gone.

    Args:
        tensor: Its name, type and shape stay.
        path: An absolute path without links, checked to be the caller's or made by this process.
        offset: Of the first byte.
        length: Bytes.
    """
    for name in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data", "external_data"):
        tensor.ClearField(name)
    tensor.data_location = TensorProto.EXTERNAL
    entries = {"location": os.path.relpath(path, ROOT), "offset": offset, "length": length, "checksum": _TOKEN}
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))


def array_in(tensor: TensorProto) -> npt.NDArray[Any]:
    """The content of a tensor; of one on disk a read-only map of the file, where its type allows one."""
    if not is_outside(tensor):
        return np.asarray(numpy_helper.to_array(tensor))
    path, offset, length = _place(tensor)
    if tensor.data_type in PLAIN and length:
        dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
        return np.memmap(path, dtype, "r", offset, shape=tuple(tensor.dims))
    return np.asarray(numpy_helper.to_array(brought_in(tensor)))


def brought_in(tensor: TensorProto) -> TensorProto:
    """A tensor with its content in memory: itself, or a copy of one on disk."""
    if not is_outside(tensor):
        return tensor
    loaded = _hollow(tensor)
    loaded.raw_data = b"".join(pieces_of(tensor))
    return loaded


def complete(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model with all weights in memory, for code of others that reads them there: itself, or a copy."""
    return _copied(model, brought_in) if refers_outside(model) else model


def pieces_of(tensor: TensorProto) -> Iterator[bytes]:
    """Yields the bytes of a tensor on disk, some at a time.

    Raises:
        OSError: The file cannot be read, or is shorter than it was.
    """
    path, offset, left = _place(tensor)
    with open(path, "rb") as file:
        file.seek(offset)
        while left:
            piece = file.read(min(left, _PIECE))
            if not piece:
                raise OSError(f"'{path}' has become shorter while it was read")
            left -= len(piece)
            yield piece


def length_of(tensor: TensorProto) -> int:
    """The bytes of a tensor on disk."""
    return _place(tensor)[2]


def put_outside(tensor: TensorProto) -> TensorProto:
    """A tensor as it is to be held: a large one on disk, inside of `weights_on_disk`; else itself."""
    store = STORE.get()
    if store is None or is_outside(tensor) or not tensor.HasField("raw_data") or len(tensor.raw_data) < _LEAST:
        return tensor
    return store.moved(tensor)


def serialized(model: onnx.ModelProto) -> Iterator[bytes]:
    """Yields the bytes of a model whose tensors on disk are in it, those of one tensor at a time.

    Source: the wire format of Protocol Buffers, in which the fields of a message come in any order.
    """
    if not refers_outside(model):
        yield model.SerializeToString()
        return
    graph = onnx.ModelProto()
    copy_fields(model.graph, graph.graph, skip=("initializer",))
    tensors = [(_head(tensor), tensor) for tensor in model.graph.initializer]
    inner = graph.graph.SerializeToString()
    sizes = [len(head) + (length_of(tensor) if is_outside(tensor) else 0) for head, tensor in tensors]
    size = len(inner) + sum(len(_lead(_INITIALIZER, each)) + each for each in sizes)
    outer = onnx.ModelProto()
    copy_fields(model, outer, skip=("graph",))
    yield outer.SerializeToString() + _lead(_GRAPH, size) + inner
    for (head, tensor), each in zip(tensors, sizes, strict=True):
        yield _lead(_INITIALIZER, each) + head
        if is_outside(tensor):
            yield from pieces_of(tensor)


_GRAPH: Final = onnx.ModelProto.GRAPH_FIELD_NUMBER
_INITIALIZER: Final = onnx.GraphProto.INITIALIZER_FIELD_NUMBER
_RAW_DATA: Final = TensorProto.RAW_DATA_FIELD_NUMBER


def _head(tensor: TensorProto) -> bytes:
    """A tensor's bytes up to the content of one that lies on disk."""
    if not is_outside(tensor):
        return bytes(tensor.SerializeToString())
    return bytes(_hollow(tensor).SerializeToString()) + _lead(_RAW_DATA, length_of(tensor))


def _lead(field: int, length: int) -> bytes:
    """Tag and length that precede a protobuf field of so many bytes."""
    found = bytearray()
    for number in (field << 3 | 2, length):
        while number > 127:
            found.append(number & 127 | 128)
            number >>= 7
        found.append(number)
    return bytes(found)


class Store:
    """A file of weights; what is put in twice lies there once, as most of a model does when it is made again."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._path = os.path.realpath(file.name)
        self._places: dict[bytes, int] = {}

    def moved(self, tensor: TensorProto) -> TensorProto:
        content = tensor.raw_data
        digest = hashlib.blake2b(content, digest_size=32).digest()
        if digest not in self._places:
            self._file.write(b"\0" * (-self._file.tell() % _ALIGNMENT))
            self._places[digest] = self._file.tell()
            self._file.write(content)
            self._file.flush()
        out = _hollow(tensor)
        refer(out, self._path, self._places[digest], len(content))
        return out


def _hollow(tensor: TensorProto) -> TensorProto:
    """A tensor without its content, of which no copy is made: name, type, shape and what is said about it."""
    hollow = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    hollow.metadata_props.extend(tensor.metadata_props)
    if tensor.HasField("doc_string"):
        hollow.doc_string = tensor.doc_string
    return hollow


def _place(tensor: TensorProto) -> tuple[Path, int, int]:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return Path(ROOT, entries["location"]), int(entries["offset"]), int(entries["length"])


def copy_model(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A deep copy of a model."""
    return _copied(proto, lambda tensor: tensor)


def copy_without_weights(proto: onnx.ModelProto, dropped: Collection[str] | None = None) -> onnx.ModelProto:
    """A deep copy of a model, leaving out the main graph's initializers of these names; None for all of them."""
    return _copied(proto, lambda tensor: None if dropped is None or tensor.name in dropped else tensor)


def _copied(proto: onnx.ModelProto, stored: Callable[[onnx.TensorProto], onnx.TensorProto | None]) -> onnx.ModelProto:
    """A deep copy of a model with what ``stored`` gives for each initializer of the main graph, None for none.

    Initializers are copied one at a time, so no message as large as the whole model is ever built.
    """
    copy = onnx.ModelProto()
    copy_fields(proto, copy, skip=("graph",))
    copy_fields(proto.graph, copy.graph, skip=("initializer",))
    for tensor in proto.graph.initializer:
        found = stored(tensor)
        if found is not None:
            copy.graph.initializer.add().CopyFrom(found)
    return copy


def copy_with(proto: onnx.ModelProto, tensors: Mapping[str, onnx.TensorProto]) -> onnx.ModelProto:
    """A deep copy of a model with other initializers of the main graph, by name."""
    return _copied(proto, lambda tensor: tensors.get(tensor.name, tensor))


def copy_with_hollow_weights(proto: onnx.ModelProto, hollow: Collection[str]) -> onnx.ModelProto:
    """A deep copy of a model in which the named initializers keep name, type and shape, but no content."""
    return _copied(
        proto, lambda t: TensorProto(name=t.name, data_type=t.data_type, dims=t.dims) if t.name in hollow else t
    )


_Message = onnx.ModelProto | onnx.GraphProto | onnx.TensorProto


def copy_fields(source: _Message, target: _Message, *, skip: Collection[str]) -> None:
    """Copies all fields that are set, but for those named in ``skip``, to a message of the same type."""
    for descriptor, value in source.ListFields():
        if descriptor.name in skip:
            continue
        if isinstance(value, (int, float, str, bytes)):
            setattr(target, descriptor.name, value)
        elif hasattr(value, "CopyFrom") and not hasattr(value, "append"):
            getattr(target, descriptor.name).CopyFrom(value)
        else:
            getattr(target, descriptor.name).extend(value)


_WIDTHS: Final = (
    (2, "INT2 UINT2"),  # which older versions of ONNX do not have
    (4, "INT4 UINT4 FLOAT4E2M1"),
    (8, "INT8 UINT8 BOOL FLOAT8E4M3FN FLOAT8E4M3FNUZ FLOAT8E5M2 FLOAT8E5M2FNUZ"),
    (16, "INT16 UINT16 FLOAT16 BFLOAT16"),
    (32, "INT32 UINT32 FLOAT"),
    (64, "INT64 UINT64 DOUBLE COMPLEX64"),
    (128, "COMPLEX128"),
)
_BITS: Final = {
    kind: bits for bits, names in _WIDTHS for name, kind in TensorProto.DataType.items() if name in names.split()
}

PACKED: Final = frozenset(kind for kind, bits in _BITS.items() if bits < 8)
"""Data types of which several elements share a byte, in every field that holds them."""


def tensor_bytes(tensor: onnx.TensorProto) -> int | None:
    """Number of bytes of a tensor of this type and shape, None for types of no fixed width."""
    bits = _BITS.get(tensor.data_type)
    if bits is None:
        return None
    return int(math.prod(tensor.dims) * bits + 7) // 8


def weight_bytes(proto: onnx.ModelProto) -> int:
    """The bytes of the main graph's initializers, in memory or on disk (`is_outside`), without reading them."""
    return sum(content_bytes(tensor) for tensor in proto.graph.initializer)


def content_bytes(tensor: onnx.TensorProto) -> int:
    """The bytes of a tensor's content; of one without a fixed width, those of the whole message."""
    if is_outside(tensor):
        return length_of(tensor)
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return 0
    known = tensor_bytes(tensor)
    return int(tensor.ByteSize()) if known is None else known  # ByteSize serializes: not for what may be large


def raw_bytes(tensor: onnx.TensorProto) -> bytes:
    """A tensor's content in the layout of ``raw_data``, little-endian.

    Raises:
        TypeError: The tensor is of strings, which have no raw layout.
    """
    if is_outside(tensor):
        return bytes(brought_in(tensor).raw_data)
    if tensor.HasField("raw_data"):
        return tensor.raw_data
    if tensor.data_type == onnx.TensorProto.STRING:
        raise TypeError(f"string tensor '{tensor.name}' has no raw bytes")
    if tensor.data_type in PACKED:  # a byte in each number, as in raw data
        return np.array(tensor.int32_data, np.int32).astype(np.uint8).tobytes()
    return bytes(numpy_helper.from_array(np.ascontiguousarray(array_in(tensor))).raw_data)


MIN_EXTERNAL_BYTES = 1024
"""Smaller tensors stay in the model file, where shape inference finds them."""


def write_external_data(proto: onnx.ModelProto, data_path: Path) -> onnx.ModelProto:
    """Writes the larger initializers of the main graph to a file, one at a time.

    Args:
        proto: The model, complete in memory; not changed.
        data_path: The file to write.

    Returns:
        A copy of the model that refers to the file by its name, to be stored in the same folder.

    Raises:
        OSError: The file cannot be written.
    """
    shell = copy_without_weights(proto)
    with data_path.open("wb") as data:
        for tensor in proto.graph.initializer:
            if tensor.data_type == onnx.TensorProto.STRING or content_bytes(tensor) < MIN_EXTERNAL_BYTES:
                shell.graph.initializer.append(brought_in(tensor))
                continue
            data.write(b"\0" * (-data.tell() % _ALIGNMENT))
            copy = shell.graph.initializer.add()
            copy.CopyFrom(_hollow(tensor))
            copy.data_location = onnx.TensorProto.EXTERNAL
            offset = data.tell()
            data.writelines(pieces_of(tensor) if is_outside(tensor) else (raw_bytes(tensor),))
            entries = {"location": data_path.name, "offset": str(offset), "length": str(data.tell() - offset)}
            for key, value in entries.items():
                copy.external_data.add(key=key, value=value)
    return shell


def with_weights_on_disk(proto: onnx.ModelProto, data_path: Path) -> onnx.ModelProto:
    """A copy of a model whose large initializers are all on disk; those that are not yet are written.

    Args:
        proto: The model; not changed.
        data_path: The file to write to; to be kept until the runtime has mapped it.

    Raises:
        OSError: The file cannot be written.
    """
    rest = onnx.ModelProto()
    rest.graph.initializer.extend(t for t in proto.graph.initializer if not is_outside(t))
    shell = copy_without_weights(proto, {tensor.name for tensor in rest.graph.initializer})
    for tensor in write_external_data(rest, data_path).graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            _, offset, length = _place(tensor)
            refer(tensor, os.path.realpath(data_path), offset, length)
        shell.graph.initializer.append(tensor)
    return shell
