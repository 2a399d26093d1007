from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kenosis_ort.errors import OutputError
from kenosis_ort.storage import writing
from kenosis_ort.storage.writing import Scratch, lock_folder, remove_leftovers
from tests.storage.killing import killed_at_every_step

_HOLDS_ONE = """
import sys, time, pathlib
from kenosis_ort.storage.writing import Scratch

held = Scratch("test", beside=pathlib.Path(sys.argv[1]))
(held.path / "big").write_text("x")
print("made", flush=True)
time.sleep(60)
"""
LOCKS = pytest.mark.skipif(writing.fcntl is None, reason="the system has no locks on folders")


def test_it_is_there_and_goes(tmp_path: Path) -> None:
    with Scratch("test", beside=tmp_path) as folder:
        (folder / "file").write_text("x")
        assert folder.parent == tmp_path
        assert folder.name.startswith(".kenosis-test-")
    assert list(tmp_path.iterdir()) == []


def test_it_goes_when_it_is_forgotten(tmp_path: Path) -> None:
    Scratch("test", beside=tmp_path)
    assert list(tmp_path.iterdir()) == []


@LOCKS
def test_a_living_one_is_left_alone_and_a_dead_one_removed(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", _HOLDS_ONE, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"made\n"
    remove_leftovers(tmp_path)
    assert len(list(tmp_path.glob(".kenosis-test-*/big"))) == 1
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert len(list(tmp_path.iterdir())) == 1
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


@LOCKS
def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    for name in ("kenosis-experiments", f"kenosis-verify-{'0' * 24}", f".kenosis-write-{'a' * 24}", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "target").mkdir()
    with Scratch("test", beside=tmp_path) as folder:
        ours = folder
    ours.symlink_to(tmp_path / "target")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / ours.name).write_text("a file")
    before = sorted(tmp_path.rglob("*"))
    remove_leftovers(tmp_path)
    remove_leftovers(tmp_path / "sub")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_any_step_it_is_removed_by_the_next_run(tmp_path: Path) -> None:
    def use() -> None:
        with Scratch("test", beside=tmp_path) as folder:
            (folder / "file").write_text("x")

    left = 0
    for _ in killed_at_every_step(use):
        left += len(list(tmp_path.iterdir()))
        remove_leftovers(tmp_path)
        assert list(tmp_path.iterdir()) == []
    assert left > 2


def test_the_lock_of_a_folder_waits_and_gives_up(tmp_path: Path) -> None:
    first = lock_folder(tmp_path)
    if first is None:
        pytest.skip("no locks here")
    assert lock_folder(tmp_path, wait_s=0.05) is None
    os.close(first)
    second = lock_folder(tmp_path)
    assert second is not None
    os.close(second)


def test_no_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.gettempdir", none)
    with pytest.raises(OutputError, match="No temporary folder can be made") as caught:
        Scratch("test")
    assert "TMPDIR" in str(caught.value.fix)
    remove_leftovers()
