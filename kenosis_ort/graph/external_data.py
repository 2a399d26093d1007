"""External data: where it may lie, how much of it there must be, reading it into memory, and writing it.

A model file is input from outside: a tensor's ``location`` may point anywhere. Data are read only from
regular files inside the model's folder; a link that leads out of it is refused. Where the model file itself
is a link (as in the cache of a model hub), the folder that it leads to counts as the model's folder too.
Sizes are checked against the opened file before anything is read.
"""

from __future__ import annotations

import logging
import os
import stat
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import BinaryIO

import onnx
from google.protobuf.message import DecodeError

from kenosis_ort.errors import ModelLoadError
from kenosis_ort.graph.outside import (
    IS_POSSIBLE,
    brought_in,
    content_bytes,
    content_of,
    copy_without_weights,
    is_outside,
    refer,
    tensor_bytes,
)
from kenosis_ort.graph.walk import all_tensors

_log = logging.getLogger(__name__)
MIN_EXTERNAL_BYTES = 1024
"""Smaller tensors stay in the model file, where shape inference finds them."""

_ALIGNMENT = 4096  # the runtime maps a file by pages
_LEFT_OUTSIDE = 2**20  # bytes of a tensor
_IN_MEMORY_UP_TO = 2**28
"""Bytes of external data that are read into memory whoever asks."""

_EXPORT = "Export the model again."
_COPY = "Copy the data file again."


def uses_external_data(proto: onnx.ModelProto) -> bool:
    """Whether any tensor of the model lies outside of it, in a place that was not checked."""
    return any(t.data_location == onnx.TensorProto.EXTERNAL and not is_outside(t) for t in all_tensors(proto))


def external_files(model_path: Path) -> list[Path]:
    """The existing files that a model file refers to as external data; none where it is no model.

    A wrong reference is no error here; `read_external_data` reports it.
    """
    try:
        proto = onnx.load_model(model_path, format="protobuf", load_external_data=False)
    except (DecodeError, OSError, ValueError) as error:
        _log.debug("no external data of %s: %s", model_path, error)
        return []
    locations = {
        entry.value
        for tensor in all_tensors(proto)
        if tensor.data_location == onnx.TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location" and entry.value and isinstance(entry.value, str)  # bytes: no text
    }
    return [path for path in (model_path.parent / location for location in sorted(locations)) if os.path.isfile(path)]


@dataclass(frozen=True)
class _Span:
    location: str
    offset: int
    length: int | None


def read_external_data(proto: onnx.ModelProto, model_path: Path, *, lazily: bool = False) -> None:
    """Reads all external data of a model into it.

    Args:
        proto: The model; changed in place.
        model_path: Its file, which fixes the folder that data may come from.
        lazily: Leave large weights of a large model where they are: they are checked, and refer to their bytes
            (`kenosis_ort.graph.outside`).

    Raises:
        ModelLoadError: A location is absolute, escapes the folder, is missing or no regular file, or a
            tensor's offset and length do not fit the file or the tensor's shape.
    """
    tensors = [t for t in all_tensors(proto) if t.data_location == onnx.TensorProto.EXTERNAL and not is_outside(t)]
    to_disk = lazily and IS_POSSIBLE and sum(tensor_bytes(t) or 0 for t in tensors) > _IN_MEMORY_UP_TO
    of_the_graph = {t.name for t in proto.graph.initializer}
    with ExitStack() as stack:
        files: dict[str, tuple[BinaryIO, int]] = {}
        for tensor in tensors:
            where = f"tensor '{tensor.name}' of {model_path}"
            span = _span(tensor, where)
            if span.location not in files:
                path = _allowed_path(span.location, model_path, where)
                file = stack.enter_context(_open(path, where))
                files[span.location] = file, os.fstat(file.fileno()).st_size
            file, size = files[span.location]
            length = _checked_length(tensor, span, size, where)
            if to_disk and length >= _LEFT_OUTSIDE and tensor.name in of_the_graph:
                refer(tensor, os.path.realpath(file.name), span.offset, length)
                continue
            file.seek(span.offset)
            data = file.read(length)
            if len(data) != length:
                raise ModelLoadError(f"Only {len(data)} of {length} bytes could be read.", where=where, fix=_COPY)
            tensor.raw_data = data
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")


