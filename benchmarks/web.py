"""What int8 gains in ONNX Runtime Web, on WebAssembly: stock's files, ours for ``ort-cpu``, ours for ``ort-web``.

The nets are those of `architectures`. Each is quantized from the same calibration data by:

- ``default``: stock's ``quantize_static`` without any option;
- ``best``: ``quant_pre_process``, then uint8 activations and int8 weights by channel;
- ``ort-cpu``: ``kenosis_ort.quantize_static`` without any option;
- ``ort-web``: the same with ``target="ort-web"``, which times there what it delivers.

All are run in turns by the WASM build in one process of Node, one thread. Times are processor time of that process,
the lower quartiles of a round, and medians over rounds; a file that is the float model counts as 1. SQNR is over inputs
that were not calibrated on, against float, the least over the net's outputs. Behind it: how many Convs and linear
layers of the file run on integer kernels, by the graph that the build optimized.

    npm install onnxruntime-web
    KENOSIS_ORT_WEB=. python benchmarks/web.py --cache nets.cache --json web.json
    KENOSIS_ORT_WEB=. python benchmarks/web.py --nets mobilenet_v2 squeezenet --recipe plain
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from _cached import digest, digest_of_files, made_once
from _zoo import OneShotReader, ort_best, ort_default, quiet_folder
from architectures import net_file, sqnr_by_output
from nets import NETS, Feed

import kenosis_ort
from kenosis_ort.targets.ort_web import WebRunner, missing, prove

VARIANTS = ("default", "best", "ort-cpu", "ort-web")
_EVALUATED = 2
_WARM = 5
_HEAVY = frozenset({"Conv", "Gemm", "MatMul"})


def quantize(variant: str, source: Path, out: Path, feeds: list[Feed], recipe: str) -> None:
    """Writes one tool's file."""
    if variant == "default":
        ort_default(str(source), out, OneShotReader(feeds))
    elif variant == "best":
        ort_best(str(source), out, feeds)
    else:
        kenosis_ort.quantize_static(str(source), str(out), OneShotReader(feeds), target=variant, recipe=recipe)


def file_of(variant: str, source: Path, feeds: list[Feed], *, recipe: str, reuse: bool) -> Path:
    """Returns one tool's file, by what it depends on: the net, the data and our own code."""
    code = variant
    if variant in VARIANTS[2:]:
        code = digest(recipe, digest_of_files(Path(kenosis_ort.__file__).parent.rglob("*.py")))
    data = digest(*(array.tobytes() for feed in feeds for array in feed.values()))
    made = source.with_name(f"{source.stem}.{variant}.{digest(variant, code, source.read_bytes(), data)}.onnx")
    with quiet_folder(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return made_once(made, lambda part: quantize(variant, source, part, feeds, recipe), reuse=reuse)


def seconds(runner: WebRunner, feed: Feed, block: float) -> float:
    """Returns the lower quartile of the runs of a block."""
    found: list[float] = []
    while len(found) < 4 or sum(found) < block:
        runner.run(None, feed)
        found.append(runner.seconds)
    return statistics.quantiles(found, n=4)[0]


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Builds, quantizes, evaluates and times one net."""
    source = net_file(name, args.cache)
    calibration, evaluation = NETS[name].feeds(args.samples, 1), NETS[name].feeds(_EVALUATED, 2)
    runners, integer = {"FP32": WebRunner(source)}, {}
    errors: dict[str, str] = {}

    def add(variant: str) -> None:
        try:
            path = file_of(variant, source, calibration, recipe=args.recipe, reuse=args.reuse)
            runners[variant] = WebRunner(path)
            heavy = [k for k in prove(path).kernels if k.op_type in _HEAVY]
            integer[variant] = (sum(k.integer for k in heavy), len(heavy))
        except Exception as error:  # a tool that fails is a result
            errors[variant] = f"{type(error).__name__}: {str(error)[:200]}"

    for variant in args.variants:
        add(variant)
    reference = [runners["FP32"].run(None, feed) for feed in evaluation]
    sqnr = {
        v: min(sqnr_by_output(reference, [r.run(None, f) for f in evaluation]))
        for v, r in runners.items()
        if v != "FP32"
    }
    rounds: dict[str, list[float]] = {name: [] for name in runners}
    for runner in runners.values():
        for _ in range(_WARM):
            runner.run(None, evaluation[0])
    order = np.random.default_rng(0)
    for _ in range(args.rounds):
        for variant in order.permutation(list(runners)):
            rounds[variant].append(seconds(runners[variant], evaluation[0], args.seconds))
    speed = {
        v: statistics.median(f / t for f, t in zip(rounds["FP32"], times, strict=True))
        for v, times in rounds.items()
        if v != "FP32"
    }
    milliseconds = {v: 1e3 * statistics.median(times) for v, times in rounds.items()}
    return {"milliseconds": milliseconds, "speed": speed, "sqnr_db": sqnr, "integer": integer, "errors": errors}


def line(name: str, result: dict[str, Any], variants: list[str]) -> str:
    """Returns one net's row."""
    cells = []
    for v in variants:
        if v not in result["speed"]:
            cells.append("failed")
        elif result["integer"][v][0] == 0:
            cells.append(f"{result['speed'][v]:.2f}x (float)")
        else:
            layers = "/".join(map(str, result["integer"][v]))
            cells.append(f"{result['speed'][v]:.2f}x {result['sqnr_db'][v]:.1f} dB {layers}")
    return f"| {name} | {result['milliseconds']['FP32']:.1f} | " + " | ".join(cells) + " |"


def main() -> None:
    """Prints the table and the geometric means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [name for name, architecture in NETS.items() if not architecture.variant]
    parser.add_argument("--cache", type=Path, default=Path("nets.cache"), help="folder for nets and files")
    parser.add_argument("--nets", nargs="+", default=default, choices=list(NETS), metavar="NET", help=", ".join(NETS))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--samples", type=int, default=8, help="samples to calibrate on (%(default)s)")
    parser.add_argument("--recipe", default="fast", help="of our files; 'plain' compares the placements alone")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.2, help="of a block of runs (%(default)s)")
    parser.add_argument(
        "--reuse", action="store_true", help="files of an earlier run, where code and data are the same"
    )
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args()
    if why := missing():
        sys.exit(why)
    args.cache = args.cache.resolve()
    args.cache.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    print(f"| Net | FP32, ms | {' | '.join(args.variants)} |\n|{'---|' * (2 + len(args.variants))}")
    for name in args.nets:
        found[name] = measure(name, args)
        print(line(name, found[name], args.variants), flush=True)
        for variant, error in found[name]["errors"].items():
            print(f"{name}, {variant}: {error}", file=sys.stderr)
        if args.json is not None:
            args.json.write_text(json.dumps(found, indent=1))
    for variant in args.variants:
        known = [
            r["speed"][variant] if r["integer"][variant][0] else 1.0 for r in found.values() if variant in r["speed"]
        ]
        if known:
            print(f"{variant}: geometric mean {float(np.exp(np.mean(np.log(known)))):.2f}x of {len(known)} nets")


if __name__ == "__main__":
    main()
