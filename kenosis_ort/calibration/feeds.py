"""Reading feeds from a data reader, once, and checking them against the model's inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort

from kenosis_ort.errors import CalibrationError, did_you_mean

Feed = Mapping[str, Any]

_NUMPY_TYPES = {
    "float": np.float32,
    "double": np.float64,
    "float16": np.float16,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "uint8": np.uint8,
    "uint16": np.uint16,
    "uint32": np.uint32,
    "uint64": np.uint64,
    "bool": np.bool_,
}


@dataclass(frozen=True)
class InputSpec:
    """What the runtime says about one input of the model.

    Attributes:
        name: Its name.
        type: The runtime's type string, e.g. ``"tensor(float)"``.
        shape: Sizes; None or a string where a size is not fixed.
    """

    name: str
    type: str
    shape: tuple[int | str | None, ...]

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """The numpy type, None where it is no plain tensor of numbers."""
        if not self.type.startswith("tensor("):
            return None
        found = _NUMPY_TYPES.get(self.type[7:-1])
        return None if found is None else np.dtype(found)

    def describe(self) -> str:
        """Returns type and shape as text."""
        sizes = ", ".join(str(d) if d is not None else "?" for d in self.shape)
        return f"{self.dtype or self.type} of shape ({sizes})"


def sample_feeds(reader: Any) -> Iterator[Feed]:
    """Yields the feeds that a reader has left.

    Args:
        reader: An object with ``get_next()`` that returns None at the end (a ``CalibrationDataReader``), or any
            iterable of dictionaries.

    Raises:
        CalibrationError: The reader is neither, or yields something that is no dictionary.
    """
    for index, feed in enumerate(_raw_feeds(reader)):
        if not isinstance(feed, Mapping):
            raise CalibrationError(
                f"The calibration data reader returned {type(feed).__name__}, not a dictionary.",
                where=f"sample {index}",
                fix="Return {input name: array} from get_next(), and None at the end.",
            )
        yield feed


def _raw_feeds(reader: Any) -> Iterator[Any]:
    get_next: Callable[[], Any] | None = getattr(reader, "get_next", None)
    if callable(get_next):
        while True:
            feed = get_next()
            if feed is None or (isinstance(feed, Mapping) and not feed):
                return
            yield feed
    elif isinstance(reader, Iterable) and not isinstance(reader, (str, bytes, Mapping)):
        yield from reader
    else:
        raise CalibrationError(
            f"The calibration data reader is of type {type(reader).__name__}, which has no get_next().",
            fix="Subclass onnxruntime.quantization.CalibrationDataReader, or use ArrayReader or ImageFolderReader.",
        )


def reader_length(reader: Any) -> int | None:
    """Returns the number of feeds a reader says it has, None if it does not say."""
    try:
        return len(reader)
    except (TypeError, NotImplementedError):
        return None


def strided_feeds(reader: Any, stride: int) -> Iterator[tuple[Feed, bool]]:
    """Yields the feeds of a reader chunk by chunk, by ``set_range``, each with "last of its chunk".

    Raises:
        CalibrationError: The reader lacks ``__len__`` or ``set_range``, or its length is no multiple of the stride.
    """
    total = reader_length(reader)
    if total is None:
        raise CalibrationError(
            "CalibStridedMinMax needs a calibration data reader with a length.",
            fix="Define __len__ and set_range on the reader, or use ArrayReader.",
        )
    if total % stride != 0:
        raise CalibrationError(
            f"Total data size ({total}) is not divisible by stride size ({stride}).",
            fix="Choose a stride that divides the number of samples.",
        )
    for start in range(0, total, stride):
        try:
            reader.set_range(start_index=start, end_index=start + stride)
        except (AttributeError, NotImplementedError) as error:
            raise CalibrationError(
                "CalibStridedMinMax needs a calibration data reader with set_range(start_index, end_index).",
                fix="Define set_range on the reader, or use ArrayReader.",
            ) from error
        yield from mark_last(sample_feeds(reader))


def mark_last(feeds: Iterable[Feed], chunk: int | None = None) -> Iterator[tuple[Feed, bool]]:
    """Yields each feed with whether it ends a chunk: the last of all, and every ``chunk``-th."""
    held: Feed | None = None
    count = 0
    for feed in feeds:
        if held is not None:
            count += 1
            yield held, chunk is not None and count % chunk == 0
        held = feed
    if held is not None:
        yield held, True


def check_feed(feed: Feed, required: Sequence[InputSpec], optional: Sequence[InputSpec], sample: int) -> dict[str, Any]:
    """Checks one feed against the model's inputs.

    Args:
        feed: Values by input name: numpy arrays, ``OrtValue`` objects, or what numpy makes arrays of.
        required: Inputs that must be fed.
        optional: Inputs with a default value.
        sample: Index of the sample, for messages.

    Returns:
        A new dictionary with arrays for the runtime.

    Raises:
        CalibrationError: A name, shape or type is wrong; the message names input, expected and got.
    """
    known = {spec.name: spec for spec in (*required, *optional)}
    for name in feed:
        if name not in known:
            raise CalibrationError(
                f"The calibration data has an input '{name}' that the model lacks.{did_you_mean(str(name), known)}",
                where=f"sample {sample}",
                fix=f"The model's inputs are: {', '.join(known) or 'none'}.",
            )
    missing = [spec.name for spec in required if spec.name not in feed]
    if missing:
        raise CalibrationError(
            f"The calibration data lacks the input '{missing[0]}'.",
            where=f"sample {sample}",
            fix=f"Return all of {', '.join(spec.name for spec in required)} from get_next(); got {', '.join(feed)}.",
        )
    return {name: _check_value(known[name], value, sample) for name, value in feed.items()}


def _check_value(spec: InputSpec, value: Any, sample: int) -> Any:
    expected = spec.dtype
    if expected is None or isinstance(value, ort.OrtValue):
        return value
    array = value if isinstance(value, np.ndarray) else np.asarray(value)
    where = f"input '{spec.name}', sample {sample}"
    if array.dtype != expected:
        raise CalibrationError(
            f"The calibration data has the wrong type: expected {spec.describe()}, got {array.dtype} of shape "
            f"{array.shape}.",
            where=where,
            fix=f"Convert it with .astype(numpy.{expected}).",
        )
    fits = len(array.shape) == len(spec.shape) and all(
        not isinstance(want, int) or want == got for want, got in zip(spec.shape, array.shape, strict=True)
    )
    if not fits:
        raise CalibrationError(
            f"The calibration data has the wrong shape: expected {spec.describe()}, got {array.dtype} of shape "
            f"{array.shape}.",
            where=where,
            fix=_shape_fix(spec, array.shape),
        )
    return array


def _shape_fix(spec: InputSpec, got: tuple[int, ...]) -> str:
    if len(got) + 1 == len(spec.shape):
        return "Add the batch axis, e.g. array[None]."
    if len(got) == 4 == len(spec.shape) and isinstance(spec.shape[1], int) and got[3] == spec.shape[1]:
        return "The image is channels-last; transpose it with array.transpose(0, 3, 1, 2)."
    if len(got) == 4 == len(spec.shape) and isinstance(spec.shape[3], int) and got[1] == spec.shape[3]:
        return "The image is channels-first; transpose it with array.transpose(0, 2, 3, 1)."
    return "Bring it to the model's input shape; '?' and names stand for any size."
