"""Well-known architectures at their real shapes: how fast int8 gets, how faithful it stays, and how close to the limit.

The nets (`nets`) are built here with random weights and activations of sane size; nothing is downloaded. Each is
quantized from the same calibration data by:

- ``default``: ``onnxruntime.quantization.quantize_static`` without any option (int8 activations and weights);
- ``best``: ``quant_pre_process``, then uint8 activations and int8 weights per channel;
- ``ours``: ``kenosis_ort.quantize_static`` without any option;
- ``--peers``: other tools with their defaults, in environments of their own (`_peers.py`): AMD Quark; NNCF, its file
  for ONNX Runtime there and that for OpenVINO there.

Speeds are ratios over FP32 of the original net (above 1 is faster): medians over rounds, in each of which every file
gets a fresh session, in random order, on pinned cores. OpenVINO runs our file too, where it is installed. SQNR is over
inputs that were not calibrated on, the least over the net's outputs. With random weights it compares the tools; it
does not say what a trained net would lose. ``limit`` is the speed if only our file's integer kernels took time, by the
runtime's profile, ``close`` how much of it is reached, and the last column what takes most of the rest.

    python benchmarks/architectures.py --cache nets.cache --json architectures.json
    python benchmarks/architectures.py --cache nets.cache --reuse --threads 2 --nets resnet50 bert_mini
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import _peers
import numpy as np
import onnx
import onnxruntime as ort
from _cached import digest, digest_of_files, made_once
from _kernels import kernel_times
from _openvino import Compiled, why_not
from _session import outputs, session, sqnr_by_output
from _timing import ratio
from _zoo import OneShotReader, ort_best, ort_default, quiet_folder
from nets import NETS, Feed

import kenosis_ort
from kenosis_ort.bench.harness import Schedule, Timings, time_interleaved

VARIANTS = ("default", "best", "ours")
OPENVINO = "openvino"
_EVALUATED = 4


def net_file(name: str, cache: Path) -> Path:
    """Builds a net, or takes it from the cache; its name tells by which code it was built."""
    code = digest_of_files((Path(__file__).parent / "nets").glob("*.py"))
    path = cache / f"{name}.{digest(code, onnx.__version__)}.onnx"
    return made_once(path, lambda part: onnx.save(NETS[name].build(), str(part)), reuse=True)


def quantize(variant: str, source: Path, out: Path, feeds: list[Feed]) -> None:
    """Writes one tool's file."""
    if variant == "ours":
        kenosis_ort.quantize_static(str(source), str(out), OneShotReader(feeds))
    elif variant == "best":
        ort_best(str(source), out, feeds)
    else:
        ort_default(str(source), out, OneShotReader(feeds))


def quantized_file(variant: str, source: Path, feeds: list[Feed], *, reuse: bool) -> Path:
    """Returns one tool's file, by what it depends on: the net, the data and the tool's own code."""
    tool = ort.__version__
    if variant == "ours":
        tool += digest_of_files(Path(kenosis_ort.__file__).parent.rglob("*.py"))
    data = digest(*(array.tobytes() for feed in feeds for array in feed.values()))
    path = source.with_name(f"{source.stem}.{variant}.{digest(variant, tool, source.read_bytes(), data)}.onnx")
    with quiet_folder():
        return made_once(path, lambda part: quantize(variant, source, part, feeds), reuse=reuse)


def attempt(variant: str, source: Path, feeds: list[Feed], *, reuse: bool) -> tuple[Path | None, str]:
    """Returns one tool's file, or None and why there is none: a tool that fails is a result."""
    try:
        path = quantized_file(variant, source, feeds, reuse=reuse)
        session(path)
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error)[:300]}"
    return path, ""


def time_files(files: dict[str, Path], feed: Feed, args: argparse.Namespace) -> Timings:
    """Times the files against each other; under the name of `OPENVINO` that runtime takes the file."""

    def opened(name: str) -> Any:
        if name == OPENVINO:
            return Compiled(files[name], threads=args.threads)
        return session(files[name], threads=args.threads)

    schedule = Schedule(rounds=args.rounds, deadline=float("inf"), warmup=3, block_s=args.seconds)
    return time_interleaved(list(files), opened, [feed], schedule, must_run="FP32")


