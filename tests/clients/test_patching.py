"""In stock's place: where names are replaced and come back; calibrators of the same interface, ranges and errors."""

import gc
import sys
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime as ort
import onnxruntime.quantization as stock
import onnxruntime.quantization.calibrate as stock_calibrate
import onnxruntime.quantization.qdq_quantizer as stock_qdq
import pytest
from onnxruntime.quantization import DynamicQuantConfig, QuantType, StaticQuantConfig
from onnxruntime.quantization.calibrate import CalibrationMethod

import kenosis_ort
from kenosis_ort import CalibrationError, create_calibrator, patch
from kenosis_ort.quantizer.stock import QUANTIZABLE_OPS
from tests import models, planning
from tests.clients.support import build, ranges

stock_module = sys.modules["onnxruntime.quantization.quantize"]  # the package hides it behind the function

BOTH = [(module, name) for module in (stock, stock_module) for name in ("quantize_static", "quantize", "QDQQuantizer")]
MORE = [(stock_module, "create_calibrator"), (stock_calibrate, "create_calibrator"), (stock_qdq, "QDQQuantizer")]
PLACES = [*BOTH, *MORE]
BEFORE = [getattr(module, name) for module, name in PLACES]


def now():
    return [getattr(module, name) for module, name in PLACES]


@pytest.fixture(autouse=True)
def all_is_back():
    yield
    assert now() == BEFORE


@pytest.fixture
def client():
    """A module that imported stock's names, under names of its own."""
    module = types.ModuleType("a_client_of_stock")
    module.q, module.Q, module.c = stock.quantize_static, stock.QDQQuantizer, stock_calibrate.create_calibrator
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def is_ours(value):
    if value.__name__ == "quantize":  # goes on to stock's where the configuration is dynamic
        return value not in BEFORE
    return str(getattr(value, "__wrapped__", value).__module__).startswith("kenosis_ort")


def test_every_place_is_ours_inside_and_stocks_outside(client):
    held = vars(client).copy()
    with patch():
        assert all(is_ours(value) for value in now())
        assert now()[0] is now()[3] is client.q
        assert client.c is stock_calibrate.create_calibrator
        assert issubclass(client.Q, kenosis_ort.QDQQuantizer)
        assert issubclass(client.Q, BEFORE[2])
        assert client.Q.__name__ == "QDQQuantizer"
        assert stock.quantize_dynamic.__module__.startswith("onnxruntime."), "that stays stock's"
    assert vars(client) == held


def test_a_module_imported_in_between_gets_stocks_back(tmp_path, monkeypatch):
    (tmp_path / "imported_in_between.py").write_text("from onnxruntime.quantization import quantize_static as q\n")
    monkeypatch.syspath_prepend(tmp_path)
    with patch():
        import imported_in_between

        assert imported_in_between.q.__wrapped__ is kenosis_ort.quantize_static
    assert imported_in_between.q is BEFORE[0]
    del sys.modules["imported_in_between"]


def test_stocks_is_back_however_it_ends_and_what_others_hold_stays(client):
    client.ours = kenosis_ort.quantize_static
    handle = patch()
    assert client.q is not BEFORE[0]
    for _ in range(2):  # once more does nothing
        handle.undo()
        assert client.q is BEFORE[0]
    with pytest.raises(ZeroDivisionError), patch():
        raise ZeroDivisionError
    assert now() == BEFORE
    with patch():
        client.q = print
        assert client.ours is kenosis_ort.quantize_static
    assert (client.q, client.ours) == (print, kenosis_ort.quantize_static)


def test_nested_and_in_any_order(client, net, tmp_path):
    outer = patch()
    inner = patch()
    client.c(net, None, str(tmp_path / "a.onnx"))
    outer.undo()
    assert client.c is not BEFORE[6]
    client.c(net, None, str(tmp_path / "a.onnx"))
    inner.undo()
    assert (outer.calls["create_calibrator"], inner.calls["create_calibrator"]) == (1, 2)


