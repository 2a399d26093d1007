"""Which of the two kernels of an integer Conv the stored weights select.

ONNX Runtime's QLinearConv multiplies directly where all weights have zero point 0, and by im2col and the 8-bit matrix
product where they have another one. Weights stored one lower, with zero point -1, are the same weights, and all outputs
are the same bit for bit. On processors with matrix tiles (AMX) the second kernel is up to twice as fast for deep Convs;
without them it takes 1.1 to 1.5 times as long throughout. The profile of the machine that a file is made for decides.
Source: benchmarks/conv_paths.py.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Final

from kenosis_ort.graph.view import GraphView
from kenosis_ort.plan import Decision, How, PlacementPlan, Role
from kenosis_ort.targets.costs import CostTable
from kenosis_ort.targets.ort_cpu.work import conv_work

SHIFTED: Final = -1
CLEAR: Final = 1.12
"""By how much the second kernel has to be estimated faster: below that it lost as often as it won when measured."""
_USUAL: Final = 14 * 14
"""Positions of a picture of unknown size."""


def with_matrix_products(
    plan: PlacementPlan, view: GraphView, keep: Collection[str] = (), *, costs: CostTable
) -> PlacementPlan:
    """Returns the plan with the weights of Convs that gain by the matrix product stored one lower.

    Args:
        plan: The plan.
        view: Its model.
        keep: Names of weights that are stored as they are.
        costs: What the kernels cost on the machine that the file is made for.
    """
    by_weight: dict[str, list[Decision]] = {}
    for d in plan.decisions:
        if d.role is Role.WEIGHT and d.how is How.OWN and d.edge.value not in keep:
            by_weight.setdefault(d.edge.value, []).append(d)
    chosen = {name for name, decisions in by_weight.items() if all(_gains(d, view, costs) for d in decisions)}
    if not chosen:
        return plan
    why = f"stored with zero point -1, for the kernel of the matrix product, which is faster on '{costs.host}'"
    decisions = tuple(
        replace(d, zero_point=SHIFTED, reason=f"{d.reason}; {why}")
        if d.edge.value in chosen and d.role is Role.WEIGHT
        else d
        for d in plan.decisions
    )
    return replace(plan, decisions=decisions)


def _gains(decision: Decision, view: GraphView, costs: CostTable) -> bool:
    node = view.node(decision.edge.consumer)
    weight = view.constant(decision.edge.value)
    if node is None or weight is None or node.op_type != "Conv" or view.attribute_int(node, "group", 1) != 1:
        return False
    outputs, inputs, *window = view.array(weight).shape
    work = costs.work(view, node) or conv_work(pixels=_USUAL, inputs=inputs, outputs=outputs, window=window)
    direct, product = costs.integer_us(work), costs.shifted_us(work)
    return direct is not None and product is not None and product * CLEAR < direct
