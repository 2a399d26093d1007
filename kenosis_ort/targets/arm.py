"""Target ``arm``: the CPU execution provider of stock ONNX Runtime on 64-bit Arm, from any machine.

The rules are those of ``ort-cpu``; each was proved on the runtime's aarch64 build, which runs on other machines under
emulation (``python benchmarks/arm.py``). Emulation tells kernels, fusions and every bit, but no times. So there is no
cost table, and what rests on the times of x86-64 kernels is left out: the float stems of mobile nets (float Convs have
no blocked layout there, and depthwise integer ones have kernels of their own), channels filled up to tiles of 16, and
weights laid out for matrix tiles.

What differs: int8 activations, which have integer kernels whatever the number of readers; no LayerNormalization made of
its parts, which is less exact there where the mean is far from zero. Float16 behind Q and DQ, which this build refuses
at load, is written for no target.
"""

import platform
from dataclasses import replace
from typing import Final

from onnx import TensorProto

from kenosis_ort.rewrite import USUAL_FORMS
from kenosis_ort.targets.model import Hooks, Target
from kenosis_ort.targets.ort_cpu import ORT_CPU
from kenosis_ort.targets.ort_cpu.rules import is_arm
from kenosis_ort.targets.vocabulary import DataTypes

_HERE: Final = is_arm(platform.machine())
_CPU: Final = ORT_CPU.hooks
_INEXACT: Final = ("collapse_layer_norm", "collapse_affine_norm", "spell_norm")
_FACTS_OF_X86_64: Final = ("int8-activation-branch-float", "int8-branches-behind-barrier")

ARM: Final[Target] = replace(
    ORT_CPU,
    name="arm",
    types=DataTypes(activation=TensorProto.INT8, why="Arm kernels take int8 activations and weights"),
    own_forms=(),
    float_forms=tuple(f.__name__ for f in USUAL_FORMS if f.__name__ not in _INEXACT),
    facts=(
        *(fact for fact in ORT_CPU.facts if fact[0] not in _FACTS_OF_X86_64),
        ("arm-int8-several-readers", "an int8 value with several readers keeps its Convs integer on Arm"),
        ("arm-float16-refused", "a Conv behind Q and DQ of float16 is refused at load"),
        ("arm-norm-stays-in-parts", "a LayerNormalization in parts is left so: the operator is less exact there"),
    ),
    costs=None,
    profiles=(),
    session_entries={} if _HERE else {"session.qdqisint8allowed": "1"},  # x86-64's makes int8 values uint8 at load
    hooks=Hooks(
        prove=_CPU.prove if _HERE else None,
        time=_CPU.time if _HERE else None,
        reclass_integers=_CPU.reclass_integers,
        writes_float=_CPU.writes_float,
        barriers=_CPU.barriers,
    ),
)
