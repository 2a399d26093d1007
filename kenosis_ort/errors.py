"""Every error that kenosis-ort raises on purpose.

A message says what happened, where (node, tensor or file) and what to do about it. The subclasses also
derive from the built-in exception that stock ``onnxruntime.quantization`` raises in the same situation,
so that an existing ``except ValueError`` keeps working.
"""

import difflib
import functools
import inspect
import sys
import traceback
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

_PACKAGE: Final = str(Path(__file__).parent)
_strict: ContextVar[bool] = ContextVar("strict_names", default=False)
_inside: ContextVar[bool] = ContextVar("inside_a_public_call", default=False)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def printable(text: str, *, keep: str = "\n") -> str:
    """A text without control characters, marks of reading order and lone surrogates: they are spelled out.

    Names in a model are input from outside; on a terminal or a page such characters clear, recolour or reverse what
    stands around them.

    Args:
        text: Any text.
        keep: Characters to leave as they are.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in keep or unicodedata.category(c) not in _SPELLED_OUT else _spelled(c) for c in text)


_SPELLED_OUT = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def _spelled(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


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
        super().__init__(printable(" ".join(" ".join(parts).splitlines()), keep=""))


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


class CalibrationCacheError(CalibrationError):
    """The calibration cache is damaged, or of another model, other options or other data."""


class ClusterError(KenosisError, RuntimeError):
    """The Dask cluster does not answer, has no worker, or its workers cannot do the work; nothing was written."""


class OptionError(KenosisError, ValueError):
    """An option is unknown, contradictory or out of range."""


class ArgumentTypeError(OptionError, TypeError):
    """An argument is of a type that it cannot have."""


class OutputError(KenosisError, OSError):
    """The output path cannot be written."""


class VerificationError(KenosisError, RuntimeError):
    """The quantized model does not load or does not compute what it should; nothing was written."""


class RuntimeEndedError(VerificationError):
    """The runtime that a model is proved on ends its process over it; delivered without proof and timing."""


class InternalError(KenosisError, RuntimeError):
    """A defect of kenosis-ort itself; the exception behind it is its cause. Nothing was written."""


class KenosisWarning(UserWarning):
    """Warning to the caller; the report has the same sentence."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*(printable(a) if isinstance(a, str) else a for a in arguments))


class _CallersOwn(BaseException):
    """Carries an exception that the caller's own code raised past everything that catches exceptions of ours."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def callers_own(callback: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wraps a callback of the caller: what it raises, perhaps to cancel, comes out of `last_gate` as it was raised."""

    @functools.wraps(callback, updated=())
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return callback(*args, **kwargs)
        except Exception as error:
            raise _CallersOwn(error) from error

    return call


def last_gate(door: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wraps a public call: whatever reaches it that is no `KenosisError` is a defect, and is reported as one.

    Inputs are checked where they are read; this is for what those checks do not know. The exception itself stays
    chained as the cause. Within, numpy neither warns nor raises where numbers of a model overflow, whatever the
    caller has set.
    """
    signature = inspect.signature(door)

    @functools.wraps(door)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        signature.bind(*args, **kwargs)  # a wrong call is the caller's TypeError
        if _inside.get():  # one public call made by another: the outer one reports
            return door(*args, **kwargs)
        import numpy as np  # not needed for ``--help``

        token = _inside.set(True)
        try:
            with np.errstate(all="ignore"):  # numbers of a model may be anything; what is not finite is told apart
                return door(*args, **kwargs)
        except (KenosisError, BrokenPipeError, Warning):  # a warning where the caller's filters make it an error
            raise
        except _CallersOwn as wrapped:
            error = wrapped.error
        except MemoryError as memory:
            raise UnsupportedModelError(
                "Memory ran out.", where=place_of(memory), fix="Allow the process more memory, or use a smaller model."
            ) from memory
        except Exception as unforeseen:
            message = " ".join(str(unforeseen).split())[:300]
            raise InternalError(
                f"kenosis-ort met something that it was not made for: {type(unforeseen).__name__}: {message}",
                where=place_of(unforeseen),
                fix="Please report this as a bug, if you can with the model; recipe='plain' may avoid it.",
            ) from unforeseen
        finally:
            _inside.reset(token)
        raise error

    return call


def warn_caller(text: str) -> None:
    """Warns with a `KenosisWarning` that points at the line outside of this package from which it was called."""
    frame, level = sys._getframe(1), 2  # noqa: SLF001
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, KenosisWarning, stacklevel=level)


def place_of(error: BaseException) -> str | None:
    """The innermost line of this package that an exception passed through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(_PACKAGE)]
    if not frames:
        return None
    return f"{Path(frames[-1].filename).relative_to(_PACKAGE).as_posix()}:{frames[-1].lineno}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``" Did you mean 'x'?"`` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""


@contextmanager
def strict_names() -> Iterator[None]:
    """Makes every name that fits nothing an error, as on the command line, where it can only be a typo."""
    token = _strict.set(True)
    try:
        yield
    finally:
        _strict.reset(token)


def unknown_name(what: str, *, where: str, fix: str) -> str:
    """The warning about a name that fits nothing; stock ignores such a name, but of a recipe, which it does not know.

    Raises:
        OptionError: Within `strict_names`.
    """
    error = OptionError(what, where=where, fix=fix)
    if _strict.get():
        raise error
    return f"{error} It is ignored{'' if where.startswith('recipe') else ', as by stock ONNX Runtime'}."
