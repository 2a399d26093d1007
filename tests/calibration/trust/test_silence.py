"""Nets that answer nothing to what was made up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from kenosis_ort import KenosisWarning, SyntheticReader, quantize_static
from kenosis_ort.calibration.trust.evidence import silent_outputs
from tests import models
from tests.calibration.synthetic.test_pages import edges
from tests.models import Net


def feeds(count: int = 6) -> list[dict[str, np.ndarray]]:
    return models.feeds(edges(), count)


def test_a_map_that_never_says_yes() -> None:
    assert silent_outputs(edges(), feeds()) == {}
    found = silent_outputs(edges(bias=-1000.0), feeds())
    assert "never rises above 0" in found["probability_out"]


def test_an_output_that_does_not_depend_on_the_sample() -> None:
    net = Net()
    x = net.input("x", [1, 4])
    net.output(net.op("Add", [net.op("Mul", [x, net.const(1e-9)]), net.const(3.0)], name="flat"), [1, 4])
    model = net.model()
    assert silent_outputs(model, models.feeds(model, 6)) == {"flat_out": "is the same for all samples"}
    assert silent_outputs(model, models.feeds(model, 3)) == {}, "too few to tell"


@pytest.mark.parametrize("build", [models.residual_block, models.mlp, models.two_input_detector])
def test_other_nets_answer(build: object) -> None:
    model: onnx.ModelProto = build()  # type: ignore[operator]
    assert silent_outputs(model, models.feeds(model, 6)) == {}


def test_the_report_says_do_not_ship(tmp_path: Path) -> None:
    model = edges(bias=-200.0)
    reader = SyntheticReader(model, samples=8, input_range=(0, 1))
    with pytest.warns(KenosisWarning):
        report = quantize_static(model, tmp_path / "out.onnx", reader, recipe="plain")
    assert report.trust is not None
    assert report.trust.verdict == "do not ship"
    assert "never rises above" in report.trust.reason
