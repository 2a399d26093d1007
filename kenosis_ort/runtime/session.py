"""Sessions of the runtime: the one way in which a model is opened and run, counted.

A model in memory is not handed to the runtime as bytes where its weights are large: the bytes, the runtime's parsed
message and its tensors would hold them three times over for a while. They go to a temporary file, from which the
runtime maps them. What was freed before goes back to the system first.

Passes hand their work to an `Executor` and know nothing of machines. What comes back is in the order of what was
handed over, whoever ended first, so that it does not depend on how many there are.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import logging
import os
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from typing_extensions import Self

from kenosis_ort.errors import VerificationError
from kenosis_ort.graph.outside import ROOT, refers_outside, weight_bytes, with_weights_on_disk, write_external_data
from kenosis_ort.runtime.counting import count

Array = npt.NDArray[Any]
T = TypeVar("T")
R = TypeVar("R")
Model = str | os.PathLike[str] | bytes | onnx.ModelProto
"""A path, a serialized model, or one in memory."""

MAPPED_FROM = 2**24
"""Bytes of weights from which on the runtime maps them from a file."""
WHOLE_LIMIT = 3000
"""A model of up to this many nodes is loaded as it is; the runtime's load time grows with the square of the depth."""

_WEIGHTS_FOLDER: Final = "session.model_external_initializers_file_folder_path"
_COPIED_UP_TO: Final = 2**30
"""Bytes of weights of which the runtime may make copies in the order that its kernels like best."""
_BYTES_LIMIT = 1_900_000_000  # protobuf and the runtime's byte loader stop at 2 GiB
_MESSAGE_LIMIT: Final = 600
_REPEATED: Final = 1e-3  # of the largest value: threads may add up in another order
_CPU: Final = ("CPUExecutionProvider",)
_GIVING_BACK: Final = ort.RunOptions()
"""Behind the run, memory for values goes back: of nets with large ones, each session that is open holds as much."""
_GIVING_BACK.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
TENSOR_TYPES: Final[Mapping[str, int]] = {
    f"tensor({name.lower()})": number for name, number in onnx.TensorProto.DataType.items() if number
}
"""Element types by what sessions call tensors of them."""

_log = logging.getLogger(__name__)
_entries: ContextVar[Mapping[str, str] | None] = ContextVar("entries", default=None)


# ---- sessions -------------------------------------------------------------------------------------------------------


class Closing(ABC):
    """A context manager that closes itself."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Releases the sessions."""


class Running(Closing):
    """A model that is open somewhere."""

    @abstractmethod
    def runs(
        self, feeds: Iterable[Mapping[str, Any]], names: Sequence[str] | None = None
    ) -> Iterator[dict[str, Array]]:
        """The outputs for each feed, in their order.

        Args:
            feeds: Values by input name.
            names: Outputs to return; None for all.

        Raises:
            VerificationError: While they are iterated: the runtime refuses a feed. Those before it came.
        """


class Session(ort.InferenceSession, Running):  # type: ignore[misc]
    """A session of the runtime in this process, which counts itself and its runs."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        count(sessions=1)

    @cached_property
    def inputs(self) -> frozenset[str]:
        """Names that a feed may hold: inputs, and those with a default value."""
        return frozenset(value.name for value in (*self.get_inputs(), *self.get_overridable_initializers()))

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs."""
        return tuple(value.name for value in self.get_outputs())

    def run(self, output_names: Sequence[str] | None, input_feed: Any, run_options: Any = None) -> list[Any]:
        """Runs the model, as `onnxruntime.InferenceSession.run`."""
        results: list[Any] = super().run(output_names, input_feed, run_options)
        count(runs=1, results=results)
        return results

    def answer(
        self, feed: Mapping[str, Any], names: Sequence[str] | None = None, run_options: ort.RunOptions | None = None
    ) -> dict[str, Array]:
        """Outputs of a feed by name, each as one array.

        Args:
            feed: Values by input name.
            names: Outputs to return; None for all.
            run_options: Of the run.

        Raises:
            VerificationError: The runtime refuses the feed.
        """
        wanted = list(self.outputs if names is None else names)
        try:
            results = self.run(wanted, dict(feed), run_options)
        except Exception as error:  # the runtime's exceptions share no base class but Exception
            text = " ".join(str(error).split())[:400]
            raise VerificationError(
                f"the model does not run: {text}", fix="check names, shapes and types of the samples"
            ) from error
        return {name: as_array(value) for name, value in zip(wanted, results, strict=True)}

    def runs(
        self, feeds: Iterable[Mapping[str, Any]], names: Sequence[str] | None = None
    ) -> Iterator[dict[str, Array]]:
        """Yields the outputs for each feed, each run when it is asked for; with the last one memory goes back."""
        for feed, following in itertools.pairwise(itertools.chain(feeds, [None])):
            assert feed is not None  # only the end of the pairs is
            yield self.answer(feed, names, _GIVING_BACK if following is None else None)

    def close(self) -> None:
        """Lets go of the model, whatever else still holds this object."""
        self._sess = self._model_bytes = None


