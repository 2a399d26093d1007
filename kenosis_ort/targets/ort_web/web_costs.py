"""Costs of the kernels of ONNX Runtime Web in WebAssembly, with SIMD and one thread.

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
from dataclasses import replace
from typing import Final

from kenosis_ort.graph.view import GraphView, ir
from kenosis_ort.targets.costs import CostTable, Work
from kenosis_ort.targets.costs import KernelCost as K
from kenosis_ort.targets.ort_cpu.work import work_of as cpu_work_of

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
