"""Proves ``target="arm"`` on ONNX Runtime's aarch64 build, under emulation or on an Arm machine.

    python benchmarks/arm.py PYTHON [--rules] [--nets NAME ...] [--zoo NAME ...]

PYTHON runs on Arm, or emulates it, and has onnxruntime and the package's dependencies; this checkout has to be on its
path. The files are made here, on whatever machine that is; the kernels are read from the Arm runtime's own optimized
graph, and its outputs compared with those of the runtime here. ``--rules`` runs the proofs of the rules there too;
``--zoo`` takes nets of the zoo (``../shared/zoo``) as well, and prints the signal to noise of their outputs there, on
up to 48 samples each, beside that of stock's best file for Arm. Times under emulation mean nothing and are not printed.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnxruntime.quantization import QuantType, quantize_static as stock

from kenosis_ort import quantize_static
from kenosis_ort.plan import Kind
from kenosis_ort.runtime.session import configured, open_session
from kenosis_ort.targets import get_target
from tests import models
from tests.models import Feed

HEAVY = ("Conv", "Gemm", "MatMul")
_ZOO_FEEDS = 4
_ZOO_ROWS = 48
RULES = "test_rule and not trt and not onednn and not qnn and not web and not arm and not into_body_dies"  # a process
THERE = """
import json, sys, numpy as np, onnxruntime as ort
from kenosis_ort.verify import verify_fusion
found = {}
for path in sys.argv[1:]:
    report = verify_fusion(path, target="arm")
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feeds = {}
    with np.load(path + ".npz", allow_pickle=False) as data:
        for key in data.files:
            number, name = key.split("|", 1)
            feeds.setdefault(number, {})[name] = data[key]
    ran = {n: session.run(None, feed) for n, feed in feeds.items()}
    np.savez(path + ".out.npz", **{f"{n}|{i}": o for n, outputs in ran.items() for i, o in enumerate(outputs)})
    found[path] = {
        "version": report.runtime_version,
        "kernels": {k.node: [k.kernel, k.status.value, k.integer, k.reason] for k in report.kernels},
        "silent": [k.node for k in report.kernels if k.silently_quantized or k.weights_per_run],
    }
