"""What the passes are fitted to, what they are judged by, and what is kept, through the public call.

In the order of their digests every fourth sample is held out, whatever their number and the pass. Here these samples
show the channels in another order than the rest do, at a lower level: no range depends on it, but all that is fitted to
them would.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from kenosis_ort import QuantizationReport, Recipe
from kenosis_ort.calibration.cached_samples import feed_digest
from tests.flow.support import quantized
from tests.models import Feed, Net

CHANNELS = 8
IN_ORDER, PAIRS_TURNED, TURNED = (0, 1, 2, 3, 4, 5, 6, 7), (2, 3, 0, 1, 6, 7, 4, 5), (7, 6, 5, 4, 3, 2, 1, 0)
OFF: dict[str, Any] = {"ranges": "minmax", "equalize": False, "smooth": "off", "bias_correction": False}


def uneven(seed: int) -> onnx.ModelProto:
    """A depthwise blur, the same for all channels, and a Conv whose weights differ a lot by channel."""
    net = Net(seed=seed)
    c, pads = CHANNELS, {"kernel_shape": [3, 3], "pads": [1] * 4}
    blur = [net.input("x", [1, c, 8, 8]), np.full((c, 1, 3, 3), 1 / 9), np.full(c, 0.1)]
    y = net.op("Relu", [net.op("Conv", blur, name="blur", group=c, **pads)], name="relu")
    weights = net.rng.normal(0, 0.3, (c, c, 3, 3)) * np.exp(net.rng.normal(0, 1.5, (1, c, 1, 1)))
    net.output(net.op("Conv", [y, weights, np.zeros(c)], name="mix", **pads), [1, c, 8, 8])
    return net.model()


def samples(seed: int, held_out: Sequence[int], *, level: float) -> list[Feed]:
    """Sixteen samples whose channels differ in size; every fourth has them in the given order, at the given level."""
    rng = np.random.default_rng(seed)
    size = np.exp(np.linspace(0, -3, CHANNELS))[:, None, None]
    found = [(rng.normal(0.3, 1, (1, CHANNELS, 8, 8)) * size).astype(np.float32) for _ in range(16)]
    return [at_place({"x": np.float32(level) * x[:, held_out] if i % 4 == 3 else x}, i) for i, x in enumerate(found)]


def at_place(feed: Feed, place: int) -> Feed:
    """A sample changed by next to nothing, so that its digest has a given place among sixteen."""
    for attempt in range(1000):
        tried = {"x": feed["x"].copy()}
        tried["x"][0, -1, -1, -1] *= np.float32(1 + attempt * 1e-5)
        if feed_digest(tried) * 16 // 2**256 == place:
            return tried
    raise AssertionError("no digest is found")


def fitted(folder: Path, seed: int, held_out: Sequence[int], level: float, **passes: Any) -> QuantizationReport:
    recipe = Recipe(**{**OFF, **passes})
    return quantized(uneven(seed), folder / "out.onnx", samples(seed, held_out, level=level), recipe=recipe)


@pytest.mark.parametrize(
    "passes",
    [{"equalize": True}, {"bias_correction": True}, {"bias_correction": True, "rounding": "learned"}],
    ids=lambda passes: list(passes)[-1],
)
def test_no_pass_is_fitted_to_held_out_samples(tmp_path: Path, passes: dict[str, Any]) -> None:
    files = []
    for order in (IN_ORDER, PAIRS_TURNED):
        report = fitted(tmp_path, 0, order, 0.6, **passes)
        assert [p.name for p in report.passes if p.kept] == list(passes), "else there is nothing to compare"
        files.append((tmp_path / "out.onnx").read_bytes())
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("passes", "cases"),
    [
        ({"equalize": True}, [(2, 0.55), (2, 0.7), (4, 0.55)]),
        ({"bias_correction": True, "rounding": "learned"}, [(1, 1.0), (2, 1.0), (4, 1.0)]),
    ],
    ids=["equalize", "bias_correction, rounding"],
)
def test_what_is_a_little_worse_on_held_out_samples_is_undone(
    tmp_path: Path, passes: dict[str, Any], cases: list[tuple[int, float]]
) -> None:
    outcomes = [p for seed, level in cases for p in fitted(tmp_path, seed, TURNED, level, **passes).passes]
    changes = {name: [p.change for p in outcomes if p.name == name and p.change is not None] for name in passes}
    for name, seen in changes.items():
        assert any(0 < change < 0.5 for change in seen), f"nothing here tells how much worse {name} may be"
    clear = {"equalize": -0.05}  # changes what is calibrated after it: has to be better by more than chance
    assert [p for p in outcomes if p.kept and not (p.change is not None and p.change < clear.get(p.name, 0))] == []


FITTING = {  # what gets samples to fit to, and as which argument
    "kenosis_ort.flow.builder.collect": 1,
    "kenosis_ort.passes.runner.channel_statistics": 1,
    "kenosis_ort.passes.correct_biases.bias_shifts": 2,
    "kenosis_ort.passes.round_weights.learn_rounding": 2,
    "kenosis_ort.passes.leave_float.search_mixed_precision": "feeds",
}


def test_whatever_is_fitted_gets_no_sample_that_is_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[int]] = {}

    def spy(name: str, at: int | str) -> None:
        module, _, function = name.rpartition(".")
        real = getattr(importlib.import_module(module), function)

        def call(*args: Any, **kwargs: Any) -> Any:
            given = list(args[at]) if isinstance(at, int) else list(kwargs[at])
            seen.setdefault(name, set()).update(round(float(feed["x"].max())) for feed in given)
            return real(*args, **kwargs)

        monkeypatch.setattr(name, call)

    for name, at in FITTING.items():
        spy(name, at)
    feeds = [{"x": np.clip(feed["x"], -1, 1)} for feed in samples(0, IN_ORDER, level=1.0)]
    for index, feed in enumerate(feeds):
        feed["x"][0, 0, 0, 0] = index + 1  # the largest number tells which sample it is
    feeds = [at_place(feed, index) for index, feed in enumerate(feeds)]
    recipe = Recipe(rounding="learned", mixed_precision=True, accuracy_budget=1e-6, max_float_share=0.5)
    quantized(uneven(0), tmp_path / "out.onnx", feeds, recipe=recipe)
    assert seen.keys() == FITTING.keys()
    held_out = {index + 1 for index in range(16) if index % 4 == 3}
    assert {name: sorted(given & held_out) for name, given in seen.items()} == {name: [] for name in FITTING}
