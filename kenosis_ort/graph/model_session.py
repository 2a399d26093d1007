"""Sessions of the runtime, and executors that run them.

One way to open a runtime session: no custom-op library unasked, the runtime's message shortened, weights not copied.

A model in memory is not handed to the runtime as bytes where its weights are large: the bytes, the runtime's parsed
message and its tensors would hold them three times over for a while. They go to a temporary file, from which the
runtime maps them.

The runtime reads a model before any other library written in C++ does.

ONNX's shape inference, checker and version converter crash or never end on some models that the runtime refuses in one
sentence. So every model from outside is loaded by the runtime first: without optimization, without custom operators
nobody asked for. What it refuses is refused here; what it loads has sound types, attributes and references.

Executors of independent work: this process, or the caller's executor.

Passes hand their work to an `Executor` and know nothing of machines. What comes back is in the order of what was
handed over, whoever ended first, so that it does not depend on how many there are.

A model in a session of its own, ended when it is no longer needed.
"""

from __future__ import annotations

import logging
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort

from kenosis_ort.errors import ModelLoadError, VerificationError
from kenosis_ort.graph.external_data import with_weights_on_disk, write_external_data
from kenosis_ort.graph.outside import ROOT, copy_model, refers_outside, weight_bytes
from kenosis_ort.graph.walk import MAIN_DOMAINS, name_nodes, opset_of
from kenosis_ort.runtime.session import Closing, new_session, runtime_limits, session_options
from kenosis_ort.storage.scratch import Scratch

Array = npt.NDArray[Any]


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


class FeedRunner(Running):
    """Runs feeds through a model. Use it as a context manager, or call `close`.

    Args:
        model: The model, or its file, neither changed nor kept; or a session that is open already.
        threads: Threads of the session.
        custom_op_libraries: Libraries with custom operators to register.

    Raises:
        VerificationError: The runtime does not load the model.
    """

    def __init__(
        self,
        model: Path | onnx.ModelProto | ort.InferenceSession,
        *,
        threads: int = 1,
        custom_op_libraries: Sequence[str] = (),
    ) -> None:
        session = (
            model
            if isinstance(model, ort.InferenceSession)
            else open_session(model, custom_op_libraries=custom_op_libraries, threads=threads, spinning=False)
        )
        self._session: ort.InferenceSession | None = session
        self.inputs = fed_names(session)
        self.outputs = tuple(o.name for o in session.get_outputs())

    def close(self) -> None:
        """Ends the session, whatever else still holds this object."""
        self._session = None

    def run(self, feed: Mapping[str, Any], names: Sequence[str] | None = None) -> dict[str, Array]:
        """Runs one feed.

        Args:
            feed: Values by input name.
            names: Outputs to return; None for all.

        Raises:
            VerificationError: The runtime refuses the feed.
        """
        assert self._session is not None, "the session was closed"
        wanted = list(self.outputs if names is None else names)
        try:
            results = self._session.run(wanted, dict(feed))
        except Exception as error:  # the runtime's exceptions share no base class but Exception
            text = " ".join(str(error).split())[:400]
            raise VerificationError(
                f"the model does not run: {text}", fix="check names, shapes and types of the samples"
            ) from error
        return {name: as_array(value) for name, value in zip(wanted, results, strict=True)}

    def runs(
        self, feeds: Iterable[Mapping[str, Any]], names: Sequence[str] | None = None
    ) -> Iterator[dict[str, Array]]:
        """Yields the outputs for each feed, each run when it is asked for."""
        return (self.run(feed, names) for feed in feeds)


T = TypeVar("T")
R = TypeVar("R")


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
        return FeedRunner(model, threads=threads, custom_op_libraries=custom_op_libraries)

    def map(self, work: Callable[[T], R], pieces: Iterable[T]) -> Iterator[R]:
        return map(work, pieces)


HERE: Final = Here()


_log = logging.getLogger(__name__)

MAPPED_FROM = 2**24
"""Bytes of weights from which on the runtime maps them from a file."""

WHOLE_LIMIT = 3000
"""A model of up to this many nodes is loaded as it is; the runtime's load time grows with the square of the depth."""

WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
"""The runtime's option that says where the external data of a model in memory lie."""

_COPIED_UP_TO = 2**30
"""Bytes of weights of which the runtime may make copies in the order that its kernels like best."""

_BYTES_LIMIT = 1_900_000_000  # protobuf and the runtime's byte loader stop at 2 GiB
_MESSAGE_LIMIT = 600
_REPEATED = 1e-3  # of the largest value: threads may add up in another order


def open_session(
    source: str | os.PathLike[str] | bytes | onnx.ModelProto,
    *,
    custom_op_libraries: Sequence[str] = (),
    threads: int = 1,
    optimize: bool = True,
    spinning: bool = True,
) -> ort.InferenceSession:
    """Opens a model on the CPU.

    Args:
        source: Path, serialized model, or a model complete in memory (not changed).
        custom_op_libraries: Libraries with custom operators to register.
        threads: Threads inside an operator.
        optimize: At full optimization, as a user's session; False for none.
        spinning: As in `session_options`.

    Raises:
        VerificationError: The runtime does not load it.
    """
    where = os.fspath(source) if isinstance(source, (str, os.PathLike)) else "<in memory>"
    try:
        options = session_options(
            threads=threads, optimize=optimize, custom_op_libraries=custom_op_libraries, spinning=spinning
        )
        return create_session(source, options)
    except Exception as error:  # the runtime raises several unrelated classes, all of them plain exceptions
        text = " ".join(str(error).split())[:_MESSAGE_LIMIT]
        raise VerificationError(f"the runtime does not load the model: {text}", where=where) from error


