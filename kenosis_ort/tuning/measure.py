"""Measures what the kernels of a target's runtime cost on this machine: the host profile.

The target's probes are run under the runtime's profiler; each kernel counts by the least of its times but a few, since
what else the machine does makes it longer, never shorter. For every class of kernels the coefficients are those of
least squares, none below zero, each time weighted by its own size. What no probe tells is taken from the nearest
profile that comes with the target, scaled by how much slower or faster its other kernels are.

Whether the kernel that a zero point of weights selects is worth it here is tried: profiles are chosen by the
processor's flags, and flags do not tell all: on a virtual machine whose processor has matrix tiles (AMX) ResNet-50 laid
out for them ran at 0.67 to 0.81 of the speed of stock's file, where another Xeon gained a third; and releases of the
runtime have computed wrong products with them. So the nearest profile is believed only once the probes whose nodes gain
by it were run in both ways, here: once for each machine, runtime and number of threads.
"""

import hashlib
import json
import logging
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from kenosis_ort.bench.kernel_times import profile_ops
from kenosis_ort.errors import OptionError
from kenosis_ort.report.evidence import OpTime
from kenosis_ort.runtime.machine import keep, machine, recall
from kenosis_ort.runtime.session import open_session
from kenosis_ort.targets import TARGETS, Target
from kenosis_ort.targets.profile import CostTable, Form, HostProfile, KernelCost, Probe, Work, nearest

_log = logging.getLogger(__name__)

BUDGET_S: Final = 30.0
_QUANTILE: Final = 0.05
_RUNS: Final = 60
_LEAST_US: Final = 0.05
_SHARE: Final = 0.75  # of the budget for runs; the rest is for loading
_CHAINS: Final = (4, 44)
_MOST_RUNS: Final = 2000
_WARMUP: Final = 2
_WARM: Final = 0.2
"""Share of a kernel's own cost in nets that stay in the near caches: probes' kernels begin cold, as most nets' do."""
_SMALL_US: Final = 20.0
_SWEEPS: Final = 4000
_FLOAT: Final = ("Conv", "FusedConv", "Gemm", "FusedGemm", "MatMul", "FusedMatMul")
"""Kernels that an integer node has where this runtime does not fuse it."""

Sample = tuple[Work, float]
Samples = Mapping[tuple[str, Form], Sequence[Sample]]


def measure_profile(
    target: Target,
    *,
    threads: int = 1,
    budget_s: float = BUDGET_S,
    name: str = "",
    progress: Callable[[int, int | None], None] | None = None,
) -> HostProfile:
    """Measures a profile of this machine.

    Args:
        target: Whose kernels are measured.
        threads: Threads of a session.
        budget_s: Seconds for all of it, give or take one run of each probe.
        name: What a report calls it; the processor's name where it is empty.
        progress: Called with the number of probes done and of all probes.

    Raises:
        OptionError: The target's kernels cannot be measured here.
    """
    if target.hooks.probes is None or target.costs is None or not target.profiles:
        known = [name for name, other in TARGETS.items() if other.hooks.probes is not None]
        raise OptionError(
            f"the kernels of target '{target.name}' cannot be measured here",
            where="target",
            fix=f"one of {', '.join(known)}",
        )
    begin, timed = time.perf_counter(), []
    probes = list(target.hooks.probes())
    for index, probe in enumerate(probes):
        left = max(begin + budget_s - time.perf_counter(), 0.0) * _SHARE / (len(probes) - index)
        timed.append(_timed(probe, threads, left))
        if progress is not None:
            progress(index + 1, len(probes))
    own_us = _added_by_profiler(timed)
    found: dict[tuple[str, Form], list[Sample]] = defaultdict(list)
    for probe, kernels, _ in timed:
        for kernel in kernels:
            us = max(kernel.milliseconds * 1e3 - own_us, _LEAST_US)
            usual: tuple[Work | None, Form] = (probe.kernels.get(kernel.kernel), "float")
            work, form = probe.nodes.get(kernel.node, usual)
            if work is not None and (form == "float" or kernel.kernel not in _FLOAT):
                found[work.shape_class, form].append((work, us))
    here = machine()
    saturates = target.data_types().saturates
    reference = nearest(target.profiles, here.features, saturates=saturates)
    return replace(
        _fitted(found, reference),
        name=name or here.cpu,
        target=target.name,
        cpu=here.cpu,
        features=here.features,
        runtime=f"onnxruntime {ort.__version__}",
        threads=threads,
        warm=_WARM,
        run=round(_run_us(threads), 1),
        saturates=saturates,
    )


