"""How a quantized net spends its time, by the runtime's own profile: in integer kernels, and in what is around them."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime as ort

from kenosis_ort.runtime.session import session_options

_INTEGER = ("QLinear", "QGemm", "MatMulInteger", "ConvInteger", "NhwcMaxPool", "DynamicQuantizeMatMul")
_HEAVY = ("QLinearConv", "QLinearMatMul", "QGemm", "MatMulInteger", "ConvInteger", "DynamicQuantizeMatMul")


@dataclass(frozen=True)
class KernelTimes:
    """Where the time goes, in milliseconds; medians over runs, by node.

    Attributes:
        total: All kernels.
        integer: The integer kernels: what is left if everything between them cost nothing.
        heavy: Those of them that multiply matrices.
        by_op: Each operator.
    """

    total: float
    integer: float
    heavy: float
    by_op: dict[str, float]

    @property
    def share(self) -> float:
        """Share of the integer kernels in the time of all: 1 is the limit."""
        return self.integer / self.total if self.total else 0.0

    def largest(self, count: int = 3) -> str:
        """Returns what else costs most."""
        others = [(ms, op) for op, ms in self.by_op.items() if not op.startswith(_INTEGER)]
        return ", ".join(f"{op} {ms / self.total:.0%}" for ms, op in sorted(others, reverse=True)[:count])


def kernel_times(path: str | Path, feed: Mapping[str, Any], *, threads: int = 1, runs: int = 15) -> KernelTimes:
    """Profiles a model.

    Args:
        path: The model.
        feed: What to run it on.
        threads: Threads of the session.
        runs: Profiled runs, after two that do not count.
    """
    by_node, types = node_times(path, feed, threads=threads, runs=runs)
    by_op: Counter[str] = Counter()
    for node, ms in by_node.items():
        by_op[types[node]] += ms  # type: ignore[assignment]
    return KernelTimes(
        total=sum(by_op.values()),
        integer=sum(ms for op, ms in by_op.items() if op.startswith(_INTEGER)),
        heavy=sum(ms for op, ms in by_op.items() if op.startswith(_HEAVY)),
        by_op=dict(by_op),
    )


def node_times(
    path: str | Path, feed: Mapping[str, Any], *, threads: int = 1, runs: int = 15
) -> tuple[dict[str, float], dict[str, str]]:
    """Returns the median milliseconds by node of the optimized graph, and the operator by node."""
    with tempfile.TemporaryDirectory(prefix="kenosis-profile-") as folder:
        options = session_options(threads=threads, spinning=True)
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        for _ in range(runs + 2):
            session.run(None, dict(feed))
        events = json.loads(Path(session.end_profiling()).read_text())
    taken: dict[str, list[float]] = defaultdict(list)
    types: dict[str, str] = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            node = event["name"].removesuffix("_kernel_time")
            taken[node].append(event["dur"] / 1e3)
            types[node] = event["args"]["op_name"]
    return {node: statistics.median(times[2:]) for node, times in taken.items()}, types
