"""Comparison of two models node for node and initializer for initializer."""

from __future__ import annotations

import onnx


def _tensor(tensor: onnx.TensorProto) -> tuple[int, tuple[int, ...], bytes]:
    bare = onnx.TensorProto()
    bare.CopyFrom(tensor)
    bare.name = ""
    array = onnx.numpy_helper.to_array(bare)
    return bare.data_type, tuple(bare.dims), array.tobytes()


def _nodes(model: onnx.ModelProto) -> list[bytes]:
    plain = []
    for node in model.graph.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        if not copy.domain:
            copy.ClearField("domain")  # absent and empty mean the same
        plain.append(copy.SerializeToString(deterministic=True))
    return plain


def _values(values: object) -> list[bytes]:
    return [v.SerializeToString(deterministic=True) for v in values]  # type: ignore[attr-defined]


def differences(want: onnx.ModelProto, got: onnx.ModelProto) -> list[str]:
    """Returns what differs, empty if the graphs are the same.

    Compared are nodes in order (with names, attributes and bodies), initializers (name, type, shape, bytes), graph
    inputs and outputs and the opsets; not the inferred shapes, the producer and the IR version.
    """
    found = []
    a, b = _nodes(want), _nodes(got)
    if a != b:
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            if x != y:
                found.append(f"node: wanted {_short(want.graph.node[i])}, got {_short(got.graph.node[i])}")
                break
        if len(a) != len(b):
            found.append(f"{len(b)} nodes for {len(a)}")
    left = {i.name: _tensor(i) for i in want.graph.initializer}
    right = {i.name: _tensor(i) for i in got.graph.initializer}
    found += [f"initializer missing: {n}" for n in left if n not in right]
    found += [f"initializer too many: {n}" for n in right if n not in left]
    found += [f"initializer differs: {n}" for n in left if n in right and left[n] != right[n]]
    if len(want.graph.initializer) != len(got.graph.initializer):
        found.append(f"{len(got.graph.initializer)} initializers for {len(want.graph.initializer)}")
    for what in ("input", "output"):
        if _values(getattr(want.graph, what)) != _values(getattr(got.graph, what)):
            found.append(f"graph {what}s differ")
    opsets = [{(o.domain, o.version) for o in m.opset_import} for m in (want, got)]
    if opsets[0] != opsets[1]:
        found.append(f"opsets: {sorted(opsets[1])} for {sorted(opsets[0])}")
    return found


def _short(node: onnx.NodeProto) -> str:
    return f"{node.op_type} '{node.name}' {list(node.input)} -> {list(node.output)}"
