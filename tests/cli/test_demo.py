"""The demonstration: three quantizations of one net, measured side by side."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kenosis_ort.cli.main import main
from kenosis_ort.demo.compare import FLOAT, measure_quality, measure_speed
from kenosis_ort.demo.digits import load_digits


def test_prints_accuracy_speed_and_proof_and_keeps_the_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["demo", "--rounds", "1", "--batch", "2", "--out", str(tmp_path / "kept")]) == 0
    printed = capsys.readouterr().out
    for expected in ("float32", "stock, default", "stock, best", "kenosis-ort", "accuracy", "speed"):
        assert expected in printed
    assert "7 of 7 Conv/Gemm/MatMul run on integer kernels" in printed
    assert (tmp_path / "kept" / "digits_kenosis.onnx").is_file()


def test_a_model_against_itself(digits_model: Path):
    digits = load_digits()
    models = {FLOAT: digits_model, "copy": digits_model}
    quality = measure_quality(models, digits)
    assert quality["copy"] == quality[FLOAT]
    assert quality["copy"].sqnr_db == np.inf
    rounds: list[tuple[int, int | None]] = []
    speed = measure_speed(models, digits, batch=1, rounds=2, on_round=lambda *done: rounds.append(done))
    assert speed[FLOAT].ratio == 1
    assert speed["copy"].microseconds > 0
    assert rounds == [(1, 2), (2, 2)]


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--batch", "-1"]])
def test_counts_have_to_be_positive(arguments: list[str]):
    with pytest.raises(SystemExit):
        main(["demo", *arguments])
