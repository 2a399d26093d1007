"""Weights that stay on disk: the same results as with all of them in memory, and no file is followed unchecked."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest

import kenosis_ort
from kenosis_ort.errors import ModelLoadError
from kenosis_ort.graph import external_data, outside
from kenosis_ort.graph.external_data import weights_on_disk
from kenosis_ort.graph.load import load_model
from tests import models
from tests.weights.test_quantize import decoder, feeds

pytestmark = pytest.mark.skipif(not outside.IS_POSSIBLE, reason="files have no common root here")


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights are treated as large ones."""
    monkeypatch.setattr(external_data, "_IN_MEMORY_UP_TO", 0)
    monkeypatch.setattr(external_data, "_LEFT_OUTSIDE", 512)
    monkeypatch.setattr(outside, "_LEAST", 256)


def split(model: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "model.onnx"
    copy = outside.copy_model(model)  # which saving changes
    onnx.save_model(copy, path, save_as_external_data=True, location="model.data", size_threshold=256)
    return path


def test_what_is_made_goes_to_disk_once(tmp_path: Path, on_disk: None) -> None:
    lazy = load_model(split(decoder(), tmp_path), lazily=True).proto
    tensor = onnx.numpy_helper.from_array(np.arange(1024, dtype=np.float32), "t")
    assert outside.put_outside(tensor) is tensor
    with weights_on_disk(lazy):
        first, second = outside.put_outside(tensor), outside.put_outside(tensor)
        assert outside.is_outside(first)
        assert not first.raw_data
        assert first == second
        assert np.array_equal(outside.array_in(first), outside.array_in(tensor))
        file = Path("/", next(e.value for e in first.external_data if e.key == "location"))
        assert file.is_file()
    assert not file.exists()


def test_a_file_cannot_claim_to_be_checked(tmp_path: Path) -> None:
    path = split(decoder(), tmp_path)
    proto = onnx.load_model(path, load_external_data=False)
    tensor = next(t for t in proto.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL)
    del tensor.external_data[:]
    for key, value in (("location", "etc/passwd"), ("checksum", "kenosis-0")):
        tensor.external_data.add(key=key, value=value)
    assert not outside.is_outside(tensor)
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelLoadError):
        load_model(path, lazily=True)


def parts(path: Path) -> tuple[object, ...]:
    """Returns all that a file says, wherever its weights lie."""
    model = onnx.load(path)
    return (
        {t.name: (t.data_type, outside.array_in(t).tobytes()) for t in model.graph.initializer},
        list(model.graph.node),
        list(model.graph.output),
    )


def weights_alone(samples: int) -> Callable[[Path, Path], Any]:
    return lambda path, out: kenosis_ort.quantize_weights(path, out, feeds(samples) or None)


def by_recipe(recipe: str) -> Callable[[Path, Path], Any]:
    return lambda path, out: kenosis_ort.quantize_static(
        path, out, models.reader(load_model(path).proto, 10), recipe=recipe, promise=False
    )


@pytest.mark.parametrize(("build", "call"), [
    (decoder, weights_alone(0)), (decoder, weights_alone(8)), (models.transformer_block, by_recipe("fast")),
    (lambda: models.bn_net(channels=16), by_recipe("accurate")),
    (models.transformer_block, by_recipe("weight-only-4")),
], ids=["weights alone", "by samples", "fast", "accurate", "weight-only-4"])  # fmt: skip
def test_files_and_reports_are_those_made_in_memory(tmp_path, on_disk, monkeypatch, build, call):
    path, reports = split(build(), tmp_path), []
    for name, limit in (("disk", 0), ("memory", 2**40)):
        monkeypatch.setattr(external_data, "_IN_MEMORY_UP_TO", limit)
        reports.append(call(path, tmp_path / f"{name}.onnx"))
        assert not [text for text in getattr(reports[-1], "warnings", ()) if "bug" in text]
    assert parts(tmp_path / "disk.onnx") == parts(tmp_path / "memory.onnx")
    if build is decoder:
        assert all((tmp_path / f"{name}.onnx.data").exists() for name in ("disk", "memory"))
        assert repr(reports[0].layers) == repr(reports[1].layers)  # NaN is not itself
        assert reports[0].outputs == reports[1].outputs


def test_an_output_may_take_the_place_of_its_source(tmp_path: Path, on_disk: None) -> None:
    path = split(decoder(), tmp_path)
    kenosis_ort.quantize_weights(path, tmp_path / "apart.onnx", feeds(6))
    kenosis_ort.quantize_weights(path, path, feeds(6))
    assert parts(path) == parts(tmp_path / "apart.onnx")


def test_all_modules_read_tensors_wherever_they_lie() -> None:
    """ONNX' own function finds nothing of what lies on disk."""
    package = Path(kenosis_ort.__file__).parent
    found = {p.name for p in package.rglob("*.py") if "numpy_helper.to_array(" in p.read_text(encoding="utf-8")}
    assert found == {"outside.py", "qdq.py"}  # which wraps it, and which knows the folder


def test_calibrating_and_planning_leave_weights_on_disk(tmp_path, on_disk, monkeypatch):
    path, reader = split(decoder(), tmp_path), kenosis_ort.ArrayReader
    monkeypatch.setattr(external_data, "_IN_MEMORY_UP_TO", 2**40)
    held = kenosis_ort.calibrate(path, reader(feeds(3))).to_json()
    planned = kenosis_ort.preview(path)
    monkeypatch.setattr(external_data, "_IN_MEMORY_UP_TO", 0)
    loaded = Mock(wraps=external_data.read_external_data)
    monkeypatch.setattr(external_data, "read_external_data", loaded)
    assert kenosis_ort.calibrate(path, reader(feeds(3))).to_json() == held
    assert kenosis_ort.calibrate(path, tmp_path / "t.json", reader(feeds(3)), resume=True).samples == 3
    assert kenosis_ort.preview(path).nodes == planned.nodes
    assert [outside.refers_outside(call.args[0]) for call in loaded.call_args_list] == [True] * 3
