"""Putting a model and its external data in the place of others, so that whoever kills us leaves a pair that loads.

Two files cannot be replaced in one step, and a model names its data. So new data first stand beside the old under a
name made from their content, ``<model>.<16 hex digits>.data``, and a new model that reads them there takes the old
one's place in one step. Only then, with nobody reading the old data, do the new ones get the name that users expect,
``<model>.data``, and the model is replaced once more, by the one that reads them there. After each step the pair at the
destination is the old one or the new one. Where the file system has no hard links, the pair keeps the first name, and
where another model of the folder reads ``<model>.data``: what others read is neither changed nor removed.

Concurrent writers of one folder wait for each other while files are moved, by a lock on the folder.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

import onnx

from kenosis_ort.graph.external_data import external_files
from kenosis_ort.graph.walk import all_tensors
from kenosis_ort.storage.paths import sha256_of
from kenosis_ort.storage.scratch import lock_folder
from kenosis_ort.storage.writing import sync, sync_folder

_log = logging.getLogger(__name__)

_DIGITS: Final = 16
_PATIENCE_S: Final = 30.0  # with others that write into the folder
_MODELS: Final = frozenset({".onnx", ".ort", ".pb"})


def data_file(model: Path) -> Path:
    """Returns where a model's external data go: ``model.onnx.data`` beside ``model.onnx``."""
    return model.with_name(f"{model.name}.data")


def swap_in(new: Path, final: Path) -> str | None:
    """Moves a model, and the data beside it where there are some, to its destination.

    Args:
        new: The model, in a folder of its own on the destination's file system; its data are in `data_file`.
        final: The destination, no link. Data of ours that a model there reads go with it.

    Returns:
        Why the data are not in `data_file`, for a warning; None where they are, or where there are none.

    Raises:
        OSError: The model at the destination could not be replaced; it is as it was, its data too.
    """
    data = data_file(new)
    for file in (new, data):
        if os.path.exists(file):
            sync(file)
    why: str | None = None
    lock = lock_folder(final.parent, wait_s=_PATIENCE_S)
    try:
        leftovers = _own_data(final)
        known = external_files(final) if leftovers or os.path.exists(data_file(final)) else []
        readers = _other_readers(final, {data_file(final), *leftovers})
        leftovers = [file for file in leftovers if file not in readers]
        _remove([file for file in leftovers if file not in known])
        if not os.path.exists(data):
            _replace(new, final)
            read = None
        elif data_file(final) in readers:
            read = _put_apart(new, data, final, known)
            why = (
                f"The external data are in '{read.name}': '{readers[data_file(final)].name}' reads "
                f"'{data_file(final).name}', which stays as it is. Fix: nothing, or name another output."
            )
        elif data_file(final) not in known:
            read = _put_beside(new, data, final)
        else:
            read = _swap_pair(new, data, final, known)
        _remove([file for file in known if file not in {read, *readers} and file in {data_file(final), *leftovers}])
        _remove([file for file in _own_data(final) if file not in {read, *readers}])
        sync_folder(final.parent)
    finally:
        if lock is not None:
            os.close(lock)
    return why


def _put_beside(new: Path, data: Path, final: Path) -> Path:
    """Replaces a model whose data, if it has any, do not stand where the new ones go; returns where those are read."""
    target, previous = data_file(final), data.with_name("previous")
    had_data = target.exists()
    if had_data:
        os.replace(target, previous)
    try:
        _replace(data, target)
        _replace(new, final)
    except OSError:
        target.unlink(missing_ok=True)
        if had_data:
            os.replace(previous, target)
        raise
    return target


def _swap_pair(new: Path, data: Path, final: Path, known: Collection[Path]) -> Path:
    """Replaces a model that reads its data where the new ones are to go; returns where those are read."""
    beside = _put_apart(new, data, final, known)
    if not data.exists():  # there are no hard links
        return beside
    try:
        _replace(data, data_file(final))
        _replace(new, final)
    except OSError as error:  # the pair in place is whole and new
        _log.warning("the external data keep the name %s: %s", beside.name, error)
        return beside
    return data_file(final)


def _put_apart(new: Path, data: Path, final: Path, known: Collection[Path]) -> Path:
    """Replaces a model by one whose data have a name made from their content; returns where they are read."""
    beside = final.with_name(f"{final.name}.{sha256_of(data)[:_DIGITS]}.data")
    first = new.with_name("first.onnx")
    _write_reading(new, first, beside.name)
    existed = beside.exists()
    _link(data, beside)
    try:
        sync_folder(final.parent)
        _replace(first, final)
    except OSError:
        if beside not in known and not existed:
            beside.unlink()
        raise
    return beside


def _link(data: Path, beside: Path) -> None:
    """Gives data a second name; where the file system has no links, only that one."""
    second = data.with_name("second")
    try:
        os.link(data, second)
    except OSError as error:
        _log.debug("no hard link %s: %s", second, error)
        os.replace(data, beside)
    else:
        os.replace(second, beside)


def _replace(source: Path, target: Path) -> None:
    os.replace(source, target)
    sync_folder(target.parent)


def _write_reading(model: Path, copy: Path, location: str) -> None:
    """Writes a copy of a model that reads its external data elsewhere."""
    proto = onnx.load_model(model, format="protobuf", load_external_data=False)
    for tensor in all_tensors(proto):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    copy.write_bytes(proto.SerializeToString())
    sync(copy)


def _own_data(final: Path) -> list[Path]:
    """Returns the files beside a model that have names made from content."""
    ours = re.compile(rf"{re.escape(final.name)}\.[0-9a-f]{{{_DIGITS}}}\.data")
    return [file for file in final.parent.iterdir() if ours.fullmatch(file.name)]


def _other_readers(final: Path, data: Collection[Path]) -> dict[Path, Path]:
    """Models of a folder, other than one, by the existing data file that they may read.

    All that read one hold its name; a model that cannot be opened counts as one that reads them all.
    """
    names = {file.name.encode(): file for file in data if os.path.exists(file)}
    if not names:
        return {}
    found: dict[Path, Path] = {}
    for model in sorted(final.parent.iterdir()):
        if model == final or model.suffix.lower() not in _MODELS or not model.is_file() or not model.stat().st_size:
            continue
        try:
            with model.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                read = [name for name in names if content.find(name) >= 0]
        except OSError as error:
            _log.info("what %s reads is not known: %s", model, error)
            read = [*names]
        found |= {names[name]: model for name in read}
    return found


def _remove(files: list[Path]) -> None:
    for file in files:
        with suppress(OSError):  # it is in nobody's way
            file.unlink()
