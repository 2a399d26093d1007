"""Files that are made once: each is named by a hash of all that decides what is in it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path


def digest(*parts: str | bytes) -> str:
    """Returns a short hash of texts and bytes."""
    found = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()[:16]


def digest_of_files(files: Iterable[Path]) -> str:
    """Returns a short hash of the contents of files, in the order of their paths."""
    return digest(*(path.read_bytes() for path in sorted(files)))


def made_once(path: Path, make: Callable[[Path], object], *, reuse: bool) -> Path:
    """Returns the path of a file, made under another name first, so that half a file is never found.

    Args:
        path: Where the file is to be.
        make: Writes it to the path that it gets, which has the same suffix.
        reuse: Whether a file that is there already is taken.
    """
    if not (reuse and path.is_file()):
        part = path.with_name(f"{path.stem}.{os.getpid()}.part{path.suffix}")
        make(part)
        part.replace(path)
    return path
