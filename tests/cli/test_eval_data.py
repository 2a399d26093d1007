"""``--eval-data`` and ``--metric``: what is lost, measured on held-out data of the caller's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kenosis_ort.cli.main import main
from kenosis_ort.demo import load_digits
from tests.cli.conftest import PLAIN

METRICS = """
import numpy as np
labels = np.load("labels.npy")

def top1(outputs, reference, indices):
    return float(np.mean([o["logits"].argmax() == labels[i] for o, i in zip(outputs, indices)]))

class Top1:
    def reset(self): self.right = []
    def update(self, outputs, reference, index): self.right.append(outputs["logits"].argmax() == labels[index])
    def compute(self): return np.mean(self.right)

updated = Top1()
number = 3
"""


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    digits = load_digits()
    np.savez(tmp_path / "held_out.npz", image=digits.images[:40])
    np.save(tmp_path / "labels.npy", digits.labels[:40])
    (tmp_path / "metrics_of_digits.py").write_text(METRICS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(model: Path, data: Path, *arguments: str) -> int:
    return main(["quantize", str(model), "out.onnx", "--data", str(data), "--json", *PLAIN, *arguments])


@pytest.mark.parametrize("metric", ["top1", "updated"])
def test_labels_and_held_out_data(
    workplace: Path, trained_model: Path, digits_data: Path, capsys: pytest.CaptureFixture[str], metric: str
) -> None:
    named = ("--eval-data", "held_out.npz", "--metric", f"metrics_of_digits.py:{metric}")
    assert run(trained_model, digits_data, *named) == 0
    found = json.loads(capsys.readouterr().out)["measure"]
    assert found["samples"] == 40
    assert found["source"] == "evaluation sample"
    assert "metric" in found["measure"]
    assert found["float_value"] >= 0.95
    assert abs(found["loss"]) <= 0.05


def test_what_suits_the_output_without_a_metric(
    workplace: Path, trained_model: Path, digits_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(trained_model, digits_data, "--eval-data", "held_out.npz") == 0
    assert json.loads(capsys.readouterr().out)["measure"]["measure"].startswith("top-1 agreement")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--eval-data", "missing.npz"), "does not exist"),
        (("--metric", "top1"), "is not module:name"),
        (("--metric", "metrics_of_digits.py:top5"), "no function 'top5'. Did you mean 'top1'"),
        (("--metric", "metrics_of_digits.py:Top1"), "is a class"),
        (("--metric", "metrics_of_digits.py:number"), "metric=3"),
        (("--metric", "nowhere:top1"), "nowhere"),
    ],
)
def test_mistakes(
    workplace: Path,
    digits_model: Path,
    digits_data: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    assert run(digits_model, digits_data, *arguments) not in (0, 1)
    said = capsys.readouterr()
    assert message in said.out + said.err
    assert not (workplace / "out.onnx").exists()


def test_the_evaluation_data_is_not_written_over(
    workplace: Path, digits_model: Path, digits_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (workplace / "held_out.npz").read_bytes()
    arguments = ["--data", str(digits_data), "--eval-data", "held_out.npz", *PLAIN]
    assert main(["quantize", str(digits_model), "held_out.npz", *arguments]) not in (0, 1)
    assert "evaluation data" in capsys.readouterr().err
    assert (workplace / "held_out.npz").read_bytes() == before
