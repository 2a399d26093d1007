"""From --data to a reader: arrays or images, told by what is there, and what a function of the caller's may return."""

import sys

import numpy as np
import onnx
import pytest

from kenosis_ort.calibration import sample_feeds
from kenosis_ort.calibration.feeds import InputSpec
from kenosis_ort.cli import main, sources
from kenosis_ort.errors import CalibrationError
from tests import models, planning


def image_model(path, *shapes):
    """Writes a model that hands its inputs on."""
    sizes = [",".join(map(str, shape)) for shape in shapes]
    ends = [", ".join(f"float[{size}] {name}{i}" for i, size in enumerate(sizes)) for name in ("in", "out")]
    nodes = " ".join(f"out{i} = Relu (in{i})" for i in range(len(shapes)))
    onnx.save(planning.parse(f"({ends[0]}) => ({ends[1]}) {{ {nodes} }}"), path)
    return path


def write_images(folder, count=3):
    image = pytest.importorskip("PIL.Image")
    folder.mkdir()
    for i in range(count):
        pixels = np.full((10, 12, 3), (40 * i, 100, 200), np.uint8)
        image.fromarray(pixels).save(folder / f"{i}.png")
    return folder


def reader_of(model, data, *more):
    words = ["quantize", str(model), "out.onnx", *([] if data is None else ["--data", str(data)]), *more]
    return sources.make_reader(main.build_parser().parse_args(words), model)


@pytest.mark.parametrize(("files", "found"), [
    ("folder/a.png folder/notes.txt", True), ("folder/sub/a.JPG", True), ("folder/a.npy folder/notes.txt", False),
    ("folder/a.npy folder/sub/a.png", "folder holds both images and arrays"),
    ("folder/notes.txt", "folder holds neither images nor arrays"), ("folder", r"unknown kind.*Fix: .*\.npz"),
    ("notes.txt", "data does not exist"),
])  # fmt: skip
def test_images_are_told_from_arrays_and_what_is_neither_is_refused(tmp_path, files, found):
    for file in files.split():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    if isinstance(found, bool):
        assert sources.holds_images(tmp_path / "folder") is found
        return
    with pytest.raises(CalibrationError, match=rf"{found}.*") as caught:
        sources.holds_images(tmp_path / "folder")
    assert (caught.value.where, bool(caught.value.fix)) == (str(tmp_path / "folder"), True)


@pytest.mark.parametrize(("shape", "more", "expected"), [
    (["n", 3, 6, 4], "", (1, 3, 6, 4)), (["n", 6, 4, 3], "--batch-size 2", (2, 6, 4, 3)),
    ([2, 1, 6, 4], "", (2, 1, 6, 4)), (["n", 3, "h", "w"], "--size 5x7", (1, 3, 5, 7)),
], ids=["channels first", "channels last", "grey, a fixed batch", "size given"])  # fmt: skip
def test_images_follow_the_models_input(tmp_path, shape, more, expected):
    images = write_images(tmp_path / "images", 4)
    feed = reader_of(image_model(tmp_path / "m.onnx", shape), images, *more.split()).get_next()
    assert {name: (value.shape, value.dtype) for name, value in feed.items()} == {"in0": (expected, np.float32)}


def test_images_are_normalized_and_limited_and_a_size_that_is_not_fixed_has_to_be_said(tmp_path):
    images = write_images(tmp_path / "images")
    normalize = "--scale 1 --mean 0,100,200 --std 1,2,4 --batch-size 2 --limit 2"
    reader = reader_of(image_model(tmp_path / "m.onnx", ["n", 6, 4, 3]), images, *normalize.split())
    np.testing.assert_allclose(reader.get_next()["in0"][1, 0, 0], [40, 0, 0], atol=1e-4)
    assert reader.get_next() is None
    with pytest.raises(CalibrationError, match="--size"):
        reader_of(image_model(tmp_path / "m.onnx", ["n", 3, "h", "w"]), images)


def test_a_single_array_goes_to_the_only_input(tmp_path):
    data, shape = tmp_path / "samples.npy", ["n", 3, 6, 4]
    np.save(data, np.zeros((2, 3, 6, 4), np.float32))
    one, two = image_model(tmp_path / "one.onnx", shape), image_model(tmp_path / "two.onnx", shape, shape)
    assert set(reader_of(one, data).get_next()) == {"in0"}
    with pytest.raises(CalibrationError, match="--input"):
        reader_of(two, data)
    assert set(reader_of(two, data, "--input", "in1").get_next()) == {"in1"}


