"""The before/after script runs both ways, and what changes is one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


@pytest.mark.parametrize("arguments", [["--stock"], []])
def test_runs_both_ways(load_example, arguments: list[str], capsys: pytest.CaptureFixture[str]):
    load_example("drop_in").main(arguments)
    printed = capsys.readouterr().out
    accuracy = float(re.search(r"held-out images: ([0-9.]+)", printed)[1])
    assert accuracy >= 0.97
    assert ("7 of 7 Conv/Gemm/MatMul" in printed) == (not arguments)


def test_only_the_import_differs():
    source = (Path(__file__).resolve().parents[2] / "examples" / "drop_in.py").read_text(encoding="utf-8")
    imports = re.findall(r"from (\S+) import quantize_static", source)
    assert imports == ["onnxruntime.quantization", "kenosis_ort"]
    assert source.count("quantize_static(model") == 1
