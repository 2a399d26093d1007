"""Values whose kernels write on a grid of their own, whatever was observed, and values that bytes are moved to."""

from __future__ import annotations

from collections.abc import Mapping

from kenosis_ort.graph.onnx_ir import ir
from kenosis_ort.placement.assignment import Assignment
from kenosis_ort.placement.sharing import Range, ScaleGroups
from kenosis_ort.plan import RangeLimit
from kenosis_ort.targets.model import Role

_WIDE = (ir.DataType.UINT16, ir.DataType.INT16)


def find_own_grids(assignment: Assignment) -> dict[str, Range | None]:
    """Returns the values whose kernels write on a grid of their own, with its range where that is one alone."""
    found: dict[str, Range | None] = {}
    rules = {rule.id: rule for rule in assignment.target.rules if rule.own_grid or rule.wide_output}
    for name in sorted(assignment.domain.integer):
        rule = rules.get(assignment.classes[name].rule)
        value = str(assignment.classes[name].node.outputs[0].name)
        is_wide = ir.DataType(assignment.constraints.overrides.type_of(value)) in _WIDE
        if rule is not None and rule.own_grid and not is_wide:
            assignment.constraints.overrides.refuse_offset(value, rule.why)
        if rule is not None and not assignment.constraints.overrides.has_scale(value):
            ends = rule.wide_output if is_wide else None
            found.update({value: ends} if rule.own_grid or ends is not None else {})
    return found


def grid_limits(
    assignment: Assignment, own_grids: Mapping[str, Range | None], groups: ScaleGroups
) -> tuple[RangeLimit, ...]:
    """Returns the ranges of those of one alone, and of Concats that read any: none may saturate what it reads."""
    found = {name: ends for name, ends in own_grids.items() if ends is not None}
    ranges = groups.ranges
    for name in assignment.domain.integer if own_grids and ranges else ():
        c = assignment.classes[name]
        root = groups.root(str(c.node.outputs[0].name))
        read = [r for v in c.data if (r := groups.root(str(v.name))) in own_grids and r != root]
        if c.role is Role.CONCAT and read and root in ranges:
            ends = [found.get(value) or ranges[value] for value in (root, *read) if value in ranges]
            found[root] = min(low for low, _ in ends), max(high for _, high in ends)
    return tuple(RangeLimit(name, *ends) for name, ends in sorted(found.items()))


def values_moved(assignment: Assignment, groups: ScaleGroups) -> dict[str, str]:
    """Returns the values that lie on a grid without Q of their own, for they are moved bytes, with what moved them.

    Before calibration nothing is known about which Concats share their grid: all values are observed then.
    """
    kept: dict[str, str] = {}
    for node in assignment.view.nodes:
        moves = assignment.classes[str(node.name)].role in (Role.PASS_THROUGH, Role.CONCAT)
        if not moves or not assignment.is_integer(node):
            continue
        read = {groups.root(str(v.name)) for v in assignment.data(node)}
        for value in assignment.q_values(node):
            name = str(value.name)
            if (
                name in assignment.quantized
                and name not in assignment.constraints.values
                and read == {groups.root(name)}
            ):
                kept[name] = str(node.name)
    return kept
