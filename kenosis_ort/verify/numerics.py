"""Whether scales and zero points of a QDQ model add up."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.graph.qdq import SourceGraph, SourceNode

Array = npt.NDArray[Any]
Model = str | os.PathLike[str] | bytes | onnx.ModelProto

_BIASED: Final = frozenset({"Conv", "ConvTranspose", "Gemm"})
_SCALE_TOLERANCE: Final = 1e-6  # relative; a float32 product is within 6e-8 of the exact one
_LEAST_STEP: Final = float(np.finfo(np.float32).smallest_subnormal)  # nothing is stored finer than that


@dataclass(frozen=True)
class Problem:
    """A scale or zero point that does not add up.

    Attributes:
        kind: ``bias-scale`` or ``bias-zero-point``.
        node: The node concerned.
        tensor: The tensor concerned.
        what: One sentence.
    """

    kind: str
    node: str
    tensor: str
    what: str


def check_bias_alignment(model: onnx.ModelProto, *, base: Path | None = None) -> list[Problem]:
    """Checks that every int32 bias has scale ``input_scale * weight_scale`` and zero point 0.

    The runtime ignores the scale of a Gemm's bias: one that is off is silently wrong there. For Gemm the product is
    times ``alpha / beta``.

    Args:
        model: A QDQ model. Not changed.
        base: Folder of its external data.

    Returns:
        One entry per bias that is off, empty if all are right.
    """
    graph = SourceGraph(model, base)
    problems = []
    for node in graph.nodes:
        if node.op_type in _BIASED and len(node.proto.input) > 2:
            problems += _bias_problems(node, graph)
    return problems


def _bias_problems(node: SourceNode, graph: SourceGraph) -> list[Problem]:
    name = node.proto.input[2]
    data, weight, bias = (graph.dq_of(v) for v in node.proto.input[:3])
    if data is None or weight is None or bias is None:
        return []
    params = graph.params(bias)
    if params.elem_type != onnx.TensorProto.INT32 or params.scale is None:
        return []
    problems = []
    if params.zero_point is not None and np.any(params.zero_point != 0):
        problems.append(Problem("bias-zero-point", node.label, name, f"the zero point of bias '{name}' is not 0"))
    a, b = graph.params(data).scale, graph.params(weight).scale
    if a is None or b is None:
        return problems
    factor = 1.0
    if node.op_type == "Gemm":
        alpha, beta = float(node.attribute("alpha", 1.0)), float(node.attribute("beta", 1.0))
        if beta == 0.0:
            return problems  # the bias is not read
        factor = alpha / beta
    expected = (a.ravel() * b.ravel() * factor).ravel()
    actual = params.scale.ravel()
    if actual.size != expected.size and 1 not in (actual.size, expected.size):
        what = f"bias '{name}' has {actual.size} scales for {expected.size} channels"
        return [*problems, Problem("bias-scale", node.label, name, what)]
    error = np.abs(actual - expected) / np.maximum(np.abs(expected), _LEAST_STEP)
    if (error > np.maximum(_SCALE_TOLERANCE, _LEAST_STEP / np.maximum(np.abs(expected), _LEAST_STEP))).any():
        what = f"the scale of bias '{name}' is off input scale x weight scale by up to {100 * error.max():.2g} %"
        problems.append(Problem("bias-scale", node.label, name, what))
    return problems
