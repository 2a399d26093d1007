"""What every calibration reader has to hold, whatever it reads from; what it refuses, and why."""

import gzip
import inspect
import io
import itertools
import pickle
import tarfile
from functools import partial

import numpy as np
import pytest
from onnxruntime.quantization import CalibrationDataReader

from kenosis_ort import (
    ArrayReader,
    ClosedLoopReader,
    ImageFolderReader,
    KenosisError,
    ParquetReader,
    Shards,
    SyntheticReader,
    TarReader,
    calibrate,
)
from kenosis_ort.calibration.readers import IndexedReader, source_files
from tests import models
from tests.graph.build import net

DATA = models.normal((6, 16))
"""Samples of the one input of `models.mlp`."""

STATES = "(float[1,4] x, float[1,4] h_in) => (float[1,4] y, float[1,4] h_out) { h_out = Tanh(x) y = Add(x, h_in) }"


def npy(array, save=np.save, **options):
    content = io.BytesIO()
    save(content, array, **options)
    return content.getvalue()


def tar(path, entries, mode="w"):
    with tarfile.open(path, mode) as archive:
        for name, content in entries.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def npz(path, **arrays):
    np.savez(path, **(arrays or {"x": DATA}))
    return path


def folder(path, **files):
    path.mkdir()
    for name, content in files.items():
        (path / name.replace("_", ".")).write_bytes(content)
    return path


def parquet(path, **columns):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns or {"x": [[*row] for row in DATA]}), path)
    return path


def images(path, **others):
    import PIL.Image

    folder(path, **others)
    for name in "abc":
        pixels = np.random.default_rng(ord(name)).integers(0, 255, (9, 7, 3), np.uint8)
        PIL.Image.fromarray(pixels).save(path / f"{name}.png")
    return path


def feeds_folder(path):
    return folder(path, **{f"{at}_npz": _bytes_of(sample[None]) for at, sample in enumerate(DATA)})


def _bytes_of(x):
    return npy(x, lambda file, x: np.savez(file, x=x))


def in_shards(path):
    return [npz(path / f"{at}.npz", x=DATA[at : at + 2]) for at in range(0, 6, 2)]


SAME = {
    "dictionary": lambda path, **how: ArrayReader({"x": DATA}, **how),
    "npz file": lambda path, **how: ArrayReader(npz(path / "a.npz"), **how),
    "npy file": lambda path, **how: ArrayReader(folder(path / "a", x_npy=npy(DATA)) / "x.npy", **how),
    "folder of npy files": lambda path, **how: ArrayReader(folder(path / "a", x_npy=npy(DATA)), **how),
    "folder of npz files": lambda path: ArrayReader(feeds_folder(path / "a")),
    "sequence of feeds": lambda path: ArrayReader([{"x": sample[None]} for sample in DATA]),
    "tar file": lambda path, **how: TarReader(
        tar(path / "a.tar", {f"{at}.npy": npy(sample) for at, sample in enumerate(DATA)}), {"x": "npy"}, **how
    ),
    "Parquet table": lambda path, **how: ParquetReader(parquet(path / "a.parquet"), {"x": "x"}, **how),
    "shards": lambda path, **how: Shards(in_shards(path), **how),
    "shards of readers": lambda path: Shards([ArrayReader({"x": DATA[at : at + 1]}) for at in range(6)]),
    "shards by a function": lambda path: Shards(lambda at: [{"x": DATA[at : at + 1]}], 6),
}
"""Readers of `DATA`, one sample a feed or, where they take ``batch_size``, more."""

OTHERS = {
    "images": lambda path: ImageFolderReader(images(path / "a"), input_name="x", size=(8, 8)),
    "made up": lambda path: SyntheticReader(models.mlp(), samples=4, input_ranges={"x": (-1, 1)}),
    "closed loop": lambda path: ClosedLoopReader(net(STATES), [{"x": models.normal((1, 4), at)} for at in range(3)]),
}
"""Readers of other data."""

EXAMPLES = {**SAME, **OTHERS}

OBJECTS = np.array([{}, {}], object)
SIZE = {"input_name": "x", "size": (4, 4)}


