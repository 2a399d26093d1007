"""From --data to a reader: arrays or images, told by what is there, and what a function of the caller's may return."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from kenosis_ort.calibration import sample_feeds
from kenosis_ort.calibration.feeds import InputSpec
from kenosis_ort.cli import sources
from kenosis_ort.cli.main import build_parser, main
from kenosis_ort.cli.sources import call_function, holds_images, image_input, names_function
from kenosis_ort.errors import CalibrationError
from tests import models, planning


def image_model(path: Path, *shapes: list[int | str]) -> Path:
    """Writes a model that hands its inputs on."""
    sizes = [",".join(map(str, shape)) for shape in shapes]
    ends = [", ".join(f"float[{size}] {name}{i}" for i, size in enumerate(sizes)) for name in ("in", "out")]
    nodes = " ".join(f"out{i} = Relu (in{i})" for i in range(len(shapes)))
    onnx.save(planning.parse(f"({ends[0]}) => ({ends[1]}) {{ {nodes} }}"), path)
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


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ("folder/a.png folder/notes.txt", True),
        ("folder/sub/a.JPG", True),
        ("folder/a.npy folder/notes.txt", False),
        ("folder/a.npy folder/sub/a.png", "folder holds both images and arrays"),
        ("folder/notes.txt", "folder holds neither images nor arrays"),
        ("notes.txt", "data does not exist"),
    ],
)
def test_images_are_told_from_arrays_and_what_is_neither_is_refused(tmp_path: Path, files: str, found: bool | str):
    for file in files.split():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    if isinstance(found, bool):
        assert holds_images(tmp_path / "folder") is found
        return
    with pytest.raises(CalibrationError, match=f"{found}.*folder.*Fix: "):
        holds_images(tmp_path / "folder")


def test_a_file_of_another_kind_is_refused(tmp_path: Path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CalibrationError, match=r"unknown kind.*notes.txt.*Fix: .*\.npz"):
        holds_images(tmp_path / "notes.txt")


@pytest.mark.parametrize(
    ("shape", "more", "expected"),
    [
        (["n", 3, 6, 4], "", (1, 3, 6, 4)),
        (["n", 6, 4, 3], "--batch-size 2", (2, 6, 4, 3)),
        ([2, 1, 6, 4], "", (2, 1, 6, 4)),
        (["n", 3, "h", "w"], "--size 5x7", (1, 3, 5, 7)),
    ],
    ids=["channels first", "channels last", "grey, a fixed batch", "size given"],
)
def test_images_follow_the_models_input(tmp_path: Path, shape: list[int | str], more: str, expected: tuple[int, ...]):
    images = write_images(tmp_path / "images", 4)
    feed = reader_of(image_model(tmp_path / "m.onnx", shape), "--data", str(images), *more.split()).get_next()
    assert set(feed) == {"in0"}
    assert feed["in0"].shape == expected
    assert feed["in0"].dtype == np.float32


def test_images_are_normalized_and_limited_and_a_size_that_is_not_fixed_has_to_be_said(tmp_path: Path):
    images = str(write_images(tmp_path / "images"))
    normalize = "--scale 1 --mean 0,100,200 --std 1,2,4 --batch-size 2 --limit 2"
    reader = reader_of(image_model(tmp_path / "m.onnx", ["n", 6, 4, 3]), "--data", images, *normalize.split())
    np.testing.assert_allclose(reader.get_next()["in0"][1, 0, 0], [40, 0, 0], atol=1e-4)
    assert reader.get_next() is None
    with pytest.raises(CalibrationError, match="--size"):
        reader_of(image_model(tmp_path / "m.onnx", ["n", 3, "h", "w"]), "--data", images)


def test_a_single_array_goes_to_the_only_input(tmp_path: Path):
    np.save(tmp_path / "samples.npy", np.zeros((2, 3, 6, 4), np.float32))
    one = image_model(tmp_path / "one.onnx", ["n", 3, 6, 4])
    assert set(reader_of(one, "--data", str(tmp_path / "samples.npy")).get_next()) == {"in0"}
    two = image_model(tmp_path / "two.onnx", ["n", 3, 6, 4], ["n", 3, 6, 4])
    with pytest.raises(CalibrationError, match="--input"):
        reader_of(two, "--data", str(tmp_path / "samples.npy"))
    assert set(reader_of(two, "--data", str(tmp_path / "samples.npy"), "--input", "in1").get_next()) == {"in1"}


def test_image_input_is_the_only_one_of_rank_4_or_the_named_one(tmp_path: Path):
    one = image_model(tmp_path / "one.onnx", [1, 2], [1, 3, 4, 4])
    assert image_input(one, None) == InputSpec("in1", np.dtype(np.float32), (1, 3, 4, 4))
    two = image_model(tmp_path / "two.onnx", [1, 3, 4, 4], ["n", 3, 8, 8])
    assert image_input(two, "in1").shape == ("n", 3, 8, 8)
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


def test_the_output_may_stand_last_and_labels_are_left_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
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


# -- a function of the caller's

SOURCE = """
import numpy as np
from onnxruntime.quantization import CalibrationDataReader

