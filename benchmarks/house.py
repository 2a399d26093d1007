"""What must stay the same while the code moves: plans, files and calibration tables of nets, and what a call costs.

Each case quantizes one net for one target with one recipe, without timing, and is known by four hashes: of the plan, of
the file's structure (nodes, names, types and shapes), of the file's bytes, and of the calibration table. Bytes and
tables depend on the processor, since the last digits of float runs do; they are compared on the kind of processor that
they were written on. ``house.json`` beside this script holds them, and what the default call on the digits net costs:
sessions, runs, quantizations, planners, plans, copies of the model, files entered and changes of file.

    python benchmarks/house.py                   # compares the shared small nets
    python benchmarks/house.py --all             # and models of the onnx package, of ../shared/zoo and ../shared/corpus
    python benchmarks/house.py --write [--all]   # after a change that is meant
    python benchmarks/house.py --counts          # the costs of one call alone
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import kenosis_ort
from kenosis_ort import Stages, SyntheticReader, quantize_static
from kenosis_ort.demo import load_digits, model_path
from kenosis_ort.runtime.counting import counted
from kenosis_ort.runtime.machine import machine, on, processor_class
from kenosis_ort.targets import DEFAULT_TARGET, TARGETS
from tests import models, processor
from tests.golden.regenerate import plan_text
from tests.planning import parse

FROZEN = Path(__file__).with_name("house.json")
PACKAGE = str(Path(kenosis_ort.__file__).parent)
SHARED = Path(__file__).resolve().parents[2] / "shared"
RECIPES: dict[str, dict[str, Any]] = {
    "fast": {},
    "plain": {"recipe": "plain"},
    "accurate": {"recipe": "accurate"},
    "data-free": {"recipe": "data-free"},
    "weight-only-8": {"recipe": "weight-only-8"},
    "none": {"stages": Stages.none()},
}
_METHODS = {
    "FusionAwareQDQQuantizer.quantize_model": "quantizations",
    "Planner.__init__": "planners",
    "_Placement.plan": "plans",
}
_LARGEST = 40_000_000  # bytes of a model of ../shared
_SAMPLES = 4


def external(folder: Path) -> Path:
    """The path of a net whose weights lie in a file of their own."""
    path = folder / "external.onnx"
    onnx.save(
        models.mlp(n_in=64, hidden=128), path, save_as_external_data=True, size_threshold=0, location="weights.bin"
    )
    return path


def without_biases(folder: Path) -> Path:
    """The path of a net whose Convs have no biases, so that they get some for their correction."""
    net = models.residual_block()
    for node in net.graph.node:
        if node.op_type == "Conv":
            del node.input[2]
    onnx.save(net, folder / "without_biases.onnx")
    return folder / "without_biases.onnx"


def decoder(folder: Path) -> Path:
    """The path of a decoder with a cache."""
    from tests.flow.test_kv_cache import DECODER

    rng = np.random.default_rng(0)
    sizes = {"table": (12, 16), **dict.fromkeys(("wq", "wk", "wv", "wo"), (16, 16)), "head": (16, 12)}
    weights = {name: rng.normal(0, 0.5, size).astype(np.float32) for name, size in sizes.items()}
    onnx.save(parse(DECODER, weights), folder / "decoder.onnx")
    return folder / "decoder.onnx"


def digits(folder: Path) -> Path:
    """The path of the demo's net."""
    with model_path() as path:
        (folder / "digits.onnx").write_bytes(Path(path).read_bytes())
    return folder / "digits.onnx"


def _small(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        onnx.save(models.ALL[name](), folder / f"{name}.onnx")
        return folder / f"{name}.onnx"

    return make


SMALL: dict[str, Callable[[Path], Path]] = {
    **{name: _small(name) for name in models.ALL},
    "external": external,
    "without_biases": without_biases,
    "decoder": decoder,
    "digits": digits,
}


def further() -> list[Path]:
    """Models of the onnx package, and of ../shared where it is."""
    light = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    found = [*sorted(light.glob("*.onnx")), *sorted(SHARED.glob("zoo/*.onnx")), *sorted(SHARED.glob("corpus/*.onnx"))]
    return [path for path in found if path.stat().st_size <= _LARGEST]


def cases(names: Sequence[str], *, everything: bool) -> Iterator[tuple[str, str, str]]:
    """Net, target and recipe of each case: all recipes for the default target, two for others, one for larger nets."""
    for name in (*SMALL, *(map(str, further()) if everything else ())):
        if names and not any(wanted in name for wanted in names):
            continue
        for target in TARGETS:
            default = target == DEFAULT_TARGET
            if name in SMALL:
                wanted: Sequence[str] = tuple(RECIPES) if default else ("fast", "plain")
            else:
                wanted = ("plain",) if default else ()
            yield from ((name, target, recipe) for recipe in wanted)


def hashed(*texts: str | bytes) -> str:
    """The first digits of a hash over texts."""
    found = hashlib.sha256()
    for text in texts:
        found.update(text.encode() if isinstance(text, str) else text)
    return found.hexdigest()[:12]


def structure(model: onnx.ModelProto) -> str:
    """Nodes, names, types and shapes of a model, without the values of its tensors."""
    graph, lines = model.graph, []
    for node in graph.node:
        kept = [a for a in node.attribute if a.type not in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.TENSOR)]
        lines.append(f"{node.domain} {node.op_type} {node.name} {node.input} {node.output} {kept}")
    lines += [f"{tensor.name} {tensor.data_type} {list(tensor.dims)}" for tensor in graph.initializer]
    return "\n".join(lines)


