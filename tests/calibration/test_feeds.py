"""Readers as users write them and those that come with us; what is said about wrong data."""

import pickle
from functools import partial
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from onnxruntime.quantization import CalibrationDataReader

import kenosis_ort
from kenosis_ort import ArrayReader, CalibrationError, ImageFolderReader, ParquetReader, TarReader
from kenosis_ort.calibration import feeds
from tests import models
from tests.calibration.support import ListReader, one_node_model, random_feeds, swept
from tests.contracts.test_readers import images as pictures, npy, parquet, read, tar
from tests.planning import parse

METHODS = pytest.mark.parametrize("method", ["minmax", "percentile"])


def run(reader, *, model=None, tensors=("y",), **options):
    return swept(one_node_model() if model is None else model, reader, tensors, **options)


@METHODS
def test_one_pass_over_a_one_shot_reader_that_tells_no_length(method):
    reader, seen = models.FeedReader(random_feeds(5)), list[Any]()
    assert run(reader, method=method, progress=lambda *told: seen.append(told)).samples == 5
    assert (reader.handed_out, seen) == (5, [(done, None) for done in range(6)])
    run(ListReader(random_feeds(1)), progress=lambda *told: seen.append(told))
    assert seen[6:] == [(0, 1), (1, 1)]


X = np.zeros((2, 3), np.float32)
LAST, CHANNELS_FIRST = {"x": np.zeros((1, 8, 8, 3), np.float32)}, one_node_model(shape=(1, 3, 8, 8))
TWO_INPUTS = {k: v for k, v in models.feeds(models.two_input_detector(), 1)[0].items() if k != "scale_factor"}
RESHAPED = parse("g (float[N,M] x) => (float[P] z) <int64[1] size = {15}> { y = Reshape (x, size)  z = Neg (y) }")
NO_SUCH = one_node_model()
NO_SUCH.graph.node[0].op_type = "NoSuchOp"


class Failing(CalibrationDataReader):
    def __init__(self, error):
        self.error, self.left = error, random_feeds(2)

    def get_next(self):
        if not self.left:
            raise self.error
        return self.left.pop()


NoRange = type("NoRange", (models.FeedReader,), {"__len__": lambda _: 4})
WRONG = (
    *((r"No data is collected.*get_next.*rewound", partial(run, empty)) for empty in ([], ListReader([]), iter(()))),
    *(("get_next", partial(run, reader)) for reader in (3, None, "path", {"x": 1})),
    (r"list, not a dictionary.*sample 1", partial(run, [random_feeds(1)[0], [1, 2]])),
    (r"failed: KeyError: 'pixel_values'\..*sample 2", lambda **how: run(Failing(KeyError("pixel_values")), **how)),
    (r"reader failed: ValueError.*sample 0", lambda **how: run(map(int, ["x"]), **how)),
    (r"^my own words", lambda **how: run(Failing(CalibrationError("my own words")), **how)),
    ("lacks the input 'scale_factor'", partial(run, [TWO_INPUTS], model=models.two_input_detector(), tensors=())),
    (r"got float32 of shape \(1, 8, 8, 3\).*transpose\(0, 3, 1, 2\)", partial(run, [LAST], model=CHANNELS_FIRST)),
    (r"float model fails.*sample 1", partial(run, [*random_feeds(1), {"x": X}], model=RESHAPED)),
    ("tensor 'layer_1'", partial(run, random_feeds(1), tensors=("layer_1",))),
    ("custom_op_libraries", partial(run, random_feeds(1), model=NO_SUCH)),
    *(
        (says, partial(run, [random_feeds(1)[0], feed]))
        for says, feed in (
            (r"(lacks|Did you mean).*sample 1", {"X1": X}),
            (r"'xx' that the model lacks\. Did you mean 'x'.*sample 1", {"x": X, "xx": 1}),
            (r"expected float32 of shape .N, M., got uint8.*sample 1.*astype.numpy.float32", {"x": X.astype(np.uint8)}),
            (r"expected float32.*got float64.*sample 1", {"x": np.full((2, 3), 1e300)}),
            (r"expected float32.*got <U1.*sample 1", {"x": [["a"]]}),
            (r"is no array: .*inhomogeneous.*sample 1", {"x": [[1.0, 2.0], [3.0]]}),
            (r"wrong shape.*sample 1.*batch axis", {"x": X[0]}),
            (r"wrong shape.*got float32 of shape .2,.*sample 1.*batch axis", {"x": [1.0, 2.0]}),
        )
    ),
)


@pytest.mark.parametrize(("says", "call"), WRONG)
@METHODS
def test_wrong_readers_feeds_and_models_are_told(says, call, method):
    with pytest.raises(CalibrationError, match=says):
        call(method=method)


