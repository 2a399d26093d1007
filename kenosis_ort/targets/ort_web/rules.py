"""The rules of ONNX Runtime Web's WASM build, as they differ from those of stock ONNX Runtime.

The graph optimizers are the same, the kernels are not. Measured on onnxruntime-web 1.30.0 in Node 20 and proved again
on whatever is installed.
"""

from __future__ import annotations

from typing import Final

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
