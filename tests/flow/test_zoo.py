"""A few real nets on a few real samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import CalibrationMethod

from kenosis_ort import ArrayReader, Stages, quantize_static
from kenosis_ort.calibration.cached_samples import model_fingerprint
from kenosis_ort.flow import builder
from kenosis_ort.passes.contract import materialize
from kenosis_ort.recipe import RECIPES, SpeedChoice
from tests.flow.support import heavy, proof, quality
from tests.models import Feed

ZOO = Path(__file__).resolve().parents[2] / "../shared/zoo"
Data = Callable[[], list[Feed]]


def _load(name: str) -> dict[str, Any]:
    with np.load(ZOO / name, allow_pickle=False) as archive:
        return dict(archive)


def cifar() -> list[Feed]:
    images = _load("cifar10_calib.npz")["images"][:24].astype(np.float32) / 255
    mean, deviation = (np.array(v, np.float32) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    x = np.ascontiguousarray(((images - mean) / deviation).transpose(0, 3, 1, 2))
    return [{"input": x[i : i + 8]} for i in range(0, 24, 4)]


def keywords() -> list[Feed]:
    raw = _load("kws.npz")
    x = ((raw["x"][:64].astype(np.float32) - float(raw["zp"])) * np.float32(raw["scale"]))[:, None]
    return [{"input": x[i : i + 16]} for i in range(0, 64, 16)]


def small_pictures() -> list[Feed]:
    images = _load("cifar10_calib.npz")["images"][:6].astype(np.float32) / 255
    luma = images @ np.array([0.299, 0.587, 0.114], np.float32)
    return [{"lr_y": x[None, None]} for x in luma]


NETS: dict[str, tuple[str, Data, float]] = {
    "cifar_resnet20": ("cifar_resnet20.onnx", cifar, 18.0),
    "mlperf_kws": ("mlperf_kws_dscnn.onnx", keywords, 18.0),
    "superres": ("superres_espcn_x3.onnx", small_pictures, 24.0),
}


@pytest.fixture
def net(request: pytest.FixtureRequest) -> tuple[Path, list[Feed], float]:
    name, data, least = NETS[request.param]
    if not (ZOO / name).exists():
        pytest.skip("the zoo is not here")
    return ZOO / name, data(), least


every_net = pytest.mark.parametrize("net", NETS, indirect=True)


@every_net
def test_close_and_all_integer(net: tuple[Path, list[Feed], float], tmp_path: Path) -> None:
    path, feeds, least = net
    out = tmp_path / "out.onnx"
    report = quantize_static(path, out, ArrayReader(feeds[: len(feeds) // 2]))
    assert quality(path, out, feeds[len(feeds) // 2 :]) > least
    assert report.left_float() == ()
    assert proof(report).silently_quantized() == ()
    planned = set(report.plan.integer_nodes()) & set(heavy(report))
    assert len(planned) >= 0.7 * len(heavy(report))  # the stem of a mobile net stays float
    assert report.warnings == ()
    assert report.size_ratio > 1.5
    assert [p.name for p in tmp_path.iterdir()] == ["out.onnx"]


@every_net
def test_placement_against_naive(net: tuple[Path, list[Feed], float], tmp_path: Path) -> None:
    path, feeds, _ = net
    found = {}
    for on in (True, False):
        out = tmp_path / f"{on}.onnx"
        report = quantize_static(path, out, ArrayReader(feeds), stages=Stages(placement=on), verify=False)
        assert report.fusion is None
        found[on] = quality(path, out, feeds)
    assert found[True] > found[False] - 0.3


@pytest.mark.parametrize("net", ["cifar_resnet20"], indirect=True)
def test_percentile(net: tuple[Path, list[Feed], float], tmp_path: Path) -> None:
    path, feeds, least = net
    out = tmp_path / "out.onnx"
    quantize_static(path, out, ArrayReader(feeds), calibrate_method=CalibrationMethod.Percentile)
    assert quality(path, out, feeds) > least


def test_what_is_cut_off_has_its_own_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first three layers of ResNet-8 left float after biases were corrected: twice the error with them."""
    path = ZOO / "mlperf_ic_resnet8.onnx"
    if not path.exists():
        pytest.skip("the zoo is not here")
    images = (_load(f"cifar10_{part}.npz")["images"][:size] for part, size in (("calib", 48), ("test", 500)))
    calibration, held_out = (np.ascontiguousarray(i.astype(np.float32).transpose(0, 3, 1, 2)) for i in images)
    choice = SpeedChoice(model_fingerprint(onnx.load(path)), "first 3 nodes float")
    recipe = replace(RECIPES["fast"], name="cut", speed=choice)

    def error() -> float:
        out = tmp_path / "out.onnx"
        report = quantize_static(path, out, ArrayReader([{"input": x[None]} for x in calibration]), recipe=recipe)
        assert "bias_correction" in {p.name for p in report.passes if p.kept}
        return float(10 ** (-quality(path, out, [{"input": held_out}]) / 10))

    own = error()
    monkeypatch.setattr(builder, "materialize", lambda model, overlay, _: materialize(model, overlay))
    assert own < 0.0012
    assert 1.5 * own < error()
