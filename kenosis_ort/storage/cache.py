"""Small facts cached between processes, in the folder that the system's conventions give caches.

They can be found out again: a file that is missing, damaged or cannot be written costs time and nothing else.
"""

import json
import logging
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

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
        with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as made:
            text = Path(made, "facts")
            text.write_text(json.dumps(dict(facts)), encoding="utf-8")
            os.replace(text, folder / f"{name}.json")
    except OSError as error:
        _log.debug("nothing is kept in '%s': %s", folder, error)
