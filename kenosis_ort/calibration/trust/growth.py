"""How far a range would grow with more, and more natural, samples: an extreme-value fit over groups of samples.

The largest values of equal groups of samples scatter like a Gumbel variable of some scale, and the largest value of
``k`` times as many samples is ``scale * ln(k)`` larger (E. J. Gumbel, "Statistics of Extremes", 1958). Made-up samples
excite deep layers less than natural ones: there the range is extended as if by many more samples. Measured on ten
trained nets, natural ranges are 0.6 to 1 times those of made-up samples in the first third of the layers, and
1 to 1.6 times in the last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_GUMBEL = math.sqrt(6) / math.pi  # scale of a Gumbel variable of unit deviation
_DECADES_OF_SAMPLES = 1.0  # by which the last layer's range is extended; 3 and 5 help some nets and harm others
_MOST_GROWTH = 0.5  # of a range's width, on each side

Range = tuple[float, float]


@dataclass(frozen=True)
class Growth:
    """The range of one tensor over groups of samples.

    Attributes:
        measured: Over all samples.
        extended: For many more samples.
        spread: Standard deviation of the groups' ends, the larger of both, as a share of the measured width; 0 for a
            constant tensor.
    """

    measured: Range
    extended: Range
    spread: float


def extend(groups: Sequence[Range], depth: float) -> Growth:
    """The range of a tensor, extended for what the samples do not show.

    Args:
        groups: Its range over each of some equal groups of samples.
        depth: Where the tensor stands in the net: 0 for inputs, 1 for the last layer.
    """
    ends = np.asarray(groups, np.float64)
    low, high = float(ends[:, 0].min()), float(ends[:, 1].max())
    width = high - low
    if len(groups) < 2 or width <= 0:
        return Growth((low, high), (low, high), 0.0)
    below, above = (float(deviation) for deviation in ends.std(axis=0, ddof=1))
    reach = _GUMBEL * math.log(10.0) * _DECADES_OF_SAMPLES * depth
    extended = (low - min(reach * below, _MOST_GROWTH * width), high + min(reach * above, _MOST_GROWTH * width))
    return Growth((low, high), extended, max(below, above) / width)


def growth_between(real: Range, made_up: Growth, real_samples: int, samples: int) -> Range:
    """The range of a few real samples, extended towards that of the made-up ones.

    Made-up samples say how ranges grow with their number, and how far at most; they excite the first layers more than
    real ones do, so that their own range would waste resolution.

    Args:
        real: Over the real samples.
        made_up: Over the made-up samples.
        real_samples: Number of real samples or groups.
        samples: Number of samples in all.
    """
    low, high = real
    width = made_up.measured[1] - made_up.measured[0]
    reach = _GUMBEL * made_up.spread * width * math.log(max(samples / max(real_samples, 1), 1.0))
    return (
        max(min(low, made_up.extended[0]), low - reach),
        min(max(high, made_up.extended[1]), high + reach),
    )
