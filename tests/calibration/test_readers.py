"""The array and image readers; what all readers hold is in `tests/contracts/test_readers.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kenosis_ort import Shards, calibrate, compare, quantize_static
from kenosis_ort.calibration import CalibrationConfig, Points, collect, sample_feeds
from kenosis_ort.calibration.archives import ImageFolderReader
from kenosis_ort.calibration.readers import ArrayReader
from kenosis_ort.errors import CalibrationError
from tests import models

X = np.arange(10 * 3, dtype=np.float32).reshape(10, 3)


def read(reader: Any, name: str = "x") -> list[np.ndarray]:
    return [feed[name] for feed in sample_feeds(reader)]


def test_a_single_npy(tmp_path: Path) -> None:
    np.save(tmp_path / "samples.npy", X)
    assert list(ArrayReader(tmp_path / "samples.npy").feed(0)) == ["samples"]
    assert list(ArrayReader(tmp_path / "samples.npy", input_name="x").feed(0)) == ["x"]


def test_a_sequence_of_feeds_is_used_as_it_is() -> None:
    reader = ArrayReader([{"x": X[:2]}, {"x": X[:5]}])
    assert [len(p) for p in read(reader)] == [2, 5]


def test_strided_collection() -> None:
    model = models.mlp()
    rng = np.random.default_rng(0)
    arrays = {"x": rng.standard_normal((6, 16)).astype(np.float32)}
    a = collect(model, ArrayReader(arrays), Points(["x"], config=CalibrationConfig(strided=2)))
    b = collect(model, ArrayReader(arrays, batch_size=6), Points(["x"]))
    assert a.range_of("x") == b.range_of("x")


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


def test_an_image_that_cannot_be_read_is_named(images: Path) -> None:
    (images / "a.png").write_bytes(b"broken")
    with pytest.raises(CalibrationError, match="cannot be read") as caught:
        ImageFolderReader(images, input_name="x", size=(4, 4)).feed(0)
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
