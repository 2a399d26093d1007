"""A case in a process of its own with limits, forked from one that has imported everything and opened no session.

The runtime's threads would not survive the fork.
"""

import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import onnxruntime.quantization
import rich.table

import kenosis_ort
import kenosis_ort.flow.run
import kenosis_ort.report.html.page
from tests import one_core
from tests.fuzz.case import ALLOWED, run_case

for _name in kenosis_ort.__all__:  # once, in the process that all others are forked from
    getattr(kenosis_ort, _name)
_IMPORTED = (onnxruntime.quantization, rich.table)

IS_POSSIBLE = "forkserver" in multiprocessing.get_all_start_methods()
MEMORY = 8 * 2**30
"""Bytes of address space a case may take."""

CPU_S = 60
WALL_S = 120.0


def _run(case, folder):
    limits = {resource.RLIMIT_AS: MEMORY, resource.RLIMIT_CPU: CPU_S, resource.RLIMIT_CORE: 0}
    for kind, limit in {**limits, resource.RLIMIT_FSIZE: 2**30}.items():
        resource.setrlimit(kind, (limit, limit))
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    one_core.stay()
    (folder / "work").mkdir()
    result = run_case(case, folder / "work", (folder / "phase").write_text)
    (folder / "result.json").write_text(json.dumps(result, default=str), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)


def isolated(case, *, keep_defects=None):
    """What comes of a case: its class and a detail.

    Args:
        case: The case.
        keep_defects: Folder to which its files are copied if what comes of it is wrong.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    folder = Path(tempfile.mkdtemp(prefix="kenosis-fuzz-"))
    try:
        process = context.Process(target=_run, args=(case, folder))
        process.start()
        process.join(WALL_S)
        ended = process.exitcode
        process.kill()
        process.join()
        result = _result(folder, ended)
        if keep_defects is not None and result["class"] not in ALLOWED:
            shutil.copytree(folder, keep_defects, dirs_exist_ok=True)
        return result
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _result(folder, ended):
    said = folder / "result.json"
    if said.exists():  # the status of a process that another thread asked for first is lost
        return dict(json.loads(said.read_text(encoding="utf-8")))
    phase, log = ((folder / name).read_text(errors="replace") if (folder / name).exists() else ""
                  for name in ("phase", "log"))  # fmt: skip
    hung = ended is None or -ended in (signal.SIGXCPU, signal.SIGKILL)
    kind = "fuzzer" if not phase else f"{'hang' if hung else 'crash'}{' of the judge' if phase == 'judge' else ''}"
    return {"class": kind, "detail": f"{phase}: ended with {ended}\n{log[-3000:]}"}
