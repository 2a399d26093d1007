"""What every calibration reader has to hold, whatever it reads from."""

import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnxruntime.quantization import CalibrationDataReader

from kenosis_ort import KenosisError, calibrate
from kenosis_ort.calibration.readers import IndexedReader, source_files
from tests import models
from tests.contracts.readers import DATA, EXAMPLES, NEAR_MISSES, SAME, read

each_reader = pytest.mark.parametrize("name", EXAMPLES)
each_of_the_same = pytest.mark.parametrize("name", SAME)
HANDED_ON = ("sequence of feeds", "shards of readers", "shards by a function", "closed loop")
"""Readers of what the caller made, who has to begin again himself."""

STREAMS = ("tar file", "Parquet table", "shards", *HANDED_ON[1:])
NOT_COPIED = ("made up", "closed loop", "shards by a function")
"""Readers that hold functions and sessions."""

BATCHED = [name for name, make in SAME.items() if "how" in inspect.signature(make).parameters]


def each_but(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in names])


def made(name: str, folder: Path, **how: Any) -> Any:
    for needed, module in (("images", "PIL"), ("Parquet table", "pyarrow")):
        if name == needed:
            pytest.importorskip(module)
    return EXAMPLES[name](folder, **how)


@each_reader
def test_it_is_a_reader_of_stocks_that_ends(name: str, tmp_path: Path) -> None:
    reader = made(name, tmp_path)
    assert isinstance(reader, CalibrationDataReader)
    feeds = read(reader)
    assert feeds
    assert all(isinstance(feed, dict) and all(hasattr(a, "dtype") for a in feed.values()) for feed in feeds)
    assert reader.get_next() is None, "it stays at its end"


@each_but(*HANDED_ON)
def test_what_it_hands_out_is_the_callers(name: str, tmp_path: Path) -> None:
    reader = made(name, tmp_path)
    feeds = read(reader)
    kept = [{name: np.array(array) for name, array in feed.items()} for feed in feeds]
    for feed in feeds:
        for array in feed.values():
            array[...] = 0
    reader.rewind()
    np.testing.assert_equal(read(reader), kept)


@each_but(*STREAMS)
def test_it_has_feeds_by_number_and_ranges_as_stock_sets_them(name: str, tmp_path: Path) -> None:
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
def test_the_same_numbers_give_the_same_table(name: str, tmp_path: Path) -> None:
    model = models.mlp()
    want = calibrate(model, [{"x": sample[None]} for sample in DATA])
    found = calibrate(model, made(name, tmp_path))
    assert found.samples == len(DATA)
    assert {t: found.range_of(t) for t in found.tensors} == {t: want.range_of(t) for t in want.tensors}


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize("batch", [1, 2, 4, 64])
def test_samples_are_batched_in_order(name: str, batch: int, tmp_path: Path) -> None:
    parts = [feed["x"] for feed in read(made(name, tmp_path, batch_size=batch))]
    whole = 2 if name == "shards" else len(DATA)  # a shard ends a batch
    assert [len(part) for part in parts] == [
        min(batch, whole - start) for _ in range(len(DATA) // whole) for start in range(0, whole, batch)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), DATA)
    assert parts[0].dtype == np.float32


@each_but(*NOT_COPIED)
def test_a_copy_on_a_worker_begins_at_the_beginning(name: str, tmp_path: Path) -> None:
    reader = made(name, tmp_path)
    copy = pickle.loads(pickle.dumps(reader))
    np.testing.assert_equal(read(copy), read(reader))


@each_reader
def test_it_knows_the_files_that_it_reads(name: str, tmp_path: Path) -> None:
    files = source_files(made(name, tmp_path))
    assert all(file.is_file() and file.is_relative_to(tmp_path) for file in files)
    on_disk = any(word in name for word in ("file", "table", "images")) or name == "shards"
    assert bool(files) == on_disk


@pytest.mark.parametrize(("says", "make"), NEAR_MISSES)
def test_what_it_cannot_read_is_told_in_one_sentence(says: str, make: Callable[[Path], Any], tmp_path: Path) -> None:
    for module in ("PIL", "pyarrow"):
        pytest.importorskip(module)
    with pytest.raises(KenosisError, match=says) as caught:
        read(make(tmp_path))
    assert "\n" not in str(caught.value)
