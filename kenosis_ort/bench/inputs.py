"""Models to be timed, as something the runtime opens, and whether they take the same inputs and the feeds fit."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from kenosis_ort.errors import CalibrationError, ModelLoadError, OptionError, did_you_mean
from kenosis_ort.graph.outside import external_files, uses_external_data
from kenosis_ort.runtime.session import TENSOR_TYPES, openable
from kenosis_ort.storage.writing import regular

ModelSource = str | os.PathLike[str] | bytes | onnx.ModelProto
Models = ModelSource | Sequence[ModelSource] | Mapping[str, ModelSource]

_ORT_FORMAT = b"ORTM"


@dataclass(frozen=True)
class TimedModel:
    """A model to time.

    Attributes:
        name: What the report calls it; no two candidates have the same.
        source: As the caller gave it.
    """

    name: str
    source: ModelSource

    def openable(self, folder: Path) -> str | bytes:
        """Model in the form that the runtime opens: the path itself, or bytes.

        Args:
            folder: An empty folder of the candidate's own, for a model in memory that is too large for bytes.

        Raises:
            ModelLoadError: The path leads to no file, or a ModelProto refers to external data.
        """
        source = self.source
        if isinstance(source, bytes):
            return source
        if isinstance(source, onnx.ModelProto):
            return _serialized(source, self.name, folder)
        path = Path(source)
        if not path.is_file():
            what = "The model path is a folder." if path.is_dir() else "The model file does not exist."
            raise ModelLoadError(what, where=str(path), fix="Check the path.")
        return str(path)


def candidates(models: Models) -> tuple[TimedModel, ...]:
    """The models with names: keys of a mapping, file names, or their place in the sequence.

    Raises:
        OptionError: There is none, or one is of a type that is no model.
    """
    if isinstance(models, Mapping):
        named = tuple(TimedModel(str(name), source) for name, source in models.items())
    else:
        sources = [models] if isinstance(models, (str, bytes, os.PathLike, onnx.ModelProto)) else list(models)
        named = tuple(TimedModel(name, source) for name, source in zip(_names(sources), sources, strict=True))
    if not named:
        raise OptionError("there is no model to time", where="models", fix="give at least one model")
    for candidate in named:
        if not isinstance(candidate.source, (str, bytes, os.PathLike, onnx.ModelProto)):
            raise OptionError(
                f"a model cannot be a {type(candidate.source).__name__}",
                where=candidate.name,
                fix="give paths, bytes or onnx.ModelProto objects",
            )
    return named


def size_of(opened: str | bytes) -> int:
    """The bytes of a model that the runtime has loaded: the file and its files of external data."""
    if isinstance(opened, bytes):
        return len(opened)
    path = Path(opened)
    size = path.stat().st_size
    with regular(path).open("rb") as file:
        if file.read(8)[4:] == _ORT_FORMAT:
            return size
    return size + sum(data.stat().st_size for data in external_files(path))


def _serialized(proto: onnx.ModelProto, name: str, folder: Path) -> str | bytes:
    if uses_external_data(proto):
        raise ModelLoadError(
            "The ModelProto refers to external data that was not loaded, and it has no folder to find it in.",
            where=name,
            fix="Pass the path of the model, or call onnx.load_external_data_for_model(model, folder) first.",
        )
    folder.mkdir(parents=True, exist_ok=True)
    return openable(proto, folder)


def _names(sources: Sequence[ModelSource]) -> Iterator[str]:
    """Yields file names, whole paths where two files have the same name, and numbers where even those are equal."""
    paths = [os.fspath(s) if isinstance(s, (str, os.PathLike)) else None for s in sources]
    file_names = Counter(Path(p).name for p in {p for p in paths if p is not None})
    used: Counter[str] = Counter()
    for number, path in enumerate(paths, 1):
        name = f"model {number}" if path is None else Path(path).name
        if path is not None and file_names[name] > 1:
            name = str(path)
        used[name] += 1
        yield name if used[name] == 1 else f"{name} ({used[name]})"


Feed = Mapping[str, Any]


@dataclass(frozen=True)
class Signature:
    """Inputs of a model as its session declares them.

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
    """A feed with arrays as the runtime takes them without a copy; what is no tensor stays as it is."""
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
    if TENSOR_TYPES.get(kind, onnx.TensorProto.STRING) == onnx.TensorProto.STRING:  # the runtime decides
        return
    dtype = onnx.helper.tensor_dtype_to_np_dtype(TENSOR_TYPES[kind])
    expected = f"{dtype} of shape ({', '.join('?' if d is None else str(d) for d in shape)})"
    got = f"{value.dtype} of shape {value.shape}"
    if value.dtype != dtype:
        raise CalibrationError(
            f"The feed has the wrong type: expected {expected}, got {got}.",
            where=where,
            fix=f"Convert it with .astype(numpy.{dtype}).",
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