def create_session(
    source: str | os.PathLike[str] | bytes | onnx.ModelProto,
    options: ort.SessionOptions,
    providers: Sequence[object] = (),
) -> ort.InferenceSession:
    """Makes a session with options of the caller's own; raises whatever the runtime raises."""
    if not isinstance(source, onnx.ModelProto):
        return new_session(source if isinstance(source, bytes) else os.fspath(source), options, providers=providers)
    if refers_outside(source):
        with Scratch("session") as folder:  # what is mapped stays
            shell = with_weights_on_disk(source, folder / "weights.bin")
            map_weights(shell, options)
            return new_session(shell.SerializeToString(), options, providers=providers)
    if weight_bytes(source) < MAPPED_FROM:
        return new_session(source.SerializeToString(), options, providers=providers)
    scratch = Scratch("session")
    try:
        opened = new_session(openable(source, scratch.path), options, providers=providers)
    except BaseException:
        scratch.close()
        raise
    if os.name == "posix":
        scratch.close()  # what is mapped stays
    else:
        weakref.finalize(opened, scratch.close)
    return opened


def map_weights(model: onnx.ModelProto, options: ort.SessionOptions) -> None:
    """Has a session map the weights of a model that lie on disk; those of a large one are not copied.

    Args:
        model: It; its bytes are what the session is made of.
        options: Of the session; changed.
    """
    options.add_session_config_entry(WEIGHTS_FOLDER, ROOT)
    if weight_bytes(model) > _COPIED_UP_TO:
        options.add_session_config_entry("session.disable_prepacking", "1")


def openable(model: onnx.ModelProto, folder: Path) -> str | bytes:
    """Model in memory in the form that the runtime opens: bytes, or a file whose weights it maps.

    Args:
        model: A model complete in memory; not changed.
        folder: An existing folder to write to where the weights are large; to be kept until the model is opened.

    Raises:
        OSError: The file cannot be written, and the model does not fit into bytes.
    """
    size = weight_bytes(model)
    if size >= MAPPED_FROM:
        path = folder / "model.onnx"
        try:
            shell = write_external_data(model, folder / "weights.bin")
            path.write_bytes(shell.SerializeToString())
            return str(path)
        except OSError as error:
            if size > _BYTES_LIMIT:
                raise
            _log.info("the weights are not mapped from a file: %s", error)
    return bytes(model.SerializeToString())


def fed_names(opened: ort.InferenceSession) -> frozenset[str]:
    """The names that a feed may hold: inputs, and those with a default value."""
    return frozenset(value.name for value in (*opened.get_inputs(), *opened.get_overridable_initializers()))


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


_REFUSAL_LIMIT = 400
_OLDEST_OPSET = 7
"""The runtime has no kernels for some operators of older sets, which preparation converts."""


def check_runtime_loads(
    proto: onnx.ModelProto,
    path: Path | None,
    name: str,
    *,
    is_split: bool = False,
    custom_op_libraries: Sequence[str] = (),
) -> None:
    """Has the runtime load a model.

    What preparation mends by itself is no reason for a refusal: node names used twice, an IR version or operator set
    newer than the runtime's, operators of sets so old that it has no kernels for them, shapes in external data.

    Args:
        proto: The model with all data in memory; not changed.
        path: Its file, None if there is none.
        name: What messages call it.
        is_split: Whether the file refers to external data.
        custom_op_libraries: Libraries with custom operators to register.

    Raises:
        ModelLoadError: The runtime refuses the model.
    """
    refusal = _refusal(path or proto, custom_op_libraries)
    if refusal is None or _lacks_kernels_only(refusal, proto):
        return
    mended = _mended(proto, is_split=is_split)
    if mended is not None and _refusal(mended, custom_op_libraries) is None:
        _log.info("%s: the runtime loads it after small repairs only (%s)", name, refusal)
        return
    raise ModelLoadError(
        f"The runtime refuses the model: {' '.join(str(refusal).split())[:_REFUSAL_LIMIT]}",
        where=name,
        fix="Check that the model runs in onnxruntime; for custom operators give custom_op_libraries.",
    ) from refusal


def _refusal(source: onnx.ModelProto | Path, libraries: Sequence[str]) -> Exception | None:
    """The runtime's error at load, None where it loads the model."""
    try:
        options = session_options(optimize=False, custom_op_libraries=libraries)
        options.add_session_config_entry("session.disable_prepacking", "1")  # nothing is run: no second copy of weights
        create_session(source, options)
    except Exception as error:  # the binding raises its own classes, all of them direct children of Exception
        return error
    return None


def _lacks_kernels_only(refusal: Exception, proto: onnx.ModelProto) -> bool:
    return type(refusal).__name__ == "NotImplemented" and 0 < opset_of(proto) < _OLDEST_OPSET


def _mended(proto: onnx.ModelProto, *, is_split: bool) -> onnx.ModelProto | None:
    """A copy with unique node names and a header that the runtime reads; None where nothing would differ."""
    limits = runtime_limits()
    copy = copy_model(proto)
    changed = bool(name_nodes(copy).duplicates) or copy.ir_version > limits.max_ir
    copy.ir_version = min(copy.ir_version, limits.max_ir)
    for entry in copy.opset_import:
        if entry.domain in MAIN_DOMAINS and entry.version > limits.max_opset:
            entry.version, changed = limits.max_opset, True
    return copy if changed or is_split else None
