"""Files of models: written complete and checked, or not at all.

A model and its external data replace others so that a killed process leaves a pair that loads. Two files cannot be
replaced in one step, and a model names its data. So new data first stand beside the old under a name made from their
content, ``<model>.<16 hex digits>.data``, and a new model that reads them there takes the old one's place in one step.
Only then, with nobody reading the old data, do the new ones get the name that users expect, ``<model>.data``, and the
model is replaced once more, by the one that reads them there. After each step the pair at the destination is the old
one or the new one. Where the file system has no hard links, the pair keeps the first name, and where another model of
the folder reads ``<model>.data``: what others read is neither changed nor removed.

Concurrent writers of one folder wait for each other while files are moved, by a lock on the folder.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import onnx
from google.protobuf.message import DecodeError, EncodeError

from kenosis_ort.errors import OutputError, warn_caller
from kenosis_ort.graph import outside
from kenosis_ort.graph.walk import all_tensors
from kenosis_ort.storage.writing import Scratch, check_apart, is_possible, locked, real, same_file, sha256_of

_log = logging.getLogger(__name__)


@contextmanager
def weights_on_disk(model: onnx.ModelProto) -> Iterator[None]:
    """Has large weights that are made inside written to a temporary file, where a model has some on disk already.

    Args:
        model: What all is made of. The file goes with the outermost such block.

    Raises:
        OutputError: No temporary folder can be made.
    """
    if outside.STORE.get() is not None or not outside.refers_outside(model):
        yield
        return
    with Scratch("weights") as folder, (folder / "made").open("wb") as file:
        token = outside.STORE.set(outside.Store(file))
        try:
            yield
        finally:
            outside.STORE.reset(token)


_KEY: Final = "kenosis_ort.target"
_PROCESSORS: Final = "kenosis_ort.processors"


def mark(model: onnx.ModelProto, target: str, *, needs_vnni: bool = False) -> None:
    """Writes into a model, in place, for which target it was made.

    Args:
        model: The model.
        target: Name of the target.
        needs_vnni: Products of its weights clip on processors without VNNI.
    """
    others = [entry for entry in model.metadata_props if entry.key not in (_KEY, _PROCESSORS)]
    entries = {_KEY: target, **({_PROCESSORS: "with VNNI"} if needs_vnni else {})}
    del model.metadata_props[:]
    model.metadata_props.extend([*others, *(onnx.StringStringEntryProto(key=k, value=v) for k, v in entries.items())])


def made_for(model: onnx.ModelProto) -> str | None:
    """The name of the target that a model was made for, None where it does not say."""
    return next((entry.value for entry in model.metadata_props if entry.key == _KEY), None)


def restore_interface(model: onnx.ModelProto, original: onnx.ModelProto) -> None:
    """Declares inputs and outputs as the original does, with their default values, in place.

    On the way inputs lose their defaults, and inference makes up names for sizes that the original leaves open.
    """
    stored = {tensor.name for tensor in model.graph.initializer}
    left = {value.name for value in model.graph.input} - stored
    model.graph.initializer.extend(t for t in original.graph.initializer if t.name in left)
    for values, declared in ((model.graph.input, original.graph.input), (model.graph.output, original.graph.output)):
        types = {value.name: value.type for value in declared if value.type.WhichOneof("value")}
        for value in values:
            if value.name in types:
                value.type.CopyFrom(types[value.name])


_DIGITS: Final = 16
_PATIENCE_S: Final = 30.0  # with others that write into the folder
_MODELS: Final = frozenset({".onnx", ".ort", ".pb"})


def uses_external_data(proto: onnx.ModelProto) -> bool:
    """Whether any tensor of the model lies outside of it, in a place that was not checked."""
    return any(t.data_location == onnx.TensorProto.EXTERNAL and not outside.is_outside(t) for t in all_tensors(proto))


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


def data_file(model: Path) -> Path:
    """Path of a model's external data: ``model.onnx.data`` beside ``model.onnx``."""
    return model.with_name(f"{model.name}.data")


def check_written(
    model: Path | None,
    output: Path,
    *,
    written: Sequence[tuple[str, Path]] = (),
    read: Sequence[tuple[str, Path]] = (),
    called: str = "the float model",
    in_place: bool = True,
) -> None:
    """Checks that no file to be written is one that is read, or written as something else.

    Args:
        model: The model's file, which is read as well as its external data; None for a model in memory.
        output: What is made of it.
        written: What else is written: what it is, and where.
        read: What else is read.
        called: What the model is, for the message.
        in_place: Whether the output may take the model's place, as stock's may.

    Raises:
        OutputError: Two are the same file.
    """
    outputs = [("the output", output), ("the output's external data", data_file(output)), *written]
    inputs = [*read]
    if model is not None:
        data = external_files(model) if any(os.path.exists(path) for _, path in outputs) else []
        if in_place and same_file(model, output):
            data = [file for file in data if not same_file(file, data_file(output))]
            check_apart(outputs[1:], [(called, model)])
        else:
            inputs.append((called, model))
        inputs += [(f"{called}'s external data", file) for file in data]
    check_apart(outputs, inputs)


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
    why: str | None = None
    with locked(final.parent, wait_s=_PATIENCE_S):
        leftovers = _own_data(final)
        known = external_files(final) if leftovers or os.path.exists(data_file(final)) else []
        readers = _other_readers(final, {data_file(final), *leftovers})
        leftovers = [file for file in leftovers if file not in readers]
        _remove([file for file in leftovers if file not in known])
        if not os.path.exists(data):
            os.replace(new, final)
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
    return why