def test_image_input_is_the_only_one_of_rank_4_or_the_named_one(tmp_path):
    one = image_model(tmp_path / "one.onnx", [1, 2], [1, 3, 4, 4])
    assert sources.image_input(one, None) == InputSpec("in1", np.dtype(np.float32), (1, 3, 4, 4))
    two = image_model(tmp_path / "two.onnx", [1, 3, 4, 4], ["n", 3, 8, 8])
    assert sources.image_input(two, "in1").shape == ("n", 3, 8, 8)
    for name, said in ((None, "--input"), ("in11", "in1")):
        with pytest.raises(CalibrationError, match=said):
            sources.image_input(two, name)


def test_array_and_synthetic_readers(tmp_path):
    model = image_model(tmp_path / "m.onnx", ["n", 3, 6, 4])
    np.savez(tmp_path / "d.npz", in0=np.ones((5, 3, 6, 4), np.float32))
    assert reader_of(model, tmp_path / "d.npz", "--batch-size", "2").get_next()["in0"].shape == (2, 3, 6, 4)
    first, again, other = (
        reader_of(model, None, "--synthetic", "2", "--seed", seed).get_next()["in0"].tolist() for seed in "778"
    )
    assert first == again != other


def test_the_output_may_stand_last_and_labels_are_left_aside(tmp_path, capsys):
    model, data, last = (str(tmp_path / name) for name in ("m.onnx", "d.npz", "last.onnx"))
    onnx.save(models.mlp(), model)
    np.savez(data, x=models.normal((4, 16)), labels=np.arange(3), scale=np.float32(2))
    said = ["quantize", model, "--data", data, "--no-promise"]
    assert main.main([*said, last]) == 0
    assert "left aside" in capsys.readouterr().err
    assert main.main(["compare", model, last, "--data", data]) == 0
    with pytest.raises(SystemExit):
        main.main([*said, "another"])  # no model's file: an argument that is too much


# -- a function of the caller's

SOURCE = """
import numpy as np
from tests.models import FeedReader

SAMPLES = np.arange(6, dtype=np.float32).reshape(3, 2)

def dictionary(): return {"x": SAMPLES}
def array(): return SAMPLES
def list_of_feeds(): return [{"x": s[None]} for s in SAMPLES]
def list_of_arrays(): return [s[None] for s in SAMPLES]
def reader(): return FeedReader(list_of_feeds())
def generator(): yield from list_of_feeds()
def nothing(): return []
def text(): return "samples.npz"
def number(): return 3
def fails(): raise ValueError("no disk")
def fails_late():
    yield {"x": SAMPLES[:1]}
    raise ValueError("no second disk")
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "loader_of_samples.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "loader_of_samples", raising=False)
    return "loader_of_samples"


@pytest.mark.parametrize("function", ["reader", "dictionary", "array", "list_of_feeds", "list_of_arrays", "generator"])
@pytest.mark.parametrize("spelling", ["{}:{}", "{}.py:{}"])
def test_whatever_holds_samples_may_be_returned(module, function, spelling):
    path = list(sys.path)
    feeds = list(sample_feeds(sources.call_function(spelling.format(module, function), lambda: "x")))
    assert [set(feed) for feed in feeds] == [{"x"}] * 3
    np.testing.assert_array_equal(np.concatenate([feed["x"] for feed in feeds]), np.arange(6).reshape(3, 2))
    assert sys.path == path


@pytest.mark.parametrize(("source", "message"), [
    ("{}:nothing", "no samples"), ("{}:text", "returned str"), ("{}:number", "returned int"),
    ("{}:fails", "ValueError: no disk"), ("{}:generatr", "Did you mean 'generator'?"),
    ("{}:SAMPLES", "no function 'SAMPLES'"), ("{}_not:reader", "ModuleNotFoundError"),
    ("{}_not.py:reader", "does not exist"),
])  # fmt: skip
def test_what_goes_wrong_is_said_with_a_fix(module, source, message):
    with pytest.raises(CalibrationError, match="Fix: ") as caught:
        sources.call_function(source.format(module), lambda: "x")
    assert message in str(caught.value)


def test_a_generator_that_fails_later_is_named_as_well(module):
    feeds = sample_feeds(sources.call_function(f"{module}:fails_late", lambda: "x"))
    next(feeds)
    with pytest.raises(CalibrationError, match="no second disk"):
        next(feeds)


def test_only_bare_arrays_ask_for_the_only_input(module):
    def two_inputs():
        raise CalibrationError("two inputs", fix="--input NAME")

    assert list(sample_feeds(sources.call_function(f"{module}:list_of_feeds", two_inputs)))
    with pytest.raises(CalibrationError, match="two inputs"):
        sources.call_function(f"{module}:list_of_arrays", two_inputs)


def test_a_function_is_told_from_a_path():
    functions = ["loader:samples", "package.loader:samples", "tools/loader.py:samples"]
    others = ["samples.npz", "C:\\data", "folder/samples", "loader:samples()"]
    assert [text for text in (*functions, *others) if sources.names_function(text)] == functions
