"""Samples: where they come from, their division, and reading them once, checked against the model's inputs."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort

from kenosis_ort.errors import CalibrationError, KenosisError, did_you_mean

Array = npt.NDArray[Any]
T = TypeVar("T")
Feed = Mapping[str, Any]
Shape = tuple["int | str | None", ...]


class Known(str, Enum):
    """Certainty of the scale of an input's values."""

    GIVEN = "given by the caller"
    REAL = "taken from the real samples"
    GRAPH = "found in the graph"
    STATISTICS = "fitted to the statistics of a BatchNormalization"
    CONVENTION = "a convention"
    GUESS = "a guess"


@dataclass(frozen=True)
class Provenance:
    """Source of samples.

    Attributes:
        known: How well the scale of each input's values is known, by its name.
        natural: Whether the samples are made after what the inputs are in nature; random tokens and features are not.
        real: Number of real feeds, which come first.
    """

    known: Mapping[str, Known] = field(default_factory=dict)
    natural: bool = False
    real: int = 0


class Sample(dict[str, Any]):
    """A feed that knows its number in the reader that it comes from.

    Args:
        feed: Values by input name.
        index: The number, from 0; None where it is not known.
        digest: Of the content, from `feed_digest`; None where it was not computed.
    """

    def __init__(self, feed: Feed, index: int | None, digest: int | None = None) -> None:
        super().__init__(feed)
        self.index = index
        self.digest = digest


_NO_NUMBERS = (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING)


class InputSpec(NamedTuple):
    """Type, shape and name of an input, as the model declares them.

    Attributes:
        name: Its name.
        dtype: The numpy type; None where it is no tensor of numbers.
        shape: Sizes, None or a name where a size is not fixed; None where even the number of axes is not known.
    """

    name: str
    dtype: np.dtype[Any] | None
    shape: Shape | None

    def describe(self) -> str:
        """Type and shape as text."""
        if self.shape is None:
            return f"{self.dtype} of any shape"
        sizes = ", ".join(str(d) if d is not None else "?" for d in self.shape)
        return f"{self.dtype} of shape ({sizes})"


class Cut(NamedTuple):
    """Some rows of a sample that run by themselves.

    Attributes:
        begin: The first of them.
        end: Behind the last of them.
        chosen: Whether they are of the part that gets a table of its own.
    """

    begin: int
    end: int
    chosen: bool

    def of(self, feed: Feed) -> dict[str, Any]:
        """These rows of all arrays of a feed."""
        return {name: value[self.begin : self.end] for name, value in feed.items()}


Part = Mapping[int, Sequence[Cut]]
"""Samples of which some get a table of their own: by number, how each is cut; not at all where all of it belongs."""


def input_specs(proto: onnx.ModelProto) -> tuple[tuple[InputSpec, ...], tuple[InputSpec, ...]]:
    """The inputs that must be fed, and those with a default value."""
    defaults = {t.name for t in proto.graph.initializer}
    specs = [_spec(value) for value in proto.graph.input]
    return tuple(s for s in specs if s.name not in defaults), tuple(s for s in specs if s.name in defaults)


def declared_shape(tensor: onnx.TypeProto.Tensor) -> Shape:
    """The sizes of a type, None or a name where one is free, for which some exporters write -1."""
    dims = tensor.shape.dim
    return tuple(d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else d.dim_param or None for d in dims)


def fits(wanted: Shape, got: tuple[int, ...]) -> bool:
    """Whether a shape is one that was declared."""
    return len(wanted) == len(got) and all(not isinstance(w, int) or w == g for w, g in zip(wanted, got, strict=True))


def _spec(value: onnx.ValueInfoProto) -> InputSpec:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type") or tensor.elem_type in _NO_NUMBERS:
        return InputSpec(value.name, None, None)
    shape = declared_shape(tensor) if tensor.HasField("shape") else None
    return InputSpec(value.name, np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)), shape)


def sample_feeds(reader: Any) -> Iterator[Feed]:
    """Yields the feeds that a reader has left.

    Args:
        reader: An object with ``get_next()`` that returns None at the end (a ``CalibrationDataReader``), or any
            iterable of dictionaries.

    Raises:
        CalibrationError: The reader is neither, fails, or yields something that is no dictionary.
    """
    feeds = _raw_feeds(reader)
    for index in itertools.count():
        try:
            feed = next(feeds, None)
        except KenosisError:
            raise
        except Exception as error:  # the caller's code may raise anything
            raise CalibrationError(
                f"The calibration data reader failed: {type(error).__name__}: {' '.join(str(error).split())}.",
                where=f"sample {index}",
                fix="The reader's own traceback is above this one; call get_next() alone to reproduce it.",
            ) from error
        if feed is None:
            return
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
            try:
                feed = get_next()
            except StopIteration:  # of a bare next() inside it: the data is at its end
                return
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
    """The number of feeds a reader says it has, None if it does not say."""
    try:
        return len(reader)
    except (TypeError, NotImplementedError):  # stock's base class raises the latter
        return None


