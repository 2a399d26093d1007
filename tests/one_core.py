"""Sessions of one thread where nobody asks for more: others would only spin where another test could run."""

from typing import Any

import onnxruntime as ort

_opened = ort.InferenceSession.__init__


def open_session(session: Any, source: Any, sess_options: Any = None, *arguments: Any, **named: Any) -> None:
    """Opens a session as the runtime does, on one core unless its options name a number of threads."""
    options = ort.SessionOptions() if sess_options is None else sess_options
    threads, options.intra_op_num_threads = options.intra_op_num_threads, options.intra_op_num_threads or 1
    try:
        _opened(session, source, options, *arguments, **named)
    finally:
        options.intra_op_num_threads = threads


def stay() -> None:
    """Makes all sessions of this process such sessions."""
    ort.InferenceSession.__init__ = open_session
