"""The examples for other tools, where those are installed."""

from __future__ import annotations

import re

import pytest

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.filterwarnings("ignore::kenosis_ort.KenosisWarning")]

ROW = re.compile(r"^(.+?), (stock|patched) +(\d+) of (\d+) +(-?[0-9.]+) dB +([0-9.]+)x$", re.MULTILINE)


def better(printed: str, least: int) -> None:
    """Asserts that of each pair of rows the patched one is not worse, and that most are better."""
    found = ROW.findall(printed)
    pairs = list(zip(found[::2], found[1::2], strict=True))
    assert len(pairs) == least, printed
    for stock, patched in pairs:
        assert (stock[0], stock[1], patched[1]) == (patched[0], "stock", "patched")
        assert float(patched[4]) >= float(stock[4]) - 0.2, printed
    assert any(float(patched[4]) > float(stock[4]) + 1 or int(p[2]) > int(s[2]) for s, p in pairs
               for stock, patched in [(s, p)]), printed  # fmt: skip


def test_optimum(load_example, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("optimum.onnxruntime")
    load_example("optimum_quantizer").main(["--samples", "8", "--rounds", "1"])
    better(capsys.readouterr().out, 2)


def test_olive(load_example, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("olive")
    load_example("olive_static").main(["--samples", "8", "--rounds", "1"])
    better(capsys.readouterr().out, 2)
