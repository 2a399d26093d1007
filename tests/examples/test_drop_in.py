"""The script before and after: both run, and one line differs."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.filterwarnings("ignore::kenosis_ort.KenosisWarning")  # where int8 does not pay on the machine at hand
@pytest.mark.parametrize("name", ["drop_in_before", "drop_in_after"])
def test_runs(load_example, name: str, capsys: pytest.CaptureFixture[str]):
    load_example(name).main()
    printed = capsys.readouterr().out
    assert float(re.search(r"held-out images: ([0-9.]+)", printed)[1]) >= 0.97
    assert ("no report" in printed) == (name == "drop_in_before")


def test_one_line_differs():
    before, after = (
        (EXAMPLES / f"drop_in_{name}.py").read_text(encoding="utf-8").splitlines() for name in ("before", "after")
    )
    changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    assert changed == [
        "- from onnxruntime.quantization import quantize_static",
        "+ from kenosis_ort import quantize_static",
    ]
