"""Files of a quantization: none is input and output, paths are those of the start, a full disk is a clean error."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from kenosis_ort import ArrayReader, OutputError, Recipe, quantize_static
from kenosis_ort.errors import KenosisWarning
from kenosis_ort.graph.load import load_model
from kenosis_ort.graph.outside import copy_model
from tests import models
from tests.flow.support import quality, quantized
from tests.models import Feed, FeedReader

resource = pytest.importorskip("resource")

MODEL = models.residual_block()


def save_with_data(path: Path, location: str) -> None:
    onnx.save(copy_model(MODEL), path, save_as_external_data=True, location=location, size_threshold=0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model of external data, arrays, a recipe and a cache; the current one."""
    save_with_data(tmp_path / "model.onnx", "weights.bin")
    np.savez(tmp_path / "data.npz", x=np.concatenate([feed["x"] for feed in models.feeds(MODEL)]))
    Recipe("plain").save(tmp_path / "recipe.toml")
    quantized(MODEL, tmp_path / "other.onnx", calibration_cache_path=tmp_path / "cache.json")
    (tmp_path / "link.onnx").symlink_to("weights.bin")
    os.link(tmp_path / "data.npz", tmp_path / "hard.onnx")
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_data_of_the_float_model_is_not_written_over_by_that_of_another_output(folder: Path) -> None:
    save_with_data(folder / "far.onnx", "near.onnx.data")
    before = (folder / "near.onnx.data").read_bytes()
    with pytest.raises(OutputError, match="the output's external data is the float model's external data"):
        quantize_static("far.onnx", "near.onnx", ArrayReader("data.npz"), recipe="plain")
    assert (folder / "near.onnx.data").read_bytes() == before


@pytest.mark.parametrize(
    ("output", "options", "text"),
    [
        ("weights.bin", {}, "the output is the float model's external data"),
        ("link.onnx", {}, "the output is the float model's external data"),
        ("sub/../data.npz", {}, "the output is the calibration data"),
        ("hard.onnx", {}, "the output is the calibration data"),
        ("recipe.toml", {"recipe": "recipe.toml"}, "the output is the recipe"),
        ("cache.json", {"calibration_cache_path": "cache.json"}, "the output is the calibration cache"),
        ("new.onnx", {"calibration_cache_path": Path("sub/../new.onnx")}, "the calibration cache is the output"),
        ("new.onnx", {"calibration_cache_path": "new.onnx.data"}, "the calibration cache is the output's external"),
    ],
)
def test_no_output_is_an_input_or_another_output(folder: Path, output: str, options: dict[str, Any], text: str) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(OutputError, match=text) as caught:
        quantize_static("model.onnx", output, ArrayReader("data.npz"), **{"recipe": "plain", **options})
    assert caught.value.fix
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("kind", [".npy", ".npz"])
def test_files_of_a_folder_of_arrays_are_data_too(tmp_path: Path, kind: str) -> None:
    for index, feed in enumerate(models.feeds(MODEL, 4)):
        if kind == ".npz":
            np.savez(tmp_path / f"{index}.npz", **feed)
        elif index == 0:
            np.save(tmp_path / "x.npy", feed["x"])
    reader = ArrayReader(tmp_path)
    with pytest.raises(OutputError, match="calibration data"):
        quantize_static(MODEL, next(tmp_path.iterdir()), reader)
    quantize_static(MODEL, tmp_path / "out.onnx", reader, recipe="plain", promise=False)


@pytest.mark.parametrize("external", [False, True])
def test_the_output_may_take_the_models_place_as_with_stock(tmp_path: Path, external: bool) -> None:
    path = tmp_path / "model.onnx"
    if external:
        save_with_data(path, "model.onnx.data")
    else:
        onnx.save(MODEL, path)
    with pytest.warns(KenosisWarning, match="the float model's own file, which is replaced"):
        quantized(path, path, use_external_data_format=external)
    assert quality(MODEL, path, models.feeds(MODEL)) > 20
    assert len(list(tmp_path.iterdir())) == 1 + external
    assert "QuantizeLinear" in {node.op_type for node in load_model(path).proto.graph.node}


def test_a_reader_that_changes_the_working_directory_moves_nothing(tmp_path: Path, folder: Path) -> None:
    class Wanderer(FeedReader):
        def get_next(self) -> Feed | None:
            os.chdir(folder / "sub")
            return super().get_next()

    reader = Wanderer(models.feeds(MODEL))
    report = quantize_static(
        "model.onnx", "out.onnx", reader, recipe="plain", promise=False, calibration_cache_path="new.json"
    )
    assert report.model_output == "out.onnx"
    assert (folder / "out.onnx").is_file()
    assert (folder / "new.json").is_file()
    assert list((folder / "sub").iterdir()) == []


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Lets writes beyond a size fail, as on a full disk; Python ignores the signal that goes with it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("external", [False, True])
def test_a_disk_that_is_full_leaves_the_old_file(tmp_path: Path, external: bool) -> None:
    out = tmp_path / "out.onnx"
    quantized(MODEL, out, use_external_data_format=external)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with files_of_at_most(2000), pytest.raises(OutputError) as caught:
        quantized(models.mlp(hidden=256), out, use_external_data_format=external)
    assert caught.value.fix
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_full_folder_of_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the system says that there is no room."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), tempfile.gettempdir())

    monkeypatch.setattr("kenosis_ort.calibration.part_session.ObservedModel._strip", full)
    with pytest.raises(OutputError, match="No space left on device") as caught:
        quantized(MODEL, tmp_path / "out.onnx")
    assert "TMPDIR" in str(caught.value.fix)
    assert list(tmp_path.iterdir()) == []


def test_no_folder_of_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(OutputError, match="No temporary folder can be made"):
        quantized(MODEL, tmp_path / "out.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("recipe", ["plain", "fast", "accurate"])
@pytest.mark.parametrize("net", [models.mlp, models.residual_block, models.transformer_block])
def test_a_model_that_is_replaced_by_its_result_becomes_what_it_becomes_elsewhere(
    tmp_path: Path, recipe: str, net: Any
) -> None:
    path, other = tmp_path / "model.onnx", tmp_path / "other.onnx"
    onnx.save(net(), path)
    quantized(path, other, recipe=recipe)
    with pytest.warns(KenosisWarning):
        quantized(path, path, recipe=recipe)
    onnx.checker.check_model(str(path), full_check=True)
    assert path.read_bytes() == other.read_bytes()
