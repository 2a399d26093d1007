"""Files: written whole or not at all, told apart by path and digest; temporary folders.

Errors of the system are raised as `OutputError`.

No output may be an input or another output, however their paths are spelled.

Temporary folders go with their object and with the process, unless that is killed.
"""

import errno
import hashlib
import logging
import os
import re
import shutil
import sys
import tempfile
import time
import unicodedata
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from kenosis_ort.errors import KenosisError, OptionError, OutputError

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_log = logging.getLogger(__name__)

_POLL_S: Final = 0.01


class Scratch:
    """A temporary folder. Use it as a context manager, which gives its path, or call `close`.

    Args:
        kind: What it is for, one lower-case word; part of its name.
        beside: The folder to make it in, hidden; None for the system's folder for temporary files.

    Raises:
        OutputError: It cannot be made.
    """

    def __init__(self, kind: str, *, beside: Path | None = None) -> None:
        try:
            made = tempfile.mkdtemp(prefix=f"{'' if beside is None else '.'}kenosis-{kind}-", dir=beside)
        except OSError as error:
            what, where = "The output folder is not writable", str(beside)
            fix = "Choose another output folder or change its permissions."
            if beside is None:
                what = "No temporary folder can be made"
                where = os.environ.get("TMPDIR") or "the system's folder for temporary files"
                fix = "Free disk space, or let the environment variable TMPDIR name a folder that can be written."
            raise OutputError(f"{what}: {error.strerror or error}.", where=where, fix=fix) from error
        self.path = Path(made)
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the folder with all that is in it."""
        self._remove()


@contextmanager
def locked(folder: Path, *, wait_s: float) -> Iterator[None]:
    """Holds an exclusive advisory lock on a folder, which the system takes away with the process, however that ends.

    Where there are no such locks, or another holds it for longer than one waits, nothing is held.

    Args:
        folder: The folder.
        wait_s: Seconds to wait for another holder.

    Raises:
        OSError: The folder is missing or cannot be opened.
    """
    if fcntl is None:
        yield
        return
    descriptor, deadline = os.open(folder, os.O_RDONLY), time.monotonic() + wait_s
    try:
        while _is_held_by_another(descriptor) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _is_held_by_another(descriptor: int) -> bool:
    """Takes the lock of an open folder, unless another has it; True if so."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:  # a file system without locks
        _log.debug("no lock: %s", error)
    return False


_FOLDS_CASE: Final = sys.platform in ("win32", "darwin")
_BLOCK: Final = 1 << 20


def absolute(path: str | os.PathLike[str]) -> Path:
    """A path that means the same file whatever the working directory becomes; raises as `real`."""
    return _spelled(os.path.abspath, path)


def real(path: str | os.PathLike[str]) -> Path:
    """The absolute path with all links followed.

    Raises:
        OptionError: The path is relative, and the working directory was deleted.
    """
    return _spelled(os.path.realpath, path)


def _spelled(form: Callable[[str], str], path: str | os.PathLike[str]) -> Path:
    try:
        return Path(form(os.fspath(path)))
    except FileNotFoundError as error:
        raise OptionError(
            "the working directory of this process was deleted, so that a relative path leads nowhere",
            where=os.fspath(path),
            fix="give an absolute path, or change to a folder that exists",
        ) from error


def same_file(a: Path, b: Path) -> bool:
    """Whether what is written to one path replaces the other's file, by links and other spellings too.

    Neither has to exist. A hard link is a file of its own here: what is written takes the place of one name.
    """
    return _identity(a) == _identity(b)


def check_apart(written: Iterable[tuple[str, Path]], read: Iterable[tuple[str, Path]]) -> None:
    """Checks that no file to be written is one that is read, or another one that is written.

    Args:
        written: What each is, for the message, and its path.
        read: The same of what is read.

    Raises:
        OutputError: Two are the same file; the message names both.
    """
    outputs: dict[Hashable, tuple[str, Path]] = {}
    for role, path in written:
        other, _ = outputs.setdefault(_identity(path), (role, path))
        if other != role:
            raise _conflict(role, path, other)
    for role, path in read:
        found = outputs.get(_identity(path))
        if found is not None:
            raise _conflict(*found, role)