def _fitted(found: Samples, reference: HostProfile) -> HostProfile:
    """A profile with the coefficients that fit what was measured; the rest is the reference's, scaled."""
    fitted = {key: fit([w for w, _ in samples], [us for _, us in samples]) for key, samples in found.items()}
    factors = [us / max(reference_us, _LEAST_US) for us, reference_us in _beside(found, reference)]
    factor = statistics.median(factors) if factors else 1.0
    kernels = {}
    for name, (in_float, in_integer) in reference.kernels.items():
        both = fitted.get((name, "float")) or _scaled(in_float, factor)
        integer = None if in_integer is None else fitted.get((name, "integer")) or _scaled(in_integer, factor)
        if in_integer == in_float and (name, "integer") not in fitted:
            integer = both  # Q, DQ and changes of layout: the same kernel on both sides
        kernels[name] = (both, integer)
    shifted = {}
    for name, cost in reference.shifted.items():
        samples, beside = found.get((name, "shifted")), kernels[name][1]
        if samples is None or beside is None:
            shifted[name] = _scaled(cost, factor)
        else:  # the call itself is the same whichever kernel works in it
            times = [max(us - beside.fixed * 1e-3, _LEAST_US) for _, us in samples]
            work = fit([w for w, _ in samples], times)
            shifted[name] = replace(work, fixed=_rounded(work.fixed + beside.fixed))
    return replace(reference, kernels=kernels, shifted=shifted)


def _beside(found: Samples, reference: HostProfile) -> Sequence[tuple[float, float]]:
    pairs = []
    for (name, form), samples in found.items():
        costs = reference.kernels.get(name)
        cost = None if costs is None else costs[0 if form == "float" else 1]
        if cost is not None and form != "shifted":
            pairs += [(us, cost.microseconds(work)) for work, us in samples]
    return pairs


def _scaled(cost: KernelCost, factor: float) -> KernelCost:
    return KernelCost(*(_rounded(value * factor) for value in astuple(cost)))


def fit(works: Sequence[Work], times: Sequence[float]) -> KernelCost:
    """Fits coefficients, none below zero, to times in microseconds; each counts by its own size.

    Args:
        works: What was done.
        times: How long it took.
    """
    names = ("products", "elements", "pieces", "reads", "weights")
    columns = np.array([[1e-3, *(getattr(work, name) * 1e-6 for name in names)] for work in works])
    wanted = np.asarray(times, np.float64)
    weights = 1 / np.maximum(wanted, 0.5)
    matrix, right = columns * weights[:, None], wanted * weights
    scale = np.maximum(np.linalg.norm(matrix, axis=0), 1e-12)
    matrix = matrix / scale
    gram, aim = matrix.T @ matrix, matrix.T @ right
    solution = np.zeros(len(gram))
    for _ in range(_SWEEPS):  # coordinate descent: convex, so it ends at the non-negative optimum
        before = solution.copy()
        for i in range(len(solution)):
            if gram[i, i] > 1e-9:
                solution[i] = max(0.0, solution[i] + (aim[i] - gram[i] @ solution) / gram[i, i])
        if np.allclose(solution, before, rtol=1e-5, atol=1e-9):
            break
    return KernelCost(*(_rounded(float(value)) for value in solution / scale))


def _rounded(value: float) -> float:
    return 0.0 if value < 1e-3 or not math.isfinite(value) else float(f"{value:.3g}")


def _timed(probe: Probe, threads: int, budget_s: float) -> tuple[Probe, tuple[OpTime, ...], float]:
    """A probe with the times of its kernels and, without the profiler, the microseconds of a run."""
    feed = dict(probe.feed)
    whole = _run_us_of(probe.model, feed, threads, budget_s / 3)
    taken = profile_ops(probe.model, [feed], threads=threads, runs=_RUNS, budget_s=2 * budget_s / 3, quantile=_QUANTILE)
    return probe, taken, whole


def _added_by_profiler(timed: Sequence[tuple[Probe, tuple[OpTime, ...], float]]) -> float:
    """The microseconds that the profiler adds to a kernel, as nets of small kernels show."""
    added = []
    for _, kernels, whole in timed:
        reported = 1e3 * sum(kernel.milliseconds for kernel in kernels)
        if reported < _SMALL_US * len(kernels):
            added.append((reported - whole) / len(kernels))
    return max(statistics.median(added), 0.0) if added else 0.0


def _run_us(threads: int) -> float:
    """The microseconds of a run besides its kernels."""
    feed = {"x": np.ones((1, 16), np.float32)}
    times = [_run_us_of(_chain(nodes), feed, threads, 0.1) for nodes in _CHAINS]
    return max(times[0] - _CHAINS[0] * (times[1] - times[0]) / (_CHAINS[1] - _CHAINS[0]), 0.1)


