"""Models to be timed: their names, the form in which the runtime opens them, and the inputs that feeds have to fit."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from kenosis_ort.calibration.feeds import Feed, InputSpec, check_feed
from kenosis_ort.errors import CalibrationError, ModelLoadError, OptionError
from kenosis_ort.graph.files import external_files, uses_external_data
from kenosis_ort.runtime.session import TENSOR_TYPES, Model as Model, openable
from kenosis_ort.storage.writing import regular

Models = Model | Sequence[Model] | Mapping[str, Model]

_ORT_FORMAT = b"ORTM"


def opened(source: Model, folder: Path, name: str) -> str | bytes:
    """Model in the form that the runtime opens: the path itself, or bytes.

    Args:
        source: As the caller gave it.
        folder: A folder of the model's own, for one in memory that is too large for bytes.
        name: What errors call it.

    Raises:
        ModelLoadError: The path leads to no file, or a ModelProto refers to external data.
    """
    if isinstance(source, bytes):
        return source
    if isinstance(source, onnx.ModelProto):
        if uses_external_data(source):
            raise ModelLoadError(
                "The ModelProto refers to external data that was not loaded, and it has no folder to find it in.",
                where=name,
                fix="Pass the path of the model, or call onnx.load_external_data_for_model(model, folder) first.",
            )
        folder.mkdir(parents=True, exist_ok=True)
        return openable(source, folder)
    path = Path(source)
    if not path.is_file():
        what = "The model path is a folder." if path.is_dir() else "The model file does not exist."
        raise ModelLoadError(what, where=str(path), fix="Check the path.")
    return str(path)


def named_models(models: Models) -> dict[str, Model]:
    """The models by name: keys of a mapping, file names, or their place in the sequence.

    Raises:
        OptionError: There is none, or one is of a type that is no model.
    """
    if isinstance(models, Mapping):
        named = {str(name): source for name, source in models.items()}
    else:
        sources: list[Any] = [models]
        if isinstance(models, Iterable) and not isinstance(models, (str, bytes)):
            sources = [*models]
        named = dict(zip(_names(sources), sources, strict=True))
    if not named:
        raise OptionError("there is no model to time", where="models", fix="give at least one model")
    for name, source in named.items():
        if not isinstance(source, (str, bytes, os.PathLike, onnx.ModelProto)):
            kind = type(source).__name__
            fix = "give paths, bytes or onnx.ModelProto objects"
            raise OptionError(f"a model cannot be a {kind}", where=name, fix=fix)
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


def _names(sources: Sequence[Model]) -> Iterator[str]:
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


Inputs = tuple[tuple[InputSpec, ...], tuple[InputSpec, ...]]
"""Inputs of a model: those that must be fed, and those with a default value."""


def declared_inputs(session: ort.InferenceSession) -> Inputs:
    """The inputs of a model as its session declares them."""
    required, optional = session.get_inputs(), session.get_overridable_initializers()
    return tuple(map(_spec, required)), tuple(map(_spec, optional))


def _spec(declared: Any) -> InputSpec:
    kind = TENSOR_TYPES.get(declared.type, onnx.TensorProto.STRING)
    dtype = None if kind == onnx.TensorProto.STRING else np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind))
    # A session does not tell a scalar from a tensor of any rank: both have an empty shape.
    return InputSpec(declared.name, dtype, tuple(declared.shape) or None)


def check_same(inputs: Mapping[str, Inputs]) -> None:
    """Checks that all models take the inputs of the first one.

    Raises:
        OptionError: A name or a type differs.
    """
    (first, (wanted, _)), *others = inputs.items()
    for name, (taken, _) in others:
        if {spec[:2] for spec in taken} != {spec[:2] for spec in wanted}:
            texts = [", ".join(f"{s.name} {s.dtype or 'no numbers'}" for s in of) or "none" for of in (wanted, taken)]
            raise OptionError(
                f"the models take different inputs: {texts[0]} for '{first}', {texts[1]} for '{name}'",
                where=name,
                fix="compare models that take the same inputs",
            )


def checked(feeds: Iterable[Feed], name: str, inputs: Inputs) -> list[dict[str, Any]]:
    """Feeds that a model takes, with arrays as the runtime takes them without a copy.

    Raises:
        CalibrationError: A name, type or shape is wrong; the message names model, input, expected and got.
    """
    found = []
    for number, feed in enumerate(feeds):
        try:
            arrays = check_feed(feed, *inputs, number)
        except CalibrationError as error:
            raise CalibrationError(error.what, where=f"{error.where}, model '{name}'", fix=error.fix) from error
        found.append({k: np.asarray(v, order="C") if isinstance(v, np.ndarray) else v for k, v in arrays.items()})
    return found
