"""Target ``ort-web``: ONNX Runtime Web on WebAssembly, in the browser and in Node.

Measured on onnxruntime-web 1.30.0 in Node 20 and proved again on whatever is installed; `node` runs it, ``bridge.mjs``
is what runs there. Its graph optimizers are those of ``ort-cpu``, without the blocked layout of float Convs. Its
kernels have SIMD where 8-bit numbers are multiplied, and hardly anywhere else.

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

Costs of the kernels of ONNX Runtime Web in WebAssembly, with SIMD and one thread.

Begun with ``benchmarks/op_costs.py --target ort-web``, the least of 40 runs by the runtime's own profile; Convs, Relu
and Clip are fitted to their times within whole nets, which that command does not repeat. 8-bit
products are three times as fast as float ones, and whatever else integer kernels do is not vectorized: to requantize
takes 1.4 ns a value, to add two of them 0.8, where float takes 0.1. So convolutions that read many channels gain, those
that read few or one by one lose.

Relu, Clip and LeakyRelu in float, outside of a Conv, cost a branch for each value: the times are those of values of
either sign, where the command measures them on positive ones.

Work is counted as for ``ort-cpu``, but for Relu and the pieces of Convs. A Relu counts apart from a Clip, which is
slower in float. Float kernels there take 16 pixels at once, whatever is left of the last 16: what they multiply in vain
counts as pieces, which small pictures are full of (7x7 is computed as 64).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto

from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.qdq import Q
from kenosis_ort.graph.view import GraphView, ir
from kenosis_ort.graph.walk import MAIN_DOMAINS
from kenosis_ort.plan import Kind, PlacementPlan
from kenosis_ort.rewrite import FLOAT_FORMS, OPTIONAL_FORMS
from kenosis_ort.targets.model import DataTypes, Hooks, Requirement, Role, Target, TimedRuntime, rule
from kenosis_ort.targets.ort_cpu import ORT_CPU
from kenosis_ort.targets.ort_cpu.work import work_of as cpu_work_of
from kenosis_ort.targets.ort_web.node import clock, missing, open_runner, prove
from kenosis_ort.targets.profile import CostTable, Work
from kenosis_ort.targets.profile import KernelCost as K

_OTHER: Final = frozenset({"absorb-relu", "absorb-clip"})
_OF_X86_64: Final = frozenset(
    {"absorb-needs-single-consumer", "absorb-clip-needs-scalar-params", "no-absorb-symmetric",
     "residual-needs-q-on-conv", "int8-activation-branch-float", "int8-branches-behind-barrier", "conv-matrix-product",
     "float-prefix"}
)  # fmt: skip

RULES: Final = (
    *(each for each in ORT_CPU.rules if each.id not in _OTHER),
    rule("web-relu-as-table", "Relu", Role.UNARY,
        "Relu is a table look-up, QLinearLeakyRelu of slope 0; in the requantization it is a branch (2.6x for 1.9x)"),
    rule("web-clip-as-table", "Clip", Role.UNARY,
        "Clip from 0 is the same look-up, whose table ends at the upper bound; in float it is a branch too",
        requires=(Requirement.CLIP_AT_ZERO,)),
)  # fmt: skip

FACTS: Final = (
    *(fact for fact in ORT_CPU.facts if fact[0] not in _OF_X86_64),
    ("web-range-keeps-negatives", "in front of a Relu or Clip an integer kernel's range keeps what is negative"),
    ("web-depthwise-float", "depthwise integer Convs have no fast kernel (0.17x to 0.7x of float)"),
    ("web-attention-refused", "the operator Attention that other targets gain by is refused at load"),
)  # fmt: skip


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


_PIXELS: Final = 16
_BY_PIXELS: Final = frozenset({"conv-pointwise", "conv-dense", "conv-depthwise", "conv-depthwise-odd"})


def work_of(view: GraphView, node: ir.Node) -> Work | None:
    """Work of a node, None where shapes that matter are not known; as for ``ort-cpu``."""
    work = cpu_work_of(view, node)
    if work is not None and node.op_type == "Relu":
        return replace(work, shape_class="relu")
    out = view.shape_of_one(node.outputs[0]) if work is not None and node.op_type == "Conv" else None
    return work if work is None or out is None else conv_work(work, out[0] * math.prod(out[2:]))


def conv_work(work: Work, pixels: int) -> Work:
    """The work of a Conv with the products that are made in vain as its pieces.

    Args:
        work: Its work on ``ort-cpu``.
        pixels: Positions written.
    """
    if work.shape_class not in _BY_PIXELS or not pixels:
        return work
    return replace(work, pieces=-pixels % _PIXELS * work.macs // pixels)


ORT_WEB_COSTS: Final = CostTable(
    measured_on="AMD EPYC of family 26 (Zen 5), onnxruntime-web 1.30.0 in Node.js 20, one thread",
    command="python benchmarks/op_costs.py --target ort-web",
    run=90.0,
    kernels={  # (float, integer): ns a call, then ps a product, an element written, a piece gathered
        "conv-pointwise": (K(3270, 60.6, 198, 61.1), K(6550, 18.6, 1430, 25.9)),
        "conv-dense": (K(6410, 70.8, 22.9, 58.1), K(7730, 21.8, 1850, 13.5)),
        "conv-depthwise": (K(3880, 241, 0, 2310), K(7250, 633, 2140, 122)),
        "conv-depthwise-odd": (K(4170, 252, 0, 2200), K(6120, 676, 1570, 0)),
        "conv-few-channels": (K(7100, 74.6, 0, 224), K(32820, 24.2, 266, 10900)),
        "conv-grouped": (K(840, 65.2, 0, 4160), K(2710, 31.8, 0, 25300)),
        "conv-grouped-odd": (K(43430, 51.3, 0, 0), K(6360, 61.8, 0, 0)),
        "conv-transpose": (K(4000, 100, 500, 0), None),
        "linear-one": (K(860, 27.5, 0, 33.9), K(3050, 59.3, 0, 84.2)),
        "linear": (K(1090, 60.2, 0, 3.9), K(2520, 18.6, 0, 98.8)),
        "matmul": (K(1050, 58.4, 0, 0), None),
        "recurrent": (K(4000, 120, 0, 0), None),
        "add": (K(460, 0, 98.5, 0), K(3680, 0, 837, 0)),
        "mul": (K(440, 0, 107, 0), K(3580, 0, 846, 0)),
        "relu": (K(100, 0, 1300, 0), K(1870, 0, 362, 0)),
        "clip": (K(100, 0, 4000, 0), K(1870, 0, 362, 0)),
        "leaky-relu": (K(100, 0, 1300, 0), K(1870, 0, 362, 0)),
        "sigmoid": (K(100, 0, 1440, 0), K(1870, 0, 365, 0)),
        "hard-sigmoid": (K(220, 0, 276, 0), None),
        "erf": (K(100, 0, 3310, 0), None),
        "softmax": (K(100, 0, 1010, 0), None),
        "norm": (K(4130, 0, 4360, 0), None),
        "skip-norm": (K(4130, 0, 4360, 0), None),
        "batch-norm": (K(2320, 0, 95.1, 0), None),
        "max-pool": (K(380, 252, 0, 0), K(1310, 230, 0, 0)),
        "average-pool": (K(100, 595, 0, 0), None),
        "global-pool": (K(100, 0, 93.4, 0), K(2460, 0, 72.9, 0)),
        "concat": (K(480, 0, 75.1, 0), K(3740, 0, 18, 0)),
        "transpose": (K(100, 0, 212, 0), K(100, 0, 204, 0)),
        "resize": (K(2100, 0, 88.9, 0), K(2580, 0, 90.9, 0)),
        "nothing": (K(1000), K(1000)),
        "other": (K(1000, 0, 200, 0), None),
        "quantize": (K(2170, 0, 454, 0), K(2170, 0, 454, 0)),
        "dequantize": (K(2550, 0, 165, 0), K(2550, 0, 165, 0)),
        "channels-last": (K(1320, 0, 215, 0), K(1320, 0, 215, 0)),
    },
    error=1.3,
    work=work_of,
    fused=frozenset({"relu", "clip", "leaky-relu", "hard-sigmoid"}),
    anywhere=True,
)


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
    float_forms=tuple(f.__name__ for f in FLOAT_FORMS if f not in OPTIONAL_FORMS and f.__name__ not in _REFUSED),
    kernel_forms=("sum_to_add", "linear_to_gemm"),
    own_forms=(),
    facts=FACTS,
    costs=ORT_WEB_COSTS,
    profiles=(),
    hooks=Hooks(
        prove=None if _WHY_NOT else prove,
        time=None if _WHY_NOT else TimedRuntime(open_runner, clock=clock, other_forms=("dynamic", "weight-only")),
        why_unasked=_WHY_NOT,
        reclass_integers=ORT_CPU.hooks.reclass_integers,
        writes_float=ORT_CPU.hooks.writes_float,
        spell=spell_relus,
        barriers=ORT_CPU.hooks.barriers,
    ),
)

__all__ = ["ORT_WEB"]