def _run_us_of(model: onnx.ModelProto, feed: Mapping[str, Any], threads: int, budget_s: float) -> float:
    """The microseconds of a run, but for the first two; of many the lowest but some."""
    session = open_session(model, threads=threads, spinning=True)
    times, end = [], time.perf_counter() + budget_s
    for index in range(_MOST_RUNS):
        start = time.perf_counter()
        session.run(None, dict(feed))
        times.append(1e6 * (time.perf_counter() - start))
        if index > _WARMUP and time.perf_counter() > end:
            break
    return sorted(times[_WARMUP:])[int(_QUANTILE * (len(times) - _WARMUP))]


def _chain(nodes: int) -> onnx.ModelProto:
    names = ["x", *(f"y{i}" for i in range(nodes))]
    chain = [helper.make_node("Sigmoid", [a], [b], name=b) for a, b in pairwise(names)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 16]) for name in (names[0], names[-1])]
    graph = helper.make_graph(chain, "chain", ends[:1], ends[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


# ---- the second kernel ----------------------------------------------------------------------------------------------

_PROMISED: Final = 1.3
"""Gain by the profile from which a node is asked about: below it noise would answer."""
_LEAST: Final = 1.1
"""Gain that has to be left here, over all of them."""
_ROUNDS: Final = 2
_known: dict[str, float] = {}


def pays(target: Target, profile: HostProfile, threads: int) -> bool:
    """Whether the second kernel is faster here where a profile of another machine says so, and as exact.

    Where the profile says so of no Conv, nothing is run: none will be chosen.

    Args:
        target: With probes.
        profile: One of its own.
        threads: Threads of a session.
    """
    if not any(_is_promised(profile, name) for name in profile.shifted):
        return True
    here = machine()
    # One that was pinned before it loaded the runtime does not use matrix tiles (1.32.0).
    text = json.dumps([target.name, here.cpu, here.features, here.cores, ort.__version__, threads, profile.name])
    name = f"second-kernel-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
    if name not in _known:
        unchanged = (recall(name) or {}).get("gain")
        if not isinstance(unchanged, float):
            unchanged = _gain(target, profile, threads)
            keep(name, {"gain": unchanged})
        _known[name] = unchanged
    return _known[name] >= _LEAST


def _gain(target: Target, profile: HostProfile, threads: int) -> float:
    """Speed of the second kernel relative to the first over the nodes that should gain; 0 where it is not exact."""
    pair = _pair(target)
    if pair is None or target.costs is None:
        return 0.0
    costs = profile.table(target.costs)
    wanted = {node for node, (work, _) in pair[0].nodes.items() if _promised(costs, work)}
    if not wanted or not _is_exact(*pair):
        return 0.0
    least = [dict.fromkeys(wanted, np.inf) for _ in pair]
    for _ in range(_ROUNDS):
        for found, probe in zip(least, pair, strict=True):
            for node, us in _times(probe, threads).items():
                if node in wanted:
                    found[node] = min(found[node], us)
    direct, second = (sum(found.values()) for found in least)
    _log.info("the second kernel is %.2fx of the first over %d nodes", direct / second, len(wanted))
    return float(direct / second)


def _is_promised(profile: HostProfile, shape_class: str) -> bool:
    """Whether products cost so much less that a Conv of many of them gains."""
    direct = profile.kernels[shape_class][1]
    return direct is not None and profile.shifted[shape_class].product * _PROMISED < direct.product


def _promised(costs: CostTable, work: Work) -> bool:
    direct, second = costs.integer_us(work), costs.shifted_us(work)
    return direct is not None and second is not None and second * _PROMISED < direct


def _pair(target: Target) -> tuple[Probe, Probe] | None:
    """A probe in integer, and the same one with weights that select the second kernel."""
    direct: dict[tuple[str, ...], Probe] = {}
    for probe in () if target.hooks.probes is None else target.hooks.probes():
        forms = {form for _, form in probe.nodes.values()}
        if forms == {"integer"}:
            direct[tuple(probe.nodes)] = probe
        elif forms == {"shifted"} and tuple(probe.nodes) in direct:
            return direct[tuple(probe.nodes)], probe
    return None


def _is_exact(direct: Probe, second: Probe) -> bool:
    made = [open_session(probe.model).run(None, dict(probe.feed)) for probe in (direct, second)]
    return all(np.array_equal(a, b) for a, b in zip(*made, strict=True))


def _times(probe: Probe, threads: int) -> Mapping[str, float]:
    """The microseconds of the nodes asked about."""
    taken = profile_ops(probe.model, [dict(probe.feed)], threads=threads, runs=20, budget_s=0.3, quantile=0.1)
    return {kernel.node: 1e3 * kernel.milliseconds for kernel in taken if kernel.node in probe.nodes}
