"""Samples in tar files and Parquet tables: what was put in comes out, and what is wrong is named."""

from __future__ import annotations

import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kenosis_ort import CalibrationError, ImageFolderReader, ParquetReader, TarReader

RNG = np.random.default_rng(0)
ARRAYS = [RNG.standard_normal((3, 4)).astype(np.float32) for _ in range(5)]


def npy(array: Any, **options: Any) -> bytes:
    content = io.BytesIO()
    np.save(content, array, **options)
    return content.getvalue()


def tar(path: Path, entries: list[tuple[str, bytes]], mode: Any = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in entries:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def read(reader: Any) -> list[dict[str, Any]]:
    return list(iter(reader.get_next, None))


@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize("batch", [1, 2])
def test_arrays_of_a_tar_file(tmp_path: Path, mode: str, batch: int) -> None:
    entries = [(f"train/{n}.{kind}", npy(a)) for n, a in enumerate(ARRAYS) for kind in ("npy", "cls")]
    reader = TarReader(tar(tmp_path / "a.tar", entries, mode), {"x": "npy"}, batch_size=batch)
    found = read(reader)
    assert [len(f["x"]) for f in found] == ([1] * 5 if batch == 1 else [2, 2, 1])
    assert np.array_equal(np.concatenate([f["x"] for f in found]), np.stack(ARRAYS))
    assert reader.get_next() is None
    copy = pickle.loads(pickle.dumps(reader))
    assert len(read(copy)) == len(found), "a copy begins at the beginning, as one on a worker has to"
    reader.rewind()
    assert len(read(reader)) == len(found)


def test_images_are_prepared_as_those_of_a_folder(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    entries = []
    (tmp_path / "images").mkdir()
    for n in range(3):
        content = io.BytesIO()
        picture = image.fromarray(RNG.integers(0, 255, (9, 7, 3), np.uint8))
        picture.save(content, "png")
        (tmp_path / "images" / f"{n}.png").write_bytes(content.getvalue())
        entries.append((f"{n}.png", content.getvalue()))
    how: dict[str, Any] = {"size": (8, 8), "mean": 0.5, "resize": "crop"}
    expected = read(ImageFolderReader(tmp_path / "images", input_name="x", batch_size=2, **how))
    found = read(TarReader(tar(tmp_path / "a.tar", entries), {"x": "png"}, images=how, batch_size=2))
    for a, b in zip(expected, found, strict=True):
        assert np.array_equal(a["x"], b["x"])
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"picture": [content for _, content in entries]}), tmp_path / "a.parquet")
    found = read(ParquetReader(tmp_path / "a.parquet", {"x": "picture"}, images=how, batch_size=2))
    for a, b in zip(expected, found, strict=True):
        assert np.array_equal(a["x"], b["x"])


@pytest.mark.parametrize(
    ("entries", "inputs", "what"),
    [
        ([("a.npy", b"no array")], {"x": "npy"}, "array cannot be read"),
        ([("a.npy", npy(np.array([{}]), allow_pickle=True))], {"x": "npy"}, "array cannot be read"),
        ([("a.npy", npy(1.0)), ("b.npy", npy(1.0))], {"x": "npy", "y": "png"}, "no '.png'"),
        ([("a.png", b"")], {"x": "png"}, "How images are prepared"),
        ([("a.npy", npy(1.0))], {"x": "npz"}, "'npz' is no suffix"),
        ([], {}, "No input is named"),
    ],
)
def test_what_is_wrong_with_a_tar_file(
    tmp_path: Path, entries: list[tuple[str, bytes]], inputs: dict[str, str], what: str
) -> None:
    path = tar(tmp_path / "a.tar", entries)
    with pytest.raises(CalibrationError, match=what):
        read(TarReader(path, inputs))


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"x" * 2000)
    with pytest.raises(CalibrationError, match="tar file cannot be read"):
        read(TarReader(tmp_path / "a.tar", {"x": "npy"}))
    whole = tar(tmp_path / "b.tar.gz", [("a.npy", npy(np.zeros(5000)))], "w:gz").read_bytes()
    (tmp_path / "b.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CalibrationError, match="tar file cannot be read"):
        read(TarReader(tmp_path / "b.tar.gz", {"x": "npy"}))
    for kind in (TarReader, ParquetReader):
        with pytest.raises(CalibrationError, match="does not exist"):
            kind(tmp_path / "no", {"x": "npy"})
        with pytest.raises(CalibrationError, match="batch size"):
            kind(tmp_path / "a.tar", {"x": "npy"}, batch_size=0)


def test_rows_of_a_parquet_file(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    flat = arrow.array([a.reshape(-1) for a in ARRAYS], arrow.list_(arrow.float32(), 12))
    ids = arrow.array([[1, 2], [3], [4, 5], [6], [7]], arrow.list_(arrow.int64()))
    columns = {"a": flat, "n": arrow.array(range(5), arrow.int32()), "ids": ids, "s": ["x"] * 4 + [None]}
    parquet.write_table(arrow.table(columns), path, row_group_size=2)
    found = read(ParquetReader(path, {"x": "a", "n": "n"}, shapes={"x": (3, 4)}, batch_size=2))
    assert np.array_equal(np.concatenate([f["x"] for f in found]), np.stack(ARRAYS))
    assert np.array_equal(np.concatenate([f["n"] for f in found]), np.arange(5))
    assert (found[0]["x"].dtype, found[0]["n"].dtype) == (np.float32, np.int32)
    assert [f["i"].tolist() for f in read(ParquetReader(path, {"i": "ids"}))] == [
        [[1, 2]],
        [[3]],
        [[4, 5]],
        [[6]],
        [[7]],
    ]
    for inputs, options, what in (
        ({"x": "b"}, {}, "no column 'b'"),
        ({"x": "s"}, {}, "no array of numbers"),
        ({"x": "a"}, {"shapes": {"x": (5, 5)}}, r"12 numbers are not of shape \(5, 5\)"),
        ({"x": "ids"}, {"batch_size": 2}, "different shapes"),
    ):
        with pytest.raises(CalibrationError, match=what):
            read(ParquetReader(path, inputs, **options))  # type: ignore[arg-type]
    (tmp_path / "b").write_text("no parquet")
    with pytest.raises(CalibrationError, match="Parquet file cannot be read"):
        ParquetReader(tmp_path / "b", {"x": "a"})
