"""``onnx_ir``, imported without sympy, which it needs only where symbolic dimensions are computed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_DEFERRED = ("sympy", "onnx_ir._symbolic_shapes")  # the latter names sympy's functions when it is imported


class _Deferred(ModuleType):
    """A module that is imported when the first of its attributes is asked for."""

    def __getattr__(self, name: str) -> Any:
        self.step_aside()
        return getattr(importlib.import_module(self.__name__), name)

    def step_aside(self) -> None:
        """Lets whoever imports the module from now on have the real one."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]


@contextmanager
def _deferred(*names: str) -> Iterator[None]:
    """Modules that are imported within the context are loaded once they are used."""
    deferred = [_Deferred(name) for name in names if name not in sys.modules]
    sys.modules.update({module.__name__: module for module in deferred})
    try:
        yield
    finally:
        for module in deferred:
            module.step_aside()


with _deferred(*_DEFERRED):
    import onnx_ir as ir

__all__ = ["ir"]
