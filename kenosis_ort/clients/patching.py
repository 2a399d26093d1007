"""Ours in the place of ``onnxruntime.quantization``'s functions and classes, for the running process.

A name is found by what it holds, not by how it is called: every module that imported one of stock's objects gets ours,
whatever name it gave it, and gets stock's back in the end. Objects made in between keep working.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final

import kenosis_ort
from kenosis_ort.clients.calibrator import create_calibrator
from kenosis_ort.clients.quantizer import QDQQuantizer
from kenosis_ort.errors import OptionError, did_you_mean
from kenosis_ort.options import KEYWORDS
from kenosis_ort.quantizer.stock import StaticQuantConfig

Called = Callable[[str, Any], None]

_HOMES: Final[Mapping[str, str]] = {
    "quantize_static": "onnxruntime.quantization.quantize",
    "quantize": "onnxruntime.quantization.quantize",
    "create_calibrator": "onnxruntime.quantization.calibrate",
    "QDQQuantizer": "onnxruntime.quantization.qdq_quantizer",
}
_OURS: Final = __name__.partition(".")[0]
_OPTIONS: Final = tuple(
    name
    for name, parameter in inspect.signature(kenosis_ort.quantize_static).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
) + tuple(KEYWORDS)

_lock = threading.RLock()
_active: list[Patch] = []
_replaced: list[tuple[Any, Any]] = []  # stock's object and what stands in its place, while a patch is active
_inside = threading.local()


class Patch:
    """Stock's names are ours until `undo`, or until the end of the ``with`` block.

    Args:
        on_call: Called with a name and what came of it after each call of ours: the report, the calibrator, or the
            quantizer after ``quantize_model``.
        options: Keyword-only parameters of `quantize_static` for the calls that the patched code makes.

    Attributes:
        calls: How often each of ours was called and returned.
        failed: How often each of ours raised.
        options: As above.

    Raises:
        OptionError: There is no such parameter.
    """

    def __init__(self, on_call: Called | None = None, **options: Any) -> None:
        self.calls: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.options = options
        self._on_call = on_call
        for name in options:
            if name not in _OPTIONS:
                raise OptionError(
                    f"quantize_static has no keyword-only parameter '{name}'.{did_you_mean(name, _OPTIONS)}",
                    where="patch",
                    fix=f"one of {', '.join(_OPTIONS)}",
                )
        with _lock:
            if not _active:
                _replaced[:] = _stand_ins()
                _exchange({id(stock): (stock, ours) for stock, ours in _replaced})
            _active.append(self)

    def undo(self) -> None:
        """Puts stock's back, in modules imported since too; another patch that is still active keeps ours."""
        with _lock:
            if self not in _active:
                return
            _active.remove(self)
            if not _active:
                _exchange({id(ours): (ours, stock) for stock, ours in _replaced})
                _replaced.clear()

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def note(self, name: str, result: Any) -> None:
        """Counts a call."""
        self.calls[name] += 1
        if self._on_call is not None:
            self._on_call(name, result)


def patch(on_call: Called | None = None, **options: Any) -> Patch:
    """Puts `quantize_static`, `quantize`, `QDQQuantizer` and `create_calibrator` in stock's place, process-wide.

    Also in modules that imported stock's already. Use it as a context manager, or call it and `Patch.undo` later; it
    may be nested. Dynamic quantization, pre-processing and the rest of ``onnxruntime.quantization`` stay stock's.

    Args:
        on_call: Called with the name and the result of every call of ours.
        options: Keyword-only parameters of `quantize_static`, which code written for stock cannot pass itself:
            ``patch(recipe="accurate", promise=False)``. Of nested patches the inner one's win.

    Returns:
        The handle, which counts calls and undoes the patch.

    Raises:
        OptionError: There is no such parameter.
    """
    return Patch(on_call, **options)


def _stand_ins() -> list[tuple[Any, Any]]:
    """Stock's objects with new ones for their place, which no other module can hold for a reason of its own."""
    stock = {name: getattr(importlib.import_module(home), name) for name, home in _HOMES.items()}

    static = _counting("quantize", kenosis_ort.quantize, stock["quantize"])

    @functools.wraps(stock["quantize"])
    def quantize(model_input: Any, model_output: Any, quant_config: Any) -> Any:
        is_static = isinstance(quant_config, StaticQuantConfig)
        return (static if is_static else stock["quantize"])(model_input, model_output, quant_config)

    class Quantizer(QDQQuantizer):
        __doc__ = QDQQuantizer.__doc__

        def __new__(cls, *arguments: Any, **named: Any) -> Any:
            if _is_inside() and cls is Quantizer:
                return stock["QDQQuantizer"](*arguments, **named)
            return super().__new__(cls)

        def quantize_model(self) -> Any:
            return _call("QDQQuantizer", super().quantize_model, {}, noted=self)

    Quantizer.__name__ = Quantizer.__qualname__ = QDQQuantizer.__name__
    Quantizer.__module__ = QDQQuantizer.__module__
    ours = {
        "quantize_static": _counting("quantize_static", kenosis_ort.quantize_static, stock["quantize_static"]),
        "quantize": quantize,
        "create_calibrator": _counting(
            "create_calibrator", create_calibrator, stock["create_calibrator"], takes_options=False
        ),
        "QDQQuantizer": Quantizer,
    }
    return [(stock[name], ours[name]) for name in _HOMES]


def _counting(
    name: str, ours: Callable[..., Any], stock: Callable[..., Any], *, takes_options: bool = True
) -> Callable[..., Any]:
    """Function of ours in the place of stock's, which gets the options of the patches."""

    @functools.wraps(ours)
    def called(*arguments: Any, **named: Any) -> Any:
        if _is_inside():  # stock's own code, which ours calls for what it leaves to stock
            return stock(*arguments, **named)
        with _lock:
            given = {k: v for handle in _active for k, v in handle.options.items()} if takes_options else {}
        return _call(name, ours, {**given, **named}, *arguments)

    return called


def _call(name: str, function: Callable[..., Any], named: Mapping[str, Any], *arguments: Any, noted: Any = None) -> Any:
    """Result of a call of ours, which all active patches count; what stock's code calls in it is stock's."""
    before, _inside.now = _is_inside(), True
    try:
        result = function(*arguments, **named)
    except BaseException:
        with _lock:
            for handle in _active:
                handle.failed[name] += 1
        raise
    finally:
        _inside.now = before
    with _lock:
        handles = list(_active)
    for handle in handles:
        handle.note(name, result if noted is None else noted)
    return result


def _is_inside() -> bool:
    return getattr(_inside, "now", False)


def _exchange(by_id: Mapping[int, tuple[Any, Any]]) -> None:
    """Puts other objects in place of some, in the namespaces of all modules but our own."""
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.partition(".")[0] == _OURS:
            continue
        names = vars(module)  # never getattr: some modules import on access
        for name, value in list(names.items()):
            if id(value) in by_id:
                names[name] = by_id[id(value)][1]
