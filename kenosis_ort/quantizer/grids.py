"""Scales, zero points and integers of activations, weights and biases: arithmetic alone, in float64.

**Activations** (stage 4): the range is widened to hold 0.0, which becomes exactly representable, and snapped inside the
bounds of an absorbed Relu or Clip so that the runtime's own test for absorption holds:
``(qmin - zero_point) * scale >= low`` and ``(qmax - zero_point) * scale <= high``. The condition was measured (rules
absorb-relu and absorb-clip of the target).

**Weights** (stage 2) are symmetric int8, per tensor or per channel. Where kernels add pairs of products in int16, the
scale of a channel is the finest at which no pair of its weights can clip, whatever the activations are:
``max(max |w| / 127, max over pairs of one sign (|w0| + |w1|) / 128)``. All 8 bits are used, which 7-bit weights
(``reduce_range``) give up, and the same integers come out on every processor. Of fewer bits than 8 the scale is the one
with the least squared error: there clipping a few large weights costs less than coarse steps for all others.

**A bias** (stage 3) is int32 at exactly ``input_scale * weight_scale``, zero point 0: the runtime's kernels multiply
the two scales themselves and trust the bias to be on that grid; a Gemm whose bias is on another grid is silently wrong
(rule bias-scale-mismatch-gemm-wrong). The scale of a channel is widened where the int32 bias would overflow there, or
that product would underflow: near-dead channels have tiny weights and a bias that is not tiny. A channel of zeros,
whose scale is free, gets one at which its bias is as fine as those of the others.

Source: Kenosis paper, stages 2 to 4.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kenosis_ort.graph.product_pairs import PairOrder, pair_sums
from kenosis_ort.graph.qdq import integer_bounds, on_grid
from kenosis_ort.plan import RangeLimit

_SMALLEST: Final = float(np.finfo(np.float32).tiny)
_LARGEST: Final = float(np.finfo(np.float32).max)


class ActivationParameters(NamedTuple):
    """``real = scale * (quantized - zero_point)``; ``scale`` is a float32 value."""

    scale: float
    zero_point: int


def nudged_parameters(
    low: float, high: float, *, signed: bool, limit: RangeLimit | None = None, bits: int = 8
) -> ActivationParameters:
    """Asymmetric parameters for a real range.

    Args:
        low: Least real value.
        high: Largest real value.
        signed: int8 (-128..127) instead of uint8 (0..255).
        limit: Bounds of the activation to be absorbed, if any.
        bits: Width of the integers.

    Raises:
        ValueError: The range is not finite or upside down.
    """
    if not (math.isfinite(low) and math.isfinite(high)) or low > high:
        raise ValueError(f"not a range: [{low}, {high}]")
    qmin, qmax = integer_bounds(bits, signed=signed)
    low, high = min(low, 0.0), max(high, 0.0)
    floor, ceiling = (None, None) if limit is None else (limit.low, limit.high)
    if floor is not None:
        low = min(max(low, floor), 0.0)
    if ceiling is not None:
        high = max(min(high, ceiling), 0.0)
    if high == low:  # a dead tensor: any scale is right that keeps inside the bounds; without bounds stock's, 1
        if floor is None and ceiling is None:
            return ActivationParameters(1.0, 0)
        low, high = (floor or -1.0, 0.0) if ceiling == 0.0 else (0.0, ceiling or 1.0)
    scale = (high - low) / (qmax - qmin)
    nearest = int(min(max(qmin - round(low / scale) if scale > 0 else qmin, qmin), qmax))

    def fit(zero_point: int) -> tuple[float, float, int]:
        """(what is cut off the range, scale, zero point) within the bounds."""
        step = scale
        if ceiling is not None and zero_point < qmax:
            step = min(step, ceiling / (qmax - zero_point))
        if floor is not None and zero_point > qmin:
            step = min(step, -floor / (zero_point - qmin))
        return max((qmin - zero_point) * step - low, high - (qmax - zero_point) * step, 0.0), step, zero_point

    up, down = ceiling is not None and nearest < qmax, floor is not None and nearest > qmin
    candidates = [nearest, *([nearest + 1] if up else ()), *([nearest - 1] if down else ())]
    _, scale, zero_point = min(map(fit, candidates), key=lambda fitted: fitted[0])
    stored = np.float32(min(max(scale, _SMALLEST), _LARGEST))
    if limit is not None:
        while not absorbs(stored, zero_point, limit, (qmin, qmax)) and stored > _SMALLEST:
            stored = np.nextafter(stored, np.float32(0.0), dtype=np.float32)
    return ActivationParameters(float(stored), zero_point)


def clamped(low: float, high: float, bounds: RangeLimit | None) -> tuple[float, float]:
    """The range cut to where the consumers of the value still see a difference."""
    if bounds is not None:
        floor = -math.inf if bounds.low is None else bounds.low
        ceiling = math.inf if bounds.high is None else bounds.high
        low, high = (min(max(end, floor), ceiling) for end in (low, high))
    return low, high


def absorbs(scale: float | np.float32, zero_point: int, limit: RangeLimit, bounds: tuple[int, int]) -> bool:
    """Whether the runtime drops a Relu or Clip of these bounds in front of Q, in its own float32 arithmetic.

    Below 8 bits it tells whether the integers keep the bounds: the runtime knows of 8 alone.

    Stricter than runtime 1.31 needs, which allows half a step; older ones do not.

    Args:
        scale: Of Q, a float32 value.
        zero_point: Of Q.
        limit: The bounds.
        bounds: The least and the largest integer.
    """
    (qmin, qmax), stored = bounds, np.float32(scale)
    with np.errstate(over="ignore"):
        below = limit.low is None or np.float32(qmin - zero_point) * stored >= np.float32(limit.low)
        above = limit.high is None or np.float32(qmax - zero_point) * stored <= np.float32(limit.high)
    return bool(below and above)


Float64 = npt.NDArray[np.float64]
_BLOCK = 2**20  # elements
_BIAS_LIMIT = float(2**30)  # half of int32's range: the accumulator needs room beside the bias
_FINE = 7  # bits at which the largest weight decides about the scale
_SHARES: Final[Float64] = np.concatenate(([1.0], np.linspace(0.98, 0.3, 35)))  # the first of equals is taken
_SAMPLED = 4096  # weights a channel
_LEAST_PRODUCT = 2.0 * _SMALLEST  # of two scales; below float32 rounds it coarsely


class QuantizedWeight(NamedTuple):
    """Weights as integers.

    Attributes:
        values: int8, the shape of the weight, zero point included.
        scale: float32, shape () per tensor or (channels,) per channel.
        axis: Channel axis, None per tensor.
        needed: The scale, float64, before it was widened for biases.
    """

    values: npt.NDArray[np.int8]
    scale: npt.NDArray[np.float32]
    axis: int | None
    needed: Float64


def quantize_weight(
    weight: npt.NDArray[np.generic],
    *,
    axis: int | None,
    reduce_range: bool = False,
    bits: int = 8,
    biases: Sequence[tuple[float, Float64]] = (),
    zero_point: int = 0,
    orders: Sequence[PairOrder] = (),
    largest_pair: int | None = None,
) -> QuantizedWeight:
    """Quantizes a weight tensor.

    Args:
        weight: Real weights of any shape.
        axis: Channel axis, None per tensor.
        reduce_range: 7-bit weights (-64..64).
        bits: Width of the integers; the range is symmetric, -7..7 for 4.
        biases: For each consumer (input scale, bias of shape (channels,)) that must fit int32.
        zero_point: 0, or -1 for weights that are stored one lower.
        orders: In which kernels that add pairs of products in int16 read the weights.
        largest_pair: What stored weights of one sign in a pair may sum to; None for whatever they do.

    Raises:
        ValueError: The weights or the biases are not finite.
    """
    top = min(64 if reduce_range else 127, 2 ** (bits - 1) - 1)
    largest = _largest(weight, axis)
    if not np.isfinite(largest).all():
        raise ValueError("the weight holds NaN or infinity")
    # A channel of zeros gets the scale of the largest: its bias then has the steps of the others, not steps of 1.
    scale = np.where(largest > 0.0, largest / top, largest.max(initial=0.0) / top or 1.0)
    if bits <= _FINE:  # no two are too large
        largest_pair = None
    scale = np.maximum(scale, pair_scale(weight, axis, orders, largest_pair, zero_point))
    if bits < _FINE:
        scale = scale * _least_error_share(weight, scale, axis, top)
    if not np.isfinite(least_scale(biases, scale)).all():
        raise ValueError("a bias of the weight holds NaN or infinity")
    stored = stored_scale(scale, biases)
    values = np.empty(weight.shape, np.int8)
    steps = stored.astype(np.float64).reshape([-1 if i == axis else 1 for i in range(weight.ndim)])
    for block in _blocks(weight):
        step = steps[block] if axis == 0 else steps
        values[block] = on_grid(weight[block], step, zero_point, zero_point - top, zero_point + top)
        if largest_pair is not None:
            for order in orders:
                values[block] = _lowered(values[block], order, largest_pair)
    return QuantizedWeight(values, stored, axis, scale)


def stored_scale(scale: Float64, biases: Sequence[tuple[float, Float64]]) -> npt.NDArray[np.float32]:
    """A weight's scale as it is stored: widened for biases, and no smaller than float32 holds."""
    return np.maximum(np.maximum(scale, least_scale(biases, scale)), _SMALLEST).astype(np.float32)


