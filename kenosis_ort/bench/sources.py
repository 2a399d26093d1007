"""What is given to be timed, as something the runtime opens: a path or bytes, with a name and a size."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from kenosis_ort.errors import ModelLoadError, OptionError
from kenosis_ort.graph.external_data import external_files, uses_external_data
from kenosis_ort.graph.session import openable
from kenosis_ort.storage.paths import regular

ModelSource = str | os.PathLike[str] | bytes | onnx.ModelProto
Models = ModelSource | Sequence[ModelSource] | Mapping[str, ModelSource]

_ORT_FORMAT = b"ORTM"


@dataclass(frozen=True)
class Candidate:
    """A model to time.

    Attributes:
        name: What the report calls it; no two candidates have the same.
        source: As the caller gave it.
    """

    name: str
    source: ModelSource

    def openable(self, folder: Path) -> str | bytes:
        """Returns what the runtime opens: the path itself, or bytes.

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


def candidates(models: Models) -> tuple[Candidate, ...]:
    """Returns the models with names: keys of a mapping, file names, or their place in the sequence.

    Raises:
        OptionError: There is none, or one is of a type that is no model.
    """
    if isinstance(models, Mapping):
        named = tuple(Candidate(str(name), source) for name, source in models.items())
    else:
        sources = [models] if isinstance(models, (str, bytes, os.PathLike, onnx.ModelProto)) else list(models)
        named = tuple(Candidate(name, source) for name, source in zip(_names(sources), sources, strict=True))
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
    """Returns the bytes of a model that the runtime has loaded: the file and its files of external data."""
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
