"""A strided stem Conv over few channels as SpaceToDepth and a Conv of stride 1.

Let the Conv have stride ``b`` along height and width, kernel ``kh x kw``, ``p`` rows of zeros above the picture and
``e`` below (columns likewise), and let ``H`` and ``W`` be multiples of ``b``. With ``x = 0`` outside the picture::

    y[o, i, j] = sum over c, u, v of w[o, c, u, v] * x[c, b i + u - p, b j + v - q]

``SpaceToDepth(b)`` gives ``z[(a b + d) C + c, m, n] = x[c, b m + a, b n + d]``. The row ``b i + u - p`` is row ``m`` of
phase ``a`` with::

    a = (u - p) mod b,      m = i + floor((u - p) / b)

and, ``H`` being a multiple of ``b``, it lies outside ``x`` exactly where ``m`` lies outside ``z``. So ``y`` is a Conv
of ``z`` with stride 1 in which tap ``u`` is tap ``t`` of the channels of phase ``a``, all others zero::

    P  = ceil(p / b)                               rows of zeros above
    t  = floor((u - p) / b) + P                    from 0 (u = 0) to K - 1 (u = kh - 1)
    K  = floor((kh - 1 - p) / b) + P + 1           its kernel height
    E  = floor((p + e - kh) / b) + K - P           rows of zeros below, from the count of rows of y:
         H / b + P + E - K + 1 = floor((H + p + e - kh) / b) + 1

``E`` is never negative: for ``e = 0`` it is ``floor(-(d + 1) / b) + floor(d / b) + 1 = 0`` with ``d = kh - 1 - p``, and
it grows with ``e``. The result is exact but for the order of additions.

In float this is about as fast. In int8 the runtime's Conv is slow over three channels (over any number that is no
multiple of 4), and up to twice as fast over the ``3 b b`` of this one, although some of its weights are zero.

Not changed: strides other than 2x2 and 4x4, dilations, groups, weights that are not constant or would more than
double, a type other than float32, heights or widths that are unknown or no multiple of ``b``. Convs over a multiple of
4 or over 8 channels and more are no stems.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper

from kenosis_ort.graph.attributes import attribute, attribute_int
from kenosis_ort.rewrite.integer_form import (
    Axis,
    IntegerForm,
    window_attributes,
    window_axes,
)
from kenosis_ort.rewrite.matching import NotCollapsibleError
from kenosis_ort.rewrite.rule import integer_rule

MULTIPLE_OF_STEM = 4
"""The runtime's int8 Conv is slow over a number of channels that is no multiple of this."""

_STEM_CHANNELS = 8
_PICTURE_RANK = 4
_BLOCKS = (2, 4)
_LARGEST_GROWTH = 2


@integer_rule(
    "Conv",
    did="strided Convs over few channels became SpaceToDepth and a Conv of stride 1",
    stays="strided Convs over few channels stay",
)
def space_to_depth_stem(form: IntegerForm, conv: onnx.NodeProto) -> None:
    """Puts SpaceToDepth in front of the named strided Convs, which get stride 1, in place.

    The Conv keeps its name, its output and its bias.
    """
    strides = attribute(conv, "strides")
    if strides is None or max(strides.ints) == 1 or not is_over_few_channels(form, conv):
        return
    weights, height, width = _check(form, conv)
    _apply(form, conv, weights, height, width)


def is_over_few_channels(form: IntegerForm, conv: onnx.NodeProto) -> bool:
    """Tells whether a Conv without groups reads so few channels, and such a number of them, that int8 is slow.

    One whose weights are not constant counts as such.
    """
    weights = form.index.constant(conv.input[1])
    if attribute_int(conv, "group", 1) != 1:
        return False
    if weights is None or len(weights.dims) != _PICTURE_RANK:
        return weights is None
    return bool(weights.dims[1] < _STEM_CHANNELS and weights.dims[1] % MULTIPLE_OF_STEM)


def _check(form: IntegerForm, conv: onnx.NodeProto) -> tuple[npt.NDArray[np.generic], Axis, Axis]:
    weights = form.array(conv.input[1])
    if weights is None:
        raise NotCollapsibleError("its weights are not constant")
    picture = form.picture(conv.input[0])
    height, width = window_axes(conv, weights.shape[2:], picture)
    block = height.stride
    if block != width.stride or block not in _BLOCKS:
        raise NotCollapsibleError(f"its stride is {height.stride} x {width.stride}")
    if any(axis.dilation != 1 and axis.kernel > 1 for axis in (height, width)):
        raise NotCollapsibleError("it is dilated")
    if picture.height is None or picture.width is None:
        raise NotCollapsibleError(f"height and width of '{conv.input[0]}' are not known")
    if picture.height % block or picture.width % block:
        raise NotCollapsibleError(f"{picture.height} x {picture.width} is no multiple of its stride")
    new_size = _phases(height)[0].kernel * _phases(width)[0].kernel * block * block
    if new_size > _LARGEST_GROWTH * height.kernel * width.kernel:
        raise NotCollapsibleError("its weights would more than double")
    return weights, height, width


def _apply(
    form: IntegerForm, conv: onnx.NodeProto, weights: npt.NDArray[np.generic], height: Axis, width: Axis
) -> None:
    block = height.stride
    outputs, channels = weights.shape[:2]
    new_height, rows, row_taps = _phases(height)
    new_width, columns, column_taps = _phases(width)
    spread = np.zeros((outputs, block, block, channels, new_height.kernel, new_width.kernel), weights.dtype)
    for u in range(height.kernel):
        for v in range(width.kernel):
            spread[:, rows[u], columns[v], :, row_taps[u], column_taps[v]] = weights[:, :, u, v]
    merged = spread.reshape(outputs, block * block * channels, new_height.kernel, new_width.kernel)
    form.index.store_constant(conv, 1, onnx.numpy_helper.from_array(merged), f"{conv.input[1]}_blocks")
    blocks = form.insert_before(conv, "SpaceToDepth", [conv.input[0]], blocksize=block)
    form.become(conv, "Conv", [blocks, *conv.input[1:]], window_attributes(new_height, new_width))


def _phases(axis: Axis) -> tuple[Axis, list[int], list[int]]:
    """Returns the new window along one axis, and the phase and the new tap of each old tap."""
    block, kernel = axis.stride, axis.kernel
    begin = -(-axis.begin // block)
    extent = (kernel - 1 - axis.begin) // block + begin + 1
    end = (axis.begin + axis.end - kernel) // block + extent - begin
    offsets = [u - axis.begin for u in range(kernel)]
    new = Axis(kernel=extent, stride=1, dilation=1, begin=begin, end=end)
    return new, [o % block for o in offsets], [o // block + begin for o in offsets]