def _cut(path, content):
    path.write_bytes(content[: len(content) // 2])
    return path


def _image(path, **options):
    return ImageFolderReader(images(path / "a"), **{**SIZE, **options})


def _tar(inputs, entries, path):
    return TarReader(tar(path / "a.tar", entries), inputs)


def _table(inputs, path, **options):
    table = parquet(path / "a.parquet", a=[[1.0] * 12] * 3, s=["x", "y", None], ids=[[1, 2], [3], [4]])
    return ParquetReader(table, inputs, **options)


NEAR_MISSES = (
    ("does not exist", lambda path: ArrayReader(path / "none.npz")),
    ("text.npz", lambda path: ArrayReader(_cut(path / "text.npz", b"no archive"))),
    ("cut.npz", lambda path: ArrayReader(_cut(path / "cut.npz", _bytes_of(DATA)))),
    ("neither", lambda path: ArrayReader(folder(path / "empty"))),
    ("both", lambda path: ArrayReader(folder(path / "mixed", a_npy=npy(DATA), b_npz=_bytes_of(DATA)))),
    ("x.npy", lambda path: ArrayReader(folder(path / "a", x_npy=npy(OBJECTS, allow_pickle=True)) / "x.npy")),
    ("objects.npz", lambda path: ArrayReader(npz(path / "objects.npz", x=OBJECTS))),
    ("different numbers of samples", lambda path: ArrayReader({"x": DATA, "y": DATA[:3]})),
    ("no sample", lambda path: ArrayReader({"x": DATA[:0]})),
    ("no leading axis", lambda path: ArrayReader({"x": np.float32(3)})), ("from a int", lambda path: ArrayReader(3)),
    ("holds no sample", lambda path: ArrayReader([])),
    ("batch_size", lambda path: ArrayReader({"x": DATA}, batch_size="2")), ("NCHW", partial(_image, layout="CHW")),
    ("letterbox", partial(_image, resize="squash")), ("mean has 2 numbers", partial(_image, mean=[1, 2])),
    ("std", partial(_image, std=0.0)), (r"size\[0\]=0", partial(_image, size=(0, 4))),
    ("size=8", partial(_image, size=8)), ("is no pair", partial(_image, size=(4, 4, 3))),
    ("limit=0", partial(_image, limit=0)), ("does not exist", lambda path: ImageFolderReader(path / "none", **SIZE)),
    ("no image", lambda path: ImageFolderReader(folder(path / "a", notes_txt=b"none"), **SIZE)),
    (r"cannot be read.*A\.png", lambda path: ImageFolderReader(images(path / "a", A_png=b"broken"), **SIZE)),
    ("array cannot be read", partial(_tar, {"x": "npy"}, {"a.npy": b"no array"})),
    ("array cannot be read", partial(_tar, {"x": "npy"}, {"a.npy": npy(OBJECTS, allow_pickle=True)})),
    ("no '.png'", partial(_tar, {"x": "npy", "y": "png"}, {"a.npy": npy(1.0), "b.npy": npy(1.0)})),
    ("How images are prepared", partial(_tar, {"x": "png"}, {"a.png": b""})),
    ("'npz' is no suffix", partial(_tar, {"x": "npz"}, {"a.npy": npy(1.0)})),
    ("No input is named", partial(_tar, {}, {})),
    ("tar file cannot be read", lambda path: TarReader(_cut(path / "a.tar", b"x" * 4000), {"x": "npy"})),
    ("tar file cannot be read", lambda path: TarReader(_cut(path / "a.gz", gzip.compress(npy(DATA))), {"x": "npy"})),
    ("does not exist", lambda path: TarReader(path / "none", {"x": "npy"})),
    ("no column 'b'", partial(_table, {"x": "b"})), ("no array of numbers", partial(_table, {"x": "s"})),
    ("12 numbers are not of shape", partial(_table, {"x": "a"}, shapes={"x": (5, 5)})),
    ("different shapes", partial(_table, {"x": "ids"}, batch_size=2)),
    ("Parquet file cannot be read", lambda path: ParquetReader(_cut(path / "b", b"no parquet"), {"x": "a"})),
    ("how many shards", lambda path: Shards(lambda at: [])), ("no number of shards", lambda path: Shards([])),
    ("count goes with a function", lambda path: Shards([path], 1)),
    ("shards cannot be made of a str", lambda path: Shards("abc")),
    ("samples=0", lambda path: SyntheticReader(models.mlp(), samples=0)),
    ("seed='1'", lambda path: SyntheticReader(models.mlp(), seed="1")),
    ("'x' is no array", lambda path: ArrayReader({"x": [[1.0], [2.0, 3.0]]})),
    ("not possible", lambda path: ClosedLoopReader(net(STATES), [], steps=0)),
    ("No output of the model", lambda path: ClosedLoopReader(models.mlp(), [])),
)  # fmt: skip
"""What a message says, and what it is raised of, at once or when it is read."""


def read(reader):
    return list(itertools.takewhile(lambda feed: feed is not None, iter(reader.get_next, None)))


# ---- what holds of each ----------------------------------------------------------------------------------------------


each_reader = pytest.mark.parametrize("name", EXAMPLES)
each_of_the_same = pytest.mark.parametrize("name", SAME)
HANDED_ON = ("sequence of feeds", "shards of readers", "shards by a function", "closed loop")
"""Readers of what the caller made, who has to begin again himself."""

NOT_COPIED = ("made up", "closed loop", "shards by a function")
"""Readers that hold functions and sessions."""

BATCHED = [name for name, make in SAME.items() if "how" in inspect.signature(make).parameters]


def each_but(*names):
    return pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in names])


