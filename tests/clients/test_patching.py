"""`kenosis_ort.patch`: where names are replaced, and that they come back."""

import sys
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onnx
import onnxruntime.quantization as stock
import onnxruntime.quantization.calibrate as stock_calibrate
import onnxruntime.quantization.qdq_quantizer as stock_qdq
import pytest
from onnxruntime.quantization import DynamicQuantConfig, QuantType, StaticQuantConfig

import kenosis_ort
from kenosis_ort import patch
from kenosis_ort.quantizer.stock import QUANTIZABLE_OPS
from tests import models
from tests.clients.support import build, ranges

stock_module = sys.modules["onnxruntime.quantization.quantize"]  # the package hides it behind the function

BOTH = [(module, name) for module in (stock, stock_module) for name in ("quantize_static", "quantize", "QDQQuantizer")]
MORE = [(stock_module, "create_calibrator"), (stock_calibrate, "create_calibrator"), (stock_qdq, "QDQQuantizer")]
PLACES = [*BOTH, *MORE]
BEFORE = [getattr(module, name) for module, name in PLACES]


def now() -> list[Any]:
    return [getattr(module, name) for module, name in PLACES]


@pytest.fixture(autouse=True)
def all_is_back() -> Iterator[None]:
    yield
    assert now() == BEFORE


@pytest.fixture
def client() -> Iterator[types.ModuleType]:
    """A module that imported stock's names, under names of its own."""
    module = types.ModuleType("a_client_of_stock")
    module.q, module.Q, module.c = stock.quantize_static, stock.QDQQuantizer, stock_calibrate.create_calibrator  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def is_ours(value: Any) -> bool:
    if value.__name__ == "quantize":  # goes on to stock's where the configuration is dynamic
        return value not in BEFORE
    return str(getattr(value, "__wrapped__", value).__module__).startswith("kenosis_ort")


def test_every_place_is_ours_inside_and_stocks_outside(client: types.ModuleType) -> None:
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


def test_a_module_imported_in_between_gets_stocks_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_in_between.py").write_text("from onnxruntime.quantization import quantize_static as q\n")
    monkeypatch.syspath_prepend(tmp_path)
    with patch():
        import imported_in_between  # type: ignore[import-not-found]

        assert imported_in_between.q.__wrapped__ is kenosis_ort.quantize_static
    assert imported_in_between.q is BEFORE[0]
    del sys.modules["imported_in_between"]


def test_stocks_is_back_however_it_ends_and_what_others_hold_stays(client: types.ModuleType) -> None:
    client.ours = kenosis_ort.quantize_static  # type: ignore[attr-defined]
    handle = patch()
    assert client.q is not BEFORE[0]
    for _ in range(2):  # once more does nothing
        handle.undo()
        assert client.q is BEFORE[0]
    with pytest.raises(ZeroDivisionError), patch():
        raise ZeroDivisionError
    assert now() == BEFORE
    with patch():
        client.q = print  # type: ignore[attr-defined]
        assert client.ours is kenosis_ort.quantize_static
    assert (client.q, client.ours) == (print, kenosis_ort.quantize_static)


def test_nested_and_in_any_order(client: types.ModuleType, tmp_path: Path) -> None:
    outer = patch()
    inner = patch()
    client.c(save(tmp_path), None, str(tmp_path / "a.onnx"))
    outer.undo()
    assert client.c is not BEFORE[6]
    client.c(save(tmp_path), None, str(tmp_path / "a.onnx"))
    inner.undo()
    assert (outer.calls["create_calibrator"], inner.calls["create_calibrator"]) == (1, 2)


def test_many_threads_patch_and_undo() -> None:
    def work(_: int) -> bool:
        with patch():
            return is_ours(stock.quantize_static)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(40)))


def save(folder: Path) -> Path:
    onnx.save(models.residual_block(), folder / "net.onnx")
    return folder / "net.onnx"


CORE: dict[str, Any] = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}


def test_calls_are_counted_and_told(tmp_path: Path) -> None:
    model, path = models.residual_block(), save(tmp_path)
    told: list[tuple[str, str]] = []
    with patch(on_call=lambda name, result: told.append((name, type(result).__name__))) as patched:
        stock.quantize_static(path, tmp_path / "1.onnx", models.reader(model), **CORE)
        stock.quantize(path, tmp_path / "2.onnx", StaticQuantConfig(models.reader(model), **CORE))
        stock.quantize(path, tmp_path / "3.onnx", DynamicQuantConfig(weight_type=QuantType.QUInt8))
        data = ranges(model, models.feeds(model, 2), tmp_path, create=stock_calibrate.create_calibrator)
        build(stock.QDQQuantizer, model, data)
    results = ["QuantizationReport", "QuantizationReport", "MinMaxCalibrater", "QDQQuantizer"]
    names = ["quantize_static", "quantize", "create_calibrator", "QDQQuantizer"]
    assert told == [*zip(names, results, strict=True)]
    assert dict(patched.calls) == dict.fromkeys(names, 1)
    assert all((tmp_path / f"{i}.onnx").exists() for i in (1, 2, 3))


def test_a_failing_call_counts_for_nothing(tmp_path: Path) -> None:
    with patch() as patched:
        with pytest.raises(kenosis_ort.ModelLoadError):
            stock.quantize_static(tmp_path / "none.onnx", tmp_path / "q.onnx", models.FeedReader([]))
        assert is_ours(stock.quantize_static)
        stock_calibrate.create_calibrator(save(tmp_path), list(QUANTIZABLE_OPS), str(tmp_path / "a.onnx"))
    assert dict(patched.calls) == {"create_calibrator": 1}


def test_options_that_the_patched_code_cannot_pass(tmp_path: Path) -> None:
    model, path = models.residual_block(), save(tmp_path)
    with patch(recipe="plain", verify=True), patch(verify=False):
        report = stock.quantize_static(path, tmp_path / "1.onnx", models.reader(model))
        other = stock.quantize(path, tmp_path / "2.onnx", StaticQuantConfig(models.reader(model)))
    for made in (report, other):
        assert (made.options["recipe"].value, made.fusion) == (kenosis_ort.RECIPES["plain"].to_dict(), None)
    for wrong, said in (("recipy", r"'recipy'.*Did you mean 'recipe'"), ("per_channel", "'per_channel'")):
        with pytest.raises(kenosis_ort.OptionError, match=said):
            patch(**{wrong: True})