print(json.dumps(found))
"""


def prove_there(python: str, files: Sequence[Path]) -> dict[str, Any]:
    """Returns what the Arm runtime makes of files that lie beside their feeds (``FILE.npz``); writes its outputs.

    Raises:
        RuntimeError: It fails there.
    """
    done = subprocess.run([python, "-c", THERE, *map(str, files)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def make(name: str, folder: Path, **options: Any) -> tuple[Path, Any]:
    """Quantizes one of the shared nets for Arm here; returns the file, with a feed beside it, and the report."""
    model, path = models.ALL[name](), folder / f"{name}.onnx"
    report = quantize_static(model, path, models.reader(model, 8), target="arm", **options)
    save_feeds(path, models.feeds(model, 1, seed=7))
    return path, report


def save_feeds(path: Path, feeds: Sequence[Feed]) -> None:
    """Puts feeds beside a file."""
    np.savez(f"{path}.npz", **{f"{n}|{name}": array for n, feed in enumerate(feeds) for name, array in feed.items()})


def outputs_there(path: Path) -> dict[str, Any]:
    """Returns the arrays that the Arm runtime returned, by ``FEED|OUTPUT``."""
    with np.load(f"{path}.out.npz", allow_pickle=False) as data:
        return {key: data[key] for key in data.files}


def outputs_here(path: Path, feeds: Sequence[Feed]) -> dict[str, Any]:
    """Returns the same of the runtime here, which makes nothing uint8 that is int8 in the file."""
    with configured(get_target("arm").session_entries):
        session = open_session(path)
    return {f"{n}|{i}": o for n, feed in enumerate(feeds) for i, o in enumerate(session.run(None, dict(feed)))}


def not_as_planned(report: Any, there: dict[str, Any]) -> list[str]:
    """Returns the nodes that the plan calls integer or absorbed and the Arm runtime runs otherwise."""
    wrong = list(there["silent"])
    for node in report.plan.nodes:
        kernel, status, integer, reason = there["kernels"].get(node.node, ("", "removed", False, ""))
        if node.kind is Kind.INTEGER and node.op_type in HEAVY and not integer:
            wrong.append(f"{node.node}: {kernel or status}, {reason}")
        elif node.kind is Kind.ABSORBED and status not in ("absorbed", "removed"):
            wrong.append(f"{node.node}: {kernel}")
    return wrong


def largest_difference(path: Path) -> float:
    """Returns the largest difference between the outputs here and there, relative to the largest output."""
    with np.load(f"{path}.npz", allow_pickle=False) as data:
        feed = {key.split("|", 1)[1]: data[key] for key in data.files}
    here, there = outputs_here(path, [feed]), outputs_there(path)
    return max(
        float(np.abs(a.astype(np.float64) - there[key].astype(np.float64)).max() / (np.abs(a).max() or 1.0))
        for key, a in here.items()
    )


def decibels(want: dict[str, Any], got: dict[str, Any]) -> float:
    """Returns the signal to noise over all floating-point outputs of the same shape."""
    signal = noise = 0.0
    for key, a in want.items():
        if a.dtype.kind == "f" and a.shape == got[key].shape:
            x, y = a.astype(np.float64), got[key].astype(np.float64)
            signal, noise = signal + float((x * x).sum()), noise + float(((x - y) ** 2).sum())
    return 10 * math.log10(signal / noise) if noise and signal else math.inf


def _samples(entry: Any, single_sample: Any) -> list[Feed]:
    """Returns a few evaluation samples of a zoo entry: rows of one batch where batches are free, else a few feeds."""
    first = entry.evals[0]
    one = single_sample(entry.path, first)
    free = [name for name in first if np.shape(first[name]) != np.shape(one[name])]
    if free:
        return [{name: array[:_ZOO_ROWS] if name in free else array for name, array in first.items()}]
    return [entry.evals[i] for i in range(_ZOO_FEEDS)]


def zoo_rows(python: str, names: Sequence[str], folder: Path) -> bool:
    """Prints a row a net of the zoo; returns whether all run as planned."""
    from _zoo import OneShotReader, choose, load_zoo, prepared_by_stock, quiet_folder, single_sample

    zoo, good = load_zoo(), True
    print(f"\n{'net of the zoo':24} {'integer there':>14} {'as planned':>10} {'ours, dB':>9} {'stock, dB':>10}")
    for name in choose(zoo, names):
        entry = zoo.ENTRIES[name]()
        feeds = _samples(entry, single_sample)
        ours, theirs = folder / f"{name}.ours.onnx", folder / f"{name}.stock.onnx"
        report = quantize_static(entry.path, ours, OneShotReader(entry.calib), target="arm")
        with quiet_folder() as scratch:
            source = prepared_by_stock(entry.path, scratch)
            reader = OneShotReader(entry.calib)
            stock(source, theirs, reader, per_channel=True, activation_type=QuantType.QInt8)
        for path in (ours, theirs):
            save_feeds(path, feeds)
        there = prove_there(python, [ours])[str(ours)]
        want = outputs_here(Path(entry.path), feeds)
        try:
            prove_there(python, [theirs])
            beside = f"{decibels(want, outputs_there(theirs)):10.1f}"
        except RuntimeError:
            beside = "not loaded"
        wrong = not_as_planned(report, there)
        heavy = [n for n in report.plan.nodes if n.op_type in HEAVY]
        integer = sum(bool(there["kernels"].get(n.node, ("", "", False))[2]) for n in heavy)
        said = "yes" if not wrong else "no"
        signal = decibels(want, outputs_there(ours))
        print(f"{name:24} {f'{integer} of {len(heavy)}':>14} {said:>10} {signal:>9.1f} {beside:>10}", flush=True)
        for text in wrong:
            print(f"    {text}")
        good &= not wrong
    return good


def main() -> int:
    """Prints a row a net; returns 1 where anything runs otherwise than planned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python")
    parser.add_argument("--nets", nargs="*", default=list(models.ALL))
    parser.add_argument("--zoo", nargs="*", help="nets of the zoo too; all without a name")
    parser.add_argument("--rules", action="store_true", help="run the proofs of the rules there too")
    arguments = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        made = {name: make(name, Path(folder), promise=False) for name in arguments.nets}
        found = prove_there(arguments.python, [path for path, _ in made.values()])
        print(f"{'net':24} {'integer there':>14} {'as planned':>10} {'largest difference':>19}")
        for name, (path, report) in made.items():
            there = found[str(path)]
            wrong = not_as_planned(report, there)
            heavy = [n for n in report.plan.nodes if n.op_type in HEAVY]
            integer = sum(bool(there["kernels"].get(n.node, ("", "", False))[2]) for n in heavy)
            said = "yes" if not wrong else "no"
            print(f"{name:24} {f'{integer} of {len(heavy)}':>14} {said:>10} {largest_difference(path):>19.1e}")
            for text in wrong:
                print(f"    {text}")
            failed |= bool(wrong)
        if arguments.zoo is not None:
            failed |= not zoo_rows(arguments.python, arguments.zoo, Path(folder))
        print(f"onnxruntime {next(iter(found.values()))['version']} on Arm")
    if arguments.rules:
        command = [arguments.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/targets", "-k", RULES]
        failed |= subprocess.run(command, check=False, cwd=Path(__file__).parent.parent).returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
