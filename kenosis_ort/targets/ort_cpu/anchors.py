"""Where a Gemm or MatMul may write float on its integer kernel."""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from kenosis_ort.graph.view import GraphView
from kenosis_ort.options import PlacementOptions

_ABSORBED: Final = ("Relu", "Clip")


def writes_float(view: GraphView, node: ir.Node, options: PlacementOptions) -> bool:
    """Tells whether the integer kernel of a Gemm or MatMul may write float; a Gemm needs an int32 bias for it.

    Source: rules gemm-float-output and gemm-float-bias-needs-output-q.
    """
    float_bias = node.op_type == "Gemm" and len(node.inputs) > 2 and node.inputs[2] is not None
    return (
        (options.quantize_bias or not float_bias)
        and not _becomes_float_gemm(view, options, node)
        and not _hidden_by_activation(view, node)
    )


def _becomes_float_gemm(view: GraphView, options: PlacementOptions, node: ir.Node) -> bool:
    """Tells whether the session would merge a MatMul with the Add behind it into a Gemm that runs in float.

    Source: rules matmul-residual-float-gemm and matmul-add-float-bias-trap. A bias vector is no danger where it becomes
    int32.
    """
    consumer = view.sole_consumer(node.outputs[0]) if node.op_type == "MatMul" else None
    if consumer is None or consumer.node.op_type != "Add":
        return False
    other = consumer.node.inputs[1 - consumer.index]
    if other is not None and view.is_row_bias(node, other):
        return not options.quantize_bias
    return other is not None and view.rank(node.outputs[0]) in (2, None)


def _hidden_by_activation(view: GraphView, node: ir.Node) -> bool:
    """Tells whether the session would look for the Q of an anchor behind its Relu or Clip, and find another node.

    Source: rule activation-hides-float-output. Where the activation has several readers the session does not look.
    """
    consumer = view.sole_consumer(node.outputs[0])
    if consumer is None or consumer.node.op_type not in _ABSORBED:
        return False
    return view.sole_consumer(consumer.node.outputs[0]) is not None
