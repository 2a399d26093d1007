"""The call without any option, as nearly everybody makes it, by the machine's clock: only structure is asserted."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from kenosis_ort import QuantizationReport, quantize_static
from tests import models
from tests.flow.support import quality, run
from tests.models import FeedReader

FORMS = {"int8", "dynamic", "weight-only", "float"}
STATUSES = {"taken", "slower", "undecided", "dropped", "absent", "untimed", "spare", "outrun"}


@pytest.mark.real_clock
@pytest.mark.parametrize(
    ("net", "size"),
    [
        (models.residual_block, {"channels": 16, "size": 32}),
        (models.mobile_block, {"channels": 8, "size": 24}),
        (models.mlp, {"n_in": 256, "hidden": 512}),
    ],
)
def test_the_default_call(tmp_path: Path, net: Callable[..., onnx.ModelProto], size: dict[str, int]) -> None:
    model, out = net(**size), tmp_path / "out.onnx"
    feeds = models.feeds(model, 16)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="INT8 (does not|is not known to) pay here")  # the machine decides
        report = quantize_static(model, out, FeedReader(feeds))
    assert [path.name for path in tmp_path.iterdir()] == ["out.onnx"]
    assert len(run(out, feeds)) == len(feeds)
    assert quality(model, out, feeds) > 15
    assert {"equalize", "bias_correction"} <= {p.name for p in report.passes}
    assert report.fusion is not None
    speed = report.speed
    assert speed is not None
    assert speed.taken is not None
    assert speed.taken.name in FORMS or speed.taken.name.endswith("float")
    assert {form.status for form in speed.candidates} <= STATUSES
    assert [form.status for form in speed.candidates].count("taken") == 1
    assert all(form.reason for form in speed.candidates)
    assert any(form.ratio is not None for form in speed.candidates), "these nets take longer than a call"
    for form in speed.candidates:
        timed = form.ratio is not None
        assert timed or form.status != "slower"
        assert not timed or (form.verdict and form.milliseconds and form.low <= form.ratio <= form.high)
    assert report.recipe is not None
    assert report.recipe.speed is not None
    assert report.recipe.speed.form == speed.taken.name
    assert QuantizationReport.from_json(report.to_json()).speed == speed
    assert "float model" in str(report)
