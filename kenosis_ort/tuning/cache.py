"""What tuning found, kept between runs: one JSON file for a model, its options and a machine.

A file that is damaged, too large, of another schema, or about another machine is passed over with one warning that
names it; it never stops a quantization. Nothing that a file says is executed or unpickled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from kenosis_ort.errors import KenosisWarning, OutputError
from kenosis_ort.storage.writing import write_text

_log = logging.getLogger(__name__)

SCHEMA_VERSION: Final = 1
SIZE_LIMIT: Final = 1 << 20
"""Bytes; what this package writes is a few kilobytes."""
_FORMAT: Final = "kenosis-ort tuning"

T = TypeVar("T")


@dataclass(frozen=True)
class CacheKey:
    """What an entry is about.

    Attributes:
        model: `kenosis_ort.calibration.fingerprint.model_fingerprint` of the float model.
        machine: `kenosis_ort.tuning.machine.machine_fingerprint`.
        options: `options_digest` of everything else that the result depends on.
    """

    model: str
    machine: str
    options: str

    @property
    def stem(self) -> str:
        """Beginning of the file's name, the same on all machines."""
        return f"{self.model[:24]}-{self.options[:12]}"

    @property
    def file_name(self) -> str:
        """Name of the entry's file."""
        return f"{self.stem}-{self.machine[:12]}.json"


def options_digest(options: Mapping[str, Any]) -> str:
    """Returns 64 hexadecimal digits that identify options, whatever their order.

    Args:
        options: Anything JSON takes; other values count by their text.
    """
    return hashlib.sha256(json.dumps(options, sort_keys=True, default=str).encode()).hexdigest()


class TuningCache:
    """A folder of entries.

    Args:
        folder: Made when the first entry is written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def load(self, key: CacheKey, decode: Callable[[Mapping[str, Any]], T]) -> T | None:
        """Returns what was stored, or None with at most one `KenosisWarning`.

        Args:
            key: What is looked for.
            decode: Makes the result from the stored data; a KeyError, TypeError or ValueError counts as damage.
        """
        path = self.folder / key.file_name
        try:
            if path.exists():
                return decode(_read(path, key))
            others = sorted(self.folder.glob(f"{key.stem}-*.json"))
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            _warn(f"the tuning cache '{path}' is ignored: {_reason(error)}")
            return None
        if others:
            _warn(f"the tuning cache '{others[0]}' is ignored: it was made on another machine")
        return None

    def store(self, key: CacheKey, data: Mapping[str, Any]) -> None:
        """Writes an entry, complete or not at all; where that is not possible, a `KenosisWarning` says so.

        Args:
            key: What it is about.
            data: Anything JSON takes.
        """
        entry = {"format": _FORMAT, "schema": SCHEMA_VERSION, **_identity(key), "data": dict(data)}
        text = json.dumps(entry, indent=1, allow_nan=False)
        path = self.folder / key.file_name
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(path, text, "the tuning cache")
        except OSError as error:
            _warn(f"the tuning cache '{path}' cannot be written: {_reason(error)}")
            return
        _log.debug("tuning result kept in %s", path)


def _read(path: Path, key: CacheKey) -> Mapping[str, Any]:
    """Returns an entry's data.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no entry of this schema, key and machine.
    """
    if not path.is_file():
        raise ValueError("it is not a regular file")
    with path.open("rb") as file:
        raw = file.read(SIZE_LIMIT + 1)
    if len(raw) > SIZE_LIMIT:
        raise ValueError(f"it is larger than {SIZE_LIMIT} bytes")
    try:
        entry = json.loads(raw.decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"it is damaged ({error})") from error
    if not isinstance(entry, dict) or entry.get("format") != _FORMAT:
        raise ValueError("it is not a tuning cache")
    if entry.get("schema") != SCHEMA_VERSION:
        raise ValueError(f"it has schema {entry.get('schema')}, this version reads {SCHEMA_VERSION}")
    if entry.get("machine") != key.machine:
        raise ValueError("it was made on another machine")
    if any(entry.get(name) != value for name, value in _identity(key).items()):
        raise ValueError("it is about another model or other options")
    data = entry.get("data")
    if not isinstance(data, dict):
        raise ValueError("it is damaged (no data)")
    return data


def _identity(key: CacheKey) -> dict[str, str]:
    return {"model": key.model, "machine": key.machine, "options": key.options}


def _reason(error: Exception) -> str:
    if isinstance(error, OutputError):
        return error.what
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    if isinstance(error, RecursionError):
        return "it is damaged (nested too deeply)"
    return str(error) if isinstance(error, ValueError) else f"it is damaged ({type(error).__name__}: {error})"


def _warn(text: str) -> None:
    warnings.warn(text, KenosisWarning, stacklevel=3)
