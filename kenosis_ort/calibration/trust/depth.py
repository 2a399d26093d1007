"""How deep in a net a tensor stands."""

from __future__ import annotations

import onnx

from kenosis_ort.graph.operators import LAYERS, Is, having

_DEEPER = LAYERS | having(Is.RECURRENT) | {"Attention"}


def depths(proto: onnx.ModelProto) -> dict[str, float]:
    """Returns the depth of every tensor of the main graph: layers on the longest way to it, as a share of the most.

    Layers are Conv, Gemm, MatMul and recurrent ones; the inputs' depth is 0.
    """
    layers: dict[str, int] = {value.name: 0 for value in proto.graph.input}
    for node in proto.graph.node:
        deepest = max((layers.get(name, 0) for name in node.input), default=0)
        layers.update(dict.fromkeys(node.output, deepest + (node.op_type in _DEEPER)))
    most = max(layers.values(), default=0)
    return {name: count / most if most else 0.0 for name, count in layers.items()}
