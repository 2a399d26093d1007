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

Channels of a picture rounded up to a multiple of 4 in front of a stem Conv.

A Conv does not see channels of zeros, and weights of zero do not see what they read. With ``C'`` the next multiple of
4, ``x' = Pad(x)`` having ``C' - C`` channels of zeros more, and ``w'`` any continuation of ``w``::

    sum over c < C' of w'[o, c, u, v] * x'[c, ...] = sum over c < C of w[o, c, u, v] * x[c, ...]

Here ``w'`` continues ``w`` by zeros, which leaves the scales of the weights what they are.

Float has no use for it. The runtime's int8 Conv gathers the window of every output, four channels at a time, and one
by one where the count is no multiple of 4: a 3x3 Conv over three channels is 1.4 to 2.1 times as fast over four. Over
large windows the multiplications that are added cost more than that saves. Where a stem is strided and the picture
can be cut in blocks, `space_to_depth_stem` does better; what it leaves, this rule takes.

Not changed: groups, windows of more than 25 elements or of one, weights that are not constant, a type other than
float32. Convs over a multiple of 4 or over 8 channels and more are no stems.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper

from kenosis_ort.graph.walk import attribute, attribute_int
from kenosis_ort.rewrite.matching import NotCollapsibleError
from kenosis_ort.rewrite.rule import Axis, IntegerForm, integer_rule, window_attributes, window_axes

_LARGEST_WINDOW = 25


@integer_rule(
    "Conv",
    did="Convs over few channels read a multiple of 4 of them",
    stays="Convs over few channels keep their odd channel count",
)
def pad_stem_channels(form: IntegerForm, conv: onnx.NodeProto) -> None:
    """Puts a Pad of channels in front of the named Convs over few of them, in place.

    The Conv keeps its name and its output.
    """
    if not is_over_few_channels(form, conv):
        return
    weights = form.array(conv.input[1])
    if weights is None:
        raise NotCollapsibleError("its weights are not constant")
    form.picture(conv.input[0])
    window = int(np.prod(weights.shape[2:]))
    if not 1 < window <= _LARGEST_WINDOW:
        raise NotCollapsibleError(f"its window has {window} elements")
    extra = -weights.shape[1] % MULTIPLE_OF_STEM
    zeros = np.zeros((weights.shape[0], extra, *weights.shape[2:]), weights.dtype)
    widened = onnx.numpy_helper.from_array(np.concatenate((weights, zeros), axis=1))
    form.index.store_constant(conv, 1, widened, f"{conv.input[1]}_padded")
    pads = form.add_constant(np.array([0, 0, 0, 0, 0, extra, 0, 0], np.int64), f"{conv.name}_pads")
    padded = form.insert_before(conv, "Pad", [conv.input[0], pads])
    form.index.release(conv, conv.input[0])
    conv.input[0] = padded
    form.index.readers.setdefault(padded, []).append(conv)
    form.done += 1


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
    """Whether a Conv without groups reads so few channels, and such a number of them, that int8 is slow.

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
    """The new window along one axis, and the phase and the new tap of each old tap."""
    block, kernel = axis.stride, axis.kernel
    begin = -(-axis.begin // block)
    extent = (kernel - 1 - axis.begin) // block + begin + 1
    end = (axis.begin + axis.end - kernel) // block + extent - begin
    offsets = [u - axis.begin for u in range(kernel)]
    new = Axis(kernel=extent, stride=1, dilation=1, begin=begin, end=end)
    return new, [o % block for o in offsets], [o // block + begin for o in offsets]
