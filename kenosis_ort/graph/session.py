"""One way to open a runtime session: no custom-op library unasked, the runtime's message shortened."""

from __future__ import annotations

import os
from collections.abc import Sequence

import onnxruntime as ort

from kenosis_ort.errors import VerificationError

_MESSAGE_LIMIT = 600


def open_session(
    source: str | os.PathLike[str] | bytes,
    *,
    custom_op_libraries: Sequence[str] = (),
    threads: int = 1,
    optimize: bool = True,
) -> ort.InferenceSession:
    """Opens a model on the CPU.

    Args:
        source: Path or serialized model.
        custom_op_libraries: Libraries with custom operators to register.
        threads: Threads inside an operator.
        optimize: At full optimization, as a user's session; False for none.

    Raises:
        VerificationError: The runtime does not load it.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        for library in custom_op_libraries:
            options.register_custom_ops_library(library)
        return ort.InferenceSession(
            source if isinstance(source, bytes) else os.fspath(source), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # the runtime raises several unrelated classes, all of them plain exceptions
        text = " ".join(str(error).split())[:_MESSAGE_LIMIT]
        raise VerificationError(
            f"the runtime does not load the model: {text}",
            where="<bytes>" if isinstance(source, bytes) else os.fspath(source),
        ) from error
