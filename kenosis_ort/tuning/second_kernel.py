"""Whether the kernel that a zero point of weights selects is worth it on the machine at hand.

Profiles are chosen by the processor's flags, and flags do not tell all: on a virtual machine whose processor has matrix
tiles (AMX) ResNet-50 laid out for them ran at 0.67 to 0.81 of the speed of stock's file, where another Xeon gained a
third; and releases of the runtime have computed wrong products with them. So the nearest profile is believed only once
the probes whose nodes gain by it were run in both ways, here: once for each machine, runtime and number of threads.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Final

import numpy as np
import onnxruntime as ort

from kenosis_ort.bench.op_times import profile_ops
from kenosis_ort.graph.session import open_session
from kenosis_ort.storage.writing import keep, recall
from kenosis_ort.targets.costs import CostTable, Probe, Work
from kenosis_ort.targets.machine import processor
from kenosis_ort.targets.model import Target
from kenosis_ort.targets.profile import HostProfile

_log = logging.getLogger(__name__)

_PROMISED: Final = 1.3
"""Gain by the profile from which a node is asked about: below it noise would answer."""
_LEAST: Final = 1.1
"""Gain that has to be left here, over all of them."""
_ROUNDS: Final = 2
_RUNS: Final = 20
_BUDGET_S: Final = 0.3
_QUANTILE: Final = 0.1
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
    text = json.dumps([target.name, *processor(), ort.__version__, threads, profile.name])
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
    costs = target.costs.on(profile)
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
    for probe in () if target.probes is None else target.probes():
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
    taken = profile_ops(
        probe.model, [dict(probe.feed)], threads=threads, runs=_RUNS, budget_s=_BUDGET_S, quantile=_QUANTILE
    )
    return {kernel.node: 1e3 * kernel.milliseconds for kernel in taken if kernel.node in probe.nodes}
