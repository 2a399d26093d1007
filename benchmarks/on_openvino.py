"""What a file made for OpenVINO gains there over one made for ONNX Runtime, over stock's and over NNCF's.

The nets are those of `architectures`. Each is quantized from the same calibration data by:

- ``stock``: stock's best file, ``quant_pre_process``, then uint8 activations and int8 weights by channel;
- ``nncf``: ``nncf.quantize`` on OpenVINO's own form of the model with its defaults, transformers named as such;
- ``ort-cpu``: ``kenosis_ort.quantize_static`` without any option;
- ``onednn``: the same with ``target="onednn"``.

All are run by OpenVINO's CPU plugin on one pinned thread, float operators in float32, in turns: each round compiles
every file anew, in random order. Times are processor time of the thread where it is one, lower quartiles of a round,
and medians over rounds. SQNR is over inputs that were not calibrated on, against OpenVINO in float32, the least over
the net's outputs. Behind it: how many of the plugin's Convs and linear layers run on int8. ``--layers`` prints where
the time goes, by the plugin's own account. With ``--provider`` the files are also run by ONNX Runtime's OpenVINO
provider, in the environment of its wheel; a second row tells how fast, how faithful, and how many nodes were left to
other providers. NNCF is asked in an environment of its own too, or in this one where it is installed.

    pip install 'kenosis-ort[openvino]'
    python -m venv nncf && nncf/bin/pip install nncf openvino
    python benchmarks/on_openvino.py --cache nets.cache --nncf nncf/bin/python --json openvino.json
    python -m venv provider && provider/bin/pip install onnxruntime-openvino numpy
    python benchmarks/on_openvino.py --cache nets.cache --nets detector --provider provider/bin/python
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _peers
import numpy as np
import onnxruntime
from _cached import digest, digest_of_files, made_once
from _zoo import OneShotReader, ort_best, quiet_folder
from architectures import net_file, sqnr_by_output
from nets import NETS, Feed

import kenosis_ort
from kenosis_ort.runtime.machine import has_matrix_tiles, machine
from kenosis_ort.targets.onednn.openvino_proof import executed, runtime_version

VARIANTS = ("stock", "nncf", "ort-cpu", "onednn")
_OURS = VARIANTS[2:]
_HEAVY = frozenset({"Convolution", "Deconvolution", "FullyConnected", "MatMul"})
_EVALUATED = 16


def quantize(variant: str, source: Path, out: Path, feeds: list[Feed], recipe: str) -> None:
    """Writes one tool's ONNX file."""
    if variant == "stock":
        ort_best(str(source), out, feeds)
    else:
        kenosis_ort.quantize_static(str(source), str(out), OneShotReader(feeds), target=variant, recipe=recipe)


