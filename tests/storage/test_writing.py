from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kenosis_ort.errors import CalibrationError, OutputError
from kenosis_ort.storage.writing import room_is_needed, write_text
from tests.storage.killing import killed_at_every_step


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_any_step_the_old_or_the_new_text_is_there(tmp_path: Path) -> None:
    file, seen = tmp_path / "file.txt", set()
    file.write_text("old")
    for _ in killed_at_every_step(lambda: write_text(file, "new", "the file")):
        seen.add(file.read_text())
        file.write_text("old")
        write_text(tmp_path / "other", "x", "the file")
        assert {p.name for p in tmp_path.iterdir()} == {"file.txt", "other"}
    assert seen == {"old", "new"}


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_text(tmp_path / "link", "text", "the file")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "file"):
        with pytest.raises(OutputError, match="the file cannot be written") as caught:
            write_text(path, "text", "the file")
        assert caught.value.where == str(path)


def test_only_a_full_disk_becomes_an_error_of_ours() -> None:
    with pytest.raises(OutputError, match="TMPDIR"), room_is_needed():
        raise OSError(errno.ENOSPC, "No space left on device", "x")
    with pytest.raises(FileNotFoundError), room_is_needed():
        raise FileNotFoundError(errno.ENOENT, "No such file")
    with pytest.raises(CalibrationError), room_is_needed():
        raise CalibrationError("other")
