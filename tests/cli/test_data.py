"""From --data to a reader: arrays or images, told by what is there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from kenosis_ort import SyntheticReader
from kenosis_ort.cli import sources
from kenosis_ort.cli.main import build_parser, main
from kenosis_ort.cli.sources import TensorInput, holds_images, image_input
from kenosis_ort.errors import CalibrationError
from tests import models


def image_model(path: Path, *shapes: list[int | str]) -> Path:
    """Writes a model that hands its inputs on."""
    inputs = [helper.make_tensor_value_info(f"in{i}", TensorProto.FLOAT, s) for i, s in enumerate(shapes)]
    outputs = [helper.make_tensor_value_info(f"out{i}", TensorProto.FLOAT, s) for i, s in enumerate(shapes)]
    nodes = [helper.make_node("Relu", [f"in{i}"], [f"out{i}"]) for i in range(len(shapes))]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    onnx.save(helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


def write_images(folder: Path, count: int = 3) -> Path:
    image = pytest.importorskip("PIL.Image")
    folder.mkdir()
    for i in range(count):
        pixels = np.full((10, 12, 3), (40 * i, 100, 200), np.uint8)
        image.fromarray(pixels).save(folder / f"{i}.png")
    return folder


def reader_of(model: Path, *arguments: str):
    return sources.make_reader(build_parser().parse_args(["quantize", str(model), "out.onnx", *arguments]), model)


def test_kind_of_a_folder(tmp_path: Path):
    images = write_images(tmp_path / "images")
    assert holds_images(images)
    arrays = tmp_path / "arrays"
    arrays.mkdir()
    np.save(arrays / "a.npy", np.zeros(3, np.float32))
    (arrays / "readme.txt").write_text("x")
    assert not holds_images(arrays)
    np.save(images / "a.npy", np.zeros(3, np.float32))
    with pytest.raises(CalibrationError, match="both images and arrays"):
        holds_images(images)


@pytest.mark.parametrize("name", ["none", "notes.txt", "empty"])
def test_what_holds_no_data_is_refused_with_a_fix(tmp_path: Path, name: str):
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CalibrationError, match="Fix: ") as raised:
        holds_images(tmp_path / name)
    assert name in str(raised.value)


def test_image_folder_follows_the_models_input(tmp_path: Path):
    model = image_model(tmp_path / "m.onnx", ["n", 3, 6, 4])
    images = write_images(tmp_path / "images")
    feed = reader_of(model, "--data", str(images)).get_next()
    assert set(feed) == {"in0"}
    assert feed["in0"].shape == (1, 3, 6, 4)
    assert feed["in0"].dtype == np.float32


def test_image_folder_channels_last_batches_and_normalization(tmp_path: Path):
    model = image_model(tmp_path / "m.onnx", ["n", 6, 4, 3])
    images = write_images(tmp_path / "images")
    normalize = ["--scale", "1", "--mean", "0,100,200", "--std", "1,2,4", "--batch-size", "2", "--limit", "2"]
    reader = reader_of(model, "--data", str(images), *normalize)
    feed = reader.get_next()["in0"]
    assert feed.shape == (2, 6, 4, 3)
    np.testing.assert_allclose(feed[1, 0, 0], [40, 0, 0], atol=1e-4)
    assert reader.get_next() is None


def test_grey_images_and_a_fixed_batch_follow_the_model_too(tmp_path: Path):
    model = image_model(tmp_path / "m.onnx", [2, 1, 6, 4])
    images = write_images(tmp_path / "images", 4)
    assert reader_of(model, "--data", str(images)).get_next()["in0"].shape == (2, 1, 6, 4)


def test_a_single_array_goes_to_the_only_input(tmp_path: Path):
    np.save(tmp_path / "samples.npy", np.zeros((2, 3, 6, 4), np.float32))
    one = image_model(tmp_path / "one.onnx", ["n", 3, 6, 4])
    assert set(reader_of(one, "--data", str(tmp_path / "samples.npy")).get_next()) == {"in0"}
    two = image_model(tmp_path / "two.onnx", ["n", 3, 6, 4], ["n", 3, 6, 4])
    with pytest.raises(CalibrationError, match="--input"):
        reader_of(two, "--data", str(tmp_path / "samples.npy"))
    named = reader_of(two, "--data", str(tmp_path / "samples.npy"), "--input", "in1")
    assert set(named.get_next()) == {"in1"}


def test_dynamic_image_size_has_to_be_said(tmp_path: Path):
    model = image_model(tmp_path / "m.onnx", ["n", 3, "h", "w"])
    images = write_images(tmp_path / "images")
    with pytest.raises(CalibrationError, match="--size"):
        reader_of(model, "--data", str(images))
    feed = reader_of(model, "--data", str(images), "--size", "5x7").get_next()
    assert feed["in0"].shape == (1, 3, 5, 7)


def test_image_input_is_the_only_one_of_rank_4_or_the_named_one(tmp_path: Path):
    one = image_model(tmp_path / "one.onnx", [1, 2], [1, 3, 4, 4])
    assert image_input(one, None) == TensorInput("in1", (1, 3, 4, 4), np.dtype(np.float32))
    two = image_model(tmp_path / "two.onnx", [1, 3, 4, 4], ["n", 3, 8, 8])
    assert image_input(two, "in1").shape == (None, 3, 8, 8)
    with pytest.raises(CalibrationError, match="--input"):
        image_input(two, None)
    with pytest.raises(CalibrationError, match="in1"):
        image_input(two, "in11")


def test_array_and_synthetic_readers(tmp_path: Path):
    model = image_model(tmp_path / "m.onnx", ["n", 3, 6, 4])
    np.savez(tmp_path / "d.npz", in0=np.ones((5, 3, 6, 4), np.float32))
    reader = reader_of(model, "--data", str(tmp_path / "d.npz"), "--batch-size", "2")
    assert reader.get_next()["in0"].shape == (2, 3, 6, 4)
    first, again = (reader_of(model, "--synthetic", "2", "--seed", "7").get_next() for _ in range(2))
    np.testing.assert_array_equal(first["in0"], again["in0"])
    other = reader_of(model, "--synthetic", "2", "--seed", "8").get_next()
    assert not np.array_equal(first["in0"], other["in0"])


def test_the_output_may_stand_last_and_labels_are_left_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = models.mlp()
    onnx.save(model, tmp_path / "m.onnx")
    stacked = {name: np.concatenate([feed[name] for feed in models.feeds(model)]) for name in models.feeds(model)[0]}
    np.savez(tmp_path / "d.npz", **stacked, labels=np.arange(3), scale=np.float32(2))
    said = ["quantize", str(tmp_path / "m.onnx"), "--data", str(tmp_path / "d.npz"), "--no-promise"]
    assert main([*said, str(tmp_path / "last.onnx")]) == 0
    assert "left aside" in capsys.readouterr().err
    assert (tmp_path / "last.onnx").is_file()
    assert main(["compare", said[1], str(tmp_path / "last.onnx"), "--data", said[3]]) == 0
    with pytest.raises(SystemExit):
        main([*said, "another"])  # no model's file: an argument that is too much


def test_the_number_of_made_up_samples_may_stand_by_itself() -> None:
    assert len(SyntheticReader(models.mlp(), 5)) == 5
