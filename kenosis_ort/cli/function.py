"""``--data module:function``: calibration data from a function of the caller's own."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from kenosis_ort.calibration.readers import ArrayReader
from kenosis_ort.errors import CalibrationError, did_you_mean

_log = logging.getLogger(__name__)

_SPELLING = re.compile(r"(?P<module>[^:]+\.py|[A-Za-z_][\w.]*):(?P<function>[A-Za-z_]\w*)")
_RETURNS = (
    "return a calibration data reader, a dictionary of stacked arrays, one stacked array, or an iterable of feeds or "
    "of arrays"
)


def names_function(source: str) -> bool:
    """Whether a source is spelled ``module:function`` or ``file.py:function``."""
    return _SPELLING.fullmatch(source) is not None


def call_function(source: str, only_input: Callable[[], str], *, batch_size: int = 1) -> Any:
    """Calls the caller's function, without arguments, and returns its data as something to read feeds from.

    A dictionary by input name and a single array hold samples along axis 0. Anything else that can be iterated over
    yields feeds, or arrays that are fed as they are.

    Args:
        source: ``module:function``, found from the current folder and then as Python finds modules, or
            ``file.py:function``.
        only_input: Returns the name of the model's only input, for arrays without a name; raises where there are more.
        batch_size: Samples a feed for stacked arrays.

    Raises:
        CalibrationError: It cannot be imported, fails, or returns something else.
    """
    with _current_folder_first():
        function = _named(source, "--data", f"define it; it takes no arguments, and has to {_RETURNS}", called=True)
        data = _guarded(function, source)
    return _feeds(data, source, only_input, batch_size)


def named_metric(source: str) -> Any:
    """Metric spelled ``module:name``; it is not called.

    Raises:
        CalibrationError: It cannot be imported, or there is none of that name.
    """
    with _current_folder_first():
        return _named(source, "--metric", "define it: metric(outputs, reference, indices), or an object to update")


def _named(source: str, option: str, fix: str, *, called: bool = False) -> Any:
    found = _SPELLING.fullmatch(source)
    if found is None:
        raise CalibrationError(f"'{source}' is not module:name", where=option, fix="for example loader:samples")
    module = _module(found["module"], source)
    named = getattr(module, found["function"], None)
    if named is None or (called and not callable(named)):
        public = [name for name, value in vars(module).items() if callable(value)]
        raise CalibrationError(
            f"'{found['module']}' has no function '{found['function']}'.{did_you_mean(found['function'], public)}",
            where=source,
            fix=fix,
        )
    return named


def _feeds(data: Any, source: str, only_input: Callable[[], str], batch_size: int) -> Any:
    if callable(getattr(data, "get_next", None)):
        return data
    if isinstance(data, np.ndarray):
        data = {only_input(): data}
    if isinstance(data, Mapping):
        return ArrayReader(data, batch_size=batch_size)
    if not isinstance(data, Iterable) or isinstance(data, (str, bytes)):
        raise CalibrationError(
            f"the function returned {type(data).__name__}, which is no calibration data", where=source, fix=_RETURNS
        )
    rest = iter(data)
    first = _guarded(lambda: next(rest, None), source)
    if first is None:
        raise CalibrationError("the function returned no samples", where=source, fix="yield at least one feed")
    entries = chain([first], _guarded_rest(rest, source))
    if isinstance(first, Mapping):
        return entries
    name = only_input()
    return ({name: np.asarray(entry)} for entry in entries)


def _module(name: str, source: str) -> ModuleType:
    if not name.endswith(".py"):
        found: ModuleType = _guarded(
            lambda: importlib.import_module(name), source, fix="run the command in the module's folder"
        )
        return found
    path = Path(name)
    if not path.is_file():
        raise CalibrationError("the Python file does not exist", where=name, fix="check --data")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise CalibrationError("the file cannot be imported", where=name, fix="name a Python file")
    module, loader = importlib.util.module_from_spec(spec), spec.loader
    _guarded(lambda: loader.exec_module(module), source)
    return module


def _guarded(call: Callable[[], Any], source: str, *, fix: str | None = None) -> Any:
    """Calls code of the caller's; what it raises becomes an error that names it, with the traceback in the log."""
    try:
        return call()
    except Exception as error:
        _log.info("%s raised", source, exc_info=True)
        raise CalibrationError(
            f"{type(error).__name__}: {error}", where=source, fix=fix or "correct the function; -v shows the traceback"
        ) from error


def _guarded_rest(rest: Iterator[Any], source: str) -> Iterator[Any]:
    end = object()
    while (entry := _guarded(lambda: next(rest, end), source)) is not end:
        yield entry


@contextmanager
def _current_folder_first() -> Iterator[None]:
    before = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        sys.path[:] = before