def session_options(*, threads: int = 1, optimize: bool = True, spinning: bool = False) -> ort.SessionOptions:
    """The options that sessions start from.

    Args:
        threads: Threads inside an operator, 0 for the runtime's own choice.
        optimize: At full optimization, as a user's session; False for none.
        spinning: Threads that wait for work keep their processor busy, as in a user's session. Without, a session of
            several threads that is not timed leaves it to others: a call takes a quarter less processor time.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    if not spinning:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4  # what fails is raised, and need not be printed too
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options


def write_optimized(options: ort.SessionOptions, path: Path, external_from: int) -> None:
    """Has a session write its optimized model to a file, and large weights to one beside it.

    Args:
        options: Of the session; changed.
        path: The file.
        external_from: Bytes from which on a weight is large.
    """
    options.optimized_model_filepath = str(path)
    entry = "session.optimized_model_external_initializers_"
    options.add_session_config_entry(f"{entry}file_name", f"{path.stem}.data")
    options.add_session_config_entry(f"{entry}min_size_in_bytes", str(external_from))


def map_weights(model: onnx.ModelProto, options: ort.SessionOptions) -> None:
    """Has a session map the weights of a model that lie on disk; those of a large one are not copied.

    Args:
        model: It; its bytes are what the session is made of.
        options: Of the session; changed.
    """
    options.add_session_config_entry(_WEIGHTS_FOLDER, ROOT)
    if weight_bytes(model) > _COPIED_UP_TO:
        options.add_session_config_entry("session.disable_prepacking", "1")


@contextmanager
def configured(entries: Mapping[str, str]) -> Iterator[None]:
    """Adds configuration entries to all sessions that are opened inside."""
    token = _entries.set(entries)
    try:
        yield
    finally:
        _entries.reset(token)


def open_session(
    source: Model,
    *,
    threads: int = 1,
    optimize: bool = True,
    spinning: bool = False,
    custom_op_libraries: Sequence[str] = (),
    options: ort.SessionOptions | None = None,
    providers: Sequence[Any] = (),
    folder: Path | None = None,
    further: Iterable[str] = (),
    name: str | None = None,
) -> Session:
    """Opens a model, on the CPU where no provider is named.

    Args:
        source: Path, serialized model, or a model in memory (not changed).
        threads: As in `session_options`.
        optimize: As there.
        spinning: As there.
        custom_op_libraries: Libraries with custom operators to register.
        options: In place of what the three arguments before say; changed.
        providers: Execution providers, the CPU's if there is none.
        folder: Where the external data of a model in memory lie.
        further: Values to return beside the outputs of a model in memory.
        name: What messages call the model; its path if there is none.

    Raises:
        VerificationError: The runtime does not load it.
    """
    options = options or session_options(threads=threads, optimize=optimize, spinning=spinning)
    try:
        for library in custom_op_libraries:
            options.register_custom_ops_library(library)
        for key, value in (_entries.get() or {}).items():
            options.add_session_config_entry(key, value)
        if folder is not None:
            options.add_session_config_entry(_WEIGHTS_FOLDER, str(folder))
        return _opened(source, options, list(providers or _CPU), tuple(further))
    except Exception as error:  # the runtime raises several unrelated classes, all of them plain exceptions
        where = os.fspath(source) if isinstance(source, (str, os.PathLike)) else "<in memory>"
        raise VerificationError(
            f"the runtime does not load the model: {' '.join(str(error).split())[:_MESSAGE_LIMIT]}",
            where=name or where,
            fix="load the model in onnxruntime alone; if it uses custom operators give custom_op_libraries",
        ) from error


@cache
def _malloc_trim() -> Callable[[int], object]:
    """The C library's function that gives freed memory back to the system; does nothing where it has none."""
    try:
        found: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # a C library other than glibc
        return lambda _: None
    return found


def make_room(source: Model) -> int:
    """Gives memory that nothing uses back to the system before a large model is opened or copied; returns its bytes."""
    size = _size(source)
    if size >= MAPPED_FROM:
        if any(gc.get_count()[1:]):  # else next to nothing was made since the last time
            gc.collect()  # graphs that were rewritten refer to themselves, and to their weights
        _malloc_trim()(0)  # of weights let go before, much is still held between small objects
    return size


def _opened(source: Model, options: ort.SessionOptions, providers: list[Any], further: Collection[str]) -> Session:
    size = make_room(source)
    if not isinstance(source, onnx.ModelProto):
        return Session(source if isinstance(source, bytes) else os.fspath(source), options, providers=providers)
    added = _returning(source, further)
    if refers_outside(source):
        with _scratch() as folder:  # what is mapped stays
            shell = with_weights_on_disk(source, Path(folder, "weights.bin"))
            map_weights(shell, options)
            return Session(shell.SerializeToString() + added, options, providers=providers)
    if size < MAPPED_FROM:
        return Session(source.SerializeToString() + added, options, providers=providers)
    scratch = _scratch()
    try:
        opened = Session(openable(source, Path(scratch.name), added), options, providers=providers)
    except BaseException:
        scratch.cleanup()
        raise
    if os.name == "posix":
        scratch.cleanup()  # what is mapped stays
    else:
        weakref.finalize(opened, scratch.cleanup)
    return opened