SAMPLES = np.arange(6, dtype=np.float32).reshape(3, 2)

class Reader(CalibrationDataReader):
    def __init__(self): self.left = iter([{"x": s[None]} for s in SAMPLES])
    def get_next(self): return next(self.left, None)

def reader(): return Reader()
def dictionary(): return {"x": SAMPLES}
def array(): return SAMPLES
def list_of_feeds(): return [{"x": s[None]} for s in SAMPLES]
def list_of_arrays(): return [s[None] for s in SAMPLES]
def generator():
    for s in SAMPLES:
        yield {"x": s[None]}
def nothing(): return []
def text(): return "samples.npz"
def number(): return 3
def fails(): raise ValueError("no disk")
def fails_late():
    yield {"x": SAMPLES[:1]}
    raise ValueError("no second disk")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "loader_of_samples.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "loader_of_samples", raising=False)
    return "loader_of_samples"


@pytest.mark.parametrize("function", ["reader", "dictionary", "array", "list_of_feeds", "list_of_arrays", "generator"])
@pytest.mark.parametrize("spelling", ["{}:{}", "{}.py:{}"])
def test_whatever_holds_samples_may_be_returned(module: str, function: str, spelling: str):
    path = list(sys.path)
    feeds = list(sample_feeds(call_function(spelling.format(module, function), lambda: "x")))
    assert [set(feed) for feed in feeds] == [{"x"}] * 3
    np.testing.assert_array_equal(np.concatenate([feed["x"] for feed in feeds]), np.arange(6).reshape(3, 2))
    assert sys.path == path


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{}:nothing", "no samples"),
        ("{}:text", "returned str"),
        ("{}:number", "returned int"),
        ("{}:fails", "ValueError: no disk"),
        ("{}:generatr", "Did you mean 'generator'?"),
        ("{}:SAMPLES", "no function 'SAMPLES'"),
        ("{}_not:reader", "ModuleNotFoundError"),
        ("{}_not.py:reader", "does not exist"),
    ],
)
def test_what_goes_wrong_is_said_with_a_fix(module: str, source: str, message: str):
    with pytest.raises(CalibrationError, match="Fix: ") as caught:
        call_function(source.format(module), lambda: "x")
    assert message in str(caught.value)


def test_a_generator_that_fails_later_is_named_as_well(module: str):
    feeds = sample_feeds(call_function(f"{module}:fails_late", lambda: "x"))
    next(feeds)
    with pytest.raises(CalibrationError, match="no second disk"):
        next(feeds)


def test_only_bare_arrays_ask_for_the_only_input(module: str):
    def two_inputs() -> str:
        raise CalibrationError("two inputs", fix="--input NAME")

    assert list(sample_feeds(call_function(f"{module}:list_of_feeds", two_inputs)))
    with pytest.raises(CalibrationError, match="two inputs"):
        call_function(f"{module}:list_of_arrays", two_inputs)


def test_a_function_is_told_from_a_path():
    functions = ["loader:samples", "package.loader:samples", "tools/loader.py:samples"]
    others = ["samples.npz", "C:\\data", "folder/samples", "loader:samples()"]
    assert [text for text in (*functions, *others) if names_function(text)] == functions
