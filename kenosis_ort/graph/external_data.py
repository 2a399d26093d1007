"""External data of a model file: where they may lie, and how they are read.

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
from pathlib import Path, PureWindowsPath
from typing import BinaryIO

import onnx

from kenosis_ort.errors import ModelLoadError
from kenosis_ort.graph import outside
from kenosis_ort.graph.walk import all_tensors

_log = logging.getLogger(__name__)
_LEFT_OUTSIDE = 2**20  # bytes of a tensor
_IN_MEMORY_UP_TO = 2**28
"""Bytes of external data that are read into memory whoever asks."""

_EXPORT = "Export the model again."
_COPY = "Copy the data file again."


_Span = tuple[str, int, int | None]
"""Where a model file says that a tensor lies: location, offset, and length where it says one."""


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
    tensors = [
        t for t in all_tensors(proto) if t.data_location == onnx.TensorProto.EXTERNAL and not outside.is_outside(t)
    ]
    to_disk = lazily and outside.IS_POSSIBLE and sum(outside.tensor_bytes(t) or 0 for t in tensors) > _IN_MEMORY_UP_TO
    of_the_graph = {t.name for t in proto.graph.initializer}
    with ExitStack() as stack:
        files: dict[str, tuple[BinaryIO, int]] = {}
        for tensor in tensors:
            where = f"tensor '{tensor.name}' of {model_path}"
            span = location, offset, _ = _span(tensor, where)
            if location not in files:
                file = stack.enter_context(_opened(_allowed_path(location, model_path, where), where))
                files[location] = file, os.fstat(file.fileno()).st_size
            file, size = files[location]
            length = _checked_length(tensor, span, size, where)
            if to_disk and length >= _LEFT_OUTSIDE and tensor.name in of_the_graph:
                outside.refer(tensor, os.path.realpath(file.name), offset, length)
                continue
            file.seek(offset)
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
        what = f"The external data entry has a malformed offset or length ({error})."
        raise ModelLoadError(what, where=where, fix=_EXPORT) from error
    if offset < 0 or (length is not None and length < 0):
        raise ModelLoadError("The external data entry has a negative offset or length.", where=where, fix=_EXPORT)
    location = entries.get("location", "")
    if not location or "\x00" in location:
        raise ModelLoadError("The external data entry names no file.", where=where, fix=_EXPORT)
    return location, offset, length


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
        what = f"External data at '{location}' lead outside the model's folder by a link."
        raise ModelLoadError(what, where=where, fix=fix)
    return target


def _opened(path: Path, where: str) -> BinaryIO:
    try:
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            raise ModelLoadError(f"External data '{path.name}' are not a regular file.", where=where, fix=_COPY)
        return path.open("rb")
    except FileNotFoundError:
        fix = f"Put it beside the model, in '{path.parent}'."
        raise ModelLoadError(f"The external data file '{path.name}' does not exist.", where=where, fix=fix) from None
    except OSError as error:
        what = f"The external data file '{path.name}' cannot be read: {error.strerror}."
        raise ModelLoadError(what, where=where, fix="Check its permissions.") from error


def _checked_length(tensor: onnx.TensorProto, span: _Span, size: int, where: str) -> int:
    location, offset, declared = span
    expected = outside.tensor_bytes(tensor)
    length = next(known for known in (declared, expected, size - offset) if known is not None)
    if expected is not None and length != expected:
        what = f"The external data entry holds {length} bytes, a tensor of shape {list(tensor.dims)} takes {expected}."
        raise ModelLoadError(what, where=where, fix=_EXPORT)
    if length < 0 or offset + length > size:
        what = f"The external data end at byte {offset + length}, the file '{location}' has only {size} bytes."
        fix = "The data file is truncated or belongs to another model: copy it again."
        raise ModelLoadError(what, where=where, fix=fix)
    return length
