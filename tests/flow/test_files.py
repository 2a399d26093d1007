"""Files of a quantization: none is input and output, paths are those of the start, a full disk is a clean error."""

import errno
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from kenosis_ort import ArrayReader, OutputError, Recipe, quantize_static
from kenosis_ort.errors import KenosisWarning
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
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("output", "options", "text"), [
    ("weights.bin", {}, "the output is the float model's external data"),
    ("sub/../data.npz", {}, "the output is the calibration data"),
    ("recipe.toml", {"recipe": "recipe.toml"}, "the output is the recipe"),
    ("cache.json", {"calibration_cache_path": "cache.json"}, "the output is the calibration cache"),
    ("new.onnx", {"calibration_cache_path": Path("sub/../new.onnx")}, "the calibration cache is the out"),
    ("new.onnx", {"calibration_cache_path": "new.onnx.data"}, "the calibration cache is the output's ext"),
    ("near.onnx", {}, "the output's external data is the float model's external data"),
])  # fmt: skip
def test_no_output_is_an_input_or_another_output(folder: Path, output: str, options: dict[str, Any], text: str) -> None:
    model = "far.onnx" if output == "near.onnx" else "model.onnx"
    save_with_data(folder / "far.onnx", "near.onnx.data")
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(OutputError, match=text) as caught:
        quantize_static(model, output, ArrayReader("data.npz"), **{"recipe": "plain", **options})
    assert caught.value.fix
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_a_reader_that_changes_the_working_directory_moves_nothing(tmp_path: Path, folder: Path) -> None:
    class Wanderer(FeedReader):
        def get_next(self) -> Feed | None:
            os.chdir(folder / "sub")
            return super().get_next()

    options: Any = {"recipe": "plain", "promise": False, "calibration_cache_path": "new.json"}
    report = quantize_static("model.onnx", "out.onnx", Wanderer(models.feeds(MODEL)), **options)
    assert report.model_output == "out.onnx"
    assert {"out.onnx", "new.json"} <= {*os.listdir(folder)}
    assert os.listdir(folder / "sub") == []


@contextmanager
def files_of_at_most(size: int) -> Any:
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


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), tempfile.gettempdir())


def test_a_full_folder_of_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kenosis_ort.calibration.part_session.ObservedModel._strip", full)
    with pytest.raises(OutputError, match="No space left on device") as caught:
        quantized(MODEL, tmp_path / "out.onnx")
    assert "TMPDIR" in str(caught.value.fix)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("net", "external", "recipe"), [
    (models.mlp, False, "plain"), (models.residual_block, True, "plain"), (models.residual_block, False, "fast"),
    (models.residual_block, True, "accurate"), (models.transformer_block, False, "accurate"),
])  # fmt: skip
def test_the_output_may_take_the_models_place_as_with_stock(tmp_path, net, external, recipe):
    """It becomes what it becomes elsewhere."""
    (here := tmp_path / "here").mkdir()
    path, other = here / "model.onnx", tmp_path / "other.onnx"
    onnx.save(net(), path, save_as_external_data=external, location="model.onnx.data", size_threshold=0)
    sizes, feeds = [sum(file.stat().st_size for file in here.iterdir())], models.feeds(net())
    quantized(path, other, feeds, recipe=recipe)
    with pytest.warns(KenosisWarning, match="the float model's own file, which is replaced"):
        report = quantized(path, path, feeds, use_external_data_format=external, recipe=recipe)
    sizes.append(sum(file.stat().st_size for file in here.iterdir()))
    assert [report.size_before, report.size_after] == sizes
    assert len([*here.iterdir()]) == 1 + external
    onnx.checker.check_model(str(path), full_check=True)
    assert quality(net(), path, feeds) == quality(net(), other, feeds) > 20
    assert external or path.read_bytes() == other.read_bytes()
