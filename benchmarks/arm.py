"""Proves ``target="arm"`` on ONNX Runtime's aarch64 build, under emulation or on an Arm machine.

    python benchmarks/arm.py PYTHON [--rules] [--nets NAME ...]

PYTHON runs on Arm, or emulates it, and has onnxruntime and the package's dependencies; this checkout has to be on its
path. The files are made here, on whatever machine that is; the kernels are read from the Arm runtime's own optimized
graph, and its outputs compared with those of the runtime here. ``--rules`` runs the proofs of the rules there too.
Times under emulation mean nothing and are not printed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kenosis_ort import quantize_static
from kenosis_ort.plan import Kind
from tests import models

HEAVY = ("Conv", "Gemm", "MatMul")
RULES = "test_rule and not trt and not onednn and not arm"
THERE = """
import json, sys, numpy as np, onnxruntime as ort
from kenosis_ort.verify import verify_fusion
found = {}
for path in sys.argv[1:]:
    report = verify_fusion(path, target="arm")
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    with np.load(path + ".npz", allow_pickle=False) as data:
        outputs = session.run(None, {name: data[name] for name in data.files})
    np.savez(path + ".out.npz", **{str(i): o for i, o in enumerate(outputs)})
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
    np.savez(f"{path}.npz", **models.feeds(model, 1, seed=7)[0])
    return path, report


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
    import onnxruntime as ort

    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    with np.load(f"{path}.npz") as data:
        here = session.run(None, {name: data[name] for name in data.files})
    with np.load(f"{path}.out.npz") as data:
        there = [data[str(i)] for i in range(len(here))]
    return max(
        float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max() / (np.abs(a).max() or 1.0))
        for a, b in zip(here, there, strict=True)
    )


def main() -> int:
    """Prints a row a net; returns 1 where anything runs otherwise than planned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python")
    parser.add_argument("--nets", nargs="*", default=list(models.ALL))
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
        print(f"onnxruntime {next(iter(found.values()))['version']} on Arm")
    if arguments.rules:
        command = [arguments.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/targets", "-k", RULES]
        failed |= subprocess.run(command, check=False, cwd=Path(__file__).parent.parent).returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
