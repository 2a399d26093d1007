"""What may be wrong with the Q and DQ of a model, whoever wrote it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.graph.constants import LAYERS
from kenosis_ort.graph.qdq import Q, SourceGraph, SourceNode
from kenosis_ort.verify import Problem


def check_quantization(model: onnx.ModelProto) -> list[Problem]:
    """Checks every Q and DQ: scales finite and above zero, Q and DQ of a pair alike, one zero point a weight.

    With an integer zero point inside the type's range 0.0 is exactly representable. The runtime's integer kernels take
    scales by channel, but one zero point for all channels.

    Args:
        model: A QDQ model. Not changed.

    Returns:
        One entry per fault, empty if there is none. Parameters that are not constant are not judged.
    """
    graph = SourceGraph(model)
    problems = []
    for node in graph.nodes:
        if not node.is_qdq:
            continue
        value = node.proto.input[0]
        params = graph.params(node)
        if params.scale is not None and not (np.all(np.isfinite(params.scale)) and np.all(params.scale > 0)):
            problems.append(Problem("scale", node.label, value, f"the scale of '{value}' is not finite and above zero"))
        if node.op_type == Q:
            continue
        maker = graph.producer.get(value)
        if maker is not None and maker.op_type == Q and not _alike(maker, node, graph):
            what = f"Q and DQ of '{maker.proto.input[0]}' have different parameters"
            problems.append(Problem("pair", node.label, value, what))
        if graph.is_initializer(value) and _is_weight(node, graph) and _differs(params.zero_point):
            what = f"the channels of weight '{value}' have different zero points"
            problems.append(Problem("weight-zero-point", node.label, value, what))
    return problems


def _alike(quantizer: SourceNode, dequantizer: SourceNode, graph: SourceGraph) -> bool:
    if list(quantizer.proto.input[1:]) == list(dequantizer.proto.input[1:]):
        return True
    a, b = graph.params(quantizer), graph.params(dequantizer)
    return a.scale is None or b.scale is None or a.same(b)


def _is_weight(dequantizer: SourceNode, graph: SourceGraph) -> bool:
    value = dequantizer.proto.output[0]
    return any(
        reader.op_type in LAYERS and list(reader.proto.input)[1:2] == [value]
        for reader in graph.consumers.get(value, [])
    )


def _differs(zero_point: npt.NDArray[np.int64] | None) -> bool:
    return zero_point is not None and bool(np.any(zero_point != zero_point.ravel()[0]))
