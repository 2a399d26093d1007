"""Temporary folders that tell whether their process still lives, so that a later run removes what a killed one left.

The process holds an advisory lock on the folder, which the system takes away with the process, however that ends. A
folder that can be locked by another belongs to nobody any more. Only folders of this user whose name is one of ours,
with a check sum at its end, are ever removed; where the system or the file system has no such locks, none is.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
import weakref
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from kenosis_ort.errors import OutputError

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_log = logging.getLogger(__name__)

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