def _conflict(role: str, path: Path, other: str) -> OutputError:
    return OutputError(f"{role} is {other} itself", where=str(path), fix=f"name another file for {role}")


def _identity(path: Path) -> Hashable:
    """Key that is equal for all paths of a file; for one with several names, or none yet, by its folder and name."""
    with suppress(OSError, ValueError):
        status = os.stat(path)
        if status.st_nlink == 1:
            return status.st_dev, status.st_ino
    target = real(path)
    try:
        folder = os.stat(target.parent)
    except (OSError, ValueError):
        return _entry(str(target))
    return folder.st_dev, folder.st_ino, _entry(target.name)


def _entry(name: str) -> str:
    """Form of a name by which this system compares names."""
    return unicodedata.normalize("NFC", name).casefold() if _FOLDS_CASE else name


def regular(path: str | os.PathLike[str]) -> Path:
    """The path, unless what lies there is a pipe, a device or a socket, which may be read for ever.

    Raises:
        OSError: It is one; a path where nothing lies is for its reader to refuse.
    """
    file = Path(path)
    if os.path.exists(file) and not (os.path.isfile(file) or os.path.isdir(file)):
        raise OSError(errno.EINVAL, "it is a pipe, a device or a socket and no regular file", str(path))
    return file


def is_possible(path: Path) -> bool:
    """Whether something lies at a path or could: a name may be longer than the system takes."""
    try:
        os.stat(path)
    except OSError as error:
        return isinstance(error, (FileNotFoundError, NotADirectoryError))
    return True


def sha256_of(*files: Path) -> str:
    """The SHA-256 of the contents of files, one behind the other, in hexadecimal digits.

    Raises:
        OSError: One cannot be read.
    """
    digest = hashlib.sha256()
    for file in files:
        with regular(file).open("rb") as opened:
            while block := opened.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


_KINDS: Final = re.compile(rb"(?:\s|#(?!!).*\n)*(?:(?P<html><)|(?P<json>\{)|(?P<toml>\[|[\w.-]+ *=)|(?P<empty>\Z))")
_HEAD: Final = 2**12  # bytes that tell a kind


def check_kind(path: Path, text: str, what: str) -> None:
    """Checks that a text does not take the place of a model, or of a file of another kind than HTML, JSON or TOML.

    Args:
        path: Where it is to go.
        text: It, or how it begins.
        what: As for `write_text`.

    Raises:
        OSError: What lies there cannot be read.
        OutputError: The name ends in ``.onnx``, or what lies there begins otherwise.
    """
    there = b""
    if path.is_file():
        with path.open("rb") as file:
            there = file.read(_HEAD)
    wanted, found = (
        each and each.lastgroup for each in map(_KINDS.match, (text[:_HEAD].encode(errors="replace"), there))
    )
    if path.suffix.lower() == ".onnx" or (wanted is not None and found not in (wanted, "empty")):
        fix = "name another file, or remove that one first"
        raise OutputError(f"{what} would take the place of a file of another kind", where=str(path), fix=fix)


_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})


def write_text(path: str | os.PathLike[str], text: str, what: str) -> None:
    """Writes a text file in UTF-8, so that after any failure, a kill included, the old or the new one is there.

    Args:
        path: The file; a link is followed.
        text: What it is to hold.
        what: What it is, for the message: ``"the report"``.

    Raises:
        OptionError: As `real`.
        OutputError: It cannot be written, or would replace a file of another kind; an existing file is as it was.
    """
    final = real(path)
    try:
        if not final.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the folder does not exist")
        check_kind(final, text, what)
        with Scratch("write", beside=final.parent) as folder:
            made = folder / "text"
            made.write_text(text, encoding="utf-8")
            os.replace(made, final)
    except OSError as error:
        if isinstance(error, KenosisError):
            raise
        raise OutputError(
            f"{what} cannot be written: {error.strerror or error}",
            where=os.fspath(path),
            fix="name a file in an existing folder that can be written",
        ) from error


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
    """Whether an error of the system's says that a disk is full or cannot be written."""
    return isinstance(error, OSError) and not isinstance(error, KenosisError) and error.errno in _NO_ROOM
