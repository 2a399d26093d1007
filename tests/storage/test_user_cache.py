from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kenosis_ort.storage.writing import keep, recall, user_cache


@pytest.mark.skipif(sys.platform != "linux", reason="the XDG convention")
def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path / "kenosis-ort"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert user_cache() == tmp_path / "home" / ".cache" / "kenosis-ort"


@pytest.mark.parametrize(("platform", "expected"), [
    ("darwin", ("Library", "Caches")), ("win32", ("AppData", "Local"))
])  # fmt: skip
def test_the_folder_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, platform, expected):
    monkeypatch.setattr(sys, "platform", platform)
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert user_cache() == tmp_path.joinpath(*expected, "kenosis-ort")


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch):
    def no_home() -> Path:
        raise RuntimeError("no home")

    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert user_cache() is None
    keep("facts", {"a": 1})
    assert recall("facts") is None
