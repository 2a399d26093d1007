"""Which of the two kernels of an integer Conv the stored weights select.

ONNX Runtime's QLinearConv multiplies directly where all weights have zero point 0, and by im2col and the 8-bit matrix
product where they have another one. Weights stored one lower, with zero point -1, are the same weights, and all outputs
are the same bit for bit; on processors with matrix tiles (AMX) the second kernel is up to twice as fast for deep Convs.
Source: benchmarks/conv_paths.py, and `LEAST` for the rule by shape.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from kenosis_ort.graph.view import GraphView
from kenosis_ort.plan import Decision, How, PlacementPlan, Role

SHIFTED: Final = -1
LEAST: Final = ((512, 64), (384, 128), (256, 256))
"""Pairs of products an output and output channels; a Conv that reaches both of a pair gains, on a Xeon with AMX."""


def with_matrix_products(
    plan: PlacementPlan, view: GraphView, keep: Collection[str] = (), *, least: Sequence[tuple[int, int]] = LEAST
) -> PlacementPlan:
    """Returns the plan with the weights of Convs that gain by the matrix product stored one lower.

    Args:
        plan: The plan.
        view: Its model.
        keep: Names of weights that are stored as they are.
        least: As `LEAST`.
    """
    by_weight: dict[str, list[Decision]] = {}
    for d in plan.decisions:
        if d.role is Role.WEIGHT and d.how is How.OWN and d.edge.value not in keep:
            by_weight.setdefault(d.edge.value, []).append(d)
    chosen = {name for name, decisions in by_weight.items() if all(_gains(d, view, least) for d in decisions)}
    if not chosen:
        return plan
    why = "stored with zero point -1, for the kernel of the matrix product"
    decisions = tuple(
        replace(d, zero_point=SHIFTED, reason=f"{d.reason}; {why}")
        if d.edge.value in chosen and d.role is Role.WEIGHT
        else d
        for d in plan.decisions
    )
    nodes = {d.edge.consumer for d in decisions if d.zero_point == SHIFTED}
    note = (
        f"Laid out for processors with matrix tiles (AMX), as this one: {len(nodes)} Convs have weights of zero point "
        "-1, which select a faster kernel there, with the same results everywhere. For other processors quantize on "
        "one, or pass tune='off'."
    )
    return replace(plan, decisions=decisions, notes=(*plan.notes, note))


def _gains(decision: Decision, view: GraphView, least: Sequence[tuple[int, int]]) -> bool:
    node = view.node(decision.edge.consumer)
    weight = view.constant(decision.edge.value)
    if node is None or weight is None or node.op_type != "Conv" or view.attribute_int(node, "group", 1) != 1:
        return False
    outputs, *others = view.array(weight).shape
    depth = math.prod(others)
    return any(depth >= products and outputs >= channels for products, channels in least)
