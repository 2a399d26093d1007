"""Quantized models through every format and back: ONNX's backend node cases, the zoo, and files of other tools.

Each model is quantized (QDQ, 8 bits) where it is not yet, converted to every format, and from there back to QDQ. What
comes back runs beside what went in on the model's own inputs, both without optimization, which hides no difference:

- right: every float output is above 25 dB of it, all others are equal;
- nothing quantized: no operator is, at stock's placement for node cases, whose operands are made constant;
- refused: a `KenosisError`, and nothing written;
- wrong: an output is below that or differs, or a file does not load or run;
- crashed: any other exception, a dead process, or more than a minute a case.

    python benchmarks/conversions.py [--match conv] [--only nodes | zoo | files]
"""

from __future__ import annotations

import argparse
import collections
import logging
import multiprocessing
import multiprocessing.connection
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import nodes
import numpy as np
import onnx
import onnxruntime as ort
from _session import outputs
from _zoo import ZOO, load_zoo, single_sample
from onnx import numpy_helper

import kenosis_ort
from kenosis_ort.interop import FORMATS

nodes.GOOD_DB = 25.0
CASE_SECONDS = 90.0
FILES = ZOO.parent / "corpus" / "quantized"
ZOO_FEEDS = 8

Verdicts = dict[str, tuple[str, str]]
Case = tuple[str, Callable[[], tuple[onnx.ModelProto, list[dict[str, Any]], bool]]]


def node_cases(match: str) -> Iterator[Case]:
    """Yields the backend node cases: a float model and its feeds."""
    for case in nodes.cases(match):

        def make(case: Any = case) -> tuple[onnx.ModelProto, list[dict[str, Any]], bool]:
            model = onnx.ModelProto()
            model.CopyFrom(case.model)
            model.ir_version = min(model.ir_version, nodes.IR_VERSIONS[0])
            names = [i.name for i in model.graph.input]
            feeds = [
                {n: nodes.as_feed(v) for n, v in zip(names, inputs, strict=False) if v is not None}
                for inputs, _ in case.data_sets
            ]
            for name in names[1:]:  # operands are weights: else there is little to quantize
                value = feeds[0].get(name)
                if isinstance(value, np.ndarray) and value.dtype.kind in "fiu":
                    model.graph.initializer.append(numpy_helper.from_array(value, name))
            held = {tensor.name for tensor in model.graph.initializer}
            kept = [value for value in model.graph.input if value.name not in held]
            del model.graph.input[:]
            model.graph.input.extend(kept)
            return model, [{n: v for n, v in feed.items() if n not in held} for feed in feeds], False

        yield f"node {case.name}", make


def zoo_cases(match: str) -> Iterator[Case]:
    """Yields the trained nets with calibration samples of their own."""
    if not ZOO.is_dir():
        return
    for name, entry_of in load_zoo().ENTRIES.items():
        if match in name:

            def make(entry_of: Any = entry_of) -> tuple[onnx.ModelProto, list[dict[str, Any]], bool]:
                entry = entry_of()
                feeds = [single_sample(entry.path, entry.calib[at]) for at in range(min(ZOO_FEEDS, len(entry.calib)))]
                return onnx.load(entry.path), feeds, False

            yield f"zoo {name}", make


def file_cases(match: str) -> Iterator[Case]:
    """Yields quantized files of other tools, on made-up inputs."""
    for path in sorted(FILES.glob("*.onnx")) if FILES.is_dir() else ():
        if match in path.name:

            def make(path: Path = path) -> tuple[onnx.ModelProto, list[dict[str, Any]], bool]:
                return onnx.load(path), [], True

            yield f"file {path.stem}", make


SOURCES: dict[str, Callable[[str], Iterator[Case]]] = {"nodes": node_cases, "zoo": zoo_cases, "files": file_cases}