def file_of(variant: str, source: Path, feeds: list[Feed], args: argparse.Namespace) -> Path:
    """Returns one tool's file, by what it depends on: the net, the data and our own code."""
    code = variant
    if variant in _OURS:
        code = digest(args.recipe, digest_of_files(Path(kenosis_ort.__file__).parent.rglob("*.py")))
    data = digest(*(array.tobytes() for feed in feeds for array in feed.values()))
    name = f"{source.stem}.{variant}.{digest(code, source.read_bytes(), data)}"
    if variant == "nncf":
        path = source.with_name(f"{name}.xml")
        if not (args.reuse and path.exists()):
            net = source.name.split(".")[0]
            path = _peers.make("nncf-openvino", [("nncf", args.nncf)], source, feeds, source.with_name(name), net)
        return path
    with quiet_folder(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = source.with_name(f"{name}.onnx")
        return made_once(made, lambda part: quantize(variant, source, part, feeds, args.recipe), reuse=args.reuse)


class Compiled:
    """A model compiled by OpenVINO for the CPU."""

    def __init__(self, path: Path, threads: int, *, counted: bool = False) -> None:
        import openvino

        how = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
        self._compiled = openvino.Core().compile_model(str(path), "CPU", how | {"PERF_COUNT": counted})
        self._request = self._compiled.create_infer_request()

    def run(self, feed: Feed) -> list[Any]:
        """Returns the outputs."""
        result = self._request.infer(feed, share_inputs=True)
        return [np.array(result[index]) for index in range(len(self._compiled.outputs))]

    def seconds(self, feed: Feed, clock: Callable[[], float], block: float) -> float:
        """Returns the lower quartile of the runs of a block, behind one that warms up."""
        self._request.infer(feed, share_inputs=True)
        found, start = [], clock()
        while len(found) < 3 or clock() - start < block:
            begin = clock()
            self._request.infer(feed, share_inputs=True)
            found.append(clock() - begin)
        return statistics.quantiles(found, n=4)[0]

    def layers(self, feed: Feed) -> dict[str, int]:
        """Returns microseconds by layer and precision, by the plugin's account: each layer's least of ten runs."""
        kinds, least = {}, {}
        for node in self._compiled.get_runtime_model().get_ordered_ops():
            info = node.get_rt_info()
            kinds[node.get_friendly_name()] = f"{info['layerType'].astype(str)} {info['runtimePrecision'].astype(str)}"
        for _ in range(10):
            self._request.infer(feed, share_inputs=True)
            for told in self._request.get_profiling_info():
                took = told.real_time.total_seconds() * 1e6
                least[told.node_name] = min(took, least.get(told.node_name, took))
        found: Counter[str] = Counter()
        for name, took in least.items():
            found[kinds.get(name, "other")] += round(took)
        return dict(found.most_common())


def integer_layers(path: Path) -> tuple[int, int]:
    """Returns how many of the plugin's Convs and linear layers run on int8, and how many there are."""
    heavy = [node for node in executed(path) if node.layer in _HEAVY]
    return sum(node.precision in ("u8", "i8") for node in heavy), len(heavy)


def measure(name: str, cache: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Builds, quantizes, evaluates and times one net."""
    source = net_file(name, cache)
    calibration, evaluation = NETS[name].feeds(args.samples, 1), NETS[name].feeds(_EVALUATED, 2)
    files, outputs, errors, kernels, layers = {"FP32": source}, {}, {}, {}, {}

    def ask(variant: str) -> None:
        try:
            path = files.get(variant) or file_of(variant, source, calibration, args)
            kernels[variant] = integer_layers(path)  # first: OpenVINO ends its process over some files
            runner = Compiled(path, args.threads, counted=args.layers)
            outputs[variant] = [runner.run(feed) for feed in evaluation]
            if args.layers:
                layers[variant] = runner.layers(evaluation[0])
            files[variant] = path
        except Exception as error:  # a tool that fails is a result
            errors[variant] = f"{type(error).__name__}: {str(error)[:200]}"

    for variant in ("FP32", *args.variants):
        ask(variant)
    sqnr = {v: min(sqnr_by_output(outputs["FP32"], outputs[v])) for v in files if v != "FP32"}
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    rounds: dict[str, list[float]] = {name: [] for name in files}
    order = np.random.default_rng(0)
    for _ in range(args.rounds):
        for variant in order.permutation(list(files)):
            runner = Compiled(files[variant], args.threads)
            rounds[variant].append(runner.seconds(evaluation[0], clock, args.seconds))
    speed = {
        v: statistics.median(f / t for f, t in zip(rounds["FP32"], times, strict=True))
        for v, times in rounds.items()
        if v != "FP32"
    }
    milliseconds = {v: 1e3 * statistics.median(times) for v, times in rounds.items()}
    found = {"milliseconds": milliseconds, "speed": speed, "sqnr_db": sqnr, "kernels": kernels, "errors": errors}
    if args.layers:
        found["layers"] = layers
    if args.provider is not None:
        onnx_files = {v: path for v, path in files.items() if path.suffix == ".onnx"}
        found["provider"] = by_provider(args.provider, onnx_files, evaluation, args)
    return found


def by_provider(python: str, files: dict[str, Path], feeds: list[Feed], args: argparse.Namespace) -> dict[str, Any]:
    """Runs files by ONNX Runtime's OpenVINO provider in another environment."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "feeds.npz"
        _peers.save_feeds(data, feeds)
        command = [python, str(Path(__file__).with_name("_provider.py")), str(data), str(args.rounds)]
        command += [str(args.seconds), *(str(path.resolve()) for path in files.values())]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
    told = json.loads(done.stdout.splitlines()[-1])
    return {"onnxruntime": told["onnxruntime"]} | dict(zip(files, told["rows"], strict=True))


def line(name: str, result: dict[str, Any], variants: list[str]) -> str:
    """Returns one net's row."""
    cells = []
    for v in variants:
        if v not in result["speed"]:
            cells.append("failed")
            continue
        integer = "/".join(map(str, result["kernels"][v])) if v in result["kernels"] else ""
        cells.append(f"{result['speed'][v]:.2f}x {result['sqnr_db'][v]:.1f} dB {integer}".strip())
    return f"| {name} | {result['milliseconds']['FP32']:.2f} | " + " | ".join(cells) + " |"


def provider_line(name: str, found: dict[str, Any], variants: list[str]) -> str:
    """Returns one net's row by the provider."""
    cells = []
    for v in variants:
        row = found.get(v)
        left = sum(n for provider, n in row["nodes"].items() if "OpenVINO" not in provider) if row else 0
        told = f"{row['speed']:.2f}x {row['sqnr_db']:.1f} dB" if row else "-"
        cells.append(told + (f", {left} nodes elsewhere" if left else ""))
    return f"| {name}, provider | {found['FP32']['milliseconds']:.2f} | " + " | ".join(cells) + " |"


def versions(args: argparse.Namespace) -> str:
    """Returns what ran, and on what machine."""
    tiles = "with" if has_matrix_tiles() else "without"
    told = f"{machine().cpu} {tiles} AMX, {args.threads} thread(s), OpenVINO {runtime_version()}, "
    told += f"onnxruntime {onnxruntime.__version__}"
    if args.nncf is None:
        return told
    ask = "from importlib.metadata import version as v; print('NNCF', v('nncf'), 'with OpenVINO', v('openvino'))"
    done = subprocess.run([args.nncf, "-c", ask], capture_output=True, text=True, check=False)
    return f"{told}; {done.stdout.strip() or 'NNCF is not in the environment named by --nncf'}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path("nets.cache"))
    parser.add_argument("--nets", nargs="+", default=[n for n in NETS if not NETS[n].variant], choices=list(NETS))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--recipe", default="fast", help="of our files; 'plain' compares the placements alone")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.25, help="of a block of runs")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--reuse", action="store_true", help="files of an earlier run, where code and data are the same"
    )
    parser.add_argument("--nncf", metavar="PYTHON", help="of an environment that holds nncf and openvino")
    parser.add_argument("--layers", action="store_true", help="where the time goes, by layer and precision")
    parser.add_argument("--provider", metavar="PYTHON", help="of an environment that holds onnxruntime-openvino")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if importlib.util.find_spec("openvino") is None:
        sys.exit("OpenVINO is not installed: pip install 'kenosis-ort[openvino]'")
    if args.nncf is None and importlib.util.find_spec("nncf") is not None:
        args.nncf = sys.executable
    if args.nncf is None:
        args.variants = [v for v in args.variants if v != "nncf"]
        print("without NNCF: no --nncf, and it is not installed here", file=sys.stderr)
    elif not os.access(args.nncf, os.X_OK):
        sys.exit(f"--nncf {args.nncf}: no such program")
    args.cache = args.cache.resolve()
    args.cache.mkdir(parents=True, exist_ok=True)
    print(f"{versions(args)}\n")
    found = {}
    print(f"| Net | OpenVINO FP32, ms | {' | '.join(args.variants)} |\n|{'---|' * (2 + len(args.variants))}")
    for name in args.nets:
        found[name] = measure(name, args.cache, args)
        print(line(name, found[name], args.variants), flush=True)
        provided = found[name].get("provider", {})
        if "FP32" in provided:
            print(provider_line(name, provided, args.variants), flush=True)
        elif provided:
            print(f"{name}, provider: {provided['error']}", file=sys.stderr)
        for variant, layers in found[name].get("layers", {}).items():
            told = ", ".join(f"{layer} {took}" for layer, took in list(layers.items())[:12])
            print(f"  {variant}, us of {sum(layers.values())}: {told}", flush=True)
        for variant, error in found[name]["errors"].items():
            print(f"{name}, {variant}: {error}", file=sys.stderr)
        if args.json is not None:
            args.json.write_text(json.dumps(found, indent=1))
    for variant in args.variants:
        known = [result["speed"][variant] for result in found.values() if variant in result["speed"]]
        if known:
            print(f"{variant}: geometric mean {float(np.exp(np.mean(np.log(known)))):.2f}x of {len(known)} nets")


if __name__ == "__main__":
    main()