def _put_beside(new: Path, data: Path, final: Path) -> Path:
    """Replaces a model whose data, if it has any, do not stand where the new ones go; returns where those are read."""
    target, previous = data_file(final), data.with_name("previous")
    had_data = target.exists()
    if had_data:
        os.replace(target, previous)
    try:
        os.replace(data, target)
        os.replace(new, final)
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
        os.replace(data, data_file(final))
        os.replace(new, final)
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
        os.replace(first, final)
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


def _write_reading(model: Path, copy: Path, location: str) -> None:
    """Writes a copy of a model that reads its external data elsewhere."""
    proto = onnx.load_model(model, format="protobuf", load_external_data=False)
    for tensor in all_tensors(proto):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    copy.write_bytes(proto.SerializeToString())


def _own_data(final: Path) -> list[Path]:
    """The files beside a model that have names made from content."""
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


INLINE_LIMIT = 2**31 - 2**26
"""Models whose weights take more bytes than this are written with external data whether asked or not."""


def write_model(
    proto: onnx.ModelProto,
    destination: Path,
    *,
    external_data: bool,
    check: Callable[[Path], object],
    content: bytes | None = None,
    warn: Callable[[str], None] = warn_caller,
) -> int:
    """Writes a model atomically.

    The model is first written to a temporary folder beside the destination, ``check`` loads it from there,
    and only then does it take the destination's place. On any failure, also one that ``check`` raises, nothing
    new is left and a file that stood at the destination is as it was. Whenever the process is killed, what stands at
    the destination is the old model or the new one, each with its own data (see `kenosis_ort.graph.files`).

    Args:
        proto: The model; not changed.
        destination: The file to write. A link is followed.
        external_data: Whether weights go to ``<destination name>.data`` beside it. They do so anyway where
            the model would be too large for one file (2 GiB).
        check: Called with the path of the temporary file; raises if the model is not fit to be kept.
        content: The model's bytes where they are known already, written as they are.
        warn: Called with a sentence where external data of another model stand where this one's were to go.

    Returns:
        Bytes written, external data included.

    Raises:
        OutputError: The folder does not exist, the destination is a folder or not writable, the disk is full.
    """
    check_destination(destination)
    final = real(destination)
    with Scratch("write", beside=final.parent) as folder:
        temporary = folder / final.name
        external = store_model(proto, temporary, external_data=external_data, content=content)
        check(temporary)
        files = [temporary, data_file(temporary)] if external else [temporary]
        written = sum(file.stat().st_size for file in files)
        try:
            why = swap_in(temporary, final)
        except OSError as error:
            what = f"The model could not be moved into place: {error.strerror or error}."
            raise OutputError(what, where=str(destination), fix="Choose another output path.") from error
    if why is not None:
        warn(why)
    _log.debug("wrote %s%s", final, " with external data" if external else "")
    return written


def store_model(proto: onnx.ModelProto, path: Path, *, external_data: bool, content: bytes | None = None) -> bool:
    """Writes a model into a folder of our own, where no other process sees it while it is incomplete.

    Args:
        proto: The model; not changed.
        path: The file to write, or to write over.
        external_data: Whether weights go to ``<name>.data`` beside it; they do so anyway above 2 GiB.
        content: The model's bytes where they are known already, written as they are.

    Returns:
        Whether weights went to the file beside it.

    Raises:
        OutputError: It cannot be written.
    """
    external = content is None and (external_data or outside.weight_bytes(proto) > INLINE_LIMIT)
    try:
        if external:
            path.write_bytes(outside.write_external_data(proto, data_file(path)).SerializeToString())
        else:
            with path.open("wb") as file:
                file.writelines((content,) if content is not None else outside.serialized(proto))
    except (OSError, EncodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        fix = "Free space, or shorten the name."
        raise OutputError(f"The model could not be written: {reason}.", where=str(path.parent), fix=fix) from error
    return external


def check_destination(destination: Path) -> None:
    """Checks that a model can be written to a path, before any work is put into it.

    Raises:
        OutputError: The folder does not exist or is not writable, or the path is a folder, no regular file or
            write-protected.
    """
    final = real(destination)
    if not is_possible(final):
        raise OutputError("The output path is too long.", where=str(destination), fix="Choose another output path.")
    if final.is_dir():
        fix = f"Give a file name, for example '{final / 'model.onnx'}'."
        raise OutputError("The output path is a folder.", where=str(destination), fix=fix)
    if not final.parent.is_dir():
        raise OutputError("The output folder does not exist.", where=str(final.parent), fix="Create it first.")
    if not os.access(final.parent, os.W_OK):
        fix = "Choose another output folder or change its permissions."
        raise OutputError("The output folder is not writable.", where=str(final.parent), fix=fix)
    if final.exists() and not final.is_file():
        raise OutputError("The output path is not a regular file.", where=str(destination), fix="Give a file name.")
    if final.exists() and not os.access(final, os.W_OK):
        fix = "Choose another output path."
        raise OutputError("The output file is write-protected.", where=str(destination), fix=fix)
