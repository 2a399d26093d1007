"""A model in a session of its own, whatever its size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.errors import VerificationError
from kenosis_ort.graph.save import store_model, weight_bytes
from kenosis_ort.graph.session import open_session
from kenosis_ort.storage.scratch import Scratch

Array = npt.NDArray[Any]

_INLINE_BYTES = 2**26


class Runner:
    """Runs feeds through a model. Use it as a context manager, or call `close`.

    Weights of more than 64 MB are mapped by the runtime from a temporary file, so that they are not held once more.

    Args:
        model: The model; neither changed nor kept.
        threads: Threads of the session.
        custom_op_libraries: Libraries with custom operators to register.

    Raises:
        VerificationError: The runtime does not load the model.
    """

    def __init__(self, model: onnx.ModelProto, *, threads: int = 1, custom_op_libraries: Sequence[str] = ()) -> None:
        self._folder: Scratch | None = None
        source: Path | bytes
        if weight_bytes(model) > _INLINE_BYTES:
            self._folder = Scratch("accuracy")
            source = self._folder.path / "model.onnx"
            store_model(model, source, external_data=True)
        else:
            source = model.SerializeToString()
        try:
            self._session = open_session(source, custom_op_libraries=custom_op_libraries, threads=threads)
        except BaseException:
            self.close()
            raise
        self.inputs = frozenset(i.name for i in self._session.get_inputs())
        self.outputs = tuple(o.name for o in self._session.get_outputs())

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Removes the temporary file, if there is one."""
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def run(self, feed: Mapping[str, Any], names: Sequence[str] | None = None) -> dict[str, Array]:
        """Runs one feed.

        Args:
            feed: Values by input name.
            names: Outputs to return; None for all.

        Raises:
            VerificationError: The runtime refuses the feed.
        """
        wanted = list(self.outputs if names is None else names)
        try:
            results = self._session.run(wanted, dict(feed))
        except Exception as error:  # the runtime's exceptions share no base class but Exception
            text = " ".join(str(error).split())[:400]
            raise VerificationError(
                f"the model does not run: {text}", fix="check names, shapes and types of the samples"
            ) from error
        return {name: np.asarray(value) for name, value in zip(wanted, results, strict=True)}
