"""The demonstration: three quantizations of one net, measured side by side."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kenosis_ort.demo import load_digits
from kenosis_ort.demo import measurements as measured
from kenosis_ort.report.text import to_text
from tests.cli.conftest import BATCH, ROUNDS


def test_prints_accuracy_speed_and_proof_and_keeps_the_models(demonstration: measured.Demonstration, kept_models: Path):
    printed = to_text(measured.render(demonstration))
    for expected in ("float32", "stock, default", "stock, best", "kenosis-ort", "accuracy", "speed"):
        assert expected in printed
    assert "7 of 7 Conv/Gemm/MatMul run on integer kernels" in printed
    assert (kept_models / "digits_kenosis.onnx").is_file()


def test_the_numbers_as_plain_data(demonstration: measured.Demonstration):
    found = demonstration.to_dict()
    assert list(found["models"]) == [measured.FLOAT, measured.STOCK_DEFAULT, measured.STOCK_BEST, measured.OURS]
    assert found["models"][measured.FLOAT]["proof"] is None
    assert found["models"][measured.OURS]["accuracy"] > 0.97
    assert found["models"][measured.OURS]["proof"].startswith("7 of 7")
    assert (found["batch"], found["rounds"]) == (BATCH, ROUNDS)


def test_a_model_against_itself(made: Path):
    digits = load_digits()
    models = dict.fromkeys((measured.FLOAT, "copy"), made / "float.onnx")
    quality = measured.measure_quality(models, digits)
    assert quality["copy"] == quality[measured.FLOAT]
    assert quality["copy"].sqnr_db == np.inf
    rounds: list[tuple[int, int | None]] = []
    speed = measured.measure_speed(models, digits, batch=1, rounds=2, on_round=lambda *done: rounds.append(done))
    assert speed[measured.FLOAT].ratio == 1
    assert speed["copy"].microseconds > 0
    assert rounds == [(1, 2), (2, 2)]
