"""The cost model against measured nets: estimated and measured times in float and in int8, and the speed of int8.

The nets are the zoo's, where it is there, and those of ``architectures.py`` and ``rewrites.py``. The estimate knows the
float model and the plan only; nothing of it was fitted to these nets. Measured is the unsearched int8 result against
the float model, one thread, by the thread's processor time, so that other programs do not count.

    python benchmarks/cost_model.py
    python benchmarks/cost_model.py --nets squeezenet kws --budget 4
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from _zoo import ZOO, OneShotReader, load_zoo, single_sample
from nets import NETS
from rewrites import NETS as REWRITTEN
from rewrites import images

import kenosis_ort
from kenosis_ort.api import _previewed
from kenosis_ort.flow.layouts import layout_of
from kenosis_ort.graph.load import load_model
from kenosis_ort.placement.cost import CostEstimate, estimate
from kenosis_ort.targets import get_target
from kenosis_ort.tuning import Track, race

_SAMPLES = 4


@dataclass(frozen=True)
class Subject:
    """A net: where it comes from, what it is calibrated with, and what it is timed on."""

    name: str
    make: Callable[[Path], tuple[str, list[dict[str, Any]], list[dict[str, Any]]]]


def subjects() -> Iterator[Subject]:
    """All nets."""
    if (ZOO / "zoo.py").is_file():
        module = load_zoo()
        for name, entry in module.ENTRIES.items():

            def from_zoo(_folder: Path, entry: Any = entry) -> Any:
                loaded = entry()
                feeds = list(loaded.calib)[:_SAMPLES]
                return loaded.path, feeds, [single_sample(loaded.path, feed) for feed in feeds[:2]]

            yield Subject(name, from_zoo)
    for name, net in NETS.items():

        def architecture(folder: Path, net: Any = net) -> Any:
            path = str(folder / "float.onnx")
            onnx.save(net.build(), path)
            feeds = list(net.feeds(_SAMPLES, 1))
            return path, feeds, feeds[:2]

        yield Subject(name, architecture)
    for name, build in REWRITTEN.items():

        def rewritten(folder: Path, build: Any = build) -> Any:
            path = str(folder / "float.onnx")
            onnx.save(build(), path)
            feeds = images(_SAMPLES, 1)
            return path, feeds, feeds[:2]

        yield Subject(f"{name} (rewrites)", rewritten)


def estimated(path: str) -> CostEstimate | None:
    """Returns the estimate before calibration; None where no plan is made."""
    costs = get_target("ort-cpu").costs
    layout = layout_of(load_model(path), _previewed(path, {}))
    view = layout.builder.view
    return None if view is None or costs is None else estimate(view, layout.plan, costs)


def measured(path: str, feeds: Sequence[Any], timed: Sequence[Any], folder: Path, budget_s: float) -> Any:
    """Returns (float milliseconds, int8 milliseconds, comparison)."""
    out = str(folder / "int8.onnx")
    kenosis_ort.quantize_static(path, out, OneShotReader(feeds), promise=False)
    found = race({"float": path, "int8": out}, Track(list(timed)), baseline="float", budget_s=budget_s)
    (standing,) = found.standings
    return found.milliseconds, standing.milliseconds, standing.comparison


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a row per net and the error."""
    known = list(subjects())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", default=[], help="only nets whose name contains one of these")
    parser.add_argument("--budget", type=float, default=8.0, help="seconds of timing a net (%(default)s)")
    args = parser.parse_args(argv)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    warnings.simplefilter("ignore")
    errors: list[float] = []
    print(f"{'net':28s} {'float ms: est. meas.':>22s} {'int8 ms: est. meas.':>22s} {'speed: est. meas.':>20s}  error")
    for subject in known:
        if args.nets and not any(part in subject.name for part in args.nets):
            continue
        with tempfile.TemporaryDirectory(prefix="kenosis-cost-model-") as scratch:
            path, feeds, timed = subject.make(Path(scratch))
            cost = estimated(path)
            if cost is None or not cost.is_complete:
                why = "no plan" if cost is None else f"{len(cost.unknown)} nodes of unknown shape"
                print(f"{subject.name:28s} {why}", flush=True)
                continue
            in_float, in_int8, comparison = measured(path, feeds, timed, Path(scratch), args.budget)
        error = cost.speed / comparison.ratio
        errors.append(error)
        print(f"{subject.name:28s} {cost.float_us / 1e3:11.3f} {in_float:10.3f} {cost.planned_us / 1e3:11.3f} "
              f"{in_int8:10.3f} {cost.speed:9.2f}x {comparison.ratio:8.2f}x  {error:5.2f}", flush=True)  # fmt: skip
    if errors:
        logs = [math.log(e) for e in errors]
        spread = math.exp(math.sqrt(sum(v * v for v in logs) / len(logs)))
        worst = math.exp(max(map(abs, logs)))
        print(f"{len(errors)} nets: the estimated speed is off by a factor of {spread:.2f} (rms), {worst:.2f} at most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
