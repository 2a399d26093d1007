"""Drop-in, fusion-aware static quantization for ONNX Runtime.

Change ``from onnxruntime.quantization import quantize_static`` to ``from kenosis_ort import quantize_static``.
"""

import sys
from types import ModuleType
from typing import Any, Final

from kenosis_ort.exports import deferred, homes_in_stub

__version__ = "0.1.0"

_HOMES: Final = homes_in_stub(__file__)
__all__ = [*_HOMES, "__version__"]

# ``kenosis-ort --help`` needs neither ONNX nor the runtime.
__getattr__ = deferred(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps a function from being hidden by the subpackage of its name, `bench`, once that is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
