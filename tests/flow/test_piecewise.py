"""Calibration piece by piece: a killed run goes on behind its checkpoint, and ends early only where it is asked to."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kenosis_ort import CalibrationError, OptionError, calibrate
from kenosis_ort.flow import preview
from kenosis_ort.flow.preview import Piecewise
from tests import models
from tests.models import FeedReader

MODEL = models.residual_block()
FEEDS = models.feeds(MODEL, 6)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sample is a piece of its own."""
    monkeypatch.setattr(preview, "Piecewise", partial(Piecewise, piece_s=0.0))


def ending(feeds: list[Any], after: int) -> Iterator[Any]:
    yield from feeds[:after]
    raise KeyboardInterrupt


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("after", [1, 4])
def test_an_interrupted_calibration_goes_on_and_makes_the_same_bytes(tmp_path: Path, after: int) -> None:
    whole, path = calibrate(MODEL, FEEDS), tmp_path / "table.json"
    with pytest.raises(KeyboardInterrupt):
        calibrate(MODEL, path, ending(FEEDS, after), resume=True)
    assert not path.exists()
    assert (tmp_path / "table.json.part").exists()
    seen: list[int] = []
    table = calibrate(MODEL, path, FeedReader(FEEDS), resume=True, progress=lambda done, _: seen.append(done))
    assert table.to_json() == whole.to_json() == path.read_text()
    assert max(seen) == len(FEEDS) - after, "what was done is not run again"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["table.json"]


def test_a_killed_process_goes_on(tmp_path: Path) -> None:
    code = f"""
        import os, signal
        from functools import partial
        from kenosis_ort import calibrate
        from kenosis_ort.flow import preview
        from kenosis_ort.flow.preview import Piecewise
        from tests.flow.test_piecewise import FEEDS, MODEL

        def deadly():
            yield from FEEDS[:4]
            os.kill(os.getpid(), signal.SIGKILL)

        preview.Piecewise = partial(Piecewise, piece_s=0.0)
        calibrate(MODEL, {str(tmp_path / "table.json")!r}, deadly(), resume=True)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    assert done.returncode == -signal.SIGKILL
    table = calibrate(MODEL, tmp_path / "table.json", FeedReader(FEEDS), resume=True)
    assert table.to_json() == calibrate(MODEL, FEEDS).to_json()


@pytest.mark.usefixtures("short")
def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    with pytest.raises(KeyboardInterrupt):
        calibrate(MODEL, path, ending(FEEDS, 3), resume=True)
    with pytest.raises(CalibrationError, match="other samples"):
        calibrate(MODEL, path, FEEDS[::-1], resume=True)
    other = models.residual_block(seed=5)
    with pytest.raises(CalibrationError, match=r"cannot be gone on with.*different models"):
        calibrate(other, path, FEEDS, resume=True)
    (tmp_path / "table.json.part").write_text("{")
    with pytest.raises(CalibrationError, match="damaged"):
        calibrate(MODEL, path, FEEDS, resume=True)
    assert not path.exists()


def test_wrong_options(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="needs a file"):
        calibrate(MODEL, FEEDS, resume=True)
    with pytest.raises(OptionError, match="order of all samples"):
        calibrate(MODEL, tmp_path / "t", FEEDS, resume=True, extra_options={"CalibMovingAverage": True})
