"""The files that the pages speak about."""

import importlib
import importlib.util
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

from kenosis_ort.demo import load_digits
from tests import models, planning

ROOT = Path(__file__).resolve().parents[2]
RNG = np.random.default_rng(7)


CLASSIFIER = """(float[1,3,16,16] image) => (logits) <float[16,3,3,3] w0, float[16,16,3,3] w1, float[10,16] w2> {
    [stem] c0 = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (image, w0) [relu0] r0 = Relu (c0)
    [body] c1 = Conv <pads = [1, 1, 1, 1]> (r0, w1) [relu1] r1 = Relu (c1) [pool] p = GlobalAveragePool (r1)
    [flatten] f = Flatten (p) [head] logits = Gemm <transB = 1> (f, w2) }"""
RECURRENT = """(float[1,16] x, float[1,32] state) => (y, stateN) <float[32,16] wx, float[32,32] wh, float[4,32] wo> {
    [inputs] a = Gemm <transB = 1> (x, wx) [states] b = Gemm <transB = 1> (state, wh) [sum] s = Add (a, b)
    [tanh] stateN = Tanh (s) [head] y = Gemm <transB = 1> (stateN, wo) }"""
"""A small net over colour pictures, and one step of a net whose state is an input and an output."""


def _write_pipeline(folder: Path) -> None:
    """Writes an encoder and its decoders, of one layer each, and a folder of sentences."""
    spec = importlib.util.spec_from_file_location("docs_bart_net", ROOT / "examples" / "bart_net.py")
    assert spec is not None
    assert spec.loader is not None
    net = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(net)
    net.LAYERS, net._FITTED_ON = 1, 16
    net.write(folder)
    (folder / "sentences").mkdir()
    for number, sentence in enumerate(net.sentences(3, seed=1)):
        np.savez(folder / "sentences" / f"{number}.npz", **sentence)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models and samples that the pages name."""
    folder = tmp_path_factory.mktemp("docs")
    digits = load_digits()
    onnx.save(models.narrow_digits(), folder / "model.onnx")
    np.savez(folder / "samples.npz", image=digits.calibration[:8])
    np.savez(folder / "test.npz", image=digits.images[:32])
    np.save(folder / "labels.npy", digits.labels[:32])
    np.savez(folder / "recording.npz", x=RNG.normal(size=(40, 1, 16)).astype(np.float32)[:, 0])
    onnx.save(planning.parse(CLASSIFIER), folder / "classifier.onnx")
    onnx.save(planning.parse(RECURRENT), folder / "recurrent.onnx")
    _write_pipeline(folder)
    (folder / "photos").mkdir()
    for number in range(8):
        pixels = RNG.integers(0, 255, size=(40, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "photos" / f"{number}.png")
    return folder


@pytest.fixture
def workplace(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of these files, which is the current folder, and a bench that runs a model for no longer than it must."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # a profile that a page measures is no other test's
    harness = importlib.import_module("kenosis_ort.bench.harness")
    monkeypatch.setattr(harness, "Schedule", partial(harness.Schedule, block_s=0.005))
    return tmp_path
