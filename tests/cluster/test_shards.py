"""Shards read in one process: the samples of one reader, in their order, and errors that name the shard."""

import itertools
from functools import reduce
from pathlib import Path

import numpy as np
import pytest

from kenosis_ort import CalibrationTable, Shards, calibrate, errors, quantize_static
from kenosis_ort.calibration.accumulators import HistogramBuilder, extremes
from kenosis_ort.calibration.statistics import Extremes
from kenosis_ort.cluster.client import versions
from tests.cluster import shards_of
from tests.cluster.shards_of import ALL, EACH, MODEL, SHARDS, feeds
from tests.models import FeedReader


@pytest.mark.parametrize("asked", ["machine", "python_version_tuple"])
def test_another_machine_or_python_is_told(asked, monkeypatch):
    here = versions()
    monkeypatch.setattr(f"platform.{asked}", lambda: ("riscv64", "0"))
    assert versions() != here


def test_shards_make_the_table_of_one_reader(tmp_path):
    whole = calibrate(MODEL, FeedReader(ALL))
    made = [feeds(number) for number in range(SHARDS)]
    paths = [tmp_path / f"{number}.npz" for number in range(SHARDS)]
    for path, shard in zip(paths, made, strict=True):
        np.savez(path, **{k: np.concatenate([f[k] for f in shard]) for k in ALL[0]})
    for source in (Shards(feeds, SHARDS), Shards(made), [FeedReader(shard) for shard in made], paths, ALL):
        assert calibrate(MODEL, source).to_json() == whole.to_json()
    assert whole.samples == SHARDS * EACH
    assert not list(tmp_path.glob("*.json"))
    merged = reduce(CalibrationTable.merge, [calibrate(MODEL, shard) for shard in made])
    written = calibrate(MODEL, tmp_path / "whole.json", FeedReader(ALL))
    texts = {table.to_json() for table in (merged, written, whole)}
    assert texts == {(tmp_path / "whole.json").read_text()}
    for name, source in (("a", FeedReader(ALL)), ("b", Shards(feeds, SHARDS))):  # which serve as a reader
        quantize_static(MODEL, tmp_path / name, source, promise=False)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("sign", [1, -1])
def test_values_beside_the_ends_of_bins_count_alike_under_every_exponent(sign):
    edges = (sign * np.arange(1, 40) / 4).astype(np.float32)  # of the bins of 700
    beside = np.concatenate([edges - np.float32(distance) for distance in (-3e-5, -1e-7, 0, 1e-7, 3e-5)])
    few, many = HistogramBuilder(), HistogramBuilder()
    few.add(beside, extremes(beside))
    many.add(beside, Extremes(-700.0, 700.0, 2))
    far = HistogramBuilder()
    far.add(beside[:0], Extremes(-700.0, 700.0, 2))
    assert few.finish().merge(far.finish()) == many.finish()


@pytest.mark.parametrize(("source", "what"), [
    (Shards(shards_of.broken, SHARDS), "OSError: the disk is gone"),
    (Shards(lambda n: n, SHARDS), "type int"),
    ([Path("no.npz")], "does not exist"),
])  # fmt: skip
def test_a_bad_shard_is_named(source, what):
    with pytest.raises(errors.CalibrationError, match=what) as caught:
        calibrate(MODEL, source)
    assert "shard " in str(caught.value.where)


@pytest.mark.parametrize(("source", "count", "error"), [
    (feeds, 0, errors.OptionError), (feeds, True, errors.OptionError), (3, None, errors.ArgumentTypeError),
    (itertools.count(), 2, errors.ArgumentTypeError),
])  # fmt: skip
def test_what_is_no_shards(source, count, error):
    with pytest.raises(error):
        Shards(source, count)


@pytest.mark.parametrize("executor", ["tcp://nowhere:1", 3, object()])
def test_an_executor_is_a_client(executor, tmp_path):
    with pytest.raises(errors.ArgumentTypeError, match="Dask client") as caught:
        quantize_static(MODEL, tmp_path / "o.onnx", FeedReader(ALL), executor=executor)
    assert caught.value.where == "executor"
