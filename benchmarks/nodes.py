"""ONNX's backend node cases, each quantized with its own inputs as calibration data.

Counted are the cases that the installed runtime runs in float (IR version lowered to what it reads):

- right: the quantized model loads and runs, float outputs are above 10 dB, all others equal;
- refused: a `KenosisError`, and nothing written;
- wrong: an output is below 10 dB or differs, or the file does not load or run;
- crashed: any other exception, a dead process, or more than a minute.

    python benchmarks/nodes.py [--stock] [--match softmax] [--json nodes.json]
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import multiprocessing
import multiprocessing.connection
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from _session import outputs
from onnx import numpy_helper
from onnxruntime.quantization import CalibrationDataReader, quantize_static as stock_quantize_static

import kenosis_ort

IR_VERSIONS = (13, 12, 11, 10, 9, 8)  # tried in turn where the runtime cannot read the case's own
GOOD_DB = 10.0
CASE_SECONDS = 60.0


class Feeds(CalibrationDataReader):  # type: ignore[misc]
    """One-shot reader of ready feeds."""

    def __init__(self, feeds: Sequence[dict[str, Any]]) -> None:
        self._it = iter(feeds)

    def get_next(self) -> dict[str, Any] | None:
        return next(self._it, None)


def cases(match: str) -> list[Any]:
    """Collects the cases, with fixed seeds, ordered by name."""
    from onnx.backend.test.case.node import collect_testcases

    np.random.seed(0)  # noqa: NPY002 - the cases draw from numpy's global generator
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [c for c in collect_testcases() if c.model is not None and c.data_sets and match in c.name]
    return sorted(found, key=lambda c: str(c.name))


def as_feed(value: Any) -> Any:
    """The cases hold arrays, numpy scalars, lists of arrays and serialized tensors."""
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    return np.asarray(value) if isinstance(value, np.generic) else value


def difference(want: Any, got: Any) -> str:
    """Returns what is wrong with an output, empty if nothing."""
    if want is None or got is None:
        return "" if want is got else "one of them is None"
    if isinstance(want, list):
        if len(want) != len(got):
            return f"{len(got)} elements for {len(want)}"
        return next((d for d in map(difference, want, got) if d), "")
    if isinstance(want, dict):
        return "" if want == got else "maps differ"
    want, got = np.asarray(want), np.asarray(got)
    if want.shape != got.shape or want.dtype != got.dtype:
        return f"{got.dtype}{got.shape} for {want.dtype}{want.shape}"
    if want.dtype.kind not in "fc":
        same = np.array_equal(want, got)
        return "" if same else f"{want.dtype} values differ"
    a, b = want.astype(np.float64), got.astype(np.float64)
    finite = np.isfinite(a)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return "infinities or NaN differ"
    signal, noise = float((a[finite] ** 2).sum()), float(((a[finite] - b[finite]) ** 2).sum())
    if not np.isfinite(noise):
        return "not finite where FP32 is"
    if noise == 0.0:
        return ""
    decibel = 10 * np.log10(signal / noise) if signal > 0 else -np.inf
    return "" if decibel > GOOD_DB else f"{decibel:.1f} dB"


def judge(case: Any, *, stock: bool) -> tuple[str, str]:
    """Quantizes one case and says which of the five kinds it is, and why."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    names = [i.name for i in model.graph.input]
    feeds = []
    for inputs, _ in case.data_sets:
        pairs = zip(names, inputs, strict=False)
        feeds.append({n: as_feed(v) for n, v in pairs if v is not None})
    want = None
    for version in (model.ir_version, *IR_VERSIONS):
        model.ir_version = min(model.ir_version, version)
        try:
            want = outputs(model, feeds)
        except Exception as error:
            if "IR version" in str(error):
                continue
            return "not run in float", str(error)[:120]
        break
    if want is None:
        return "not run in float", "no IR version that the runtime reads"
    with tempfile.TemporaryDirectory(prefix="kenosis-node-") as folder:
        source, out = Path(folder) / "in" / "m.onnx", Path(folder) / "out" / "m.onnx"
        source.parent.mkdir()
        out.parent.mkdir()
        onnx.save(model, str(source))
        refusal: tuple[type[Exception], ...] = ()
        try:
            if stock:
                stock_quantize_static(str(source), str(out), Feeds(feeds))
            else:
                refusal = (kenosis_ort.KenosisError,)
                kenosis_ort.quantize_static(str(source), str(out), Feeds(feeds))
        except refusal as error:
            left = sorted(p.name for p in out.parent.iterdir())
            if left:
                return "wrong", f"refused but left {left}"
            return "refused", f"{type(error).__name__}: {error}"
        except Exception as error:
            return "crashed", f"{type(error).__name__}: {error}"[:300]
        try:
            got = outputs(out, feeds)
        except Exception as error:
            return "wrong", f"does not load or run: {error}"[:300]
    for w, g in zip(want, got, strict=True):
        for output, a, b in zip(model.graph.output, w, g, strict=True):
            problem = difference(a, b)
            if problem:
                return "wrong", f"{output.name}: {problem}"
    return "right", ""


