"""Small facts kept between processes, in the folder that the system's conventions give caches.

What is kept can be found out again: a file that is missing, damaged or cannot be written costs time and nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kenosis_ort.errors import OutputError
from kenosis_ort.storage.writing import write_text

_log = logging.getLogger(__name__)
_SIZE_LIMIT: Final = 1 << 16


def user_cache() -> Path | None:
    """Returns the folder for caches of this package, None where the user has no home.

    ``$XDG_CACHE_HOME`` or ``~/.cache`` (XDG Base Directory Specification 0.8: a relative value is ignored),
    ``~/Library/Caches`` on macOS, ``%LOCALAPPDATA%`` on Windows; below it ``kenosis-ort``.
    """
    said = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", "")
    base: Path | None = Path(said) if said and Path(said).is_absolute() else None
    if base is None:
        try:
            home = Path.home()
        except RuntimeError:
            return None
        usual = {"win32": ("AppData", "Local"), "darwin": ("Library", "Caches")}
        base = home.joinpath(*usual.get(sys.platform, (".cache",)))
    return base / "kenosis-ort"


def recall(name: str) -> Mapping[str, Any] | None:
    """Returns what was kept under a name, None where there is nothing of use.

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
