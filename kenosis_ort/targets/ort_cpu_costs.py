"""What the kernels of stock ONNX Runtime cost on an x86-64 server core with AVX512-VNNI.

Printed by ``benchmarks/op_costs.py``. Absolute times differ between processors; the ratios of float to integer are what
decisions rest on. They hold for processors whose 8-bit products are exact (VNNI, and Arm with dot products alike in
kind); without such products integer is slower than the table says.
"""

from __future__ import annotations

from typing import Final

from kenosis_ort.targets.costs import CostTable
from kenosis_ort.targets.costs import KernelCost as K

ORT_CPU_COSTS: Final = CostTable(
    measured_on="Intel Xeon of the Sapphire Rapids family at 2.6 GHz, onnxruntime 1.31.1, one thread",
    command="python benchmarks/op_costs.py",
    run=4.0,
    kernels={  # (float, integer): ns a call, then ps a product, an element written, a piece gathered
        "conv-pointwise": (K(950, 10.7, 97.9, 0), K(1850, 2.38, 167, 0)),
        "conv-dense": (K(1390, 12, 0, 2210), K(2630, 2.95, 49.2, 4650)),
        "conv-depthwise": (K(850, 15.4, 92.2, 0), K(1870, 24, 108, 920)),
        "conv-depthwise-odd": (K(1080, 14.9, 129, 56.7), K(1690, 67.8, 246, 1180)),
        "conv-few-channels": (K(730, 11.3, 35.1, 1130), K(3150, 2.92, 369, 6380)),
        "conv-grouped": (K(720, 12.1, 0, 1230), K(730, 3.1, 88.7, 9750)),
        "conv-grouped-odd": (K(21190, 31.8, 0, 0), K(3780, 35.4, 0, 0)),
        "conv-transpose": (K(5000, 20, 100, 0), None),
        "linear-one": (K(480, 49.2, 0, 0), K(2110, 11.9, 3440, 0.429)),
        "linear": (K(1270, 12.6, 215, 39.8), K(1630, 0.796, 396, 13)),
        "matmul": (K(2490, 12.6, 29.8, 0), None),
        "recurrent": (K(5000, 49.2, 0, 0), None),
        "add": (K(650, 0, 123, 0), K(800, 0, 142, 0)),
        "mul": (K(670, 0, 139, 0), K(1490, 0, 235, 0)),
        "clip": (K(300, 0, 125, 0), None),
        "leaky-relu": (K(550, 0, 199, 0), K(480, 0, 244, 0)),
        "sigmoid": (K(300, 0, 314, 0), K(490, 0, 237, 0)),
        "hard-sigmoid": (K(500, 0, 298, 0), None),
        "erf": (K(690, 0, 521, 0), None),
        "softmax": (K(960, 0, 256, 0), None),
        "norm": (K(740, 0, 486, 0), None),
        "skip-norm": (K(740, 0, 4000, 0), None),
        "batch-norm": (K(700, 0, 134, 0), None),
        "max-pool": (K(300, 32.3, 0, 0), K(990, 30.9, 0, 0)),
        "average-pool": (K(300, 33.4, 0, 0), None),
        "global-pool": (K(300, 0, 74.9, 0), K(850, 0, 36.1, 0)),
        "concat": (K(380, 0, 118, 0), K(830, 0, 30.6, 0)),
        "transpose": (K(570, 0, 171, 0), K(300, 0, 62.1, 0)),
        "resize": (K(710, 0, 114, 0), K(1710, 0, 47.1, 0)),
        "nothing": (K(300), K(300)),
        "other": (K(700, 0, 200, 0), None),
        "quantize": (K(1350, 0, 261, 0), K(1350, 0, 261, 0)),
        "dequantize": (K(510, 0, 134, 0), K(510, 0, 134, 0)),
        "channels-last": (K(560, 0, 84.1, 0), K(560, 0, 84.1, 0)),
    },
    error=1.25,
)