def test_many_threads_patch_and_undo():
    def work(_):
        with patch():
            return is_ours(stock.quantize_static)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(40)))


CORE = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}


def test_calls_are_counted_and_told(net, tmp_path):
    model = models.residual_block()
    told = []
    with patch(on_call=lambda name, result: told.append((name, type(result).__name__))) as patched:
        stock.quantize_static(net, tmp_path / "1.onnx", models.reader(model), **CORE)
        stock.quantize(net, tmp_path / "2.onnx", StaticQuantConfig(models.reader(model), **CORE))
        stock.quantize(net, tmp_path / "3.onnx", DynamicQuantConfig(weight_type=QuantType.QUInt8))
        data = ranges(model, models.feeds(model, 2), tmp_path, create=stock_calibrate.create_calibrator)
        build(stock.QDQQuantizer, model, data)
    results = ["QuantizationReport", "QuantizationReport", "MinMaxCalibrater", "QDQQuantizer"]
    names = ["quantize_static", "quantize", "create_calibrator", "QDQQuantizer"]
    assert told == [*zip(names, results, strict=True)]
    assert dict(patched.calls) == dict.fromkeys(names, 1)
    assert all((tmp_path / f"{i}.onnx").exists() for i in (1, 2, 3))


def test_a_failing_call_counts_for_nothing(net, tmp_path):
    with patch() as patched:
        with pytest.raises(kenosis_ort.ModelLoadError):
            stock.quantize_static(tmp_path / "none.onnx", tmp_path / "q.onnx", models.FeedReader([]))
        assert is_ours(stock.quantize_static)
        stock_calibrate.create_calibrator(net, list(QUANTIZABLE_OPS), str(tmp_path / "a.onnx"))
    assert dict(patched.calls) == {"create_calibrator": 1}


def test_options_that_the_patched_code_cannot_pass(net, tmp_path):
    model = models.residual_block()
    with patch(recipe="plain", verify=True), patch(verify=False):
        report = stock.quantize_static(net, tmp_path / "1.onnx", models.reader(model))
        other = stock.quantize(net, tmp_path / "2.onnx", StaticQuantConfig(models.reader(model)))
    for made in (report, other):
        assert (made.options["recipe"].value, made.fusion) == (kenosis_ort.RECIPES["plain"].to_dict(), None)
    for wrong, said in (("recipy", r"'recipy'.*Did you mean 'recipe'"), ("per_channel", "'per_channel'")):
        with pytest.raises(kenosis_ort.OptionError, match=said):
            patch(**{wrong: True})


# ---- our calibrators against stock's: the same interface, the same ranges, flat memory ------------------------------


METHODS = pytest.mark.parametrize("method", list(CalibrationMethod), ids=lambda m: m.name)


