"""What a file for Qualcomm's HTP keeps there, beside stock's own configuration for it, on the provider's simulator.

Each net is quantized from the same calibration data by:

- ``qnn``: ``kenosis_ort.quantize_static(..., target="qnn")``;
- ``qnn16``: the same with uint16 activations;
- ``stock``: ``qnn_preprocess_model``, ``get_qnn_qdq_config`` with its defaults, ``quantize``;
- ``stock16``: the same with uint16 activations and per-channel int8 weights, the strongest that its page names.

Every file is loaded in a fresh process that may not fall back to the CPU. Printed are the nodes that HTP takes of those
that are left after loading, and the signal to noise against the float net, on samples that were not calibrated on: of
HTP, and in brackets of ONNX Runtime's CPU provider on the same file; of the zoo's nets behind it the task's own metric
on HTP over the same samples, the float net's in the first column. The simulator tells no times.

    pip install 'kenosis-ort[qnn]'
    python benchmarks/on_qnn.py                    the demo's net of digits
    python benchmarks/on_qnn.py --zoo              the zoo's trained nets as well, or those named
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from _session import outputs
from _zoo import METRICS, OneShotReader, choose, load_zoo, quiet_folder
from onnxruntime.quantization import QuantType, quantize
from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config, qnn_preprocess_model
from onnxruntime.tools.onnx_model_utils import fix_output_shapes, make_input_shape_fixed

import kenosis_ort
from kenosis_ort.demo import INPUT_NAME, load_digits, model_path
from kenosis_ort.graph.load import load_model
from kenosis_ort.targets.proof import Status
from kenosis_ort.targets.qnn.htp_proof import chip, missing

VARIANTS = ("qnn", "qnn16", "stock", "stock16")
_CALIBRATION, _EVALUATED = 64, 12
Feed = dict[str, Any]
Judge = Callable[[list[Any], list[Any]], float]
"""The task's metric of outputs beside the float net's, both a list a sample."""
THERE = """
import sys, numpy as np
from kenosis_ort.targets.other_process import open_on_htp
with np.load(sys.argv[2], allow_pickle=False) as data:
    feeds = {}
    for key in data.files:
        number, name = key.split("|", 1)
        feeds.setdefault(int(number), {})[name] = data[key]
session = open_on_htp(sys.argv[1], sys.argv[3], fallback=False, log=False)
ran = {n: session.run(None, feed) for n, feed in feeds.items()}
np.savez(sys.argv[1] + ".out.npz", **{f"{n}|{i}": o for n, outputs in ran.items() for i, o in enumerate(outputs)})
"""


def rows(feeds: Sequence[Feed], static: onnx.ModelProto, most: int) -> list[Feed]:
    """Returns samples of the shapes that a model wants: batches are taken apart."""
    ranks = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in static.graph.input}
    found: list[Feed] = []
    for feed in feeds:
        split = [n for n, array in feed.items() if list(np.shape(array)) != ranks[n]]
        for row in range(min((len(feed[n]) for n in split), default=1)):
            found.append({n: array[row : row + 1] if n in split else array for n, array in feed.items()})
            if len(found) == most:
                return found
    return found


def by_stock(source: Path, out: Path, feeds: list[Feed], *, wide: bool) -> None:
    """Quantizes as stock's page for QNN does."""
    prepared = out.with_suffix(".pre.onnx")
    changed = qnn_preprocess_model(str(source), str(prepared))
    path = str(prepared if changed else source)
    options: dict[str, Any] = {}
    if wide:
        options = {"activation_type": QuantType.QUInt16, "weight_type": QuantType.QInt8, "per_channel": True}
    quantize(path, str(out), get_qnn_qdq_config(path, OneShotReader(feeds), **options))


def by_us(source: Path, out: Path, feeds: list[Feed], *, wide: bool, recipe: str) -> None:
    """Quantizes for the target."""
    options = {"activation_type": QuantType.QUInt16} if wide else {}
    kenosis_ort.quantize_static(str(source), str(out), OneShotReader(feeds), target="qnn", recipe=recipe, **options)


def decibels(want: Sequence[Any], got: Sequence[Any]) -> float:
    """Returns the signal to noise over all floating-point outputs of the same shape."""
    pairs = [(a.astype(np.float64), b) for a, b in zip(want, got, strict=True) if a.dtype.kind == "f"]
    noise = sum(float(((a - b) ** 2).sum()) for a, b in pairs if a.shape == b.shape)
    return 10 * float(np.log10(sum(float((a * a).sum()) for a, _ in pairs) / noise)) if noise else float("inf")


def judge_of(name: str, entry: Any) -> Judge:
    """Returns the metric of a net of the zoo over its first samples, one by one as `rows` gives them."""
    key = METRICS[name][0]

    def judge(want: list[Any], got: list[Any]) -> float:
        labels = None if entry.labels is None else entry.labels[: len(want)]
        return float(entry.metric(want, got, labels)[key])

    return judge


def judged(judge: Judge | None, want: list[Any], got: list[Any], samples: int) -> float | None:
    """Returns the metric; None where there is none, or it needs all samples."""
    if judge is None:
        return None
    each = len(want) // samples
    apart = [[found[i : i + each] for i in range(0, len(found), each)] for found in (want, got)]
    try:
        return judge(*apart)
    except (ValueError, IndexError):  # arrays of all samples are compared
        return None


