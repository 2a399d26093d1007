"""Real nets: MinMax is stock's bit for bit, and the percentile within its bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from kenosis_ort.calibration import CalibrationConfig, collect
from kenosis_ort.calibration.synthetic import SyntheticReader
from tests.calibration.support import stock

ZOO = Path(__file__).resolve().parents[2] / "../shared/zoo"
SMALL = ["ad01_bn", "cifar_resnet20_bn", "mlperf_ic_resnet8", "mlperf_kws_dscnn", "silero_vad_16k"]

pytestmark = pytest.mark.skipif(not ZOO.exists(), reason="the zoo is not here")


def net(name: str) -> tuple[onnx.ModelProto, list[dict[str, Any]]]:
    path = ZOO / f"{name}.onnx"
    model = onnx.load(path)
    model.ir_version = min(model.ir_version, 10)
    reader = SyntheticReader(path, samples=3)
    return model, [reader.feed(i) for i in range(3)]


@pytest.mark.parametrize("name", SMALL)
def test_minmax_is_stock(name: str) -> None:
    """With as many threads as stock takes: the rounding of a Conv depends on them."""
    model, samples = net(name)
    theirs = stock(model, samples)
    config = CalibrationConfig(bit_exact=True)
    ours = collect(model, samples, tensors=list(theirs.keys()), config=config).to_tensors_data()
    assert len(theirs.keys()) > 8
    for tensor in theirs:
        np.testing.assert_array_equal(theirs[tensor].lowest, ours[tensor].lowest, err_msg=tensor)
        np.testing.assert_array_equal(theirs[tensor].highest, ours[tensor].highest, err_msg=tensor)


@pytest.mark.parametrize("name", SMALL[:4])
@pytest.mark.parametrize("percentile", [99.999, 99.0])
def test_percentile_is_within_the_bound(name: str, percentile: float) -> None:
    model, samples = net(name)
    theirs = stock(model, samples, "Percentile", percentile=percentile)
    config = CalibrationConfig(method="percentile", percentile=percentile, bit_exact=True)
    table = collect(model, samples, tensors=list(theirs.keys()), config=config, threads=1)
    for tensor in theirs:
        low, high = table.range_of(tensor)
        statistics = table.tensors[tensor]
        bound = 1.0001 * max(abs(statistics.low), abs(statistics.high)) / 1024
        assert abs(float(theirs[tensor].lowest) - low) <= bound, tensor
        assert abs(float(theirs[tensor].highest) - high) <= bound, tensor
