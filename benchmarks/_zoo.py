"""Access to the zoo of trained nets beside the repository: feeds, task metrics, and stock's configurations."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
from _session import session
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantType,
    quant_pre_process,
    quantize_static as stock_quantize_static,
)

ZOO = Path(__file__).resolve().parents[1] / "../shared/zoo"

# net -> (key of the task metric, True where more is better, tolerance of "no worse than")
METRICS = {
    "cifar_resnet20": ("int8_top1", True, 0.003),
    "cifar_resnet20_bn": ("int8_top1", True, 0.003),
    "mlperf_ic_resnet8": ("int8_top1", True, 0.003),
    "mobilenetv1_cifar_probe": ("int8_top1", True, 0.003),
    "squeezenet11": ("int8_top1", True, 0.003),
    "mlperf_kws_dscnn": ("int8_top1", True, 0.003),
    "mlperf_ad_bn": ("score_rel_err", False, 0.003),
    "yolox_nano": ("int8_map", True, 0.003),
    "fastestdet": ("int8_map", True, 0.003),
    "superres": ("int8_psnr", True, 0.3),
    "silero_vad": ("agree", True, 0.003),
    "ultraface": ("det_f1", True, 0.003),
}


class OneShotReader(CalibrationDataReader):  # type: ignore[misc]
    """Hands out the feeds of a zoo entry once."""

    def __init__(self, feeds: Iterable[dict[str, Any]]) -> None:
        self._feeds: Sequence[dict[str, Any]] = feeds if isinstance(feeds, Sequence) else list(feeds)
        self._next = 0

    def __len__(self) -> int:
        return len(self._feeds)

    def get_next(self) -> dict[str, Any] | None:
        if self._next >= len(self._feeds):
            return None
        self._next += 1
        return self._feeds[self._next - 1]


def load_zoo() -> ModuleType:
    """Imports the zoo's own script."""
    path = ZOO / "zoo.py"
    if not path.is_file():
        raise SystemExit(f"the zoo is not there: {path.resolve()}")
    spec = importlib.util.spec_from_file_location("zoo_entries", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"cannot import {path.resolve()}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def choose(module: ModuleType, names: Sequence[str]) -> list[str]:
    """Returns the names asked for, all by default."""
    unknown = [n for n in names if n not in module.ENTRIES]
    if unknown:
        raise SystemExit(f"unknown nets {unknown}; there are {', '.join(module.ENTRIES)}")
    return list(names) or list(module.ENTRIES)


def single_sample(path: str | Path, feed: dict[str, Any]) -> dict[str, Any]:
    """Returns the feed cut to batch 1 where the model's first dimension is free."""
    model = onnx.load(str(path), load_external_data=False)
    free = {i.name for i in model.graph.input
            if i.type.tensor_type.shape.dim and i.type.tensor_type.shape.dim[0].HasField("dim_param")}  # fmt: skip
    return {k: v[:1] if k in free else v for k, v in feed.items()}


@contextlib.contextmanager
def quiet_folder() -> Iterator[Path]:
    """A temporary working folder (stock's preprocessing leaves files there) with stock's warnings off."""
    before = Path.cwd()
    root = logging.getLogger()
    level = root.level
    with tempfile.TemporaryDirectory(prefix="kenosis-bench-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        root.setLevel(logging.CRITICAL)
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)
            root.setLevel(level)


def ort_default(source: str, out: Path, reader: CalibrationDataReader) -> str:
    """``quantize_static(model, out, reader)`` of stock ONNX Runtime."""
    stock_quantize_static(source, str(out), reader)
    return ""


def _pre_process(source: str, out: Path) -> tuple[Path, str]:
    """Stock's preprocessing; returns the file to go on with and what had to be left out."""
    try:
        quant_pre_process(source, str(out))
    except Exception:
        try:
            quant_pre_process(source, str(out), skip_symbolic_shape=True)
        except Exception:
            return Path(source), "no preprocessing"
        return out, "no symbolic shapes"
    return out, ""


def prepared_by_stock(source: str, folder: Path) -> Path:
    """The model after stock's ``quant_pre_process``, or as it is where that fails."""
    return _pre_process(source, folder / "prepared.onnx")[0]


def ort_best(source: str, out: Path, feeds: Iterable[dict[str, Any]]) -> str:
    """quant_pre_process, then uint8 activations and per-channel int8 weights, MinMax.

    Where the result does not load, per-tensor weights; where preprocessing fails, without the symbolic shape
    inference, then without preprocessing. Returns what had to be changed, empty for the plain recipe.
    """
    prepared, note = _pre_process(source, out.with_name(out.stem + ".pre.onnx"))
    notes = [note] if note else []
    failures: list[str] = []
    for per_channel in (True, False):
        try:
            stock_quantize_static(str(prepared), str(out), OneShotReader(feeds), per_channel=per_channel,
                                  activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8)  # fmt: skip
            session(out)
        except Exception as error:
            failures.append(str(error))
            notes.append("per-channel does not load: per-tensor")
            continue
        return ", ".join(notes)
    raise RuntimeError(failures[-1])


def sqnr_of(metric: dict[str, Any]) -> float | None:
    """The signal-to-quantization-noise ratio among a zoo metric's values, in dB."""
    for key in ("sqnr_db", "state_sqnr_db"):
        if key in metric and np.isfinite(metric[key]):
            return float(metric[key])
    return None