def on_cpu(path: Path, feeds: list[Feed]) -> list[Any]:
    """Returns the outputs of all samples on ONNX Runtime's CPU provider."""
    return [output for row in outputs(path, feeds) for output in row]


def on_htp(path: Path, feeds: list[Feed]) -> list[Any]:
    """Returns the same on HTP, from a process of its own that may not fall back.

    Raises:
        RuntimeError: The file does not load there as a whole.
    """
    samples = path.with_suffix(".npz")
    np.savez(samples, **{f"{n}|{name}": array for n, feed in enumerate(feeds) for name, array in feed.items()})
    command = [sys.executable, "-c", THERE, str(path), str(samples), chip()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no word"])[-1][:300])
    with np.load(f"{path}.out.npz", allow_pickle=False) as data:
        order = sorted(data.files, key=lambda key: [int(part) for part in key.split("|")])
        return [data[key] for key in order]


def measure(
    source: Path, calibration: list[Feed], evaluation: list[Feed], args: argparse.Namespace, judge: Judge | None
) -> dict[str, Any]:
    """Quantizes and runs one net by every tool."""
    want = on_cpu(source, evaluation)
    found: dict[str, Any] = {"float": {"metric": judged(judge, want, want, len(evaluation))}}
    makers: dict[str, Callable[[Path], None]] = {
        "qnn": lambda out: by_us(source, out, calibration, wide=False, recipe=args.recipe),
        "qnn16": lambda out: by_us(source, out, calibration, wide=True, recipe=args.recipe),
        "stock": lambda out: by_stock(source, out, calibration, wide=False),
        "stock16": lambda out: by_stock(source, out, calibration, wide=True),
    }
    for variant in args.variants:
        out = source.with_name(f"{source.stem}.{variant}.onnx")
        result: dict[str, Any] = {}
        found[variant] = result
        try:
            with quiet_folder(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                makers[variant](out)
                result["cpu_db"] = decibels(want, on_cpu(out, evaluation))
                kernels = kenosis_ort.verify_fusion(out, target="qnn").kernels
            left = [k for k in kernels if k.status not in (Status.REMOVED, Status.OTHER)]
            result["taken"] = sum(k.kernel.startswith("HTP ") for k in left)
            result["integer"] = sum(k.integer for k in left)
            result["nodes"] = len(left)
            result["refused"] = [f"{k.op_type} '{k.node}'" for k in left if not k.kernel.startswith("HTP ")]
            got = on_htp(out, evaluation)
            result["htp_db"] = decibels(want, got)
            result["metric"] = judged(judge, want, got, len(evaluation))
        except Exception as error:  # a tool that fails is a result
            result["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return found


def cell(result: dict[str, Any]) -> str:
    """Returns what one tool reaches on one net, in words."""
    nodes = f"{result['taken']}/{result['nodes']}" if "taken" in result else ""
    if "htp_db" in result:
        metric = "" if result["metric"] is None else f", {result['metric']:.3f}"
        return f"{nodes}, {result['htp_db']:.1f} dB ({result['cpu_db']:.1f}){metric}"
    return f"{nodes} refused".strip()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zoo", nargs="*", help="nets of the zoo too; all without a name")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--recipe", default="fast")
    parser.add_argument("--samples", type=int, default=_CALIBRATION, help="to calibrate on, at most")
    parser.add_argument("--evaluate", type=int, default=_EVALUATED, help="samples that the outputs are compared on")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if missing():
        sys.exit(missing())
    found: dict[str, Any] = {}
    print(f"| Net | float | {' | '.join(args.variants)} |\n|{'---|' * (2 + len(args.variants))}")

    def row(
        name: str,
        path: str,
        calibration: Sequence[Feed],
        evaluation: Sequence[Feed],
        folder: Path,
        judge: Judge | None = None,
    ) -> None:
        source, model = folder / f"{name}.onnx", load_model(path).proto
        for info in model.graph.input:
            dims, shape = info.type.tensor_type.shape.dim, np.shape(calibration[0][info.name])
            if any(not dim.dim_value for dim in dims):
                fixed = [d.dim_value or (n if i else 1) for i, (d, n) in enumerate(zip(dims, shape, strict=True))]
                make_input_shape_fixed(model.graph, info.name, fixed)
        fix_output_shapes(model)
        onnx.save(model, source)
        samples = rows(calibration, model, args.samples), rows(evaluation, model, args.evaluate)
        found[name] = measure(source, *samples, args, judge)
        exact = found[name]["float"]["metric"]
        cells = ["" if exact is None else f"{exact:.3f}", *(cell(found[name][v]) for v in args.variants)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
        for variant, result in found[name].items():
            for text in (*result.get("refused", ())[:4], *([result["error"]] if "error" in result else ())):
                print(f"{name}, {variant}: {text}", file=sys.stderr)
        if args.json is not None:
            args.json.write_text(json.dumps(found, indent=1))

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        digits = load_digits()
        batches = [[{INPUT_NAME: images}] for images in (digits.calibration, digits.images)]
        with model_path() as path:
            row("digits", str(path), *batches, folder)
        if args.zoo is not None:
            zoo = load_zoo()
            for name in choose(zoo, args.zoo):
                entry = zoo.ENTRIES[name]()
                row(name, entry.path, list(entry.calib), list(entry.evals), folder, judge_of(name, entry))


if __name__ == "__main__":
    main()
