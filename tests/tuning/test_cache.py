"""The tuning cache, above all what it does with files that it should not trust."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

import pytest

from kenosis_ort.errors import KenosisWarning
from kenosis_ort.tuning.cache import SIZE_LIMIT, CacheKey, TuningCache, options_digest

KEY = CacheKey("a" * 64, "b" * 64, "c" * 64)
DATA = {"accepted": ["float prefix of 2"], "noisy": False}


def test_what_is_stored_is_loaded(tmp_path: Path):
    cache = TuningCache(tmp_path / "not" / "there" / "yet")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.load(KEY, dict) is None
        cache.store(KEY, DATA)
        assert cache.load(KEY, dict) == DATA
        assert cache.load(CacheKey("d" * 64, KEY.machine, KEY.options), dict) is None
        assert cache.load(CacheKey(KEY.model, KEY.machine, "d" * 64), dict) is None
    assert [p.name for p in cache.folder.iterdir()] == [KEY.file_name]


def test_a_second_result_takes_the_place_of_the_first(tmp_path: Path):
    cache = TuningCache(tmp_path)
    cache.store(KEY, DATA)
    cache.store(KEY, {"accepted": []})
    assert cache.load(KEY, dict) == {"accepted": []}
    assert len(list(tmp_path.iterdir())) == 1


def changed(**fields):
    def change(path: Path) -> None:
        entry = json.loads(path.read_text())
        path.write_text(json.dumps({**entry, **fields}))

    return change


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(("damage", "reason"), [
    (lambda p: p.write_bytes(b""), "damaged"),
    (lambda p: p.write_bytes(p.read_bytes()[:40]), "damaged"),
    (lambda p: p.write_bytes(b"\xff\xfe\x00pickle"), "damaged"),
    (lambda p: p.write_text("[" * 200_000), "damaged"),
    (lambda p: p.write_text("[1, 2]"), "not a tuning cache"),
    (lambda p: p.write_text("{}"), "not a tuning cache"),
    (lambda p: p.write_bytes(b" " * (SIZE_LIMIT + 1)), "larger"),
    (directory, "not a regular file"),
    (changed(schema=999), "schema 999"),
    (changed(machine="e" * 64), "another machine"),
    (changed(model="e" * 64), "another model"),
    (changed(options="e" * 64), "other options"),
    (changed(data=[]), "damaged"),
    (changed(data={"accepted": 3}), "damaged"),
    (changed(data={}), "damaged"),
])  # fmt: skip
def test_a_file_not_to_be_trusted_is_ignored_with_one_warning(tmp_path: Path, damage, reason: str):
    def decode(data):
        return [str(name) for name in data["accepted"]]

    cache = TuningCache(tmp_path)
    cache.store(KEY, DATA)
    assert cache.load(KEY, decode) == DATA["accepted"]
    damage(tmp_path / KEY.file_name)
    with pytest.warns(KenosisWarning, match=reason) as caught:
        assert cache.load(KEY, decode) is None
    assert len(caught) == 1
    assert KEY.file_name in str(caught[0].message)


def test_an_entry_of_another_machine_is_ignored_with_one_warning(tmp_path: Path):
    cache = TuningCache(tmp_path)
    for digit in "12":
        cache.store(CacheKey(KEY.model, digit * 64, KEY.options), DATA)
    with pytest.warns(KenosisWarning, match="another machine") as caught:
        assert cache.load(KEY, dict) is None
    assert len(caught) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="permissions of files")
def test_an_unreadable_file_is_ignored(tmp_path: Path):
    cache = TuningCache(tmp_path)
    cache.store(KEY, DATA)
    path = tmp_path / KEY.file_name
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user reads everything")
    with pytest.warns(KenosisWarning, match=KEY.file_name):
        assert cache.load(KEY, dict) is None


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.warns(KenosisWarning, match="cannot be written"):
        TuningCache(file).store(KEY, DATA)
    assert file.read_text() == ""


def test_nothing_is_left_where_moving_into_place_fails(tmp_path: Path):
    (tmp_path / KEY.file_name).mkdir()
    with pytest.warns(KenosisWarning, match="cannot be written"):
        TuningCache(tmp_path).store(KEY, DATA)
    assert [p.name for p in tmp_path.iterdir()] == [KEY.file_name]


def test_the_digest_of_options():
    assert options_digest({"a": 1, "b": (2, 3)}) == options_digest({"b": [2, 3], "a": 1})
    assert options_digest({"a": 1}) != options_digest({"a": 2})
