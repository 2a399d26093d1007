"""What becomes of precisions other than 8 bits, from the measured table."""

from __future__ import annotations

from typing import Final

from kenosis_ort.targets.ort_cpu.rules import PRECISIONS, Runs

from .markdown import code, table

_RUNS: Final = {
    Runs.INTEGER: "on an integer kernel",
    Runs.FLOAT: "in float",
    Runs.FAILS: "not at all",
}


def precision_table() -> str:
    """Returns one row a combination."""
    rows = [
        [
            p.what,
            _RUNS[p.runs],
            ", ".join(code(kernel) for kernel in p.kernel.split(", ") if kernel),
            "yes" if p.offered else "no",
            p.reason,
        ]
        for p in PRECISIONS
    ]
    return table(["Weights and activations", "Runs", "Kernel", "Of use", "Why"], rows)
