"""``--data module:function``: what the function may return, and what happens when it does not."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from kenosis_ort.calibration import sample_feeds
from kenosis_ort.cli.sources import call_function, names_function
from kenosis_ort.errors import CalibrationError

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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("loader:samples", True),
        ("package.loader:samples", True),
        ("tools/loader.py:samples", True),
        ("samples.npz", False),
        ("C:\\data", False),
        ("folder/samples", False),
        ("loader:samples()", False),
    ],
)
def test_spelling(text: str, expected: bool):
    assert names_function(text) is expected
