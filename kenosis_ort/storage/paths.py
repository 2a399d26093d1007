"""Paths: no output may be an input or another output, however they are spelled; and what files hold, by digest."""

from __future__ import annotations

import errno
import hashlib
import os
import sys
import unicodedata
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Final

from kenosis_ort.errors import OutputError

_FOLDS_CASE: Final = sys.platform in ("win32", "darwin")
_BLOCK: Final = 1 << 20


def absolute(path: str | os.PathLike[str]) -> Path:
    """A path that means the same file whatever the working directory becomes."""
    return Path(os.path.abspath(path))


def same_file(a: Path, b: Path) -> bool:
    """Whether two paths are one file, by links and other spellings too; neither has to exist."""
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
    """Key that is equal for all paths of a file; for one that does not exist, by its folder and name."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        target = Path(os.path.realpath(path))
        try:
            folder = os.stat(target.parent)
        except (OSError, ValueError):
            return _entry(str(target))
        return folder.st_dev, folder.st_ino, _entry(target.name)
    return status.st_dev, status.st_ino


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
