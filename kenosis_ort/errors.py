"""Every error that kenosis-ort raises on purpose.

A message says what happened, where (node, tensor or file) and what to do about it. The subclasses also
derive from the built-in exception that stock ``onnxruntime.quantization`` raises in the same situation,
so that an existing ``except ValueError`` keeps working.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KenosisError(Exception):
    """Base class of all errors raised by kenosis-ort.

    Args:
        what: What happened, one sentence.
        where: The node, tensor or file it happened at.
        fix: What the caller can do about it.
    """

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.what = what
        self.where = where
        self.fix = fix
        parts = [what if where is None else f"{what} [at: {where}]"]
        if fix is not None:
            parts.append(f"Fix: {fix}")
        super().__init__(" ".join(parts))


class ModelLoadError(KenosisError, ValueError):
    """The model file is missing, truncated, not ONNX, or its external data cannot be read safely."""


class UnsupportedModelError(KenosisError, ValueError):
    """The model is valid but cannot be quantized: opset, operator, type or size out of reach."""


class AlreadyQuantizedError(UnsupportedModelError):
    """The model already holds Q/DQ or integer kernels."""


class NothingToQuantizeError(UnsupportedModelError):
    """No node of the model is left to quantize."""


class CalibrationError(KenosisError, ValueError):
    """The calibration data or cache is missing, empty, of wrong names, shapes or types, or not finite."""


class OptionError(KenosisError, ValueError):
    """An option is unknown, contradictory or out of range."""


class OutputError(KenosisError, OSError):
    """The output path cannot be written."""


class VerificationError(KenosisError, RuntimeError):
    """The quantized model does not load or does not compute what it should; nothing was written."""


class KenosisWarning(UserWarning):
    """Something the caller should look at; the same sentence stands in the report."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ``" Did you mean 'x'?"`` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""