def test_what_a_reader_raises_is_kept():
    cause = OSError("disk gone")
    with pytest.raises(CalibrationError) as caught:
        run(Failing(cause))
    assert caught.value.__cause__ is cause
    with pytest.raises(KeyboardInterrupt):
        run(Failing(KeyboardInterrupt()))
    assert run(Failing(StopIteration())).samples == 2, "a bare next in a reader ends the data"


IDS = feeds.InputSpec("ids", np.dtype("int64"), (None, 3))
FLOATS = feeds.InputSpec("x", np.dtype("float32"), (1, "M"))
KEPT = (
    *((IDS, value) for value in ([[1, 2, 3]], [np.array([1, 2, 3], np.int32)], np.array([[1, 2, 3]], np.uint8))),
    (IDS, ort.OrtValue.ortvalue_from_numpy(np.array([[1, 2, 3]], np.int64))),
    *((FLOATS, value) for value in ([[1, 2, 3]], [(1.0, 2.0, 3.0)], np.array([[1.0, 2.0, 3.0]]))),
    *((FLOATS, value) for value in (np.array([[1.0, 2.0]], np.float16), np.array([[1.0, np.inf, np.nan]]))),
    (feeds.InputSpec("b", np.dtype("bool"), (1, 3)), [[1, 2, 3]]),
    (feeds.InputSpec("b", np.dtype("int32"), None), np.array([[1, 2, 3]], np.int64)),
)


@pytest.mark.parametrize(("spec", "value"), KEPT)
def test_values_become_the_models_type_where_that_keeps_them(spec, value):
    (made,) = feeds.check_feed({spec.name: value}, [spec], [], 0).values()
    assert isinstance(made, np.ndarray)
    assert made.dtype == spec.dtype
    given = value.numpy() if isinstance(value, ort.OrtValue) else np.array(value)
    np.testing.assert_array_equal(made, given.astype(made.dtype))


REFUSED = (
    *(("int32", np.array([2**40])), ("uint8", [-1]), ("int64", np.array([1.0], np.float32)), ("int64", [1.5])),
    *(("bool", np.array([1], np.int64)), ("float32", np.array([True]))),
)


@pytest.mark.parametrize(("dtype", "value"), REFUSED)
def test_values_that_would_change_are_refused(dtype, value):
    with pytest.raises(CalibrationError, match=f"wrong type: expected {dtype}.*input 'v', sample 7"):
        feeds.check_feed({"v": value}, [feeds.InputSpec("v", np.dtype(dtype), None)], [], 7)


@pytest.mark.parametrize(("says", "reader", "stride"), [
    ("not divisible", ListReader(random_feeds(4)), 3),
    ("__len__", models.FeedReader([]), 2),
    ("set_range", NoRange([]), 2),
])  # fmt: skip
def test_stride_needs_length_range_and_a_divisor(says, reader, stride):
    with pytest.raises(CalibrationError, match=says):
        run(reader, strided=stride)


@METHODS
def test_inputs_with_a_default_need_not_be_fed(method):
    model = parse("g (float[2] x, float[2] d) => (float[2] y) { y = Add (x, d) }", ir_version=8)
    model.graph.initializer.append(helper.make_tensor("d", TensorProto.FLOAT, [2], [1.0, 2.0]))
    x = np.zeros(2, np.float32)
    assert run([{"x": x}], model=model, method=method).tensors["y"].high == 2.0
    assert run([{"x": x, "d": x}], model=model, method=method).tensors["y"].high == 0.0


# ---- arrays, images, tar files and Parquet tables; what all readers hold: `tests/contracts` --------------------------


ROWS = np.arange(10 * 3, dtype=np.float32).reshape(10, 3)


def test_a_single_npy_is_called_as_its_file_or_as_the_caller_says(tmp_path):
    np.save(tmp_path / "samples.npy", ROWS)
    for name, options in (("samples", {}), ("x", {"input_name": "x"})):
        assert list(ArrayReader(tmp_path / "samples.npy", **options).feed(0)) == [name]


# ---- images ---------------------------------------------------------------------------------------------------


@pytest.fixture
def images(tmp_path):
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


def test_images_layout_scale_and_order(images):
    reader = ImageFolderReader(images, input_name="x", size=(6, 12), mean=[0.5, 0, 0], std=[0.5, 1, 1])
    assert (len(reader), reader.feed(0)["x"].shape, reader.feed(0)["x"].dtype) == (3, (1, 3, 6, 12), np.float32)
    first = reader.feed(0)["x"][0]
    assert (first[0, 0, 0], first[0, 0, -1], first[2, 0, -1]) == (1.0, -1.0, 1.0)
    np.testing.assert_allclose(reader.feed(2)["x"][0, 1], 100 / 255, rtol=1e-6)
    bgr = ImageFolderReader(images, input_name="x", size=(6, 12), channel_order="BGR", layout="NHWC", scale=1.0)
    assert bgr.feed(0)["x"].shape == (1, 6, 12, 3)
    assert bgr.feed(0)["x"][0, 0, 0].tolist() == [0, 0, 255]


