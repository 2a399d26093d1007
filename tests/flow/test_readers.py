"""Calibration readers as others write them, through the public call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from kenosis_ort import CalibrationError, quantize_static
from tests import models

CORE = {"promise": False, "tune": "off"}


class Reader:
    """A reader that derives from nothing."""

    def __init__(self, feeds: list[Any]) -> None:
        self.feeds = iter(feeds)

    def get_next(self) -> Any:
        return next(self.feeds, None)


@pytest.fixture(scope="module")
def net() -> onnx.ModelProto:
    return models.residual_block()


@pytest.fixture(scope="module")
def feeds(net: onnx.ModelProto) -> list[dict[str, Any]]:
    return models.feeds(net, 8)


@pytest.fixture(scope="module")
def usual(net: onnx.ModelProto, feeds: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    out = tmp_path_factory.mktemp("usual") / "out.onnx"
    quantize_static(net, out, Reader(feeds), **CORE)
    return out.read_bytes()


def as_generator(feeds: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield from feeds


@pytest.mark.parametrize(
    "written",
    [
        lambda fs: Reader([{k: v.tolist() for k, v in f.items()} for f in fs]),
        lambda fs: Reader([{k: list(v) for k, v in f.items()} for f in fs]),
        lambda fs: Reader([{k: v.astype(np.float64) for k, v in f.items()} for f in fs]),
        lambda fs: Reader([{k: ort.OrtValue.ortvalue_from_numpy(v) for k, v in f.items()} for f in fs]),
        lambda fs: Reader([*fs, {}]),
        as_generator,
        list,
    ],
    ids=["nested lists", "lists of arrays", "float64", "runtime values", "ends with {}", "generator", "list"],
)
def test_the_same_numbers_give_the_same_file(
    net: onnx.ModelProto, feeds: list[dict[str, Any]], usual: bytes, tmp_path: Path, written: Callable[[Any], Any]
) -> None:
    quantize_static(net, tmp_path / "out.onnx", written(feeds), **CORE)
    assert (tmp_path / "out.onnx").read_bytes() == usual


def test_one_big_batch(net: onnx.ModelProto, feeds: list[dict[str, Any]], tmp_path: Path) -> None:
    open_batch = onnx.ModelProto()
    open_batch.CopyFrom(net)
    for value in (*open_batch.graph.input, *open_batch.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "N"
    batch = {"x": np.concatenate([f["x"] for f in feeds])}
    report = quantize_static(open_batch, tmp_path / "out.onnx", Reader([batch]), **CORE)
    assert report.outputs[0].sqnr_db > 20


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (Reader([]), "yields no sample"),
        (Reader([{}]), "yields no sample"),
        (Reader([{"y": np.zeros(1, np.float32)}]), "input 'y' that the model lacks.*sample 0"),
        (Reader([{"x": [[1.0], [1.0, 2.0]]}]), "is no array.*input 'x', sample 0"),
    ],
)
def test_what_cannot_be_used_is_named(net: onnx.ModelProto, tmp_path: Path, data: Any, says: str) -> None:
    with pytest.raises(CalibrationError, match=says):
        quantize_static(net, tmp_path / "out.onnx", data, **CORE)
    assert not (tmp_path / "out.onnx").exists()