def judge(make: Callable[[], tuple[onnx.ModelProto, list[dict[str, Any]], bool]]) -> Verdicts:
    """Returns kind and reason of each conversion of a case; one entry "quantize" where it came to none."""
    model, feeds, quantized = make()
    with tempfile.TemporaryDirectory(prefix="kenosis-conversions-") as folder:
        source, qdq = Path(folder) / "m.onnx", Path(folder) / "quantized.onnx"
        onnx.save(model, str(source))
        try:
            if quantized:
                kenosis_ort.convert(source, qdq, "qdq")
                reader = kenosis_ort.SyntheticReader(qdq, samples=2)
                feeds = [reader.feed(at) for at in range(2)]
            else:
                outputs(source, feeds[:1])
                stages = kenosis_ort.Stages() if len(model.graph.node) > 20 else kenosis_ort.Stages.none()
                kenosis_ort.quantize_static(
                    str(source), str(qdq), nodes.Feeds(feeds), recipe="plain", promise=False, stages=stages
                )
                if not any(node.op_type == "QuantizeLinear" for node in onnx.load(qdq).graph.node):
                    return {"quantize": ("nothing quantized", "")}
        except Exception as error:
            return {"quantize": ("nothing quantized", str(error)[:100])}
        want = outputs(qdq, feeds[:2], optimize=False)
        return {to: through(to, qdq, feeds[:2], want) for to in FORMATS}


def through(to: str, qdq: Path, feeds: Sequence[dict[str, Any]], want: Sequence[Sequence[Any]]) -> tuple[str, str]:
    """Converts to a format and back, and says what came of it."""
    there, back = qdq.with_name(f"{to}.onnx"), qdq.with_name(f"{to}.back.onnx")
    for before, after, kind in ((qdq, there, to), (there, back, "qdq")):
        if to == "float" and after is back:
            return "right", ""
        try:
            kenosis_ort.convert(before, after, kind)
        except kenosis_ort.KenosisError as error:
            if after.exists():
                return "wrong", "refused, but left a file"
            crashed = isinstance(error, (kenosis_ort.InternalError, kenosis_ort.VerificationError))
            step = "" if after is there else "back: "
            return "crashed" if crashed else "refused", f"{step}{type(error).__name__}: {error}"
        except Exception as error:
            return "crashed", f"{type(error).__name__}: {error}"[:300]
    try:
        # what kernels round twice goes far in some nets, and hides what is compared
        got = outputs(back, feeds, optimize=False)
        outputs(back, feeds)
    except Exception as error:
        return "wrong", f"does not load or run: {error}"[:300]
    for w, g in zip(want, got, strict=True):
        for a, b in zip(w, g, strict=True):
            problem = nodes.difference(a, b)
            if problem:
                return "wrong", problem
    return "right", ""


def work(pipe: multiprocessing.connection.Connection, source: str, match: str) -> None:
    """Worker process, so that a crash or a hang costs one case only."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    ort.set_default_logger_severity(4)
    found = list(SOURCES[source](match))
    pipe.send([name for name, _ in found])
    while (index := pipe.recv()) is not None:
        np.random.seed(0)  # noqa: NPY002
        pipe.send(judge(found[index][1]))


def judged(source: str, match: str) -> Iterator[tuple[str, Verdicts]]:
    """Yields the verdicts of all cases of a source."""
    context = multiprocessing.get_context("spawn")

    def start() -> tuple[Any, Any, list[str]]:
        pipe, other = context.Pipe()
        process = context.Process(target=work, args=(other, source, match), daemon=True)
        process.start()
        other.close()
        return pipe, process, pipe.recv()

    pipe, process, names = start()
    for index, name in enumerate(names):
        pipe.send(index)
        try:
            limit = CASE_SECONDS * (1 if source == "nodes" else 10)
            verdicts = pipe.recv() if pipe.poll(limit) else {"all": ("crashed", f"more than {limit:.0f} s")}
        except EOFError:
            verdicts = {"all": ("crashed", "the process died")}
        if "all" in verdicts:
            process.kill()
            process.join()
            pipe, process, _ = start()
        yield name, verdicts
    pipe.send(None)
    process.join()


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the counts by format; 1 where any is wrong or crashed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--only", choices=sorted(SOURCES), action="append", help="only this source; may be repeated")
    args = parser.parse_args(argv)
    failed = 0
    for source in args.only or SOURCES:
        counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        refused: collections.Counter[str] = collections.Counter()
        cases = 0
        for name, verdicts in judged(source, args.match):
            cases += 1
            for to, (kind, why) in verdicts.items():
                counts[to][kind] += 1
                if kind in ("wrong", "crashed"):
                    print(f"{kind:8s} {name} to {to}: {why}", flush=True)
                    failed += 1
                elif kind == "refused":
                    refused[f"{to}: " + re.sub(r"'[^']*'|[0-9]+", "*", why.split("[at:")[0])[:110]] += 1
        print(f"{source}: {cases} cases")
        for to, kinds in counts.items():
            print(f"  {to:9s}" + ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()))
        for why, count in refused.most_common():
            print(f"  refused {count:4d} x {why}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