def measure(name: str, cache: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Builds, quantizes, evaluates and times one net."""
    architecture = NETS[name]
    source = net_file(name, cache)
    calibration, evaluation = architecture.feeds(args.samples, 1), architecture.feeds(_EVALUATED, 2)
    result: dict[str, Any] = {"errors": {}}
    files = {"FP32": source}
    for variant in VARIANTS:
        path, error = attempt(variant, source, calibration, reuse=args.reuse)
        if path is None:
            result["errors"][variant] = error
        else:
            files[variant] = path
    for column in _peers.columns(args.peers):
        path = source.with_name(f"{source.stem}.{column}")
        try:
            files[column] = _peers.make(column, args.peers, source, calibration, path, name)
            session(files[column])
        except Exception as error:  # a tool that fails is a result
            files.pop(column, None)
            result["errors"][column] = f"{type(error).__name__}: {str(error)[:300]}"
    reference = outputs(source, evaluation)
    result["sqnr_db"] = {v: sqnr_by_output(reference, outputs(files[v], evaluation)) for v in files if v != "FP32"}
    if "ours" in files:
        reason = why_not(files["ours"]) if args.openvino else "not asked for"
        if reason is None:
            files[OPENVINO] = files["ours"]
        else:
            result["errors"][OPENVINO] = reason
    if not args.skip_speed:
        timings = time_files(files, evaluation[0], args)
        result["milliseconds"] = {n: statistics.median(timings.round_ms(n)) for n in timings.blocks}
        result["speed"] = {n: ratio(timings, n, "FP32") for n in timings.blocks if n != "FP32"}
        if "ours" in files and "best" in files:
            result["ours_over_best"] = ratio(timings, "ours", "best")
        if "ours" in files:
            times = kernel_times(files["ours"], evaluation[0], threads=args.threads)
            result["kernels"] = {**asdict(times), "share": times.share, "rest": times.largest()}
    return result


HEADER = (f"{'net':22s} {'FP32 ms':>8s} {'default':>8s} {'best':>6s} {'ours':>6s} {'+-':>5s} {'ours/best':>9s} "
          f"{'OV':>6s} {'dB best':>8s} {'dB ours':>8s} {'limit':>6s} {'close':>6s}  rest")  # fmt: skip


def row(name: str, result: dict[str, Any]) -> str:
    """One line of the table; a dash where a tool failed or nothing was timed."""

    def number(value: float | None, width: int, digits: int = 2) -> str:
        return f"{value:{width}.{digits}f}" if value is not None else f"{'-':>{width}s}"

    speed = {n: pair[0] for n, pair in result.get("speed", {}).items()}
    kernels = result.get("kernels", {})
    share = kernels.get("share")
    limit = speed["ours"] / share if share and "ours" in speed else None
    least = {n: min(values) for n, values in result["sqnr_db"].items()}
    return " ".join([
        f"{name:22s}", number(result.get("milliseconds", {}).get("FP32"), 8), number(speed.get("default"), 8),
        number(speed.get("best"), 6), number(speed.get("ours"), 6),
        number(result.get("speed", {}).get("ours", (None, None))[1], 5),
        number(result.get("ours_over_best", (None,))[0], 9), number(speed.get(OPENVINO), 6),
        number(least.get("best"), 8, 1), number(least.get("ours"), 8, 1), number(limit, 6), number(share, 6),
        "", str(kernels.get("rest", "")),
    ])  # fmt: skip


def peer_cells(result: dict[str, Any]) -> str:
    """The other tools' speeds and SQNRs as one more line."""
    found = []
    for name in _peers.FORMS:
        if name in result.get("sqnr_db", {}):
            speed = result.get("speed", {}).get(name)
            times = "" if speed is None else f"{speed[0]:.2f}x, "
            found.append(f"{name} {times}{min(result['sqnr_db'][name]):.1f} dB")
    return f"{'':22s} {'; '.join(found)}" if found else ""


def geometric_means(table: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Returns the geometric mean of each column of ratios, over the nets that have it."""
    columns: dict[str, list[float]] = {}
    for result in table.values():
        for name, pair in result.get("speed", {}).items():
            columns.setdefault(name, []).append(pair[0])
        if "ours_over_best" in result:
            columns.setdefault("ours/best", []).append(result["ours_over_best"][0])
    return {name: float(np.exp(np.mean(np.log(values)))) for name, values in columns.items()}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [name for name, architecture in NETS.items() if not architecture.variant]
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=default, metavar="NET", help=", ".join(NETS))
    parser.add_argument("--threads", type=int, choices=(1, 2), default=1, help="threads of a session (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of fresh sessions (%(default)s)")
    parser.add_argument("--seconds", type=float, default=0.25, help="length of one block (%(default)s)")
    parser.add_argument("--samples", type=int, default=8, help="samples to calibrate on (%(default)s)")
    parser.add_argument("--cache", type=Path, help="folder for nets and quantized files; a temporary one if not given")
    parser.add_argument("--reuse", action="store_true", help="take quantized files of the same content from the cache")
    parser.add_argument("--skip-speed", action="store_true", help="only quantize and compare outputs")
    parser.add_argument("--no-openvino", dest="openvino", action="store_false", help="leave OpenVINO out")
    _peers.add_argument(parser)
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and the geometric means."""
    args = arguments(argv)
    target = args.json.resolve() if args.json else None
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[-args.threads :]))
    table: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="kenosis-nets-") as folder:
        cache = args.cache.resolve() if args.cache else Path(folder)
        cache.mkdir(parents=True, exist_ok=True)
        print(HEADER, flush=True)
        for name in args.nets:
            table[name] = measure(name, cache, args)
            print(row(name, table[name]), flush=True)
            if args.peers:
                print(peer_cells(table[name]), flush=True)
            if target:
                write(target, table)
    means = geometric_means(table)
    print("geometric mean  " + "  ".join(f"{name} {mean:.2f}x" for name, mean in means.items()))
    print(f"onnxruntime {ort.__version__}, kenosis-ort {kenosis_ort.__version__}; {_peers.versions() or 'no peers'}")
    for name, result in table.items():
        for what, reason in result["errors"].items():
            print(f"{name}, {what}: {reason}")
    return 0


def write(target: Path, table: dict[str, dict[str, Any]]) -> None:
    """Writes what there is so far."""
    target.write_text(json.dumps({"nets": table, "geometric_means": geometric_means(table)}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