def strided_feeds(reader: Any, stride: int) -> Iterator[Feed | None]:
    """Yields the feeds of a reader chunk by chunk, by ``set_range``, and None after each chunk.

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
        except (AttributeError, NotImplementedError) as error:  # stock's base class raises the latter
            raise CalibrationError(
                "CalibStridedMinMax needs a calibration data reader with set_range(start_index, end_index).",
                fix="Define set_range on the reader, or use ArrayReader.",
            ) from error
        yield from mark_chunks(sample_feeds(reader))


def mark_chunks(feeds: Iterable[Feed], chunk: int | None = None) -> Iterator[Feed | None]:
    """Yields each feed as soon as it is read, and None after the last and after every ``chunk``-th.

    Nothing is read ahead: a reader may hand out the same buffer, refilled, for every sample.
    """
    for count, feed in enumerate(feeds, 1):
        yield feed
        if chunk is not None and count % chunk == 0:
            yield None
    yield None


def check_feed(feed: Feed, required: Sequence[InputSpec], optional: Sequence[InputSpec], sample: int) -> dict[str, Any]:
    """Checks one feed against the model's inputs.

    Args:
        feed: Values by input name: numpy arrays, ``OrtValue`` objects, nested lists, or what numpy makes arrays of.
        required: Inputs that must be fed.
        optional: Inputs with a default value.
        sample: Index of the sample, for messages.

    Returns:
        A new dictionary with arrays for the runtime. Floats and integers of another width become the model's; numbers
        in lists, which carry no type of their own, become what the model wants, as the runtime itself has it.

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


def checked_feeds(reader: Any, inputs: tuple[Sequence[InputSpec], Sequence[InputSpec]]) -> Iterator[dict[str, Any]]:
    """Yields the feeds that a reader has left, checked against the inputs of `input_specs`; see `check_feed`."""
    for number, feed in enumerate(sample_feeds(reader)):
        yield check_feed(feed, *inputs, number)


def _check_value(spec: InputSpec, value: Any, sample: int) -> Any:
    expected = spec.dtype
    if expected is None:
        return value
    where = f"input '{spec.name}', sample {sample}"
    given = _as_array(value, where)
    array = _cast(given, expected, typed=not isinstance(value, (list, tuple, int, float)))
    if array is None:
        raise CalibrationError(
            f"The calibration data has the wrong type: expected {spec.describe()}, got {given.dtype} of shape "
            f"{given.shape}.",
            where=where,
            fix=f"Convert it with .astype(numpy.{expected}).",
        )
    if spec.shape is not None and not fits(spec.shape, array.shape):
        raise CalibrationError(
            f"The calibration data has the wrong shape: expected {spec.describe()}, got {array.dtype} of shape "
            f"{array.shape}.",
            where=where,
            fix=_shape_fix(spec.shape, array.shape),
        )
    return array


def _as_array(value: Any, where: str) -> Array:
    if isinstance(value, np.ndarray):
        return value
    try:
        return np.asarray(value.numpy() if isinstance(value, ort.OrtValue) else value)
    except Exception as error:  # ragged lists, tensors on a device: each library has classes of its own
        raise CalibrationError(
            f"The calibration data is no array: {' '.join(str(error).split())}.",
            where=where,
            fix="Give every row the same length, by padding for instance, or a numpy array.",
        ) from error


_OF_LISTS = (("int", "float"), ("bool", "float"), ("int", "bool"))
"""Kinds that numbers without a type of their own may have, and that they become."""


def _cast(array: Array, expected: np.dtype[Any], *, typed: bool) -> Array | None:
    """The array in the model's type; None where that would change what it says."""
    if array.dtype == expected:
        return array
    source, wanted = _kind(array.dtype), _kind(expected)
    if not typed and (array.size == 0 or (source, wanted) in _OF_LISTS):
        return array.astype(expected)
    if source == wanted == "float":
        with np.errstate(over="ignore"):
            out = array.astype(expected)
        return out if np.isfinite(out).all() or not np.isfinite(array).all() else None
    if wanted == "int" and source in ("int", "bool"):
        limits = np.iinfo(expected)
        fits = source == "bool" or (int(array.min(initial=0)) >= limits.min and int(array.max(initial=0)) <= limits.max)
        return array.astype(expected) if fits else None
    return None


def _kind(dtype: np.dtype[Any]) -> str:
    if dtype.kind in "iu":
        return "int"
    if dtype.kind == "f" or dtype.name == "bfloat16":
        return "float"
    return "bool" if dtype.kind == "b" else dtype.name


