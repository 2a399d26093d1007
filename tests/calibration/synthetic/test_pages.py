"""Made-up writing, and which nets are shown it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from kenosis_ort.calibration.part_session import SessionSettings
from kenosis_ort.calibration.synthetic import SyntheticReader, pixels, reader
from kenosis_ort.calibration.synthetic.drawing import is_line, page
from kenosis_ort.calibration.synthetic.draws import Draws
from kenosis_ort.calibration.synthetic.pixels import ImageMaker
from tests.models import Net

NATURAL, WRITTEN = 40, 200
CHECKSUMS = [1732377, 1701846, 2983786, 1612538]


def edges(*, bias: float = 0.0, size: tuple[int, int] = (32, 32)) -> onnx.ModelProto:
    """A net that answers to differences between neighbours: a map of probabilities."""
    net = Net()
    x = net.input("x", [1, 3, *size])
    kernel = np.zeros((4, 3, 3, 3), np.float32)
    for i, (y0, x0) in enumerate(((0, 1), (1, 0), (1, 2), (2, 1))):
        kernel[i, :, 1, 1], kernel[i, :, y0, x0] = 4, -4
    y = net.op("Conv", [x, net.const(kernel), net.const(np.full(4, 0.5))], name="edges")
    y = net.op("Relu", [y], name="relu")
    one = [y, net.const(np.ones((1, 4, 1, 1))), net.const(np.array([bias]))]
    inner = [1, 1, size[0] - 2, size[1] - 2]
    net.output(net.op("Sigmoid", [net.op("Conv", one, name="sum")], name="probability"), inner)
    return net.model()


def brightness(monkeypatch: pytest.MonkeyPatch, noisy: int) -> None:
    """Makes photographs and writing flat but for one of them, which is noise."""

    def drawn(level: int) -> Any:
        def draw(draws: Draws, height: int, width: int) -> Any:
            spread = 80 if level == noisy else 0
            return (level + draws.integers(-1, 1, (3, height, width)) * spread % 56).astype(np.uint8)

        return draw

    monkeypatch.setattr(pixels, "photograph", drawn(NATURAL))
    monkeypatch.setattr(pixels, "page", drawn(WRITTEN))


def maker_of(model: onnx.ModelProto, **options: Any) -> ImageMaker:
    (maker,) = SyntheticReader(model, samples=2, input_range=(0, 1), **options)._makers.values()
    assert isinstance(maker, ImageMaker)
    return maker


@pytest.mark.parametrize("size", [(1, 1), (5, 3), (16, 16), (48, 320), (96, 96)])
def test_pages_of_any_size_repeat(size: tuple[int, int]) -> None:
    pages = [page(Draws(0, i, "x"), *size) for i in range(3)]
    assert all(p.shape == (3, *size) and p.dtype == np.uint8 for p in pages)
    assert all(np.array_equal(p, page(Draws(0, i, "x"), *size)) for i, p in enumerate(pages))


def test_a_page_is_the_same_on_every_platform() -> None:
    assert [int(page(Draws(0, i, "x"), 64, 64).astype(np.int64).sum()) for i in range(4)] == CHECKSUMS


def test_rows_of_ink_and_blank_rows() -> None:
    """On paper, rows of writing and blank ones take turns, and writing is a small part of the picture."""
    found = 0
    for i in range(24):
        grey = page(Draws(1, i, "x"), 128, 128).astype(np.int64).sum(axis=0)
        paper = np.median(grey)
        ink = np.abs(grey - paper) > 120
        if np.abs(grey - paper)[~ink].max() > 60 and ink.mean() > 0.4:
            continue  # over a photograph
        rows = ink.any(axis=1)
        turns = int((rows[1:] != rows[:-1]).sum())
        found += turns >= 4 and 0.01 < ink.mean() < 0.4
    assert found >= 6


@pytest.mark.parametrize(
    ("size", "line"), [((48, 320), True), ((32, 100), True), ((64, 64), False), ((375, 1242), False)]
)
def test_lines(size: tuple[int, int], line: bool) -> None:
    assert is_line(*size) is line


def test_a_net_that_writing_excites_is_shown_it(monkeypatch: pytest.MonkeyPatch) -> None:
    brightness(monkeypatch, WRITTEN)
    maker = maker_of(edges())
    assert maker.writing
    assert "half of them of writing" in maker.says
    reader = SyntheticReader(edges(), samples=32, input_range=(0, 255))
    written = [bool(reader.feed(i)["x"].mean() > 120) for i in range(32)]
    assert sum(written) == 16
    for every in (2, 4, 8):
        assert 0 < sum(written[::every]) < 32 // every, "whoever takes every second sample gets some of both"


def test_a_net_that_photographs_excite_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    brightness(monkeypatch, NATURAL)
    maker = maker_of(edges())
    assert not maker.writing
    assert "writing" not in maker.says


def test_a_net_that_takes_lines_needs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    model = edges(size=(32, 128))
    monkeypatch.setattr(pixels, "_excitement", lambda *_, writing, **__: ([1.1 if writing else 1.0], [1.0]))
    assert maker_of(model).writing
    assert not maker_of(edges()).writing


def test_a_net_that_does_not_run_is_shown_photographs() -> None:
    model = edges()
    maker = maker_of(model)
    model.graph.node[0].op_type = "NoSuchOperator"
    assert not pixels.shows_writing(model, maker, SessionSettings())


def test_a_picture_among_other_inputs_is_a_photograph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "shows_writing", lambda *_: True)
    net = Net()
    pictures = [net.input(name, [1, 3, 32, 32]) for name in "ab"]
    net.output(net.op("Add", pictures, name="sum"), [1, 3, 32, 32])
    makers = SyntheticReader(net.model(), samples=2, input_range=(0, 1))._makers.values()
    assert not any(maker.writing for maker in makers if isinstance(maker, ImageMaker))
    assert maker_of(edges()).writing
