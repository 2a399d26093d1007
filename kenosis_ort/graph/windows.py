"""Windows of a convolution: what its kernel is multiplied with at each place of its output."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def windows(
    data: Array,
    kernel: Sequence[int],
    *,
    strides: Sequence[int] = (),
    dilations: Sequence[int] = (),
    pads: Sequence[int] = (),
    auto_pad: str = "",
    filling: int = 0,
) -> Array:
    """A view of shape (batch, channels, *places, *taps) of padded data of shape (batch, channels, *sizes).

    Args:
        data: Input of the convolution.
        kernel: Sizes of its window, one an axis.
        strides: Its attribute of this name, empty for 1 along each axis; the others likewise.
        dilations: Steps between taps.
        pads: Elements added before each axis, then those behind each; empty for none.
        auto_pad: Takes the place of `pads` where it is ``SAME_UPPER`` or ``SAME_LOWER``.
        filling: What padding holds.

    Source: the ONNX operator specification, Conv.
    """
    rank = len(kernel)
    steps, apart, ends = strides or [1] * rank, dilations or [1] * rank, pads or [0] * (2 * rank)
    reach = [(taps - 1) * step + 1 for taps, step in zip(kernel, apart, strict=True)]
    around = list(zip(ends[:rank], ends[rank:], strict=True))
    if auto_pad.startswith("SAME"):
        sizes = zip(data.shape[2:], steps, reach, strict=True)
        total = [max((-(-size // step) - 1) * step + wide - size, 0) for size, step, wide in sizes]
        upper = [(each // 2, each - each // 2) for each in total]
        around = upper if auto_pad == "SAME_UPPER" else [(more, less) for less, more in upper]
    padded = np.pad(data, [(0, 0), (0, 0), *around], constant_values=filling)
    view = np.lib.stride_tricks.sliding_window_view(padded, reach, axis=tuple(range(2, 2 + rank)))
    every = tuple(slice(None, None, step) for step in (1, 1, *steps, *apart))
    return np.asarray(view[every])
