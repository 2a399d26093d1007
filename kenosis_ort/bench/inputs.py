"""Whether the models take the same inputs, and the feeds fit them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnxruntime as ort

from kenosis_ort.errors import CalibrationError, OptionError, did_you_mean

Feed = Mapping[str, Any]

_NUMPY: Final[Mapping[str, type[np.generic]]] = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(int8)": np.int8,
    "tensor(int16)": np.int16,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(uint8)": np.uint8,
    "tensor(uint16)": np.uint16,
    "tensor(uint32)": np.uint32,
    "tensor(uint64)": np.uint64,
    "tensor(bool)": np.bool_,
}


@dataclass(frozen=True)
class Signature:
    """What a model takes, as its session says.

    Attributes:
        required: Type (``tensor(float)``) by name of the inputs that must be fed.
        shapes: Shape by name; a number where a size is fixed.
        optional: Names of inputs with a default value.
    """

    required: Mapping[str, str]
    shapes: Mapping[str, tuple[int | str | None, ...]]
    optional: frozenset[str]

    @classmethod
    def of(cls, session: ort.InferenceSession) -> Signature:
        """Reads it off a session."""
        inputs = session.get_inputs()
        return cls(
            required={i.name: i.type for i in inputs},
            shapes={i.name: tuple(i.shape) for i in inputs},
            optional=frozenset(i.name for i in session.get_overridable_initializers()),
        )


def check_same(baseline: str, expected: Signature, name: str, got: Signature) -> None:
    """Checks that a model takes the baseline's inputs.

    Raises:
        OptionError: A name or a type differs.
    """
    if dict(expected.required) == dict(got.required):
        return
    raise OptionError(
        f"the models take different inputs: {_describe(expected)} for '{baseline}', {_describe(got)} for '{name}'",
        where=name,
        fix="compare models that take the same inputs",
    )


def as_feed(feed: Feed, signature: Signature) -> Feed:
    """Returns a feed with arrays as the runtime takes them without a copy; what is no tensor stays as it is."""
    return {name: _as_array(value, signature.required.get(name, "tensor")) for name, value in feed.items()}


def _as_array(value: Any, kind: str) -> Any:
    if not kind.startswith("tensor"):
        return value
    return np.asarray(value.numpy() if isinstance(value, ort.OrtValue) else value, order="C")


def check_feeds(name: str, signature: Signature, feeds: Sequence[Feed]) -> None:
    """Checks that a model takes all feeds.

    Raises:
        CalibrationError: A name, type or shape is wrong; the message names model, input, expected and got.
    """
    known = {*signature.required, *signature.optional}
    for number, feed in enumerate(feeds):
        where = f"feed {number}, model '{name}'"
        for key in feed:
            if key not in known:
                raise CalibrationError(
                    f"The feed has an input '{key}' that the model lacks.{did_you_mean(str(key), known)}",
                    where=where,
                    fix=f"The model's inputs are: {', '.join(signature.required) or 'none'}.",
                )
        for key in signature.required:
            if key not in feed:
                raise CalibrationError(
                    f"The feed lacks the input '{key}'.",
                    where=where,
                    fix=f"Give all of: {', '.join(signature.required)}.",
                )
            _check_array(feed[key], signature.required[key], signature.shapes[key], f"input '{key}', {where}")


def _check_array(value: Any, kind: str, shape: tuple[int | str | None, ...], where: str) -> None:
    dtype = _NUMPY.get(kind)
    if dtype is None:  # strings, sequences, types that numpy lacks: the runtime judges
        return
    expected = f"{np.dtype(dtype)} of shape ({', '.join('?' if d is None else str(d) for d in shape)})"
    got = f"{value.dtype} of shape {value.shape}"
    if value.dtype != dtype:
        raise CalibrationError(
            f"The feed has the wrong type: expected {expected}, got {got}.",
            where=where,
            fix=f"Convert it with .astype(numpy.{np.dtype(dtype)}).",
        )
    # A session does not tell a scalar from a tensor of any rank: both have an empty shape.
    if shape and (
        len(shape) != value.ndim
        or any(isinstance(want, int) and want != size for want, size in zip(shape, value.shape, strict=True))
    ):
        raise CalibrationError(
            f"The feed has the wrong shape: expected {expected}, got {got}.",
            where=where,
            fix="Bring it to the model's input shape; '?' and names stand for any size.",
        )


def _describe(signature: Signature) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in signature.required.items()) or "none"