@pytest.fixture
def net(tmp_path):
    onnx.save(models.residual_block(), tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


def ends(data):
    return {k: (float(np.ravel(v.lowest)[0]), float(np.ravel(v.highest)[0])) for k, v in data.items()}


def by_both(model, samples, folder, **options):
    """Ranges by stock's calibrator and by ours."""
    feeds, both = models.feeds(model, samples), (stock_calibrate.create_calibrator, create_calibrator)
    return [ranges(model, feeds, folder, create=create, **options) for create in both]


@pytest.mark.parametrize("options", [
    {}, {"symmetric": True}, {"moving_average": True, "averaging_constant": 0.3}, {"averaging_constant": 7},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("op_types", [None, ["Conv"]], ids=str)
def test_minmax_ranges_are_stocks_to_the_bit(options, op_types, tmp_path):
    want, got = by_both(models.residual_block(), 6, tmp_path, op_types=op_types, calls=2, **options)
    assert (ends(got), got.calibration_method) == (ends(want), want.calibration_method)
    for name, entry in want.items():
        assert (got[name].lowest.dtype, got[name].lowest.shape) == (entry.lowest.dtype, entry.lowest.shape)


@pytest.mark.parametrize("method", ["Percentile", "Entropy", "Distribution"])
def test_histogram_methods_are_near_stocks(method, tmp_path):
    want, got = by_both(models.residual_block(size=24), 4, tmp_path, method=CalibrationMethod[method])
    assert ends(got).keys() == ends(want).keys()
    for name, (low, high) in ends(want).items():
        width = high - low
        assert ends(got)[name] == pytest.approx((low, high), abs=width / 200), name


@METHODS
def test_the_object_is_stocks_with_its_interface(method, net, tmp_path):
    augmented = tmp_path / "augmented.onnx"
    calibrator = create_calibrator(str(net), ["Conv"], str(augmented), method)
    assert isinstance(calibrator, getattr(stock_calibrate, f"{method.name}Calibrater"))
    assert augmented.exists()
    assert calibrator.get_augment_model() is calibrator.model
    assert len(calibrator.get_augment_model().graph.output) > 1
    calibrator.set_execution_providers(["CPUExecutionProvider"])
    calibrator.collect_data(models.reader(models.residual_block()))
    assert calibrator.compute_data().calibration_method == method
    assert isinstance(calibrator.infer_session, ort.InferenceSession)
    assert len(calibrator.infer_session.get_outputs()) > 1


def test_the_augmented_model_is_loaded_only_where_it_is_asked_for(net, tmp_path):
    calibrator = create_calibrator(net, None, str(tmp_path / "augmented.onnx"))
    (tmp_path / "augmented.onnx").unlink()
    calibrator.collect_data(models.reader(models.residual_block()))
    assert "x" in calibrator.compute_data()


def test_ranges_by_channel_are_stocks_and_so_are_errors(net, tmp_path):
    out = str(tmp_path / "a.onnx")
    by_channel = create_calibrator(net, None, out, extra_options={"per_channel": True})
    assert type(by_channel) is stock_calibrate.MinMaxCalibrater
    with pytest.raises(ValueError, match="Unsupported calibration method"):
        create_calibrator(net, None, out, "MinMax")
    with pytest.raises(ValueError, match="model_path should be model path"):
        create_calibrator(models.residual_block(), None, out)
    calibrator = create_calibrator(net, None, out)
    with pytest.raises(ValueError, match="No data is collected"):
        calibrator.collect_data(models.FeedReader([]))
    calibrator.collect_data(models.reader(models.residual_block()))
    calibrator.collect_data(models.FeedReader([]))  # nothing more is no error


@METHODS
def test_feeds_are_not_kept(method, net, tmp_path):
    alive = []
    references = []

    def feeds():
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
def test_minus_infinity_counts_for_nothing(method, tmp_path):
    """Stock's MinMax gives such a tensor an infinite range, its histograms fail."""
    masked = planning.parse("(float[1,4] x, float[1,4] mask) => (y) { m = Add (x, mask) y = Softmax (m) }")
    feed = {"x": np.float32([[1, 2, 3, 4]]), "mask": np.float32([[0, 0, -np.inf, -np.inf]])}
    found = ends(ranges(masked, [feed, feed], tmp_path, create=create_calibrator, method=method, symmetric=False))
    assert np.isfinite([*found.values()]).all()
    assert method.name != "MinMax" or (found["m"], found["mask"]) == ((1.0, 2.0), (0.0, 0.0))


def test_where_the_collection_cannot_begin_stock_takes_over(net, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise CalibrationError("not today")

    monkeypatch.setattr("kenosis_ort.clients.calibrator.Sweep", fails)
    calibrator = create_calibrator(net, None, str(tmp_path / "a.onnx"))
    with pytest.warns(UserWarning, match="as stock does: not today") as caught:
        calibrator.collect_data(models.reader(models.residual_block()))
    assert caught[0].filename == __file__
    assert "x" in calibrator.compute_data()