def made(name, folder, **how):
    for needed, module in (("images", "PIL"), ("Parquet table", "pyarrow")):
        if name == needed:
            pytest.importorskip(module)
    return EXAMPLES[name](folder, **how)


@each_reader
def test_it_is_a_reader_of_stocks_that_ends(name, tmp_path):
    reader = made(name, tmp_path)
    assert isinstance(reader, CalibrationDataReader)
    feeds = read(reader)
    assert feeds
    assert all(isinstance(feed, dict) and all(hasattr(a, "dtype") for a in feed.values()) for feed in feeds)
    assert reader.get_next() is None, "it stays at its end"


@each_but(*HANDED_ON)
def test_what_it_hands_out_is_the_callers(name, tmp_path):
    reader = made(name, tmp_path)
    feeds = read(reader)
    kept = [{name: np.array(array) for name, array in feed.items()} for feed in feeds]
    for feed in feeds:
        for array in feed.values():
            array[...] = 0
    reader.rewind()
    np.testing.assert_equal(read(reader), kept)


@each_but("tar file", "Parquet table", "shards", *HANDED_ON[1:])  # which are streams
def test_it_has_feeds_by_number_and_ranges_as_stock_sets_them(name, tmp_path):
    reader = made(name, tmp_path)
    assert isinstance(reader, IndexedReader)
    feeds = read(reader)
    assert len(reader) == len(feeds)
    np.testing.assert_equal([reader.feed(at) for at in range(len(reader))], feeds)
    reader.set_range(start_index=1, end_index=3)
    np.testing.assert_equal(read(reader), feeds[1:3])
    reader.set_range(len(feeds) - 1, 99)
    np.testing.assert_equal(read(reader), feeds[-1:])
    assert len(reader) == len(feeds)
    with pytest.raises(KenosisError, match="range"):
        reader.set_range(2, 1)
    reader.rewind()
    np.testing.assert_equal(read(reader), feeds)


@each_of_the_same
def test_the_same_numbers_give_the_same_table(name, tmp_path):
    model = models.mlp()
    want = calibrate(model, [{"x": sample[None]} for sample in DATA])
    found = calibrate(model, made(name, tmp_path))
    assert found.samples == len(DATA)
    assert {t: found.range_of(t) for t in found.tensors} == {t: want.range_of(t) for t in want.tensors}


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize("batch", [1, 2, 4, 64])
def test_samples_are_batched_in_order(name, batch, tmp_path):
    parts = [feed["x"] for feed in read(made(name, tmp_path, batch_size=batch))]
    whole = 2 if name == "shards" else len(DATA)  # a shard ends a batch
    sizes = [min(batch, whole - start) for start in range(0, whole, batch)]
    assert [len(part) for part in parts] == sizes * (len(DATA) // whole)
    np.testing.assert_array_equal(np.concatenate(parts), DATA)
    assert parts[0].dtype == np.float32


@each_but(*NOT_COPIED)
def test_a_copy_on_a_worker_begins_at_the_beginning(name, tmp_path):
    reader = made(name, tmp_path)
    copy = pickle.loads(pickle.dumps(reader))
    np.testing.assert_equal(read(copy), read(reader))


@each_reader
def test_it_knows_the_files_that_it_reads(name, tmp_path):
    files = source_files(made(name, tmp_path))
    assert all(file.is_file() and file.is_relative_to(tmp_path) for file in files)
    on_disk = any(word in name for word in ("file", "table", "images")) or name == "shards"
    assert bool(files) == on_disk


@pytest.mark.parametrize(("says", "make"), NEAR_MISSES)
def test_what_it_cannot_read_is_told_in_one_sentence(says, make, tmp_path):
    for module in ("PIL", "pyarrow"):
        pytest.importorskip(module)
    with pytest.raises(KenosisError, match=says) as caught:
        read(make(tmp_path))
    assert "\n" not in str(caught.value)
