"""The same call gives the same bytes: again, in other threads, from a path or from memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import onnx
import pytest
from onnxruntime.quantization import CalibrationMethod

from tests import models
from tests.flow.support import quantized

ROOT = Path(__file__).resolve().parents[2]
BUILDS: dict[str, Callable[[], onnx.ModelProto]] = {
    "residual": models.residual_block,
    "batch norm": models.bn_net,
    "detector": models.two_input_detector,
    "if": models.net_with_if,
}


@pytest.mark.parametrize("method", list(CalibrationMethod), ids=lambda m: m.name)
def test_again(tmp_path: Path, method: CalibrationMethod) -> None:
    written = []
    for i in range(2):
        out = tmp_path / f"{i}.onnx"
        quantized(models.residual_block(), out, calibrate_method=method)
        written.append(out.read_bytes())
    assert written[0] == written[1]


def test_from_a_path_as_from_memory(tmp_path: Path) -> None:
    model = models.two_input_detector()
    onnx.save(model, tmp_path / "float.onnx")
    onnx.save_model(
        models.two_input_detector(),
        tmp_path / "external.onnx",
        save_as_external_data=True,
        location="external.bin",
        size_threshold=0,
    )
    quantized(model, tmp_path / "a.onnx")
    quantized(tmp_path / "float.onnx", tmp_path / "b.onnx")
    quantized(tmp_path / "external.onnx", tmp_path / "c.onnx", models.feeds(model))
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "c.onnx").read_bytes()


def test_in_threads_as_one_after_the_other(tmp_path: Path) -> None:
    def one(where: str, name: str) -> bytes:
        folder = tmp_path / where
        folder.mkdir(exist_ok=True)
        out = folder / f"{name}.onnx"
        quantized(BUILDS[name](), out)
        return out.read_bytes()

    alone = {name: one("alone", name) for name in BUILDS}
    with ThreadPoolExecutor(len(BUILDS)) as pool:
        for round_ in range(2):
            together = list(pool.map(lambda name, r=round_: one(f"together{r}", name), BUILDS))
            assert dict(zip(BUILDS, together, strict=True)) == alone


NETS = ("residual_block", "two_input_detector", "transformer_block", "net_with_if", "mlp")


def test_in_another_process(tmp_path: Path) -> None:
    """Nothing depends on the order of sets of strings."""
    code = (
        "import sys; from pathlib import Path; from tests import models; from tests.flow.support import quantized\n"
        "for name in sys.argv[2:]: quantized(getattr(models, name)(), Path(sys.argv[1]) / name, promise=False)"
    )
    for seed in ("0", "1"):
        (tmp_path / seed).mkdir()
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / seed), *NETS]
        subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=300)
    differing = [name for name in NETS if (tmp_path / "0" / name).read_bytes() != (tmp_path / "1" / name).read_bytes()]
    assert not differing
