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
        "conv-pointwise": (K(590, 11, 85.3, 0), K(760, 2.43, 177, 0)),
        "conv-dense": (K(1550, 12.1, 0, 2350), K(1340, 3.04, 66.5, 4520)),
        "conv-depthwise": (K(560, 15.4, 98.8, 0), K(1070, 24.6, 107, 932)),
        "conv-depthwise-odd": (K(670, 15.6, 120, 56.5), K(1300, 70.2, 250, 1140)),
        "conv-few-channels": (K(220, 11.3, 6.36, 1340), K(2820, 1.89, 402, 6390)),
        "conv-grouped": (K(100, 12.5, 0, 1240), K(100, 3.43, 60.2, 10100)),
        "conv-grouped-odd": (K(15550, 35.2, 0, 0), K(880, 37, 0, 0)),
        "conv-transpose": (K(2000, 20, 100, 0), None),
        "linear-one": (K(100, 48, 0, 112), K(1190, 16, 0, 15.1)),
        "linear": (K(100, 13, 85.7, 59.2), K(1130, 0.987, 333, 24)),
        "matmul": (K(1380, 12.3, 64.3, 0), None),
        "recurrent": (K(2000, 60, 0, 0), None),
        "add": (K(240, 0, 109, 0), K(400, 0, 126, 0)),
        "mul": (K(240, 0, 104, 0), K(300, 0, 232, 0)),
        "clip": (K(100, 0, 106, 0), None),
        "leaky-relu": (K(230, 0, 171, 0), K(270, 0, 233, 0)),
        "sigmoid": (K(250, 0, 280, 0), K(270, 0, 230, 0)),
        "hard-sigmoid": (K(480, 0, 249, 0), None),
        "erf": (K(200, 0, 527, 0), None),
        "softmax": (K(450, 0, 241, 0), None),
        "norm": (K(620, 0, 483, 0), None),
        "skip-norm": (K(620, 0, 4000, 0), None),
        "batch-norm": (K(420, 0, 108, 0), None),
        "max-pool": (K(110, 27.7, 0, 0), K(270, 39.1, 0, 0)),
        "average-pool": (K(110, 27.7, 0, 0), None),
        "global-pool": (K(100, 0, 72.9, 0), K(1120, 0, 31, 0)),
        "concat": (K(840, 0, 96, 0), K(1100, 0, 25.5, 0)),
        "transpose": (K(180, 0, 168, 0), K(130, 0, 46.4, 0)),
        "resize": (K(920, 0, 100, 0), K(1200, 0, 52.1, 0)),
        "nothing": (K(150), K(150)),
        "other": (K(400, 0, 200, 0), None),
        "quantize": (K(300, 0, 200, 0), K(300, 0, 200, 0)),
        "dequantize": (K(170, 0, 118, 0), K(170, 0, 118, 0)),
        "channels-last": (K(100, 0, 69, 0), K(100, 0, 69, 0)),
    },
    error=1.25,
)
