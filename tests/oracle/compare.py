"""Comparison of two models node for node and initializer for initializer."""

import onnx


def _parts(model):
    """What two models have to agree in, by what it is called."""
    graph, parts = model.graph, {}
    for at, node in enumerate(graph.node):
        plain = onnx.NodeProto()
        plain.CopyFrom(node)
        if not plain.domain:
            plain.ClearField("domain")  # absent and empty mean the same
        parts[f"node {at}"] = plain.SerializeToString(deterministic=True)
    for tensor in graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        parts[f"initializer {tensor.name}"] = tensor.data_type, tuple(tensor.dims), array.tobytes()
    parts["number of initializers"] = len(graph.initializer)
    for what, values in (("inputs", graph.input), ("outputs", graph.output)):
        parts[what] = [value.SerializeToString(deterministic=True) for value in values]
    parts["opsets"] = {(entry.domain, entry.version) for entry in model.opset_import}
    return parts


def differences(want, got):
    """What differs, empty if the graphs are the same.

    Compared are nodes in order (with names, attributes and bodies), initializers (name, type, shape, bytes), graph
    inputs and outputs and the opsets; not the inferred shapes, the producer and the IR version.
    """
    a, b = _parts(want), _parts(got)
    return [name for name in {**a, **b} if a.get(name) != b.get(name)]
