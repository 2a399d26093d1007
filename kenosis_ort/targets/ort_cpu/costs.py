"""What the kernels of stock ONNX Runtime cost on a core of an x86-64 processor.

The numbers are those of one machine, in ``profiles/``: ``amx`` of a Xeon with matrix tiles (AMX), ``vnni`` of an EPYC
with AVX512-VNNI alone, ``avx2`` of one with neither. `kenosis_ort.tuning.measure` takes further ones. Absolute times
differ between processors; the ratios of float to integer are what decisions rest on.

``python benchmarks/cost_model.py`` holds estimates against measured nets.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from kenosis_ort.targets.costs import CostTable
from kenosis_ort.targets.ort_cpu.work import work_of
from kenosis_ort.targets.profile import HostProfile

_FOLDER: Final = files(__package__) / "profiles"
PROFILES: Final = tuple(
    HostProfile.parse((_FOLDER / f"{name}.json").read_text("utf-8")) for name in ("vnni", "amx", "avx2")
)
"""The machines that come with the package; where nothing is known of a processor, the first whose products are exact or
not, as its own are."""

ORT_CPU_COSTS: Final = CostTable(
    measured_on="",
    command="kenosis-ort profile",
    run=0.0,
    kernels={},
    error=1.0,
    work=work_of,
    fused=frozenset({"clip", "leaky-relu", "hard-sigmoid", "add"}),
    blocked=frozenset({"Conv", "MaxPool", "AveragePool", "GlobalAveragePool"}),
    gates=frozenset({"Sigmoid"}),
).on(PROFILES[0])
