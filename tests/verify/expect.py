"""Short forms for what the tests assert about a fusion report."""

from __future__ import annotations

import numpy as np
import onnx

from kenosis_ort.graph.constants import LAYERS
from kenosis_ort.graph.qdq import Q, SourceGraph
from kenosis_ort.graph.walk import known_as
from kenosis_ort.verify import FusionReport, KernelReport, Status, verify_fusion


def report(model: onnx.ModelProto) -> FusionReport:
    """Returns the report, after checking what holds for every report."""
    found = verify_fusion(model)
    check_complete(model, found)
    return found


def check_complete(model: onnx.ModelProto, found: FusionReport) -> None:
    """Every compute node of the main graph has exactly one entry, and absorbers know what they absorbed."""
    compute = [n for n in model.graph.node if n.op_type not in ("QuantizeLinear", "DequantizeLinear", "Constant")]
    main = [k for k in found.kernels if not k.graph]
    assert [k.op_type for k in main] == [known_as(n.domain, n.op_type) for n in compute]
    for k in found.kernels:
        if k.absorbed_into is not None:
            owner = next(o for o in found.kernels if o.node == k.absorbed_into)
            assert k.node in owner.absorbed
            assert k.kernel == owner.kernel
            assert k.status is Status.ABSORBED
        if k.status is Status.FLOAT:
            assert k.reason
            assert not k.integer


def one(found: FusionReport, op_type: str) -> KernelReport:
    """Returns the only entry of an operator type."""
    entries = [k for k in found.kernels if k.op_type == op_type]
    assert len(entries) == 1, f"{len(entries)} nodes of type {op_type}"
    return entries[0]


def faults(model: onnx.ModelProto) -> list[str]:
    """What is wrong with the Q and DQ of a model, whoever wrote it, by kind; what is not constant is not judged.

    A scale is finite and above zero, Q and DQ of a pair are alike, and the channels of a weight have one zero point.
    """
    graph = SourceGraph(model)
    weights = {v for node in graph.nodes if node.op_type in LAYERS for v in list(node.proto.input)[1:2]}
    found = []
    for node in (n for n in graph.nodes if n.is_qdq):
        params, maker = graph.params(node), graph.producer.get(node.proto.input[0])
        if params.scale is not None and not (np.isfinite(params.scale) & (params.scale > 0)).all():
            found.append("scale")
        if node.op_type != Q and maker is not None and maker.op_type == Q:
            its = graph.params(maker)
            if params.scale is not None and its.scale is not None and not its.same(params):
                found.append("pair")
        if node.proto.output[0] in weights and params.zero_point is not None and np.ptp(params.zero_point):
            found.append("weight-zero-point")
    return found
