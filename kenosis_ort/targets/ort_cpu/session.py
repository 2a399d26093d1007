"""How a model is opened in stock ONNX Runtime to be timed."""

from __future__ import annotations

from collections.abc import Sequence

from kenosis_ort.graph.session import open_session
from kenosis_ort.targets.model import Runner


def open_runner(source: str | bytes, *, threads: int, custom_op_libraries: Sequence[str]) -> Runner:
    """Returns a stock session at full optimization.

    Raises:
        VerificationError: The runtime refuses the model.
    """
    runner: Runner = open_session(source, custom_op_libraries=custom_op_libraries, threads=threads)
    return runner
