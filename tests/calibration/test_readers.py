"""Readers of arrays, images, tar files and Parquet tables; what all readers hold: `tests/contracts/test_readers.py`."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kenosis_ort
from kenosis_ort import CalibrationError, ImageFolderReader, ParquetReader, TarReader
from kenosis_ort.calibration.readers import ArrayReader
from tests import models
from tests.contracts.readers import images as pictures
from tests.contracts.readers import npy, parquet, read, tar

X = np.arange(10 * 3, dtype=np.float32).reshape(10, 3)


def test_a_single_npy_is_called_as_its_file_or_as_the_caller_says(tmp_path: Path) -> None:
    np.save(tmp_path / "samples.npy", X)
    for name, options in (("samples", {}), ("x", {"input_name": "x"})):
        assert list(ArrayReader(tmp_path / "samples.npy", **options).feed(0)) == [name]


# ---- images ---------------------------------------------------------------------------------------------------


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Three images of 6 rows and 12 columns: left half red, right half blue, and a grey one in a subfolder."""
    image = pytest.importorskip("PIL.Image")
    pixels = np.zeros((6, 12, 3), np.uint8)
    pixels[:, :6, 0] = 255
    pixels[:, 6:, 2] = 255
    for name in ("a.png", "b.png"):
        image.fromarray(pixels).save(tmp_path / name)
    (tmp_path / "class").mkdir()
    image.fromarray(np.full((6, 12), 100, np.uint8)).save(tmp_path / "class" / "c.png")
    (tmp_path / "notes.txt").write_text("no image")
    return tmp_path


def test_images_layout_scale_and_order(images: Path) -> None:
    reader = ImageFolderReader(images, input_name="x", size=(6, 12), mean=[0.5, 0, 0], std=[0.5, 1, 1])
    assert (len(reader), reader.feed(0)["x"].shape, reader.feed(0)["x"].dtype) == (3, (1, 3, 6, 12), np.float32)
    first = reader.feed(0)["x"][0]
    assert (first[0, 0, 0], first[0, 0, -1], first[2, 0, -1]) == (1.0, -1.0, 1.0)
    np.testing.assert_allclose(reader.feed(2)["x"][0, 1], 100 / 255, rtol=1e-6)
    bgr = ImageFolderReader(images, input_name="x", size=(6, 12), channel_order="BGR", layout="NHWC", scale=1.0)
    assert bgr.feed(0)["x"].shape == (1, 6, 12, 3)
    assert bgr.feed(0)["x"][0, 0, 0].tolist() == [0, 0, 255]


def test_images_resize(images: Path) -> None:
    common: dict[str, Any] = {"input_name": "x", "size": (6, 6), "scale": 1.0}
    crop = ImageFolderReader(images, resize="crop", **common).feed(0)["x"][0]
    assert crop[0, 0].tolist() == [255, 255, 255, 0, 0, 0]  # the middle six columns
    box = ImageFolderReader(images, resize="letterbox", fill=7, **common).feed(0)["x"][0]
    assert box[:, 0].tolist() == [[7] * 6] * 3
    assert box[:, -1].tolist() == [[7] * 6] * 3
    assert box[0, 3, 0] == 255
    stretch = ImageFolderReader(images, **common).feed(0)["x"][0]
    assert (stretch[0, 0, 0], stretch[2, 0, -1]) == (255, 255)


def test_images_batch_limit_type_and_grey(images: Path) -> None:
    reader = ImageFolderReader(images, input_name="x", size=(4, 4), batch_size=2, scale=1.0, dtype=np.uint8)
    assert [len(feed["x"]) for feed in read(reader)] == [2, 1]
    assert reader.feed(1)["x"].dtype == np.uint8
    assert reader.feed(1)["x"].max() == 100
    assert len(ImageFolderReader(images, input_name="x", size=(4, 4), limit=2)) == 2
    grey = ImageFolderReader(images, input_name="x", size=(4, 4), channel_order="GRAY")
    assert grey.feed(2)["x"].shape == (1, 1, 4, 4)


def test_images_without_pillow(images: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(CalibrationError, match="pip install pillow"):
        ImageFolderReader(images, input_name="x", size=(4, 4))


@pytest.mark.parametrize("form", ["file", "dictionary", "shards", "readers in shards"])
def test_labels_are_left_aside_in_every_form_of_arrays(form: str, tmp_path: Path) -> None:
    model, out, path = models.mlp(), tmp_path / "o.onnx", tmp_path / "a.npz"
    data = {"x": np.concatenate([feed["x"] for feed in models.feeds(model, 4)]), "label": np.arange(4)}
    np.savez(path, **data)
    arrays = {"file": ArrayReader(path), "dictionary": ArrayReader(data)}
    shards = {"shards": [path, path], "readers in shards": list(arrays.values())}
    source: Any = arrays[form] if form in arrays else kenosis_ort.Shards(shards[form])
    report = kenosis_ort.quantize_static(model, out, source, recipe="plain", promise=False)
    assert "Left aside in the data, no input of the model: label." in report.notes
    source.rewind()
    assert kenosis_ort.calibrate(model, source).samples == (8 if "shards" in form else 4)
    if isinstance(source, ArrayReader):
        assert "label" in source.feed(0), "the caller's reader is as it was"
        source.rewind()
        assert kenosis_ort.compare(model, out, source, samples=2).samples == 2


def test_arrays_that_are_no_inputs() -> None:
    told = ArrayReader({"x": X, "names": np.arange(3), "scale": np.float32(2)}, inputs=["x"])
    assert told.left_aside == ("names", "scale")
    assert list(told.feed(0)) == ["x"]


# ---- tar files and Parquet tables ------------------------------------------------------------------------------------


RNG = np.random.default_rng(0)
ARRAYS = [RNG.standard_normal((3, 4)).astype(np.float32) for _ in range(5)]


def test_arrays_of_a_tar_file(tmp_path: Path) -> None:
    entries = {f"train/{n}.{kind}": npy(a) for n, a in enumerate(ARRAYS) for kind in ("npy", "cls")}
    reader = TarReader(tar(tmp_path / "a.tar", entries, "w:gz"), {"x": "npy"})
    found = read(reader)
    assert np.array_equal(np.concatenate([f["x"] for f in found]), np.stack(ARRAYS))
    copy = pickle.loads(pickle.dumps(reader))
    assert len(read(copy)) == len(found), "a copy begins at the beginning, as one on a worker has to"


def test_images_are_prepared_as_those_of_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    pytest.importorskip("pyarrow")
    folder = pictures(tmp_path / "images")
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    how: dict[str, Any] = {"size": (8, 8), "mean": 0.5, "resize": "crop"}
    expected = read(ImageFolderReader(folder, input_name="x", batch_size=2, **how))
    table = parquet(tmp_path / "a.parquet", picture=[*files.values()])
    in_tar = TarReader(tar(tmp_path / "a.tar", files), {"x": "png"}, images=how, batch_size=2)
    for reader in (in_tar, ParquetReader(table, {"x": "picture"}, images=how, batch_size=2)):
        np.testing.assert_equal(read(reader), expected)


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
    assert [f["i"][0].tolist() for f in read(ParquetReader(path, {"i": "ids"}))] == [[1, 2], [3], [4, 5], [6], [7]]
