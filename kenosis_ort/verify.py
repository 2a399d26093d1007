"""Checks of a quantized file: the kernels that the runtime runs it on, and whether its numbers add up.

The fusion proof with the kernel of every compute node, conformance to the patterns of a target's document, and scales
and zero points of biases. What clipped products cost on other processors is `kenosis_ort.clipping`'s.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnx

from kenosis_ort.clipping import clipping_loss
from kenosis_ort.errors import OptionError, last_gate, warn_caller
from kenosis_ort.graph.files import made_for
from kenosis_ort.graph.load import read_source
from kenosis_ort.graph.qdq import SourceGraph, SourceNode, indexed
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.runtime.session import Model
from kenosis_ort.targets import DEFAULT_TARGET, TARGETS, Target, get_target
from kenosis_ort.targets.proof import (
    BrokenClause,
    Cause,
    Clause,
    ConvPattern,
    FusionReport,
    KernelReport,
    PatternReport,
    Status,
)

__all__ = [
    "BrokenClause",
    "Cause",
    "Clause",
    "ConvPattern",
    "FusionReport",
    "KernelReport",
    "PatternReport",
    "Problem",
    "Status",
    "check_bias_alignment",
    "clipping_loss",
    "verify_fusion",
    "verify_patterns",
]


@last_gate
def verify_fusion(
    model: Model,
    *,
    plan: PlacementPlan | None = None,
    custom_op_libraries: Sequence[str] = (),
    threads: int = 1,
    target: str | Target | None = None,
) -> FusionReport:
    """Loads a model in a target's runtime at full optimization and reports what executes each of its nodes.

    A model of more than 3,000 nodes is loaded in onnxruntime in pieces, cut through quantized values, because the
    runtime's load time grows with the square of the depth. Nodes of ``If``, ``Loop`` and ``Scan`` bodies are reported
    as well. The model is not run, nothing is left on disk.

    Args:
        model: Path, serialized model or `ModelProto`; external data is read by the runtime only. Not changed.
        plan: The plan behind the model; its reasons are reported for the nodes that it keeps in float.
        custom_op_libraries: Shared libraries of custom operators to register.
        threads: Threads of the session.
        target: Whose runtime is asked: a name, or a `kenosis_ort.targets.Target`; None for the one that the file says
            it was made for, or ``ort-cpu`` where it says nothing.

    Returns:
        One entry per compute node, in the model's order.

    Warns:
        KenosisWarning: The file was made for another target than the one that is asked.

    Raises:
        ModelLoadError: The file is missing or is not an ONNX model.
        VerificationError: The runtime refuses the model.
        OptionError: The target has no runtime that can be asked here.
    """
    source = read_source(model)
    made = made_for(source.proto)
    given = target if target is not None else _provable(made or DEFAULT_TARGET) or DEFAULT_TARGET
    asked = get_target(given)
    if asked.hooks.prove is None:
        provers = sorted(name for name, known in TARGETS.items() if known.hooks.prove is not None)
        raise OptionError(
            f"{asked.unasked}, so that it cannot be asked which kernels it uses",
            where="target",
            fix=f"one of {provers}; the file itself can be compared with the float model by kenosis_ort.compare",
        )
    if made not in (None, asked.name):
        fix = "nothing, if it runs there in the end; else quantize for the runtime that it runs on (target)."
        fix = f"target='{made}'." if _provable(str(made)) else fix
        warn_caller(
            f"{source.name} was made for target '{made}', and the runtime of '{asked.name}' is asked, which may want "
            f"Q and DQ elsewhere. Fix: {fix}"
        )
    return asked.hooks.prove(model, plan=plan, custom_op_libraries=custom_op_libraries, threads=threads)


def _provable(name: str) -> Target | None:
    """The target of a name, if there is one whose runtime can be asked here."""
    known = TARGETS.get(name)
    return None if known is None or known.hooks.prove is None else known


@last_gate
def verify_patterns(model: Model, target: str | Target = "onednn") -> PatternReport:
    """Holds every Conv of a QDQ model, of any origin, against the quantized patterns that a target's document defines.

    Args:
        model: Path, serialized model or `ModelProto`; external data is not read. Not changed.
        target: Whose document: a name, or a `kenosis_ort.targets.Target`.

    Returns:
        One entry per Conv, in the model's order, those of ``If``, ``Loop`` and ``Scan`` bodies included.

    Raises:
        ModelLoadError: The file is missing or is not an ONNX model.
        OptionError: There is no document of that target.
    """
    asked = get_target(target)
    if asked.hooks.conform is None:
        raise OptionError(
            f"target '{asked.name}' has no documented patterns",
            where="target",
            fix=f"one of {sorted(name for name, known in TARGETS.items() if known.hooks.conform is not None)}",
        )
    source = read_source(model)
    return asked.hooks.conform(source.proto, source.folder, asked.name)


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
    graph = indexed(model, base)
    biased = (node for node in graph.nodes if node.op_type in _BIASED and len(node.proto.input) > 2)
    return [problem for node in biased for problem in _bias_problems(node, graph)]


def _bias_problems(node: SourceNode, graph: SourceGraph) -> Iterator[Problem]:
    """Yields what is wrong with the bias of a node."""
    name = node.proto.input[2]
    data, weight, bias = (graph.dq_of(v) for v in node.proto.input[:3])
    if data is None or weight is None or bias is None:
        return
    params = graph.params(bias)
    if params.elem_type != onnx.TensorProto.INT32 or params.scale is None:
        return
    if params.zero_point is not None and np.any(params.zero_point != 0):
        yield Problem("bias-zero-point", node.label, name, f"the zero point of bias '{name}' is not 0")
    a, b = graph.params(data).scale, graph.params(weight).scale
    if a is None or b is None:
        return
    factor = 1.0
    if node.op_type == "Gemm":
        alpha, beta = float(node.attribute("alpha", 1.0)), float(node.attribute("beta", 1.0))
        if beta == 0.0:
            return  # the bias is not read
        factor = alpha / beta
    expected = (a.ravel() * b.ravel() * factor).ravel()
    actual = params.scale.ravel()
    if actual.size != expected.size and 1 not in (actual.size, expected.size):
        what = f"bias '{name}' has {actual.size} scales for {expected.size} channels"
        yield Problem("bias-scale", node.label, name, what)
        return
    error = np.abs(actual - expected) / np.maximum(np.abs(expected), _LEAST_STEP)
    if (error > np.maximum(_SCALE_TOLERANCE, _LEAST_STEP / np.maximum(np.abs(expected), _LEAST_STEP))).any():
        what = f"the scale of bias '{name}' is off input scale x weight scale by up to {100 * error.max():.2g} %"
        yield Problem("bias-scale", node.label, name, what)
