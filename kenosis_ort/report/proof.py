"""What the report says of the fusion proof."""

from __future__ import annotations

from collections import Counter
from typing import Final

from kenosis_ort.graph.operators import Is, having
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.targets.proof import FusionReport, KernelReport

_NAMED = 3
_IN_BLOCKS: Final = frozenset({"MatMulNBits", "GatherBlockQuantized"})


def heavy_kernels(fusion: FusionReport) -> tuple[KernelReport, ...]:
    """Returns the kernels of the nodes that carry the arithmetic, Conv, Gemm and MatMul, unless computed at load."""
    return tuple(k for k in fusion.kernels if k.op_type in having(Is.HEAVY) and k.status != "removed")


def fusion_verdict(fusion: FusionReport, plan: PlacementPlan | None = None) -> str:
    """Returns the outcome of a fusion proof in one sentence, judged by the plan if there is one."""
    heavy = heavy_kernels(fusion)
    blocks = sum(k.op_type in _IN_BLOCKS for k in fusion.kernels)
    weights = f"{blocks} layers and embeddings have weights in blocks, with float data" if blocks else ""
    recurrent = Counter(k.op_type for k in fusion.kernels if k.op_type in having(Is.RECURRENT) and not k.integer)
    floats = "".join(f"; {count} {op_type} in float" for op_type, count in sorted(recurrent.items()))
    if not heavy:
        return f"{weights or 'There is no Conv, Gemm or MatMul to run'}{floats}."
    integer = sum(k.integer for k in heavy)
    text = f"{integer} of {len(heavy)} Conv/Gemm/MatMul run on integer kernels{floats}"
    text += f"; {weights}" if weights else ""
    broken = 0 if plan is None else len(left_float(fusion, plan))
    if broken:
        return f"{text}; {broken} planned as integer run in float, see the table."
    if plan and integer < len(heavy):
        return f"{text}; the others stay float as planned."
    return f"{text}."


def processors_line(fusion: FusionReport) -> str:
    """What the file computes on other x86-64 processors, in one sentence; "" where nothing runs on integers."""
    if not fusion.processors or not any(k.integer for k in fusion.kernels):
        return ""
    clipping = fusion.clipping()
    if not clipping:
        return f"the same integers on every processor: {', '.join(p.name for p in fusion.processors)}"
    named = ", ".join(f"'{k.node}' ({k.clipping})" for k in clipping[:_NAMED])
    more = f" and {len(clipping) - _NAMED} more" if len(clipping) > _NAMED else ""
    others = ", ".join(p.name for p in fusion.processors if not p.exact)
    return f"products of 8-bit weights clip on {others}: layers (channels) {named}{more}"


def left_float(fusion: FusionReport, plan: PlacementPlan) -> tuple[KernelReport, ...]:
    """Returns the nodes that the plan calls integer and the runtime runs in float (empty is the goal)."""
    planned = set(plan.integer_nodes())
    running = ("float", "absorbed")
    return tuple(k for k in fusion.kernels if k.node in planned and not k.integer and k.status in running)
