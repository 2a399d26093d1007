"""The rules of ONNX Runtime Web's WASM build, as they differ from those of stock ONNX Runtime.

The graph optimizers are the same, the kernels are not. Measured on onnxruntime-web 1.30.0 in Node 20 and proved again
on whatever is installed.

Relu and Clip as a table look-up.

``Relu(x) = max(x, 0)``, and ``LeakyRelu(x)`` of slope 0 is ``x`` where ``x >= 0`` and ``0 * x = 0`` elsewhere: the same
for every finite number, and behind a DequantizeLinear there are no others. ``Clip(x, 0, b) = min(Relu(x), b)``, and the
quantization behind it does the ``min`` where its largest value is no more than half a step above ``b``.

Between integer kernels stock ONNX Runtime lets a Relu vanish into the requantization of the kernel before it. In the
WASM build that requantization clips by a branch for each value, which goes either way where about half of the values
are negative: 5 to 8 ns a value for 1. So the values are quantized as they come, and the Relu is a table look-up of its
own, for which the runtime has QLinearLeakyRelu (0.4 ns). Pointwise Convs, 24 to 144 channels of 56x56: 0.66x of float
for 0.23x; dense ones, 64 channels of 28x28: 2.6x for 1.9x.

In float, Relu, LeakyRelu and Clip outside of a kernel are such branches themselves (1.3 to 4 ns), so that the look-up
stands in front of a float node too. Only what the plan calls integer is spelled that way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import onnx
import onnx.numpy_helper

from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.qdq import Q
from kenosis_ort.graph.walk import MAIN_DOMAINS
from kenosis_ort.plan import Kind, PlacementPlan
from kenosis_ort.targets.model import FusionRule, Requirement, Role
from kenosis_ort.targets.ort_cpu.rules import FACTS as CPU_FACTS
from kenosis_ort.targets.ort_cpu.rules import RULES as CPU_RULES

_OTHER: Final = frozenset({"absorb-relu", "absorb-clip"})
_OF_X86_64: Final = frozenset(
    {
        "absorb-needs-single-consumer",
        "absorb-clip-needs-scalar-params",
        "no-absorb-symmetric",
        "residual-needs-q-on-conv",
        "int8-activation-branch-float",
        "int8-branches-behind-barrier",
        "conv-matrix-product",
        "float-prefix",
    }
)

RULES: Final = (
    *(rule for rule in CPU_RULES if rule.id not in _OTHER),
    FusionRule(
        "web-relu-as-table",
        ("Relu",),
        Role.UNARY,
        "Relu is a table look-up, QLinearLeakyRelu of slope 0; in the requantization it is a branch (2.6x for 1.9x)",
    ),
    FusionRule(
        "web-clip-as-table",
        ("Clip",),
        Role.UNARY,
        "Clip from 0 is the same look-up, whose table ends at the upper bound; in float it is a branch too",
        requires=(Requirement.CLIP_AT_ZERO,),
    ),
)

FACTS: Final = (
    *(fact for fact in CPU_FACTS if fact[0] not in _OF_X86_64),
    ("web-range-keeps-negatives", "in front of a Relu or Clip an integer kernel's range keeps what is negative"),
    ("web-depthwise-float", "depthwise integer Convs have no fast kernel (0.17x to 0.7x of float)"),
    ("web-attention-refused", "the operator Attention that other targets gain by is refused at load"),
)


_SPELLED: Final = ("Relu", "Clip")


def spell_relus(quantized: onnx.ModelProto, plan: PlacementPlan) -> None:
    """Turns each Relu and Clip from 0 that a plan calls integer into a LeakyRelu of slope 0, in place.

    A Clip stays where the quantization behind it reaches above its upper bound, as it may where it shares its scale.

    Args:
        quantized: The quantized model.
        plan: Its placement.
    """
    graph = quantized.graph
    nodes = [
        node
        for node in graph.node
        if node.op_type in _SPELLED
        and node.domain in MAIN_DOMAINS
        and (decision := plan.by_node.get(node.name)) is not None
        and decision.kind is Kind.INTEGER
    ]
    constants = {tensor.name: tensor for tensor in graph.initializer} if nodes else {}
    behind: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node if nodes else ():
        for value in node.input:
            behind.setdefault(value, []).append(node)
    for node in nodes:
        if node.op_type == "Clip" and not _ends_at(node, behind.get(node.output[0], []), constants):
            continue
        del node.input[1:], node.attribute[:]
        node.op_type = "LeakyRelu"
        node.attribute.append(onnx.helper.make_attribute("alpha", 0.0))


def _ends_at(clip: onnx.NodeProto, readers: list[onnx.NodeProto], constants: Mapping[str, onnx.TensorProto]) -> bool:
    """Whether all that reads a Clip quantizes it up to its upper bound and no further."""
    given = [a.f for a in clip.attribute if a.name == "max"]
    if len(clip.input) > 2 and clip.input[2] in constants:
        given = [float(array_in(constants[clip.input[2]]).reshape(-1)[0])]
    if not given:
        return len(clip.input) <= 2 or not clip.input[2]
    for reader in readers:
        if reader.op_type != Q or any(name not in constants for name in reader.input[1:]) or len(reader.input) < 3:
            return False
        scale, zero_point = (array_in(constants[name]) for name in reader.input[1:])
        most = float(np.iinfo(zero_point.dtype).max) - float(zero_point.reshape(-1)[0])
        step = float(scale.reshape(-1)[0])
        if most * step > given[0] + 0.5 * step:
            return False
    return bool(readers)
