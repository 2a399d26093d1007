"""Where a Conv or linear layer had better write float: its kernel may anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kenosis_ort.graph.onnx_ir import ir
from kenosis_ort.graph.view import GraphView
from kenosis_ort.options import PlacementOptions
from kenosis_ort.targets.model import Role
from kenosis_ort.targets.onednn.rules import CONSTANT_STEPS, EPILOGUE, GATES, RULES

_ROLES: Final = {op: rule.role for rule in RULES for op in rule.op_types}
_ON_BYTES: Final = (Role.ANCHOR, Role.BINARY, Role.UNARY, Role.CONCAT)


def writes_float(view: GraphView, node: ir.Node, _: PlacementOptions) -> bool:
    """Tells whether an anchor had better write float.

    A Conv does where nothing that works on bytes on the way to a further layer reads it; in between a Q would be a pass
    less in front of the reader. A linear layer always does where not only further layers read it: the residual stream
    of a transformer is float.
    """
    if node.op_type != "Conv":
        return True
    return not any(_works_on_bytes(reader) and _leads_on(view, reader) for reader in _readers(view, node))


def _readers(view: GraphView, node: ir.Node) -> Iterator[ir.Node]:
    """Yields what reads a node behind its epilogue and behind operators that move bytes."""
    stack, seen = [node], {id(node)}
    while stack:
        for value in stack.pop().outputs:
            for consumer in view.consumers(value):
                reader = consumer.node
                if id(reader) in seen:
                    continue
                seen.add(id(reader))
                if _is_passed(view, reader):
                    stack.append(reader)
                else:
                    yield reader


def _is_passed(view: GraphView, node: ir.Node) -> bool:
    """Tells whether a node is part of an epilogue, or is once it is rewritten (HardSigmoid as Clip), or moves bytes."""
    if node.op_type in EPILOGUE or node.op_type == "HardSigmoid" or _ROLES.get(node.op_type) is Role.PASS_THROUGH:
        return True
    constant = any(v is not None and view.is_constant(v) for v in node.inputs)
    gated = any(v is not None and (maker := v.producer()) is not None and maker.op_type in GATES for v in node.inputs)
    return (node.op_type in CONSTANT_STEPS and constant) or (node.op_type == "Mul" and gated and _is_gate(node))


def _works_on_bytes(node: ir.Node) -> bool:
    """Tells whether a node works on bytes, or does so once it is rewritten: Sum as Add, BatchNormalization as Conv."""
    return _ROLES.get(node.op_type) in _ON_BYTES or node.op_type in ("Sum", "BatchNormalization")


def _is_gate(product: ir.Node) -> bool:
    """Tells whether a product is ``x * f(x)``."""
    for gate in (v.producer() for v in product.inputs if v is not None):
        if gate is not None and gate.op_type in GATES and any(v is gate.inputs[0] for v in product.inputs):
            return True
    return False


def _leads_on(view: GraphView, node: ir.Node) -> bool:
    """Tells whether a layer with constant weights can be reached from a node, or is it."""
    stack, seen = [node], {id(node)}
    while stack:
        found = stack.pop()
        weight = found.inputs[1] if len(found.inputs) > 1 else None
        if _ROLES.get(found.op_type) is Role.ANCHOR and weight is not None and view.is_constant(weight):
            return True
        for value in found.outputs:
            for consumer in view.consumers(value):
                if id(consumer.node) not in seen:
                    seen.add(id(consumer.node))
                    stack.append(consumer.node)
    return False
