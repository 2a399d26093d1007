import json

import onnxruntime
import pytest

from kenosis_ort.runtime import limits
from kenosis_ort.runtime.counting import counted
from kenosis_ort.runtime.limits import RuntimeLimits, runtime_limits


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that knows nothing yet, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    runtime_limits.cache_clear()
    yield tmp_path
    runtime_limits.cache_clear()


def _file(folder):
    (found,) = folder.rglob("runtime-*.json")
    return found


def test_limits_are_probed_once_for_an_installation(fresh):
    with counted() as first:
        found = runtime_limits()
    runtime_limits.cache_clear()
    with counted() as second:
        assert runtime_limits() == found
    assert first.total.sessions > 0
    assert second.total.sessions == 0
    assert found.version == onnxruntime.__version__


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", json.dumps({"max_ir": 10, "max_opset": "21", "max_ml": 3, "version": "1"}),
             json.dumps({"max_ir": 10**9, "max_opset": 21, "max_ml": 3, "version": onnxruntime.__version__}),
             json.dumps({"max_ir": 10, "max_opset": 199, "max_ml": 3, "version": "0.1.0"})],
)  # fmt: skip
def test_what_a_damaged_file_or_that_of_another_runtime_says_is_not_believed(fresh, text):
    found = runtime_limits()
    _file(fresh).write_text(text)
    runtime_limits.cache_clear()
    assert runtime_limits() == found
    assert json.loads(_file(fresh).read_text())["max_ir"] == found.max_ir


def test_without_a_place_to_keep_them_limits_are_found_all_the_same(fresh, monkeypatch):
    monkeypatch.setattr(limits, "recall", lambda name: None)
    monkeypatch.setattr("kenosis_ort.storage.writing.user_cache", lambda: fresh / "file" / "below")
    (fresh / "file").write_text("no folder")
    assert isinstance(runtime_limits(), RuntimeLimits)
