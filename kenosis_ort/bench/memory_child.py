"""Runs in a process of its own, as a script: loads a model, runs it, writes down how much memory that took.

Imports nothing but numpy and onnxruntime, so that little lies below what is measured.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

JOB, FEED, RESULT = "job.json", "feed.npz", "result.json"


def main(folder: Path) -> None:
    """Performs the job that lies in a folder and leaves the result there."""
    job = json.loads((folder / JOB).read_text(encoding="utf-8"))
    with np.load(folder / FEED, allow_pickle=False) as archive:
        feed = {name: archive[f"arr_{index}"] for index, name in enumerate(job["inputs"])}
    options = ort.SessionOptions()
    options.intra_op_num_threads = job["threads"]
    options.log_severity_level = 3
    for library in job["libraries"]:
        options.register_custom_ops_library(library)
    before = resident_bytes(peak=False)
    session = ort.InferenceSession(job["model"], options, providers=["CPUExecutionProvider"])
    for _ in range(job["runs"]):
        session.run(None, feed)
    result = {"before": before, "peak": resident_bytes(peak=True)}
    (folder / RESULT).write_text(json.dumps(result), encoding="utf-8")


def resident_bytes(*, peak: bool) -> int:
    """This process's resident memory, now or at its highest; where the system reports only the highest, that.

    Raises:
        OSError: The system tells neither.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        # Not getrusage: after fork and exec, Linux counts the parent's memory in.
        wanted = "VmHWM:" if peak else "VmRSS:"
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(wanted):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        raise OSError("this system does not tell a process's peak memory")
    import resource  # not on Windows

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]))
