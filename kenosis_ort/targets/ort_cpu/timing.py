"""Sessions of stock ONNX Runtime for timing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kenosis_ort.graph.session import open_session
from kenosis_ort.runtime.session import new_session, session_options
from kenosis_ort.storage.scratch import Scratch
from kenosis_ort.targets.model import Runner

_log = logging.getLogger(__name__)


def open_runner(source: str | bytes, *, threads: int, custom_op_libraries: Sequence[str]) -> Runner:
    """A stock session at full optimization.

    Raises:
        VerificationError: The runtime refuses the model.
    """
    runner: Runner = open_session(source, custom_op_libraries=custom_op_libraries, threads=threads)
    return runner


def opener(source: str | bytes, *, threads: int, custom_op_libraries: Sequence[str]) -> Callable[[], Runner]:
    """Function that opens fresh sessions of a model, which the runtime optimizes once, for the first of them.

    Most of what opening takes is optimizing the graph (YOLOX-Nano in int8: 110 ms, of its optimized form 14 ms). What
    the runtime writes of that graph has the same kernels: over eleven nets in float and int8 its runs take between
    0.99 and 1.01 of the time, with equal outputs. A model in a file has large weights, which would be written again; it
    is opened as it is, and so is what the runtime refuses, whose sessions then say why.
    """
    optimized = b"" if isinstance(source, bytes) else None  # not known yet, or never to be

    def opened() -> Runner:
        nonlocal optimized
        runner: Runner
        try:
            if optimized:
                runner = open_session(
                    optimized, custom_op_libraries=custom_op_libraries, threads=threads, optimize=False
                )
                return runner
            if optimized is not None:
                with Scratch("optimized") as folder:
                    options = session_options(threads=threads, custom_op_libraries=custom_op_libraries)
                    options.optimized_model_filepath = str(folder / "model.onnx")
                    runner = new_session(source, options)
                    optimized = (folder / "model.onnx").read_bytes()
                return runner
        except Exception as error:  # the runtime raises several unrelated classes, all of them plain exceptions
            _log.info("not opened in optimized form: %s", error)
            optimized = None
        return open_runner(source, threads=threads, custom_op_libraries=custom_op_libraries)

    return opened
