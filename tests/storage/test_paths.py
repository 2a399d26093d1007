from __future__ import annotations

import os
from pathlib import Path

import pytest

from kenosis_ort.errors import OutputError
from kenosis_ort.storage import writing
from kenosis_ort.storage.writing import check_apart, same_file


def spellings(folder: Path) -> dict[str, Path]:
    """Paths that are all the file ``model.onnx``."""
    model = folder / "model.onnx"
    model.write_bytes(b"model")
    (folder / "sub").mkdir()
    (folder / "soft.onnx").symlink_to(model)
    os.link(model, folder / "hard.onnx")
    (folder / "linked").symlink_to(folder)
    return {
        "itself": model,
        "relative": Path(os.path.relpath(model)),
        "by a parent": folder / "sub" / ".." / "model.onnx",
        "soft link": folder / "soft.onnx",
        "hard link": folder / "hard.onnx",
        "linked folder": folder / "linked" / "model.onnx",
    }


def test_every_spelling_of_a_file_that_exists(tmp_path: Path) -> None:
    for path in spellings(tmp_path).values():
        assert same_file(path, tmp_path / "model.onnx")
        assert not same_file(path, tmp_path / "other.onnx")


def test_spellings_of_a_file_that_does_not_exist(tmp_path: Path) -> None:
    new = tmp_path / "new.onnx"
    (tmp_path / "to_new").symlink_to(new)
    (tmp_path / "linked").symlink_to(tmp_path)
    for path in (new, tmp_path / "sub" / ".." / "new.onnx", tmp_path / "to_new", tmp_path / "linked" / "new.onnx"):
        assert same_file(path, new)
    assert not same_file(new, tmp_path / "newer.onnx")


def test_case_where_the_system_ignores_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_FOLDS_CASE", True)
    assert same_file(tmp_path / "Out.onnx", tmp_path / "out.ONNX")
    monkeypatch.setattr(writing, "_FOLDS_CASE", False)
    assert not same_file(tmp_path / "Out.onnx", tmp_path / "out.ONNX")


def test_both_are_named(tmp_path: Path) -> None:
    model, out = tmp_path / "model.onnx", tmp_path / "out.onnx"
    with pytest.raises(OutputError, match="the report is the float model itself"):
        check_apart([("the output", out), ("the report", model)], [("the float model", model)])
    with pytest.raises(OutputError, match="the report is the output itself"):
        check_apart([("the output", out), ("the report", out)], [("the float model", model)])
    check_apart([("the output", out)], [("the float model", model), ("the float model", model)])
