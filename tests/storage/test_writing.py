"""Files written whole or not at all, facts kept between processes, paths told apart; temporary folders that go."""

import errno
import os
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from kenosis_ort.errors import CalibrationError, OutputError
from kenosis_ort.runtime import machine
from kenosis_ort.storage import writing
from kenosis_ort.storage.writing import Scratch, check_apart, locked, same_file, write_text
from tests.storage.killing import killed_at_every_step


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_any_step_the_old_or_the_new_text_is_there(tmp_path):
    file, seen = tmp_path / "file.txt", set()
    file.write_text("old")
    for _ in killed_at_every_step(lambda: write_text(file, "new", "the file")):
        seen.add(file.read_text())
        file.write_text("old")
    assert seen == {"old", "new"}


def test_a_link_is_followed_and_its_file_replaced(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "file").write_text("old")
    with (tmp_path / "file").open() as held:
        write_text(tmp_path / "link", "text", "the file")
        assert held.read() == "old", "the file is another one, in the place of the old"
    assert ((tmp_path / "link").is_symlink(), (tmp_path / "file").read_text()) == (True, "text")


def test_what_cannot_be_written_is_named(tmp_path):
    for path in (tmp_path, tmp_path / "none" / "file"):
        with pytest.raises(OutputError, match="the file cannot be written") as caught:
            write_text(path, "text", "the file")
        assert caught.value.where == str(path)


def test_only_a_full_disk_becomes_an_error_of_ours():
    full = OSError(errno.ENOSPC, "No space left on device", "x")
    with pytest.raises(OutputError, match="TMPDIR"), writing.room_is_needed():
        raise full
    for other in (FileNotFoundError(errno.ENOENT, "No such file"), CalibrationError("other")):
        with pytest.raises(type(other)) as caught, writing.room_is_needed():
            raise other
        assert caught.value is other


def test_every_spelling_of_a_file(tmp_path):
    model, new = tmp_path / "model.onnx", tmp_path / "new.onnx"
    model.write_bytes(b"model")
    (tmp_path / "sub").mkdir()
    (tmp_path / "soft.onnx").symlink_to(model)
    (tmp_path / "to_new").symlink_to(new)
    (tmp_path / "linked").symlink_to(tmp_path)
    relative = Path(os.path.relpath(model))
    spelled = ("model.onnx", "sub/../model.onnx", "soft.onnx", "linked/model.onnx")
    for path in (relative, *(tmp_path / name for name in spelled)):
        assert (same_file(path, model), same_file(path, tmp_path / "other.onnx")) == (True, False)
    os.link(model, tmp_path / "hard.onnx")
    assert same_file(tmp_path / "linked" / "model.onnx", model)
    assert not same_file(tmp_path / "hard.onnx", model), "only this name gets another file"
    for name in ("new.onnx", "sub/../new.onnx", "to_new", "linked/new.onnx"):
        assert same_file(tmp_path / name, new), "one that does not exist"
    assert not same_file(new, tmp_path / "newer.onnx")


def test_case_where_the_system_ignores_it(tmp_path, monkeypatch):
    for folds in (True, False):
        monkeypatch.setattr(writing, "_FOLDS_CASE", folds)
        assert same_file(tmp_path / "Out.onnx", tmp_path / "out.ONNX") == folds


def test_both_are_named(tmp_path):
    model, out = ("the float model", tmp_path / "model.onnx"), ("the output", tmp_path / "out.onnx")
    for role, path in (model, out):
        with pytest.raises(OutputError, match=f"the report is {role} itself"):
            check_apart([out, ("the report", path)], [model])
    check_apart([out], [model, model])


@pytest.mark.parametrize(("platform", "said", "expected"), [
    ("linux", "/cache", "/cache"), *(("linux", said, "/home/me/.cache") for said in ("", "relative/folder")),
    ("darwin", "", "/home/me/Library/Caches"), ("win32", "", "/home/me/AppData/Local"),
])  # fmt: skip
def test_the_folder_for_facts(monkeypatch, platform, said, expected):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("XDG_CACHE_HOME", said)
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    assert machine.user_cache() == Path(expected, "kenosis-ort")


def test_without_a_home_nothing_is_kept(monkeypatch):
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("no home")))
    assert machine.user_cache() is None
    machine.keep("facts", {"a": 1})
    assert machine.recall("facts") is None


# ---- temporary folders -----------------------------------------------------------------------------------------------


def test_it_is_there_and_goes(tmp_path):
    with Scratch("test", beside=tmp_path) as folder:
        (folder / "file").write_text("x")
        assert (folder.parent, folder.name[:14]) == (tmp_path, ".kenosis-test-")
    assert list(tmp_path.iterdir()) == []
    Scratch("test", beside=tmp_path)  # forgotten at once
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(writing.fcntl is None, reason="the system has no locks on folders")
def test_the_lock_of_a_folder_is_waited_for_but_not_for_ever(tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    with locked(tmp_path, wait_s=0):
        with locked(tmp_path, wait_s=0.01):
            assert waits
        del waits[:]
    with locked(tmp_path, wait_s=60):
        assert not waits


def test_no_folder_for_temporary_files(tmp_path, monkeypatch):
    with pytest.raises(OutputError, match="The output folder is not writable: No such file") as caught:
        Scratch("test", beside=tmp_path / "gone")
    assert caught.value.where == str(tmp_path / "gone")
    lacking = FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")
    monkeypatch.setattr("tempfile.gettempdir", Mock(side_effect=lacking))
    with pytest.raises(OutputError, match="No temporary folder can be made") as caught:
        Scratch("test")
    assert "TMPDIR" in str(caught.value.fix)
