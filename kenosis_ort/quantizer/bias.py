"""Stage 3: int32 bias at exactly ``input_scale * weight_scale``, zero point 0, in float64.

The runtime's kernels multiply the two scales themselves and trust the bias to be on that grid; a Gemm whose bias
is on another grid is silently wrong (rule bias-scale-mismatch-gemm-wrong). Source: Kenosis paper, stage 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class QuantizedBias:
    """Attributes: ``values`` int32 (channels,); ``scale`` float32, shape () or (channels,)."""

    values: npt.NDArray[np.int32]
    scale: npt.NDArray[np.float32]


def quantize_bias(
    bias: npt.NDArray[np.generic], *, input_scale: float, weight_scale: npt.NDArray[np.float32], beta: float = 1.0
) -> QuantizedBias:
    """Quantizes a bias vector.

    Args:
        bias: Real bias, shape (channels,).
        input_scale: Scale of the data input, a float32 value.
        weight_scale: Scale of the weights, shape () or (channels,).
        beta: Gemm's factor on the bias, folded in here.
    """
    scale = np.float32(input_scale) * weight_scale.astype(np.float32)
    steps = np.asarray(bias, dtype=np.float64) * beta / scale.astype(np.float64)
    limit = np.iinfo(np.int32)
    return QuantizedBias(np.clip(np.rint(steps), limit.min, limit.max).astype(np.int32), np.asarray(scale, np.float32))
