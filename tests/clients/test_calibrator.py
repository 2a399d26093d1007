"""Our calibrators against stock's: the same interface, the same ranges, flat memory."""

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnxruntime.quantization import calibrate as stock
from onnxruntime.quantization.calibrate import CalibrationMethod

from kenosis_ort import CalibrationError, create_calibrator
from tests import models, planning
from tests.clients.support import ranges

METHODS = pytest.mark.parametrize("method", list(CalibrationMethod), ids=lambda m: m.name)


@pytest.fixture
def net(tmp_path: Path) -> Path:
    onnx.save(models.residual_block(), tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


def ends(data: Any) -> dict[str, tuple[float, float]]:
    return {k: (float(np.ravel(v.lowest)[0]), float(np.ravel(v.highest)[0])) for k, v in data.items()}


def by_both(model: onnx.ModelProto, samples: int, folder: Path, **options: Any) -> list[Any]:
    """Ranges by stock's calibrator and by ours."""
    feeds, both = models.feeds(model, samples), (stock.create_calibrator, create_calibrator)
    return [ranges(model, feeds, folder, create=create, **options) for create in both]


@pytest.mark.parametrize(
    "options",
    [{}, {"symmetric": True}, {"moving_average": True, "averaging_constant": 0.3}, {"averaging_constant": 7}],
    ids=str,
)
@pytest.mark.parametrize("op_types", [None, ["Conv"]], ids=str)
def test_minmax_ranges_are_stocks_to_the_bit(options: dict[str, Any], op_types: Any, tmp_path: Path) -> None:
    want, got = by_both(models.residual_block(), 6, tmp_path, op_types=op_types, calls=2, **options)
    assert (ends(got), got.calibration_method) == (ends(want), want.calibration_method)
    for name, entry in want.items():
        assert (got[name].lowest.dtype, got[name].lowest.shape) == (entry.lowest.dtype, entry.lowest.shape)


@pytest.mark.parametrize("method", ["Percentile", "Entropy", "Distribution"])
def test_histogram_methods_are_near_stocks(method: str, tmp_path: Path) -> None:
    want, got = by_both(models.residual_block(size=24), 4, tmp_path, method=CalibrationMethod[method])
    assert ends(got).keys() == ends(want).keys()
    for name, (low, high) in ends(want).items():
        width = high - low
        assert ends(got)[name] == pytest.approx((low, high), abs=width / 200), name


@METHODS
def test_the_object_is_stocks_with_its_interface(method: CalibrationMethod, net: Path, tmp_path: Path) -> None:
    augmented = tmp_path / "augmented.onnx"
    calibrator = create_calibrator(str(net), ["Conv"], str(augmented), method)
    assert isinstance(calibrator, getattr(stock, f"{method.name}Calibrater"))
    assert augmented.exists()
    assert calibrator.get_augment_model() is calibrator.model
    assert len(calibrator.get_augment_model().graph.output) > 1
    calibrator.set_execution_providers(["CPUExecutionProvider"])
    calibrator.collect_data(models.reader(models.residual_block()))
    assert calibrator.compute_data().calibration_method == method
    assert isinstance(calibrator.infer_session, ort.InferenceSession)
    assert len(calibrator.infer_session.get_outputs()) > 1


def test_the_augmented_model_is_loaded_only_where_it_is_asked_for(net: Path, tmp_path: Path) -> None:
    calibrator = create_calibrator(net, None, str(tmp_path / "augmented.onnx"))
    (tmp_path / "augmented.onnx").unlink()
    calibrator.collect_data(models.reader(models.residual_block()))
    assert "x" in calibrator.compute_data()


def test_ranges_by_channel_are_stocks_and_so_are_errors(net: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "a.onnx")
    assert type(create_calibrator(net, None, out, extra_options={"per_channel": True})) is stock.MinMaxCalibrater
    with pytest.raises(ValueError, match="Unsupported calibration method"):
        create_calibrator(net, None, out, "MinMax")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="model_path should be model path"):
        create_calibrator(models.residual_block(), None, out)  # type: ignore[arg-type]
    calibrator = create_calibrator(net, None, out)
    with pytest.raises(ValueError, match="No data is collected"):
        calibrator.collect_data(models.FeedReader([]))
    calibrator.collect_data(models.reader(models.residual_block()))
    calibrator.collect_data(models.FeedReader([]))  # nothing more is no error


@METHODS
def test_feeds_are_not_kept(method: CalibrationMethod, net: Path, tmp_path: Path) -> None:
    alive: list[int] = []
    references: list[weakref.ref[Any]] = []

    def feeds() -> Iterator[models.Feed]:
        for seed in range(8):
            feed = {"x": models.normal((1, 3, 8, 8), seed)}
            references.append(weakref.ref(feed["x"]))
            yield feed
            del feed
            gc.collect()
            alive.append(sum(r() is not None for r in references))

    reader = SimpleNamespace(get_next=partial(next, feeds(), None))
    create_calibrator(net, None, str(tmp_path / "a.onnx"), method).collect_data(reader)
    assert len(alive) == 8
    assert max(alive) <= 2


@METHODS
def test_minus_infinity_counts_for_nothing(method: CalibrationMethod, tmp_path: Path) -> None:
    """Stock's MinMax gives such a tensor an infinite range, its histograms fail."""
    masked = planning.parse("(float[1,4] x, float[1,4] mask) => (y) { m = Add (x, mask) y = Softmax (m) }")
    feed = {"x": np.float32([[1, 2, 3, 4]]), "mask": np.float32([[0, 0, -np.inf, -np.inf]])}
    found = ends(ranges(masked, [feed, feed], tmp_path, create=create_calibrator, method=method, symmetric=False))
    assert np.isfinite([*found.values()]).all()
    assert method.name != "MinMax" or (found["m"], found["mask"]) == ((1.0, 2.0), (0.0, 0.0))


def test_where_the_collection_cannot_begin_stock_takes_over(net, tmp_path, monkeypatch):
    def fails(*_: Any, **__: Any) -> Any:
        raise CalibrationError("not today")

    monkeypatch.setattr("kenosis_ort.clients.calibrator.Sweep", fails)
    calibrator = create_calibrator(net, None, str(tmp_path / "a.onnx"))
    with pytest.warns(UserWarning, match="as stock does: not today") as caught:
        calibrator.collect_data(models.reader(models.residual_block()))
    assert caught[0].filename == __file__
    assert "x" in calibrator.compute_data()
