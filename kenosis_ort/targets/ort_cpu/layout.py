"""Where float is better than the table says: pools that are slow beside channels-last, and what a MatMul writes.

An integer Conv works channels-last, and the runtime lays out what follows it the same way, as far as the operators
let it; everything else stays channels-first. A MaxPool on bytes has a fast kernel channels-last only. Channels-first
it is 30 times as slow as in float (192 channels of 56x56, window 3, stride 2: 3.2 ms for 0.1), so such a pool stays
float, and its output is quantized behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Final

from kenosis_ort.graph.onnx_ir import ir
from kenosis_ort.graph.view import GraphView
from kenosis_ort.options import PlacementOptions
from kenosis_ort.targets.model import NodeClass, Role

_RULE: Final = "maxpool-channels-first-slow"
CHANNELS_LAST: Final = frozenset(
    {"Add", "Mul", "Concat", "Sigmoid", "LeakyRelu", "Relu", "Clip", "MaxPool",
     "Sub", "Div", "Pow", "Sum", "Tanh", "HardSigmoid", "HardSwish", "Elu", "Gelu", "QuickGelu", "PRelu", "Mish",
     "Softplus", "Erf", "Exp", "Sqrt", "Abs", "Neg", "Reciprocal", "Softsign", "Selu", "Celu",
     "Slice", "Split", "Resize", "Pad", "Max", "Min"}
)  # fmt: skip
"""Operators behind an integer Conv that the runtime runs in its channels-last layout."""


def leave_slow_pools_float(
    view: GraphView, classes: Mapping[str, NodeClass], integer: Collection[str]
) -> dict[str, NodeClass]:
    """Returns the classes with each MaxPool made float whose data is not channels-last.

    Args:
        view: The prepared model.
        classes: The classes so far.
        integer: Names of the nodes that would run in integer.
    """
    out = dict(classes)
    laid_out: set[int] = set()
    for node in view.nodes:
        c = out[str(node.name)]
        runs = str(node.name) in integer
        if runs and node.op_type == "MaxPool" and not _all(c, laid_out):
            out[str(node.name)] = replace(
                c, role=Role.ISLAND, rule=_RULE, reason="its data is not channels-last, where int8 pools are slow"
            )
            continue
        if _hands_on(c, runs, laid_out):
            laid_out.update(id(v) for v in node.outputs)
    return out


def _hands_on(c: NodeClass, runs: bool, laid_out: set[int]) -> bool:
    """Tells whether the runtime has the outputs of a node channels-last."""
    if c.role is Role.ANCHOR:
        return runs and c.node.op_type == "Conv"
    if c.node.op_type not in CHANNELS_LAST:
        return False
    # The runtime transposes the smaller part of the operands of an integer kernel; it does not for float ones.
    return any(id(v) in laid_out for v in c.data) if runs else _all(c, laid_out)


def _all(c: NodeClass, laid_out: set[int]) -> bool:
    return bool(c.data) and all(id(v) in laid_out for v in c.data)


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