def case(named: tuple[str, str, str]) -> tuple[str, dict[str, str]]:
    """The hashes of one case, or the error that it ends in."""
    name, target, recipe = named
    options = dict(RECIPES[recipe])
    options |= {"target": target, "promise": False, "evidence": "none", "verify": target == DEFAULT_TARGET}
    if target == DEFAULT_TARGET and recipe != "none":
        options["host"] = "avx2"  # what a machine measures of itself does not count
    key = f"{Path(name).stem} {target} {recipe}"
    with tempfile.TemporaryDirectory() as made, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(made)
        source = SMALL[name](folder) if name in SMALL else Path(name)
        table = folder / "table.json"
        if recipe != "weight-only-8":
            options["calibration_cache_path"] = str(table)
        try:
            reader: Any = SyntheticReader(str(source), _SAMPLES)
            if name in models.ALL:
                reader = models.reader(models.ALL[name](), _SAMPLES)
            with on(processor.USUAL):  # some forms are for processors with matrix tiles alone
                report = quantize_static(str(source), str(folder / "out.onnx"), reader, **options)
        except kenosis_ort.KenosisError as error:
            return key, {"error": f"{type(error).__name__}: {error.what}"[:120].replace(str(folder), "")}
        model = onnx.load(folder / "out.onnx")
        del model.metadata_props[:]
        ranges = json.dumps(json.loads(table.read_text()).get("tensors"), sort_keys=True) if table.exists() else ""
    found = {"plan": plan_text(report.plan), "structure": structure(model), "table": ranges}
    return key, {kind: hashed(text) for kind, text in found.items()} | {
        "file": hashed(model.SerializeToString(deterministic=True))
    }


class Profile:
    """Counts calls of the package's functions, and copies of models, of the threads that start inside."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.counts: Counter[str] = Counter()
        self._last: dict[int, str] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            made = isinstance(getattr(argument, "__self__", None), onnx.ModelProto)
            if made and argument.__name__ in ("CopyFrom", "MergeFrom", "__deepcopy__"):
                self.counts["copies"] += 1
            return
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        self.files.add(code.co_filename)
        thread = threading.get_ident()
        self.counts["changes of file"] += self._last.get(thread) != code.co_filename
        self._last[thread] = code.co_filename
        method = f"{type(frame.f_locals.get('self')).__name__}.{code.co_name}"
        counted_as = _METHODS.get(method)
        if counted_as is not None:
            self.counts[counted_as] += 1


def counts() -> dict[str, int]:
    """What one default call on the digits net with 32 samples costs, but for timing."""
    images = load_digits().calibration[:32]
    with tempfile.TemporaryDirectory() as made, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source, profile = digits(Path(made)), Profile()
        feeds = [{"image": image[None]} for image in images]

        def call() -> None:
            quantize_static(str(source), str(Path(made) / "out.onnx"), models.FeedReader(feeds), promise=False)

        call()  # what a process does once is not counted
        with counted() as asked:
            sys.setprofile(profile)
            threading.setprofile(profile)
            try:
                call()
            finally:
                sys.setprofile(None)
                threading.setprofile(None)
    found = {
        "sessions": asked.total.sessions,
        "runs": asked.total.runs,
        "files entered": len(profile.files),
        **profile.counts,
    }
    return {name: int(number) for name, number in sorted({**found, **profile.counts}.items())}


def compared(frozen: dict[str, Any], found: dict[str, dict[str, str]], *, same_processor: bool) -> list[str]:
    """One line for each case that differs."""
    lines = []
    for key, now in found.items():
        before = frozen["cases"].get(key)
        if before is None:
            lines.append(f"{key}: not frozen")
            continue
        kinds = ("error", "plan", "structure", *(("table", "file") if same_processor else ()))
        differing = [kind for kind in kinds if before.get(kind) != now.get(kind)]
        if differing:
            lines.append(f"{key}: {', '.join(differing)} {now.get('error', '')}".rstrip())
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what differs, and the costs of a call beside those that are frozen; 1 where anything does or is higher."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--counts", action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--nets", nargs="*", default=[], metavar="PART", help="nets with one of these in their name")
    args = parser.parse_args(argv)
    frozen: dict[str, Any] = {"processor": "", "counts": {}, "cases": {}}
    if FROZEN.exists():
        frozen = json.loads(FROZEN.read_text(encoding="utf-8"))
    costs, here = counts(), processor_class(machine().features) or "none of them"
    print(f"{'one call':>18s} {'now':>7s} {'frozen':>7s}")
    for name, number in costs.items():
        print(f"{name:>18s} {number:7d} {frozen['counts'].get(name, 0):7d}")
    same = frozen["processor"] == here  # elsewhere a last digit may decide for another pass, which costs more
    higher = [name for name, number in costs.items() if same and number > frozen["counts"].get(name, 0)]
    if args.counts and not args.write:
        return 1 if higher else 0
    todo = [] if args.counts else list(cases(args.nets, everything=args.all))
    with ProcessPoolExecutor(args.workers) as pool:
        found = dict(pool.map(case, todo))
    differing = compared(frozen, found, same_processor=same)
    print(*differing, sep="\n")
    print(
        f"{len(differing)} of {len(found)} cases differ; frozen on {frozen['processor'] or 'nothing'}, this is {here}"
    )
    if args.write:
        new = {"processor": here, "counts": costs, "cases": dict(sorted({**frozen["cases"], **found}.items()))}
        FROZEN.write_text(json.dumps(new, indent=0) + "\n", encoding="utf-8")
        return 0
    return 1 if differing or higher else 0


if __name__ == "__main__":
    sys.exit(main())