def _shape_fix(wanted: Shape, got: tuple[int, ...]) -> str:
    if len(got) + 1 == len(wanted):
        return "Add the batch axis, e.g. array[None]."
    if len(got) == 4 == len(wanted) and isinstance(wanted[1], int) and got[3] == wanted[1]:
        return "The image is channels-last; transpose it with array.transpose(0, 3, 1, 2)."
    if len(got) == 4 == len(wanted) and isinstance(wanted[3], int) and got[1] == wanted[3]:
        return "The image is channels-first; transpose it with array.transpose(0, 2, 3, 1)."
    return "Bring it to the model's input shape; '?' and names stand for any size."


def bytes_of(feed: Mapping[str, Any]) -> int:
    """The bytes of a feed's arrays."""
    return sum(map(_bytes, feed.values()))


def _bytes(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(map(_bytes, value))
    return int(getattr(value.numpy() if isinstance(value, ort.OrtValue) else value, "nbytes", 0))


_CACHE_RANK, _TOKENS_RANK = 4, 2
_TOKENS, _MASKS = ("decoder_input_ids", "input_ids"), ("decoder_attention_mask", "attention_mask")

Dims = Mapping[str, Sequence[Any]]
Sizes = Mapping[str, tuple[int, ...]]


def misfit(session: ort.InferenceSession, feed: Mapping[str, Any]) -> str:
    """Sentence about an input that does not fit the others; "" if none is known not to.

    The runtime only says at which node it stopped. Exporters give open dimensions names, and inputs whose dimensions
    have one name must agree. The names are not always true, so they are read only once a run has failed.

    Args:
        session: Of the model.
        feed: What it fails on.
    """
    declared = {value.name: value.shape for value in session.get_inputs() if value.name in feed}
    given = {name: np.shape(feed[name]) for name in declared}
    found: dict[str, dict[int, list[tuple[str, int]]]] = {}
    for name, dims in declared.items():
        for axis, (dim, size) in enumerate(zip(dims, given[name], strict=False)):
            if isinstance(dim, str):
                found.setdefault(dim, {}).setdefault(size, []).append((name, axis))
    for dim, sizes in found.items():
        if len(sizes) > 1:
            (few, ((name, axis), *_)), *_, (many, ((other, at), *_)) = sorted(sizes.items(), key=lambda s: len(s[1]))
            return (
                f"The input '{name}' has {few} on axis {axis}, and the input '{other}' has {many} on axis {at}; the "
                f"model calls both '{dim}'."
            )
    return _odd_mask(declared, given)


def _odd_mask(declared: Dims, given: Sizes) -> str:
    """Error of a mask that does not cover the tokens and the cache."""
    tokens = next((name for name in _TOKENS if len(given.get(name, ())) == _TOKENS_RANK), "")
    open_caches = [n for n, dims in declared.items() if len(dims) == _CACHE_RANK and not isinstance(dims[2], int)]
    cache = next((name for name in open_caches if len(given[name]) == _CACHE_RANK), "")
    for mask in _MASKS if tokens else ():
        if len(given.get(mask, ())) == _TOKENS_RANK:
            read, past = given[tokens][1], given[cache][2] if cache else 0
            if given[mask][1] != read + past:
                covered = f"{read}, and the cache '{cache}' has {past}" if cache else str(read)
                return f"The input '{mask}' has {given[mask][1]} on axis 1, where '{tokens}' has {covered}."
    return ""


class Rows(dict[str, Any]):
    """A feed whose rows are samples of their own, as was tried."""


LEAST_FEEDS = 4
_FEW_FEEDS = 32


def no_sample(what: str = "no sample") -> CalibrationError:
    """The error for a reader that yields nothing."""
    return CalibrationError(
        f"No data is collected: the calibration data reader yields {what}.",
        fix="Return at least one {input name: array} from get_next(); a reader that was read to its end must be made "
        "anew or rewound.",
    )


def split_feeds(feeds: Sequence[T]) -> tuple[list[T], list[T]]:
    """The samples to fit passes to, and those to evaluate on; both empty where there are too few to do both.

    Every fourth is held out; of fewer than 32 every second: two samples of a small net differ by 30 dB.
    """
    if len(feeds) < LEAST_FEEDS:
        return [], []
    every = 2 if len(feeds) < _FEW_FEEDS else 4
    fit = [f for i, f in enumerate(feeds) if i % every != every - 1]
    return fit, list(feeds[every - 1 :: every])


def some_of(feeds: Sequence[Feed], count: int) -> list[Feed]:
    """Evenly spaced feeds that hold so many samples, rows of `Rows` counted each; all where there are fewer."""
    rows = sum(len(next(iter(feed.values()))) if isinstance(feed, Rows) else 1 for feed in feeds)
    wanted = -(-count * len(feeds) // max(rows, 1))
    return [feeds[place * len(feeds) // wanted] for place in range(wanted)] if wanted < len(feeds) else list(feeds)
