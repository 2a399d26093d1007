"""Executors of independent work: this process, or the caller's executor.

Passes hand their work to an `Executor` and know nothing of machines. What comes back is in the order of what was
handed over, whoever ended first, so that it does not depend on how many there are.

A model in a session of its own, ended when it is no longer needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy.typing as npt
import onnx
import onnxruntime as ort

from kenosis_ort.errors import VerificationError
from kenosis_ort.graph.session import as_array, fed_names, open_session
from kenosis_ort.runtime.session import Closing

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
            else open_session(model, custom_op_libraries=custom_op_libraries, threads=threads)
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