def work(pipe: multiprocessing.connection.Connection, match: str, stock: bool) -> None:
    """Worker process: judges case after case, so that a crash or a hang costs one case only."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    ort.set_default_logger_severity(4)
    found = cases(match)
    pipe.send([str(c.name) for c in found])
    while (index := pipe.recv()) is not None:
        pipe.send(judge(found[index], stock=stock))


class Worker:
    """A worker process that is replaced when it dies or hangs."""

    def __init__(self, match: str, *, stock: bool) -> None:
        self._args = (match, stock)
        self.names: list[str] = []
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=work, args=(other, *self._args), daemon=True)
        self._process.start()
        other.close()
        self.names = self._pipe.recv()

    def judge(self, index: int) -> tuple[str, str]:
        """Judges one case in the worker."""
        self._pipe.send(index)
        try:
            if self._pipe.poll(CASE_SECONDS):
                kind, why = self._pipe.recv()
                return str(kind), str(why)
            result = ("crashed", f"more than {CASE_SECONDS:.0f} s")
        except EOFError:
            result = ("crashed", "the process died")
        self._process.kill()
        self._process.join()
        self._start()
        return result

    def stop(self) -> None:
        """Ends the worker."""
        self._pipe.send(None)
        self._process.join()


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the counts and the cases that are not right; 1 where any is wrong or crashed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", action="store_true", help="judge stock ONNX Runtime instead")
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--json", type=Path, help="write kind and reason of every case to this file")
    args = parser.parse_args(argv)
    worker = Worker(args.match, stock=args.stock)
    start = time.perf_counter()
    verdicts: dict[str, tuple[str, str]] = {}
    for index, name in enumerate(worker.names):
        verdicts[name] = worker.judge(index)
        if sys.stderr.isatty() and index % 20 == 0:
            print(f"\r{index}/{len(worker.names)}", end="", file=sys.stderr, flush=True)
    worker.stop()
    counts = collections.Counter(kind for kind, _ in verdicts.values())
    judged = len(verdicts) - counts["not run in float"]
    for kind in ("wrong", "crashed"):
        for name, (k, why) in verdicts.items():
            if k == kind:
                print(f"{kind:8s} {name}: {why}")
    refused: dict[str, list[str]] = {}
    for name, (kind, why) in verdicts.items():
        if kind == "refused":
            refused.setdefault(re.sub(r"'[^']*'|[0-9]+", "*", why.split("[at:")[0])[:110], []).append(name)
    for why, names in sorted(refused.items(), key=lambda item: -len(item[1])):
        print(f"refused  {len(names):4d} x {why} ({names[0]}{', ...' if len(names) > 1 else ''})")
    print(
        f"{'stock' if args.stock else 'ours'}: {judged} cases run in float: right {counts['right']}, "
        f"refused {counts['refused']}, wrong {counts['wrong']}, crashed {counts['crashed']} "
        f"({counts['not run in float']} not run in float; {time.perf_counter() - start:.0f} s)"
    )
    if args.json:
        args.json.write_text(json.dumps(verdicts, indent=1) + "\n")
    return 1 if counts["wrong"] or counts["crashed"] else 0


if __name__ == "__main__":
    sys.exit(main())
