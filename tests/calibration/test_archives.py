"""Samples in tar files and Parquet tables: what was put in comes out, and what is wrong is named."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kenosis_ort import CalibrationError, ImageFolderReader, ParquetReader, TarReader
from tests.contracts.readers import npy, read, tar

RNG = np.random.default_rng(0)
ARRAYS = [RNG.standard_normal((3, 4)).astype(np.float32) for _ in range(5)]


@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize("batch", [1, 2])
def test_arrays_of_a_tar_file(tmp_path: Path, mode: str, batch: int) -> None:
    entries = [(f"train/{n}.{kind}", npy(a)) for n, a in enumerate(ARRAYS) for kind in ("npy", "cls")]
    reader = TarReader(tar(tmp_path / "a.tar", dict(entries), mode), {"x": "npy"}, batch_size=batch)
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
    found = read(TarReader(tar(tmp_path / "a.tar", dict(entries)), {"x": "png"}, images=how, batch_size=2))
    for a, b in zip(expected, found, strict=True):
        assert np.array_equal(a["x"], b["x"])
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"picture": [content for _, content in entries]}), tmp_path / "a.parquet")
    found = read(ParquetReader(tmp_path / "a.parquet", {"x": "picture"}, images=how, batch_size=2))
    for a, b in zip(expected, found, strict=True):
        assert np.array_equal(a["x"], b["x"])


def test_a_tar_file_that_is_cut_is_none(tmp_path: Path) -> None:
    whole = tar(tmp_path / "b.tar.gz", {"a.npy": npy(np.zeros(5000))}, "w:gz").read_bytes()
    (tmp_path / "b.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CalibrationError, match="tar file cannot be read"):
        read(TarReader(tmp_path / "b.tar.gz", {"x": "npy"}))


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
