"""Files: written whole or not at all, cached between processes, told apart by path and digest; temporary folders.

Errors of the system are raised as `OutputError`. Small facts are cached in the folder that the system's conventions
give caches, and can be found out again: a file that is missing, damaged or cannot be written costs time and nothing
else.

No output may be an input or another output, however their paths are spelled.

Temporary folders tell whether their process still lives, so that a later run removes what a killed one left. The
process holds an advisory lock on the folder, which the system takes away with the process, however that ends. A
folder that can be locked by another belongs to nobody any more. Only folders of this user whose name is one of ours,
with a check sum at its end, are ever removed; where the system or the file system has no such locks, none is.
"""

import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import time
import unicodedata
import weakref
import zlib
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from kenosis_ort.errors import KenosisError, OutputError

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


_OURS: Final = re.compile(r"\.?kenosis-[a-z]+-(?P<token>[0-9a-f]{16})(?P<check>[0-9a-f]{8})")
_ATTEMPTS: Final = 5
_PATIENCE_S: Final = 5.0  # with a run that looks whether a folder is dead
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
        self._lock_descriptor: int | None = None
        for attempt in range(_ATTEMPTS):
            try:
                self.path = Path(tempfile.gettempdir() if beside is None else beside) / _new_name(kind, beside)
                self.path.mkdir(mode=0o700)
            except OSError as error:
                raise _not_made(error, beside) from error
            self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
            try:
                self._lock_descriptor = lock_folder(self.path, wait_s=_PATIENCE_S)
            except OSError as error:
                if not isinstance(error, FileNotFoundError) or attempt == _ATTEMPTS - 1:
                    raise _not_made(error, beside) from error
                continue  # another run took it for a dead one's, between making and locking it
            return

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the folder with all that is in it."""
        self._remove()
        if self._lock_descriptor is not None:
            os.close(self._lock_descriptor)
            self._lock_descriptor = None

    def __del__(self) -> None:
        if getattr(self, "_lock_descriptor", None) is not None:
            self.close()


def _new_name(kind: str, beside: Path | None) -> str:
    token = secrets.token_hex(8)
    return f"{'' if beside is None else '.'}kenosis-{kind}-{token}{_check_sum(token)}"


def _check_sum(token: str) -> str:
    return f"{zlib.crc32(token.encode()):08x}"


def lock_folder(folder: Path, *, wait_s: float = 0.0) -> int | None:
    """A descriptor that holds an exclusive advisory lock on a folder until it is closed.

    Args:
        folder: The folder; not a link.
        wait_s: Seconds to wait for another holder.

    Returns:
        The descriptor; None where another holds the lock, or where there are no such locks.

    Raises:
        OSError: The folder is missing or cannot be opened.
    """
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        lock = _lock(descriptor, time.monotonic() + wait_s)
        if lock and not os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    except BaseException:
        os.close(descriptor)
        raise
    if not lock:
        os.close(descriptor)
        return None
    return descriptor


def _lock(descriptor: int, deadline: float) -> bool:
    while not (lock := _try_lock(descriptor)) and lock is not None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return bool(lock)


def _try_lock(descriptor: int) -> bool | None:
    """Whether the lock is ours now; None on a file system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        _log.debug("no lock: %s", error)
        return None
    return True


def remove_leftovers(folder: Path | None = None) -> None:
    """Removes the scratch folders of killed processes.

    Args:
        folder: Where to look; None for the system's folder for temporary files.
    """
    if fcntl is None:
        return
    try:
        inside = Path(tempfile.gettempdir() if folder is None else folder)
        names = os.listdir(inside)
    except OSError as error:
        _log.debug("no look for leftovers: %s", error)
        return
    for name in names:
        match = _OURS.fullmatch(name)
        if match and _check_sum(match["token"]) == match["check"]:
            with suppress(OSError):  # of another user, or gone meanwhile
                _remove_if_dead(inside / name)


def _remove_if_dead(path: Path) -> None:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return
    lock = lock_folder(path)
    if lock is None:
        return
    try:
        shutil.rmtree(path, ignore_errors=True)
        _log.info("removed %s, which a killed run left", path)
    finally:
        os.close(lock)


def _not_made(error: OSError, beside: Path | None) -> OutputError:
    reason = error.strerror or str(error)
    if beside is not None:
        return OutputError(
            f"The output folder is not writable: {reason}.",
            where=str(beside),
            fix="Choose another output folder or change its permissions.",
        )
    return OutputError(
        f"No temporary folder can be made: {reason}.",
        where=os.environ.get("TMPDIR") or "the system's folder for temporary files",
        fix="Free disk space, or let the environment variable TMPDIR name a folder that can be written.",
    )


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


_log = logging.getLogger(__name__)
_SIZE_LIMIT: Final = 1 << 16


def user_cache() -> Path | None:
    """The folder for caches of this package, None where the user has no home.

    ``$XDG_CACHE_HOME`` or ``~/.cache`` (XDG Base Directory Specification 0.8: a relative value is ignored),
    ``~/Library/Caches`` on macOS, ``%LOCALAPPDATA%`` on Windows; below it ``kenosis-ort``.
    """
    cache_home = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", "")
    base: Path | None = Path(cache_home) if cache_home and Path(cache_home).is_absolute() else None
    if base is None:
        try:
            home = Path.home()
        except RuntimeError:
            return None
        usual = {"win32": ("AppData", "Local"), "darwin": ("Library", "Caches")}
        base = home.joinpath(*usual.get(sys.platform, (".cache",)))
    return base / "kenosis-ort"


def recall(name: str) -> Mapping[str, Any] | None:
    """Content cached under a name, None where there is nothing of use.

    Args:
        name: Of a file, without its ending.
    """
    folder = user_cache()
    path = None if folder is None else folder / f"{name}.json"
    try:
        if path is None or not path.is_file() or path.stat().st_size > _SIZE_LIMIT:
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        _log.debug("'%s' is not read: %s", path, error)
        return None
    return found if isinstance(found, dict) else None


def keep(name: str, facts: Mapping[str, Any]) -> None:
    """Keeps facts under a name, whole or not at all; where that is not possible, nothing.

    Args:
        name: As for `recall`.
        facts: Anything JSON takes.
    """
    folder = user_cache()
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / f"{name}.json", json.dumps(dict(facts)), "a cache")
    except (OSError, OutputError) as error:
        _log.debug("nothing is kept in '%s': %s", folder, error)
