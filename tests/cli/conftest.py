"""Nets of digits, a small one and the shipped one, and a few images as files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from kenosis_ort.cli.main import main
from kenosis_ort.demo import load_digits, model_path
from kenosis_ort.demo.__main__ import Demonstration, demonstrate
from tests import models

ROUNDS, BATCH = 1, 2  # of the demonstration
PLAIN = ("--recipe", "plain", "--no-promise")  # the fastest way to a quantized model


@pytest.fixture(scope="session")
def trained_model() -> Iterator[Path]:
    with model_path() as path:
        yield path


@pytest.fixture(scope="session")
def digits_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "digits.onnx"
    onnx.save(models.narrow_digits(), path)
    return path


@pytest.fixture(scope="session")
def digits_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "samples.npz"
    np.savez(path, image=load_digits().calibration[:12])
    return path


@pytest.fixture(scope="session")
def quantized(tmp_path_factory: pytest.TempPathFactory, digits_model: Path, digits_data: Path) -> Path:
    path = tmp_path_factory.mktemp("quantized") / "digits.int8.onnx"
    assert main(["quantize", str(digits_model), str(path), "--data", str(digits_data), "-q", *PLAIN]) == 0
    return path


@pytest.fixture(scope="session")
def kept_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the demonstration keeps its models."""
    return tmp_path_factory.mktemp("demo") / "kept"


@pytest.fixture(scope="session")
def demonstration(kept_models: Path) -> Demonstration:
    return demonstrate(kept_models, batch=BATCH, rounds=ROUNDS)