def _span(tensor: onnx.TensorProto, where: str) -> _Span:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    try:
        offset = int(entries.get("offset", "0") or 0)
        length = int(entries["length"]) if entries.get("length") else None
    except ValueError as error:
        raise ModelLoadError(
            f"The external data entry has a malformed offset or length ({error}).", where=where, fix=_EXPORT
        ) from error
    if offset < 0 or (length is not None and length < 0):
        raise ModelLoadError("The external data entry has a negative offset or length.", where=where, fix=_EXPORT)
    location = entries.get("location", "")
    if not location or "\x00" in location:
        raise ModelLoadError("The external data entry names no file.", where=where, fix=_EXPORT)
    return _Span(location, offset, length)


def _allowed_path(location: str, model_path: Path, where: str) -> Path:
    fix = "Keep the data file in the model's folder and save the model with a relative location."
    windows = PureWindowsPath(location)
    if os.path.isabs(location) or windows.drive or windows.root:
        raise ModelLoadError(f"External data at the absolute path '{location}' are refused.", where=where, fix=fix)
    if ".." in windows.parts or ".." in Path(location).parts:
        raise ModelLoadError(f"External data at '{location}' lie outside the model's folder.", where=where, fix=fix)
    candidate = model_path.parent / location
    target = Path(os.path.realpath(candidate))
    folders = {Path(os.path.realpath(model_path.parent)), Path(os.path.realpath(model_path)).parent}
    if not any(target.is_relative_to(folder) for folder in folders):
        raise ModelLoadError(
            f"External data at '{location}' lead outside the model's folder by a link.", where=where, fix=fix
        )
    return target


def _open(path: Path, where: str) -> BinaryIO:
    try:
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            raise ModelLoadError(f"External data '{path.name}' are not a regular file.", where=where, fix=_COPY)
        return path.open("rb")
    except FileNotFoundError:
        raise ModelLoadError(
            f"The external data file '{path.name}' does not exist.",
            where=where,
            fix=f"Put it beside the model, in '{path.parent}'.",
        ) from None
    except OSError as error:
        raise ModelLoadError(
            f"The external data file '{path.name}' cannot be read: {error.strerror}.",
            where=where,
            fix="Check its permissions.",
        ) from error


def _checked_length(tensor: onnx.TensorProto, span: _Span, size: int, where: str) -> int:
    expected = tensor_bytes(tensor)
    length = span.length if span.length is not None else (expected if expected is not None else size - span.offset)
    if expected is not None and length != expected:
        raise ModelLoadError(
            f"The external data entry holds {length} bytes, a tensor of shape {list(tensor.dims)} takes {expected}.",
            where=where,
            fix=_EXPORT,
        )
    if length < 0 or span.offset + length > size:
        raise ModelLoadError(
            f"The external data end at byte {span.offset + length}, the file '{span.location}' has only {size} bytes.",
            where=where,
            fix="The data file is truncated or belongs to another model: copy it again.",
        )
    return length


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
    shell = copy_without_weights(proto, lambda _: True)
    with data_path.open("wb") as data:
        for tensor in proto.graph.initializer:
            copy = shell.graph.initializer.add()
            if tensor.data_type == onnx.TensorProto.STRING or content_bytes(tensor) < MIN_EXTERNAL_BYTES:
                copy.CopyFrom(brought_in(tensor))
                continue
            data.write(b"\0" * (-data.tell() % _ALIGNMENT))
            copy.name, copy.data_type = tensor.name, tensor.data_type
            copy.dims.extend(tensor.dims)
            copy.metadata_props.extend(tensor.metadata_props)
            if tensor.HasField("doc_string"):
                copy.doc_string = tensor.doc_string
            copy.data_location = onnx.TensorProto.EXTERNAL
            offset = data.tell()
            for piece in content_of(tensor):
                data.write(piece)
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
    shell = copy_without_weights(proto, lambda tensor: not is_outside(tensor))
    rest = onnx.ModelProto()
    rest.graph.initializer.extend(t for t in proto.graph.initializer if not is_outside(t))
    for tensor in write_external_data(rest, data_path).graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            span = _span(tensor, tensor.name)
            refer(tensor, os.path.realpath(data_path), span.offset, span.length or 0)
        shell.graph.initializer.append(tensor)
    return shell
