"""Runs cases, each in a process of its own with limits, forked from one that has imported everything.

    python -m tests.fuzz.farm --cases 150 --seed 1 --jobs 2

prints one line of JSON a case. No session is opened before the fork: the runtime's threads would not survive it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

MEMORY: Final = 8 * 2**30
"""Bytes of address space a case may take."""

CPU_SECONDS: Final = 60
WALL_SECONDS: Final = 120.0


@dataclass
class _Child:
    number: int
    pid: int
    folder: Path
    start: float
    killed: bool = False

    @property
    def work(self) -> Path:
        """What the case itself sees; the log, the phase and the result lie beside it."""
        return self.folder / "work"


def run_all(numbers: Sequence[int], seed: int, *, jobs: int, keep: Path | None = None) -> Iterator[dict[str, Any]]:
    """Runs cases and yields their results as they come.

    Args:
        numbers: Numbers of the cases.
        seed: Seed of the series.
        jobs: Cases at a time.
        keep: Folder to which the files of cases with defects are moved.
    """
    from tests import one_core
    from tests.fuzz.case import ALLOWED  # imports everything, once

    _import_all()
    one_core.stay()
    waiting = list(reversed(numbers))
    running: dict[int, _Child] = {}
    base = Path(tempfile.mkdtemp(prefix="kenosis-fuzz-"))
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                child = _start(waiting.pop(), seed, base)
                running[child.pid] = child
            for child, status in _ended(running):
                result = _result(child, seed, status)
                result["seconds"] = round(time.monotonic() - child.start, 2)
                if result["class"] not in ALLOWED and keep is not None:
                    target = keep / f"{seed}-{child.number}"
                    shutil.rmtree(target, ignore_errors=True)
                    shutil.copytree(child.work, target)
                    (target / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
                shutil.rmtree(child.folder, ignore_errors=True)
                yield result
    finally:
        for child in running.values():
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
        shutil.rmtree(base, ignore_errors=True)


def _import_all() -> None:
    """Imports what every case needs, so that only the first process pays for it."""
    import kenosis_ort

    for name in kenosis_ort.__all__:
        getattr(kenosis_ort, name)
    import onnxruntime.quantization
    import rich.table

    import kenosis_ort.flow.run
    import kenosis_ort.graph.view
    import kenosis_ort.report.html.page
    from tests.fuzz.seeds import SEEDS, seed_bytes

    for name in SEEDS:
        seed_bytes(name)
    del onnxruntime, rich


def _start(number: int, seed: int, base: Path) -> _Child:
    folder = base / str(number)
    (folder / "work").mkdir(parents=True)
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return _Child(number, pid, folder, time.monotonic())
    code = 1
    try:
        os.setsid()
        for kind, limit in (
            (resource.RLIMIT_AS, MEMORY),
            (resource.RLIMIT_CPU, CPU_SECONDS),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_FSIZE, 2**30),
        ):
            resource.setrlimit(kind, (limit, limit))
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        from tests.fuzz.case import make_case, result_line, run_case

        def say(phase: str) -> None:
            (folder / "phase").write_text(phase)

        say("mutation")
        result = run_case(make_case(seed, number), folder / "work", say)
        (folder / "result.json").write_text(result_line(result), encoding="utf-8")
        code = 0
    except BaseException:  # the parent tells it by the missing result
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _ended(running: dict[int, _Child]) -> Iterator[tuple[_Child, int]]:
    """Waits a little for children to end; kills those that take too long."""
    select.select([], [], [], 0.01)
    for pid in list(running):
        child = running[pid]
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            yield running.pop(pid), status
        elif not child.killed and time.monotonic() - child.start > WALL_SECONDS:
            child.killed = True
            os.kill(pid, signal.SIGKILL)


def _result(child: _Child, seed: int, status: int) -> dict[str, Any]:
    path = child.folder / "result.json"
    if path.exists():
        return dict(json.loads(path.read_text(encoding="utf-8")))
    from tests.fuzz.case import make_case

    phase = (child.folder / "phase").read_text() if (child.folder / "phase").exists() else "start"
    log = (child.folder / "log").read_text(errors="replace")[-3000:] if (child.folder / "log").exists() else ""
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    hung = child.killed or number in (signal.SIGXCPU, signal.SIGKILL)
    kind = "hang" if hung else "crash"
    kind = "fuzzer" if phase in ("start", "mutation") else f"{kind} of the judge" if phase == "judge" else kind
    told = make_case(seed, child.number).told() if kind != "fuzzer" else {"case": f"{seed}/{child.number}"}
    return {**told, "class": kind, "detail": f"{phase}: signal {number}\n{log}"}


def main() -> None:
    """Prints one line of JSON a case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=150)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep", type=Path)
    arguments = parser.parse_args()
    numbers = range(arguments.first, arguments.first + arguments.cases)
    for result in run_all(numbers, arguments.seed, jobs=arguments.jobs, keep=arguments.keep):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
