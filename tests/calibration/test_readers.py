"""The array and image readers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnxruntime.quantization import CalibrationDataReader

from kenosis_ort import Shards, calibrate, compare, quantize_static
from kenosis_ort.calibration import CalibrationConfig, Points, collect, sample_feeds
from kenosis_ort.calibration.archives import ImageFolderReader
from kenosis_ort.calibration.readers import ArrayReader
from kenosis_ort.errors import CalibrationError
from tests import models

X = np.arange(10 * 3, dtype=np.float32).reshape(10, 3)
Y = np.arange(10, dtype=np.int64)


def read(reader: Any, name: str = "x") -> list[np.ndarray]:
    return [feed[name] for feed in sample_feeds(reader)]


def npz(folder: Path) -> Path:
    np.savez(folder / "data.npz", x=X, y=Y)
    return folder / "data.npz"


def npy_folder(folder: Path) -> Path:
    (folder / "arrays").mkdir()
    np.save(folder / "arrays" / "x.npy", X)
    np.save(folder / "arrays" / "y.npy", Y)
    return folder / "arrays"


@pytest.mark.parametrize("make", [npz, npy_folder, lambda _: {"x": X, "y": Y}])
@pytest.mark.parametrize(("batch", "sizes"), [(1, [1] * 10), (4, [4, 4, 2]), (10, [10]), (64, [10])])
def test_arrays_with_a_sample_axis(make: Any, batch: int, sizes: list[int], tmp_path: Path) -> None:
    reader = ArrayReader(make(tmp_path), batch_size=batch)
    assert isinstance(reader, CalibrationDataReader)
    assert len(reader) == len(sizes)
    parts = read(reader)
    assert [len(p) for p in parts] == sizes
    np.testing.assert_array_equal(np.concatenate(parts), X)
    assert parts[0].dtype == np.float32
    assert reader.get_next() is None
    reader.rewind()
    np.testing.assert_array_equal(np.concatenate(read(reader, "y")), Y)


def test_a_folder_of_npz_is_one_feed_a_file(tmp_path: Path) -> None:
    for i in range(3):
        np.savez(tmp_path / f"{i}.npz", x=X[i : i + 2], y=Y[:1])
    reader = ArrayReader(tmp_path, batch_size=7)
    assert len(reader) == 3
    np.testing.assert_array_equal(read(reader)[1], X[1:3])


def test_a_single_npy(tmp_path: Path) -> None:
    np.save(tmp_path / "samples.npy", X)
    assert list(ArrayReader(tmp_path / "samples.npy").feed(0)) == ["samples"]
    assert list(ArrayReader(tmp_path / "samples.npy", input_name="x").feed(0)) == ["x"]


def test_a_sequence_of_feeds_is_used_as_it_is() -> None:
    reader = ArrayReader([{"x": X[:2]}, {"x": X[:5]}])
    assert [len(p) for p in read(reader)] == [2, 5]


def test_range_as_stock_sets_it() -> None:
    reader = ArrayReader({"x": X})
    reader.set_range(start_index=4, end_index=6)
    np.testing.assert_array_equal(np.concatenate(read(reader)), X[4:6])
    assert len(reader) == 10
    reader.set_range(8, 20)
    assert len(read(reader)) == 2
    with pytest.raises(CalibrationError, match="range"):
        reader.set_range(3, 1)


def test_source_arrays_are_not_shared() -> None:
    source = X.copy()
    feed = ArrayReader({"x": source}).feed(0)
    feed["x"][:] = -1
    np.testing.assert_array_equal(source, X)


def test_strided_collection() -> None:
    model = models.mlp()
    rng = np.random.default_rng(0)
    arrays = {"x": rng.standard_normal((6, 16)).astype(np.float32)}
    a = collect(model, ArrayReader(arrays), Points(["x"], config=CalibrationConfig(strided=2)))
    b = collect(model, ArrayReader(arrays, batch_size=6), Points(["x"]))
    assert a.range_of("x") == b.range_of("x")


def bad_sources(folder: Path) -> dict[str, Any]:
    (folder / "text.npz").write_text("no archive")
    (folder / "empty").mkdir()
    (folder / "mixed").mkdir()
    np.save(folder / "mixed" / "a.npy", X)
    np.savez(folder / "mixed" / "b.npz", x=X)
    np.save(folder / "objects.npy", np.array([{}, {}], dtype=object), allow_pickle=True)
    np.savez(folder / "objects.npz", x=np.array([{}, {}], dtype=object))
    whole = npz(folder).read_bytes()
    (folder / "cut.npz").write_bytes(whole[: len(whole) // 2])
    return {
        "does not exist": folder / "none.npz",
        "text.npz": folder / "text.npz",
        "cut.npz": folder / "cut.npz",
        "neither": folder / "empty",
        "both": folder / "mixed",
        "objects.npy": folder / "objects.npy",
        "objects.npz": folder / "objects.npz",
        "different numbers of samples": {"x": X, "y": Y[:3]},
        "no sample": {"x": X[:0]},
        "no leading axis": {"x": np.float32(3)},
        "from a int": 3,
        "holds no sample": [],
    }


BAD = """does not exist|text.npz|cut.npz|neither|both|objects.npy|objects.npz|different numbers of samples|no sample|no
leading axis|from a int|holds no sample""".replace("\n", " ").split("|")


@pytest.mark.parametrize("match", BAD)
def test_bad_sources(match: str, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError) as caught:
        ArrayReader(bad_sources(tmp_path)[match])
    assert match in str(caught.value)


def test_bad_batch_size() -> None:
    with pytest.raises(CalibrationError, match="batch size"):
        ArrayReader({"x": X}, batch_size=0)


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
    assert [len(f) for f in read(reader)] == [2, 1]
    assert reader.feed(1)["x"].dtype == np.uint8
    assert reader.feed(1)["x"].max() == 100
    assert len(ImageFolderReader(images, input_name="x", size=(4, 4), limit=2)) == 2
    grey = ImageFolderReader(images, input_name="x", size=(4, 4), channel_order="GRAY")
    assert grey.feed(2)["x"].shape == (1, 1, 4, 4)


def test_images_errors(images: Path) -> None:
    good: dict[str, Any] = {"input_name": "x", "size": (4, 4)}
    for options, match in [
        ({"layout": "CHW"}, "NCHW"),
        ({"resize": "squash"}, "letterbox"),
        ({"mean": [1, 2]}, "mean has 2 numbers"),
        ({"std": 0.0}, "std"),
        ({"size": (0, 4)}, "positive"),
        ({"limit": 0}, "positive"),
    ]:
        with pytest.raises(CalibrationError, match=match):
            ImageFolderReader(images, **{**good, **options})
    with pytest.raises(CalibrationError, match="does not exist"):
        ImageFolderReader(images / "none", **good)
    (images / "nothing").mkdir()
    with pytest.raises(CalibrationError, match="no image"):
        ImageFolderReader(images / "nothing", **good)
    (images / "a.png").write_bytes(b"broken")
    with pytest.raises(CalibrationError, match="cannot be read") as caught:
        ImageFolderReader(images, **good).feed(0)
    assert str(caught.value.where).endswith("a.png")


def test_images_without_pillow(images: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(CalibrationError, match="pip install pillow"):
        ImageFolderReader(images, input_name="x", size=(4, 4))


@pytest.mark.parametrize("form", ["dictionary", "shards", "readers in shards"])
def test_labels_are_left_aside_in_every_form_of_arrays(form: str, tmp_path: Path) -> None:
    model = models.mlp()
    (name,) = [value.name for value in model.graph.input]
    data = {name: np.stack([feed[name][0] for feed in models.feeds(model, 4)]), "label": np.arange(4)}
    paths = [tmp_path / "a.npz", tmp_path / "b.npz"]
    for path in paths:
        np.savez(path, **data)
    forms = {"dictionary": lambda: ArrayReader(data), "shards": lambda: Shards(paths)}
    forms["readers in shards"] = lambda: Shards([ArrayReader(data), ArrayReader(data)])
    report = quantize_static(model, tmp_path / "o.onnx", forms[form](), recipe="plain", promise=False)
    assert "Left aside in the data, no input of the model: label." in report.notes
    assert calibrate(model, forms[form]()).samples == (4 if form == "dictionary" else 8)


def test_what_is_no_input_of_the_model_is_left_aside(tmp_path: Path) -> None:
    model, out = models.mlp(), tmp_path / "out.onnx"
    stacked = {name: np.concatenate([feed[name] for feed in models.feeds(model)]) for name in models.feeds(model)[0]}
    np.savez(tmp_path / "data.npz", **stacked, labels=np.arange(len(next(iter(stacked.values())))))
    reader = ArrayReader(tmp_path / "data.npz")
    report = quantize_static(model, out, reader, recipe="plain", promise=False)
    assert "Left aside in the data, no input of the model: labels." in report.notes
    assert compare(model, out, ArrayReader(tmp_path / "data.npz"), samples=2).samples == 2
    assert "labels" in reader.feed(0)  # the caller's reader is as it was
    np.savez(tmp_path / "more.npz", **stacked, names=np.arange(3), scale=np.float32(2))
    told = ArrayReader(tmp_path / "more.npz", inputs=stacked)
    assert told.left_aside == ("names", "scale")
    assert told.feed(0).keys() == stacked.keys()


def test_a_name_that_leaves_an_input_unfed_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", wrong=np.zeros((4, 3), np.float32))
    with pytest.raises(CalibrationError, match="'wrong'"):
        quantize_static(models.mlp(), tmp_path / "out.onnx", ArrayReader(tmp_path / "data.npz"), recipe="plain")