def pair_scale(
    weight: npt.NDArray[np.generic],
    axis: int | None,
    orders: Sequence[PairOrder],
    largest_pair: int | None,
    zero_point: int = 0,
) -> Float64:
    """Least scale at which no two neighbours of one sign sum to more than a kernel holds, shape () or (channels,).

    Args:
        weight: Real weights of any shape.
        axis: Channel axis, None per tensor.
        orders: In which kernels read the weights.
        largest_pair: What two stored neighbours may sum to; None for whatever they do.
        zero_point: 0, or -1 for weights that are stored one lower.
    """
    found = np.zeros(() if axis is None else weight.shape[axis])
    if largest_pair is None:
        return found
    room = largest_pair + 2 * zero_point  # both of a pair are stored lower
    for order in orders:
        found = np.maximum(found, _largest_pair(weight, axis, order) / room)
    return found


def _largest_pair(weight: npt.NDArray[np.generic], axis: int | None, order: PairOrder) -> Float64:
    """Largest magnitude that two weights of one sign in a pair sum to, shape () or (channels,)."""
    found = np.zeros(() if axis is None else weight.shape[axis])
    for block in _blocks(weight):
        pairs = order.pairs(np.asarray(weight[block], np.float64))
        a, b = pairs[..., 0], pairs[..., 1]  # a reduction over two is slow
        sums = np.maximum(np.maximum(a, 0.0) + np.maximum(b, 0.0), -(np.minimum(a, 0.0) + np.minimum(b, 0.0)))
        if axis is None or axis not in order.row_axes():
            found = np.maximum(found, sums.max(initial=0.0))  # an axis that pairs cross: one bound for all channels
            continue
        row = order.row_axes().index(axis)
        part = sums.max(axis=tuple(i for i in range(sums.ndim) if i != row), initial=0.0)
        place = block if axis == 0 else ...
        found[place] = np.maximum(found[place], part)
    return found


