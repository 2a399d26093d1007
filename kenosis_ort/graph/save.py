"""Writing a model: complete and checked, or not at all."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import onnx
from google.protobuf.message import EncodeError

from kenosis_ort.errors import OutputError, warn_caller
from kenosis_ort.graph.external_data import weight_bytes, write_external_data
from kenosis_ort.graph.outside import serialized
from kenosis_ort.graph.swap import data_file, swap_in
from kenosis_ort.storage.scratch import Scratch, remove_leftovers

_log = logging.getLogger(__name__)

INLINE_LIMIT = 2**31 - 2**26
"""Models whose weights take more bytes than this are written with external data whether asked or not."""


def write_model(
    proto: onnx.ModelProto,
    destination: Path,
    *,
    external_data: bool,
    check: Callable[[Path], None],
    content: bytes | None = None,
    warn: Callable[[str], None] = warn_caller,
) -> int:
    """Writes a model atomically and durably.

    The model is first written to a temporary folder beside the destination, ``check`` loads it from there,
    and only then does it take the destination's place. On any failure, also one that ``check`` raises, nothing
    new is left and a file that stood at the destination is as it was. Whenever the process is killed, what stands at
    the destination is the old model or the new one, each with its own data (see `kenosis_ort.graph.swap`); what a
    killed process left is removed by the next call.

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
    final = Path(os.path.realpath(destination))
    remove_leftovers(final.parent)
    with Scratch("write", beside=final.parent) as folder:
        temporary = folder / final.name
        external = store_model(proto, temporary, external_data=external_data, content=content)
        check(temporary)
        files = [temporary, data_file(temporary)] if external else [temporary]
        written = sum(file.stat().st_size for file in files)
        try:
            why = swap_in(temporary, final)
        except OSError as error:
            raise OutputError(
                f"The model could not be moved into place: {error.strerror or error}.",
                where=str(destination),
                fix="Choose another output path.",
            ) from error
    if why is not None:
        warn(why)
    _log.debug("wrote %s%s", final, " with external data" if external else "")
    return written


def store_model(proto: onnx.ModelProto, path: Path, *, external_data: bool, content: bytes | None = None) -> bool:
    """Writes a model into a folder of our own, where nobody sees it while it is incomplete.

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
    external = content is None and (external_data or weight_bytes(proto) > INLINE_LIMIT)
    try:
        if external:
            path.write_bytes(write_external_data(proto, data_file(path)).SerializeToString())
        else:
            with path.open("wb") as file:
                for piece in (content,) if content is not None else serialized(proto):
                    file.write(piece)
    except (OSError, EncodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise OutputError(
            f"The model could not be written: {reason}.",
            where=str(path.parent),
            fix="Free space, or shorten the name.",
        ) from error
    return external


def check_destination(destination: Path) -> None:
    """Checks that a model can be written to a path, before any work is put into it.

    Raises:
        OutputError: The folder does not exist or is not writable, or the path is a folder, no regular file or
            write-protected.
    """
    final = Path(os.path.realpath(destination))
    try:
        os.stat(final)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # a name that is too long
        raise OutputError(
            f"The output path cannot be used: {error.strerror}.",
            where=str(destination),
            fix="Choose another output path.",
        ) from error
    if final.is_dir():
        raise OutputError(
            "The output path is a folder.",
            where=str(destination),
            fix=f"Give a file name, for example '{final / 'model.onnx'}'.",
        )
    if not final.parent.is_dir():
        raise OutputError("The output folder does not exist.", where=str(final.parent), fix="Create it first.")
    if not os.access(final.parent, os.W_OK):
        raise OutputError(
            "The output folder is not writable.",
            where=str(final.parent),
            fix="Choose another output folder or change its permissions.",
        )
    if final.exists() and not final.is_file():
        raise OutputError("The output path is not a regular file.", where=str(destination), fix="Give a file name.")
    if final.exists() and not os.access(final, os.W_OK):
        raise OutputError(
            "The output file is write-protected.", where=str(destination), fix="Choose another output path."
        )
