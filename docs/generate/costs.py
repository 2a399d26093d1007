"""The measured costs of the runtime's kernels."""

from __future__ import annotations

from kenosis_ort.targets.ort_cpu.work import PROFILES

from .markdown import code, table


def cost_table() -> str:
    """Returns picoseconds a product in float and integer, of the kernels that multiply."""
    rows = []
    for name, (in_float, in_integer) in PROFILES[0].kernels.items():
        if in_float.product:
            integer, ratio = "no integer kernel", ""
            if in_integer is not None:
                integer = f"{in_integer.product:g}" if in_integer.product else "by what it reads"
                ratio = f"{in_float.product / in_integer.product:.1f}x" if in_integer.product else ""
            rows.append([code(name), f"{in_float.product:g}", integer, ratio])
    head = f"Picoseconds a product, {PROFILES[0].machine}. `kenosis-ort profile` measures them anew."
    return f"{head}\n\n{table(['Kernel', 'Float', 'Integer', 'Ratio'], rows)}"
