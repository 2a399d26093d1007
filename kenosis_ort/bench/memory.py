"""Peak memory of a model: loaded and run in a process of its own."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kenosis_ort.bench import memory_child
from kenosis_ort.errors import VerificationError

_log = logging.getLogger(__name__)

_RUNS = 3


def peak_memory(
    opened: str | bytes,
    feed: Mapping[str, Any],
    folder: Path,
    *,
    threads: int,
    custom_op_libraries: Sequence[str] = (),
) -> int:
    """Returns by how many bytes loading and running a model raises a process's memory at most.

    Args:
        opened: Path or serialized model.
        feed: Arrays by input name.
        folder: An empty folder of the caller's; files are left there.
        threads: Threads of the session.
        custom_op_libraries: Libraries with custom operators to register.

    Raises:
        VerificationError: The process failed, or the system does not tell a process's memory.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(opened, bytes):
        path = folder / "model.onnx"
        path.write_bytes(opened)
    else:
        path = Path(opened).resolve()
    arrays = [np.asarray(value) for value in feed.values()]
    if any(array.dtype.hasobject for array in arrays):
        raise VerificationError("peak memory cannot be measured with inputs of strings")
    np.savez(folder / memory_child.FEED, *arrays)
    job = {
        "model": str(path),
        "inputs": list(feed),
        "threads": threads,
        "libraries": [str(Path(library).resolve()) for library in custom_op_libraries],
        "runs": _RUNS,
    }
    (folder / memory_child.JOB).write_text(json.dumps(job), encoding="utf-8")
    # The file itself, not "-m": importing this package would raise the memory that is to be measured from.
    done = subprocess.run(
        [sys.executable, memory_child.__file__, str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise VerificationError(f"peak memory could not be measured: {last}")
    result = json.loads((folder / memory_child.RESULT).read_text(encoding="utf-8"))
    _log.debug("peak memory: %s", result)
    return int(result["peak"]) - int(result["before"])
