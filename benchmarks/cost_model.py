"""The cost model against measured nets: estimated and measured times in float and in int8, and the speed of int8.

The nets are the zoo's, where it is there, and those of ``architectures.py`` and ``rewrites.py``. The estimate knows the
float model and the plan only; nothing of it was fitted to these nets. Measured is the unsearched int8 result against
the float model, one thread, by the thread's processor time, so that other programs do not count.

With ``--nodes`` estimates are held against the runtime's profile instead, kernel by kernel without what the profiler
adds to each (it tells whole microseconds, so that the sum is a run's time without it): the sum by net, and the sum by
class of kernels over all nets. Of a machine that runs slower or faster than when its profile was taken, the factor is
told; ``--host`` with a profile just measured has none.

    python benchmarks/cost_model.py
    python benchmarks/cost_model.py --nets squeezenet kws --budget 4 --host amx
    python benchmarks/cost_model.py --nodes
    kenosis-ort profile --out host.json && python benchmarks/cost_model.py --nodes --host host.json
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
from _zoo import ZOO, OneShotReader, load_zoo, single_sample
from nets import NETS
from rewrites import NETS as REWRITTEN, images

import kenosis_ort
from kenosis_ort.api import _previewed
from kenosis_ort.bench.kernel_times import profile_ops
from kenosis_ort.flow.builder import Builder, for_integers
from kenosis_ort.flow.fit import fitted
from kenosis_ort.graph.load import load_model
from kenosis_ort.placement.cost import CostEstimate, NetCosts
from kenosis_ort.tuning.races import RaceSetup, race

HEADER = f"{'net':28s} {'float ms: est. meas.':>22s} {'int8 ms: est. meas.':>22s} {'speed: est. meas.':>20s}  error"
_SAMPLES = 4
_RUNS, _RUN_SECONDS = 400, 2.0
_QUANTILE = 0.05  # of the times of a run and of a kernel: what else the machine does makes them longer, never shorter


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


def laid_out(path: str, host: str | None, **options: Any) -> tuple[Builder, CostEstimate] | None:
    """The builder and the estimate before calibration; None where no plan is made."""
    proto = load_model(path).proto
    builder = for_integers(proto, fitted(proto, _previewed(path, {"host": host, **options})))
    costs = builder.request.target.costs
    none = builder.planner is None or costs is None
    return None if none else (builder, NetCosts(builder.prepared.graph, costs).estimate(builder.plan))


class Nodes:
    """Estimated and measured microseconds of all nets, by net and by class of kernels."""

    def __init__(self) -> None:
        self.nets: list[tuple[float, float]] = []  # estimated over measured, in float and int8
        self.classes: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])

    def add(
        self, name: str, found: tuple[Builder, CostEstimate], int8: str, timed: Sequence[Any], folder: Path
    ) -> None:
        """Profiles a net in float, in our form, and in int8; prints its sums."""
        builder, cost = found
        view, costs = builder.prepared.graph, builder.request.target.costs
        assert costs is not None
        onnx.save(builder.prepared.proto, str(folder / "prepared.onnx"))
        ratios = []
        for form, path in (("float", str(folder / "prepared.onnx")), ("int8", int8)):
            whole = run_us(path, list(timed))
            kernels = profile_ops(path, list(timed), runs=40, budget_s=4, quantile=_QUANTILE)
            told = sum(1e3 * op.milliseconds for op in kernels)
            added = max(told - (whole - cost.run_us), 0.0) / len(kernels)
            taken: dict[str, float] = defaultdict(float)
            for op in kernels:
                taken[op.node] += max(1e3 * op.milliseconds - added, 0.05)
            expected = cost.float_us if form == "float" else cost.planned_us
            ratios.append(expected / (cost.run_us + sum(taken.values())))
            for node in cost.nodes:
                work = costs.work(view, view.node(node.node))  # type: ignore[arg-type]
                kernel = "float" if form == "float" or node.kind.value == "float" else "integer"
                row = self.classes[kernel, "" if work is None else work.shape_class]
                row[0] += 1
                row[1] += node.float_us if form == "float" else node.planned_us
                row[2] += taken.get(node.node, 0.0)
        self.nets.append((ratios[0], ratios[1]))
        print(f"{name:28s} estimated / measured: float {ratios[0]:5.2f}  int8 {ratios[1]:5.2f}", flush=True)

    def show(self) -> None:
        """Prints the classes that take most, and the errors of the nets."""
        for (kernel, name), (count, us, measured_us) in sorted(self.classes.items(), key=lambda row: -row[1][2])[:30]:
            print(f"{kernel:8s} {name:20s} {count:6.0f} nodes  {us:10.0f} {measured_us:10.0f} us "
                  f"{us / max(measured_us, 1.0):6.2f}")  # fmt: skip
        of_machine = math.exp(sum(math.log(a * b) for a, b in self.nets) / (2 * len(self.nets)))
        print(f"the machine runs at {of_machine:.2f} of its speed when the profile was taken")
        for at, form in enumerate(("float", "int8")):
            ratios = [r[at] for r in self.nets]
            print(f"{len(self.nets)} nets in {form}: off by {100 * (rms(ratios) - 1):.0f} % (rms), "
                  f"{100 * (rms([r / of_machine for r in ratios]) - 1):.0f} % without that factor")  # fmt: skip


def run_us(path: str, feeds: Sequence[dict[str, Any]]) -> float:
    """Returns the microseconds of a run, without the profiler."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < _RUNS and time.perf_counter() - begin < _RUN_SECONDS:
        start = time.perf_counter()
        session.run(None, feeds[len(times) % len(feeds)])
        times.append(time.perf_counter() - start)
    return 1e6 * sorted(times)[int(_QUANTILE * len(times))]


