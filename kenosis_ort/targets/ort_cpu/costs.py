"""What the kernels of stock ONNX Runtime cost on an x86-64 server core with AVX512-VNNI.

Printed by ``benchmarks/op_costs.py``. Absolute times differ between processors; the ratios of float to integer are what
decisions rest on. They hold for processors whose 8-bit products are exact (VNNI, and Arm with dot products alike in
kind); without such products integer is slower than the table says. Linear layers of many lines ran on AMX, which
makes them up to three times faster than VNNI alone.

Against measured nets (``benchmarks/cost_model.py``): speed relative to float within a factor of 1.15 as root mean
square over 30 nets and 1.42 at most, some mobile nets being underrated and transformers overrated; absolute times right
up to a millisecond and up to 2 too low beyond, where activations no longer fit the caches.
"""

from __future__ import annotations

from typing import Final

from kenosis_ort.targets.costs import CostTable
from kenosis_ort.targets.costs import KernelCost as K
from kenosis_ort.targets.ort_cpu.work import work_of

ORT_CPU_COSTS: Final = CostTable(
    measured_on="Intel Xeon of the Sapphire Rapids family at 2.6 GHz, onnxruntime 1.31.1, one thread",
    command="python benchmarks/op_costs.py",
    run=4.0,
    kernels={  # (float, integer): ns a call, then ps a product, an element written, a piece gathered
        "conv-pointwise": (K(600, 11.2, 77.3, 0), K(890, 2.53, 170, 0)),
        "conv-dense": (K(1550, 12, 0, 2520), K(1350, 3.06, 70.8, 4570)),
        "conv-depthwise": (K(560, 15.8, 94.2, 0), K(1030, 25.4, 106, 940)),
        "conv-depthwise-odd": (K(680, 17.4, 105, 28.2), K(1300, 72.7, 241, 1060)),
        "conv-few-channels": (K(140, 11, 29.2, 1330), K(5010, 4.28, 356, 6150)),
        "conv-grouped": (K(180, 13.5, 0, 806), K(100, 4.16, 26.5, 9440)),
        "conv-grouped-odd": (K(6550, 38.5, 0, 0), K(100, 38.3, 0, 0)),
        "conv-transpose": (K(2000, 20, 100, 0), None),
        "linear-one": (K(100, 51.6, 0, 129), K(970, 19.3, 0, 14.3)),
        "linear": (K(100, 13.9, 34.7, 61.9), K(910, 1.2, 330, 22.9)),
        "matmul": (K(1380, 12.3, 64.3, 0), None),
        "recurrent": (K(2000, 60, 0, 0), None),
        "add": (K(260, 0, 110, 0), K(440, 0, 126, 0)),
        "mul": (K(260, 0, 109, 0), K(370, 0, 237, 0)),
        "clip": (K(100, 0, 104, 0), None),
        "leaky-relu": (K(260, 0, 174, 0), K(280, 0, 234, 0)),
        "sigmoid": (K(260, 0, 297, 0), K(280, 0, 236, 0)),
        "hard-sigmoid": (K(470, 0, 256, 0), None),
        "erf": (K(210, 0, 511, 0), None),
        "softmax": (K(420, 0, 245, 0), None),
        "norm": (K(550, 0, 472, 0), None),
        "skip-norm": (K(620, 0, 4000, 0), None),
        "batch-norm": (K(420, 0, 112, 0), None),
        "max-pool": (K(110, 27.7, 0, 0), K(270, 39.1, 0, 0)),
        "average-pool": (K(110, 27.7, 0, 0), None),
        "global-pool": (K(100, 0, 72.9, 0), K(1150, 0, 39.2, 0)),
        "concat": (K(850, 0, 96, 0), K(1110, 0, 25.5, 0)),
        "transpose": (K(180, 0, 169, 0), K(120, 0, 57, 0)),
        "resize": (K(920, 0, 100, 0), K(1210, 0, 50.8, 0)),
        "nothing": (K(150), K(150)),
        "other": (K(400, 0, 200, 0), None),
        "quantize": (K(310, 0, 239, 0), K(310, 0, 239, 0)),
        "dequantize": (K(140, 0, 114, 0), K(140, 0, 114, 0)),
        "channels-last": (K(100, 0, 67.6, 0), K(100, 0, 67.6, 0)),
        "blocked": (K(360, 0, 127, 0), K(360, 0, 127, 0)),
    },
    error=1.42,
    work=work_of,
    fused=frozenset({"clip", "leaky-relu", "hard-sigmoid"}),
    blocked=frozenset({"Conv", "MaxPool", "AveragePool", "GlobalAveragePool"}),
)
