"""A model in a session of its own, ended when it is no longer needed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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
        """Returns the outputs for each feed, in their order.

        Args:
            feeds: Values by input name.
            names: Outputs to return; None for all.

        Raises:
            VerificationError: While they are iterated: the runtime refuses a feed. Those before it came.
        """


class Runner(Running):
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