def _lowered(values: npt.NDArray[np.int8], order: PairOrder, limit: int) -> npt.NDArray[np.int8]:
    """The integers, the larger of a pair brought nearer to 0 where rounding took the pair's sum beyond the limit."""
    high, low = pair_sums(values, order)
    excess = np.maximum(high - limit, 0) + np.minimum(low + limit, 0)  # of one sign: both cannot be
    if not excess.any():
        return values
    pairs = order.pairs(values).astype(np.int16)
    larger = np.argmax(pairs * np.sign(excess)[..., None], axis=-1)[..., None]
    np.put_along_axis(pairs, larger, np.take_along_axis(pairs, larger, -1) - excess[..., None], -1)
    return np.ascontiguousarray(order.tensor(pairs, values.shape), np.int8)


def _least_error_share(weight: npt.NDArray[np.generic], scale: Float64, axis: int | None, top: int) -> Float64:
    """Factor for each scale with the least squared error, from some of the weights where there are many."""
    rows = np.moveaxis(weight, axis, 0).reshape(scale.size, -1) if axis is not None else weight.reshape(1, -1)
    steps = np.asarray(rows[:, :: max(1, rows.shape[1] // _SAMPLED)], np.float64) / scale.reshape(-1, 1)
    errors = [np.square(steps - on_grid(steps, share, 0, -top, top) * share).sum(axis=1) for share in _SHARES]
    return np.asarray(_SHARES[np.argmin(errors, axis=0)].reshape(scale.shape))


def _largest(weight: npt.NDArray[np.generic], axis: int | None) -> Float64:
    """The largest magnitudes, shape () or (channels,); NaN or infinity stay what they are."""
    others = tuple(i for i in range(weight.ndim) if i != axis)
    found = np.zeros(() if axis is None else weight.shape[axis])
    for block in _blocks(weight):
        part = np.abs(np.asarray(weight[block], np.float64)).max(axis=others, initial=0.0)
        place = block if axis == 0 else ...
        found[place] = np.maximum(found[place], part)
    return found


def _blocks(weight: npt.NDArray[np.generic]) -> Iterator[tuple[slice, ...]]:
    """Yields slices of the first axis, so that float64 temporaries stay small beside a large weight."""
    if weight.ndim == 0:
        yield ()
        return
    rows = max(2, _BLOCK // max(1, math.prod(weight.shape[1:])) // 2 * 2)  # even: pairs along the axis stay together
    for start in range(0, weight.shape[0], rows):
        yield (slice(start, start + rows),)


def least_scale(biases: Sequence[tuple[float, Float64]], scale: Float64) -> Float64:
    """The smallest weight scale at which every bias fits int32.

    Args:
        biases: For each consumer (input scale, bias of shape (channels,)).
        scale: The weight's own scale, of shape () or (channels,): the shape of the result.
    """
    needed = np.zeros_like(scale, dtype=np.float64)
    for input_scale, bias in biases:
        steps = np.maximum(np.abs(np.asarray(bias, dtype=np.float64)) / _BIAS_LIMIT, _LEAST_PRODUCT)
        least = steps / input_scale
        needed = np.maximum(needed, least.max(initial=0.0) if scale.ndim == 0 else least)
    return needed


class QuantizedBias(NamedTuple):
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
    limit = np.iinfo(np.int32)
    values = on_grid(np.asarray(bias, np.float64) * beta, scale.astype(np.float64), 0, limit.min, limit.max)
    return QuantizedBias(values.astype(np.int32), np.asarray(scale, np.float32))
