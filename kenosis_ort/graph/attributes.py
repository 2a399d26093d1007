"""Attributes of a node."""

from __future__ import annotations

import onnx


def attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto | None:
    """Returns a node's attribute, None if it has none of that name."""
    return next((a for a in node.attribute if a.name == name), None)


def attribute_int(node: onnx.NodeProto, name: str, default: int) -> int:
    """Returns an integer attribute, or its default."""
    found = attribute(node, name)
    return default if found is None else int(found.i)


def attribute_float(node: onnx.NodeProto, name: str, default: float) -> float:
    """Returns a float attribute, or its default."""
    found = attribute(node, name)
    return default if found is None else float(found.f)