def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="kenosis-session-", ignore_cleanup_errors=True)


def _size(source: Model) -> int:
    """The bytes of a model, at least."""
    if isinstance(source, onnx.ModelProto):
        return weight_bytes(source)
    if isinstance(source, bytes):
        return len(source)
    return os.path.getsize(source) if os.path.isfile(source) else 0


def _returning(model: onnx.ModelProto, further: Collection[str]) -> bytes:
    """Serialized suffix that makes values outputs of a serialized model: protobuf joins two messages to one."""
    if not further:
        return b""
    known = {value.name for value in model.graph.output}
    outputs = [onnx.ValueInfoProto(name=name) for name in dict.fromkeys(further) if name not in known]
    return bytes(onnx.ModelProto(graph=onnx.GraphProto(output=outputs)).SerializeToString())


def openable(model: onnx.ModelProto, folder: Path, added: bytes = b"") -> str | bytes:
    """Model in memory in the form that the runtime opens: bytes, or a file whose weights it maps.

    Args:
        model: A model complete in memory; not changed.
        folder: An existing folder to write to where the weights are large; to be kept until the model is opened.
        added: What follows its serialized form.

    Raises:
        OSError: The file cannot be written, and the model does not fit into bytes.
    """
    size = weight_bytes(model)
    if size >= MAPPED_FROM:
        path = folder / "model.onnx"
        try:
            shell = write_external_data(model, folder / "weights.bin")
            path.write_bytes(shell.SerializeToString() + added)
            return str(path)
        except OSError as error:
            if size > _BYTES_LIMIT:
                raise
            _log.info("the weights are not mapped from a file: %s", error)
    return bytes(model.SerializeToString()) + added


# ---- work that may be done elsewhere --------------------------------------------------------------------------------


class Executor(ABC):
    """Does pieces of work that do not depend on each other."""

    @property
    @abstractmethod
    def ahead(self) -> int:
        """Models worth having under way before the outcome of the first is looked at."""

    @abstractmethod
    def open(
        self, model: Path | onnx.ModelProto, *, threads: int = 1, custom_op_libraries: Sequence[str] = ()
    ) -> Running:
        """Opens a model to be run on feeds.

        Args:
            model: The model, or its file; not changed, neither here nor by the caller as long as it is open.
            threads: Threads of a session in this process, 0 for the runtime's own choice.
            custom_op_libraries: Libraries with custom operators to register.

        Raises:
            VerificationError: The runtime does not load the model; elsewhere, when it is first run.
        """

    @abstractmethod
    def map(self, work: Callable[[T], R], pieces: Iterable[T]) -> Iterator[R]:
        """Yields what each piece leads to, in their order.

        Args:
            work: A function of a module of this package, of nothing but its argument.
            pieces: What it takes; to be pickled.

        Raises:
            Exception: Whatever the work raises.
        """


class Here(Executor):
    """This process: one piece after the other, each when its outcome is asked for."""

    @property
    def ahead(self) -> int:
        return 0

    def open(
        self, model: Path | onnx.ModelProto, *, threads: int = 1, custom_op_libraries: Sequence[str] = ()
    ) -> Running:
        return open_session(model, threads=threads, custom_op_libraries=custom_op_libraries)

    def map(self, work: Callable[[T], R], pieces: Iterable[T]) -> Iterator[R]:
        return map(work, pieces)


HERE: Final = Here()


# ---- what comes back ------------------------------------------------------------------------------------------------


def repeats(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> bool:
    """Whether two runs on the same feed gave the same; a model that draws random numbers does not."""
    if first.shape != second.shape or first.dtype.kind not in "fc":
        return np.array_equal(first, second)
    largest = float(np.abs(first[np.isfinite(first)]).max(initial=0.0))
    return np.allclose(first, second, rtol=0.0, atol=_REPEATED * largest, equal_nan=True)


def as_array(value: Any) -> npt.NDArray[Any]:
    """An output or input of a session as one array, so that two such values can be compared.

    Sequences of tensors are strung together, maps are their values in the order of the keys, and sequences of maps
    (as of a classifier's probabilities) one row a map. An optional value that is not there is an empty array.
    """
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, ort.OrtValue):
        return np.asarray(value.numpy())
    if isinstance(value, dict):
        return np.asarray([value[key] for key in sorted(value)])
    if not isinstance(value, (list, tuple)):
        return np.zeros(0) if value is None else np.asarray(value)
    parts = [as_array(item) for item in value]
    if value and all(isinstance(item, dict) for item in value) and len({part.shape for part in parts}) == 1:
        return np.stack(parts)
    return np.concatenate([part.reshape(-1) for part in parts]) if parts else np.zeros(0)


class Runner(Protocol):
    """Anything that runs feeds; an ``onnxruntime.InferenceSession`` is one."""

    def run(self, output_names: None, input_feed: Any) -> Any:
        """Runs the model once."""