def test_images_resize(images):
    common = {"input_name": "x", "size": (6, 6), "scale": 1.0}
    crop = ImageFolderReader(images, resize="crop", **common).feed(0)["x"][0]
    assert crop[0, 0].tolist() == [255, 255, 255, 0, 0, 0]  # the middle six columns
    box = ImageFolderReader(images, resize="letterbox", fill=7, **common).feed(0)["x"][0]
    assert (box[:, 0].tolist(), box[:, -1].tolist(), box[0, 3, 0]) == ([[7] * 6] * 3, [[7] * 6] * 3, 255)
    stretch = ImageFolderReader(images, **common).feed(0)["x"][0]
    assert (stretch[0, 0, 0], stretch[2, 0, -1]) == (255, 255)


def test_images_batch_limit_type_and_grey(images):
    reader = ImageFolderReader(images, input_name="x", size=(4, 4), batch_size=2, scale=1.0, dtype=np.uint8)
    assert [len(feed["x"]) for feed in read(reader)] == [2, 1]
    assert (reader.feed(1)["x"].dtype, reader.feed(1)["x"].max()) == (np.uint8, 100)
    assert len(ImageFolderReader(images, input_name="x", size=(4, 4), limit=2)) == 2
    grey = ImageFolderReader(images, input_name="x", size=(4, 4), channel_order="GRAY")
    assert grey.feed(2)["x"].shape == (1, 1, 4, 4)


def test_images_without_pillow(images, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(CalibrationError, match="pip install pillow"):
        ImageFolderReader(images, input_name="x", size=(4, 4))


@pytest.mark.parametrize("form", ["file", "dictionary", "shards", "readers in shards"])
def test_labels_are_left_aside_in_every_form_of_arrays(form, tmp_path):
    model, out, path = models.mlp(), tmp_path / "o.onnx", tmp_path / "a.npz"
    data = {"x": np.concatenate([feed["x"] for feed in models.feeds(model, 4)]), "label": np.arange(4)}
    np.savez(path, **data)
    arrays = {"file": ArrayReader(path), "dictionary": ArrayReader(data)}
    shards = {"shards": [path, path], "readers in shards": list(arrays.values())}
    source = arrays[form] if form in arrays else kenosis_ort.Shards(shards[form])
    report = kenosis_ort.quantize_static(model, out, source, recipe="plain", promise=False)
    assert "Left aside in the data, no input of the model: label." in report.notes
    source.rewind()
    assert kenosis_ort.calibrate(model, source).samples == (8 if "shards" in form else 4)
    if isinstance(source, ArrayReader):
        assert "label" in source.feed(0), "the caller's reader is as it was"
        source.rewind()
        assert kenosis_ort.compare(model, out, source, samples=2).samples == 2


def test_arrays_that_are_no_inputs():
    told = ArrayReader({"x": ROWS, "names": np.arange(3), "scale": np.float32(2)}, inputs=["x"])
    assert told.left_aside == ("names", "scale")
    assert list(told.feed(0)) == ["x"]


# ---- tar files and Parquet tables ------------------------------------------------------------------------------------


ARRAYS = [*models.normal((5, 3, 4))]


def test_arrays_of_a_tar_file(tmp_path):
    entries = {f"train/{n}.{kind}": npy(a) for n, a in enumerate(ARRAYS) for kind in ("npy", "cls")}
    reader = TarReader(tar(tmp_path / "a.tar", entries, "w:gz"), {"x": "npy"})
    found = read(reader)
    assert np.array_equal(np.concatenate([f["x"] for f in found]), np.stack(ARRAYS))
    copy = pickle.loads(pickle.dumps(reader))
    assert len(read(copy)) == len(found), "a copy begins at the beginning, as one on a worker has to"


def test_images_are_prepared_as_those_of_a_folder(tmp_path):
    pytest.importorskip("PIL")
    pytest.importorskip("pyarrow")
    folder = pictures(tmp_path / "images")
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    how = {"size": (8, 8), "mean": 0.5, "resize": "crop"}
    expected = read(ImageFolderReader(folder, input_name="x", batch_size=2, **how))
    table = parquet(tmp_path / "a.parquet", picture=[*files.values()])
    in_tar = TarReader(tar(tmp_path / "a.tar", files), {"x": "png"}, images=how, batch_size=2)
    for reader in (in_tar, ParquetReader(table, {"x": "picture"}, images=how, batch_size=2)):
        np.testing.assert_equal(read(reader), expected)


def test_rows_of_a_parquet_file(tmp_path):
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
