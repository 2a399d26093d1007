"""Files written whole or not at all, durably; and what the system refuses told as an `OutputError`."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from kenosis_ort.errors import KenosisError, OutputError
from kenosis_ort.storage.scratch import Scratch, remove_leftovers

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})


def write_text(path: str | os.PathLike[str], text: str, what: str) -> None:
    """Writes a text file in UTF-8, so that after any failure, a kill included, the old or the new one is there.

    Args:
        path: The file; a link is followed.
        text: What it is to hold.
        what: What it is, for the message: ``"the report"``.

    Raises:
        OutputError: It cannot be written; an existing file is as it was.
    """
    final = Path(os.path.realpath(path))
    try:
        if final.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not final.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the folder does not exist")
        remove_leftovers(final.parent)
        with Scratch("write", beside=final.parent) as folder:
            made = folder / "text"
            made.write_text(text, encoding="utf-8")
            sync(made)
            os.replace(made, final)
            sync_folder(final.parent)
    except OSError as error:
        if isinstance(error, KenosisError):
            raise
        raise OutputError(
            f"{what} cannot be written: {error.strerror or error}",
            where=os.fspath(path),
            fix="name a file in an existing folder that can be written",
        ) from error


def sync(path: Path) -> None:
    """Waits until a file's content is on the disk."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Waits until a folder's entries are on the disk, where the system and the file system can do that."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def room_is_needed() -> Iterator[None]:
    """Turns a full or read-only disk, met while temporary files are written, into an error with a fix.

    Raises:
        OutputError: There is no room.
    """
    try:
        yield
    except OSError as error:
        if not is_lack_of_room(error):
            raise
        raise OutputError(
            f"A temporary file cannot be written: {error.strerror}.",
            where=error.filename if isinstance(error.filename, str) else None,
            fix="Free disk space, or let the environment variable TMPDIR name a folder with room.",
        ) from error


def is_lack_of_room(error: BaseException) -> bool:
    """Tells whether an error of the system's says that a disk is full or cannot be written."""
    return isinstance(error, OSError) and not isinstance(error, KenosisError) and error.errno in _NO_ROOM
