"""Target ``ort-web``: ONNX Runtime Web on WebAssembly, in the browser and in Node.

`rules` is the table, `costs` what kernels cost, `relu_as_table` the form of activations that suits its kernels; `node`
runs the runtime in Node, ``bridge.mjs`` is what runs there, `proof` reads the graphs that it optimized.

Its graph optimizers are those of ``ort-cpu``, without the blocked layout of float Convs. Its kernels have SIMD where
8-bit numbers are multiplied, and hardly anywhere else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnx import TensorProto

from kenosis_ort.rewrite import FLOAT_FORMS, OPTIONAL_FORMS
from kenosis_ort.targets.model import DataTypes, Target, TimedRuntime
from kenosis_ort.targets.ort_cpu import ORT_CPU
from kenosis_ort.targets.ort_web.node import clock, missing, open_runner, prove
from kenosis_ort.targets.ort_web.web_costs import ORT_WEB_COSTS
from kenosis_ort.targets.ort_web.web_rules import FACTS, RULES, spell_relus

_WHY_NOT: Final = missing()
_REFUSED: Final = ("fuse_attention",)

ORT_WEB: Final[Target] = replace(
    ORT_CPU,
    name="ort-web",
    rules=RULES,
    absorbs=(),
    clamps=(),
    clips_slowly=True,
    eager=("Relu", "Clip"),
    types=DataTypes(
        activation=TensorProto.UINT8,
        weight=TensorProto.INT8,
        why="uint8 activations, int8 weights by channel: 8-bit products are exact in WebAssembly",
    ),
    host=None,
    reclass=None,
    refine=None,
    float_forms=tuple(f.__name__ for f in FLOAT_FORMS if f not in OPTIONAL_FORMS and f.__name__ not in _REFUSED),
    kernel_forms=("sum_to_add", "linear_to_gemm"),
    own_forms=(),
    spell=spell_relus,
    facts=FACTS,
    costs=ORT_WEB_COSTS,
    profiles=(),
    why_unasked=_WHY_NOT,
    prove=None if _WHY_NOT else prove,
    time=None if _WHY_NOT else TimedRuntime(open_runner, clock=clock, other_forms=("dynamic", "weight-only")),
)

__all__ = ["ORT_WEB"]