def rms(ratios: Sequence[float]) -> float:
    """Returns the root mean square of factors, as a factor."""
    return math.exp(math.sqrt(sum(math.log(r) ** 2 for r in ratios) / len(ratios)))


def measured(path: str, feeds: Sequence[Any], timed: Sequence[Any], folder: Path, budget_s: float) -> Any:
    """Returns (float milliseconds, int8 milliseconds, comparison)."""
    out = str(folder / "int8.onnx")
    kenosis_ort.quantize_static(path, out, OneShotReader(feeds), promise=False)
    found = race(path, out, RaceSetup(list(timed)), budget_s=budget_s)
    return found.reference_milliseconds, found.milliseconds, found.comparison


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a row per net and the error."""
    known = list(subjects())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", default=[], help="only nets whose name contains one of these")
    parser.add_argument("--host", help="host profile, by name or file (default: this machine's, or the nearest)")
    parser.add_argument("--nodes", action="store_true", help="hold kernels against the runtime's profile")
    parser.add_argument("--budget", type=float, default=8.0, help="seconds of timing a net (%(default)s)")
    args = parser.parse_args(argv)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    warnings.simplefilter("ignore")
    errors: list[float] = []
    nodes = Nodes()
    if not args.nodes:
        print(
            f"{'net':28s} {'float ms: est. meas.':>22s} {'int8 ms: est. meas.':>22s} {'speed: est. meas.':>20s}  error"
        )
    for subject in known:
        if args.nets and not any(part in subject.name for part in args.nets):
            continue
        with tempfile.TemporaryDirectory(prefix="kenosis-cost-model-") as scratch:
            path, feeds, timed = subject.make(Path(scratch))
            found = laid_out(path, args.host, **({"tune": "off"} if args.nodes else {}))
            if found is None or found[1].unknown:
                why = "no plan" if found is None else f"{len(found[1].unknown)} nodes of unknown shape"
                print(f"{subject.name:28s} {why}", flush=True)
                continue
            cost = found[1]
            if args.nodes:
                out = str(Path(scratch) / "int8.onnx")
                options = {"promise": False, "recipe": "plain", "tune": "off", "verify": False}
                kenosis_ort.quantize_static(path, out, OneShotReader(feeds), **options)
                nodes.add(subject.name, found, out, timed, Path(scratch))
                continue
            in_float, in_int8, comparison = measured(path, feeds, timed, Path(scratch), args.budget)
        error = cost.speed / comparison.ratio
        errors.append(error)
        print(f"{subject.name:28s} {cost.float_us / 1e3:11.3f} {in_float:10.3f} {cost.planned_us / 1e3:11.3f} "
              f"{in_int8:10.3f} {cost.speed:9.2f}x {comparison.ratio:8.2f}x  {error:5.2f}", flush=True)  # fmt: skip
    if nodes.nets:
        nodes.show()
    if errors:
        worst = math.exp(max(abs(math.log(e)) for e in errors))
        print(f"{len(errors)} nets: the estimated speed is off by a factor of {rms(errors):.2f} (rms), {worst:.2f} at "
              "most")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
