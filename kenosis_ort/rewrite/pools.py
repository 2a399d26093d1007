"""Windows over pictures: their padding, pools, and means that are pools, as the operators that are the fastest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kenosis_ort.graph.view import ir, optional
from kenosis_ort.rewrite.rule import Editor, FloatArray, NotCollapsibleError, Picture, known, operand, refuse_if, rule

_OPSET = 13  # Unsqueeze and Squeeze with axes as an input
_PICTURE_RANK = 4


@rule(
    "LRN",
    did="LRN nodes became a moving average over squares, which is several times as fast",
    stays="LRN nodes stay",
    least_opset=_OPSET,
)
def lrn_to_pool(editor: Editor, norm: ir.Node) -> None:
    """Local response normalization as a moving average over the squares.

    Over the channels ``c - l ... c + l`` around each one, with ``size = 2 l + 1`` and zeros beyond the first and the
    last::

        LRN(x)[c] = x[c] / (bias + alpha / size * sum over the window of x^2) ^ beta

    and the sum divided by ``size`` is what AveragePool computes along the channels, with padding counted::

        m      = Squeeze(AveragePool(Unsqueeze(x * x, 1); kernel = size x 1 x 1, pads = l, count_include_pad = 1), 1)
        LRN(x) = x / (alpha * m + bias) ^ beta

    The channels become the depth of a picture of one channel, so heights and widths need not be known. With
    ``r = Sqrt(s)``, ``s ^ 0.75`` is ``r * Sqrt(r)``; other exponents than 0.25, 0.5, 0.75 and 1 are left to Pow.

    The runtime's own LRN computes a power per element in scalar code. In its place, a window of 5 (one AVX512 thread)
    takes 0.76 ms for 12.9 over 64 channels of 56 x 56, and 0.46 ms for 9.7 over 192 of 28 x 28. A 1x1 Conv with a band
    matrix for weights is as fast up to 100 channels and half as fast at 256; and it would be quantized, which squares
    suffer from. None of the operators above runs in integer: their neighbours may, and lose no accuracy by it.

    Not changed: an even size, which the runtime does not run; a bias or an alpha that is not positive, for which the
    power may be undefined; a rank other than 4; a type other than float32.
    """
    x, given, size = operand(norm, 0), norm.attributes, norm.attributes.get_int("size", 0)
    alpha, beta, bias = given.get_float("alpha", 1e-4), given.get_float("beta", 0.75), given.get_float("bias", 1.0)
    editor.require_float32(x)
    refuse_if(editor.rank(x) != _PICTURE_RANK, f"'{x.name}' is not known to have {_PICTURE_RANK} dimensions")
    refuse_if(size % 2 != 1, "its size is even")
    refuse_if(bias <= 0.0 or alpha <= 0.0, "its bias or its alpha is not positive")

    def constant(number: float, name: str) -> ir.Value:
        return editor.add_constant(np.array(number, np.float32), f"{norm.name}_{name}")

    axis = editor.add_constant(np.array([1], np.int64), f"{norm.name}_axis")
    depth = editor.insert_before(norm, "Unsqueeze", [editor.insert_before(norm, "Mul", [x, x]), axis])
    beside = size // 2
    pool = editor.insert_before(
        norm, "AveragePool", [depth], kernel_shape=(size, 1, 1), pads=(beside, 0, 0, beside, 0, 0), count_include_pad=1
    )
    mean = editor.insert_before(norm, "Squeeze", [pool, axis])
    scaled = editor.insert_before(norm, "Mul", [mean, constant(alpha, "alpha")])
    shifted = editor.insert_before(norm, "Add", [scaled, constant(bias, "bias")])
    editor.become(norm, "Div", [x, _power(editor, norm, shifted, beta)])


def _power(editor: Editor, norm: ir.Node, base: ir.Value, exponent: float) -> ir.Value:
    """The value of ``base ^ exponent``, by square roots where they do."""
    if math.isclose(exponent, 1.0):
        return base
    for roots, joined in ((0.5, False), (0.25, False), (0.75, True)):
        if math.isclose(exponent, roots):
            first = editor.insert_before(norm, "Sqrt", [base])
            if roots == 0.5:
                return first
            second = editor.insert_before(norm, "Sqrt", [first])
            return editor.insert_before(norm, "Mul", [first, second]) if joined else second
    power = editor.add_constant(np.array(exponent, np.float32), f"{norm.name}_beta")
    return editor.insert_before(norm, "Pow", [base, power])


@rule(
    "Conv",
    "MaxPool",
    did="Convs and MaxPools took over the zeros of a Pad in front of them",
    stays="Convs and MaxPools keep a Pad in front of them",
)
def fold_padding(editor: Editor, window: ir.Node) -> None:
    """A Pad of zeros as padding of the Conv or MaxPool behind it.

    With ``p`` zeros put before and behind each axis of the picture::

        Conv(Pad(x; p); pads = q)    = Conv(x; pads = p + q)
        MaxPool(Pad(x; p); pads = q) = MaxPool(x; pads = p + q)        where x >= 0

    A Conv pads with zeros itself. A MaxPool pads with what is less than everything, which gives the same where each of
    its windows holds an element of ``x``, none of which is negative: so it does behind a Relu, with windows that no
    padding is as wide as.

    Exporters of TensorFlow write a Pad in front of each strided Conv. Alone it has no integer kernel, so that it would
    stand between Q and DQ: MobileNetV2 at 128x128 1.27x of FP32, without it 1.55x (one AVX2 thread). ONNX Runtime does
    the same to a float model, ``PadFusion``.

    Not changed: other modes, numbers or types, padding that is computed, cuts, or is of the batch or the channels,
    ``auto_pad`` that adds padding.
    """
    pad = editor.producer(window.inputs[0], "Pad")
    if pad is None:
        return
    x = operand(pad, 0)
    editor.require_float32(x)
    mode, given = window.attributes.get_string("auto_pad", "NOTSET"), window.attributes.get_ints("pads", ())
    refuse_if(mode not in ("NOTSET", "VALID"), f"its auto_pad is '{mode}'")
    zeros = _zeros_of(editor, pad, x)
    pads = [
        own + more for own, more in zip(given if given and mode == "NOTSET" else [0] * len(zeros), zeros, strict=True)
    ]
    if window.op_type == "MaxPool":
        _check_maximum(editor, window, pads, x)
    padded = window.inputs[0]
    editor.read(window, 0, x)
    editor.set_attribute(window, "auto_pad", None)
    editor.set_attribute(window, "pads", pads)
    editor.drop_unread([padded], window.name)
    editor.done += 1


def _zeros_of(editor: Editor, pad: ir.Node, x: ir.Value) -> list[int]:
    """Zeros that a Pad puts before each axis of a picture, then behind each."""
    amounts, filling = editor.array(optional(pad, 1)), optional(pad, 2)
    refuse_if(pad.attributes.get_string("mode", "constant") != "constant", f"'{pad.name}' does not pad with a constant")
    refuse_if(filling is not None and editor.scalar(filling) != 0.0, f"'{pad.name}' does not pad with zeros")
    rank = known(editor.rank(x), f"the rank of '{x.name}' is not known")
    listed, computed = optional(pad, 3), f"the padding of '{pad.name}' is computed"
    axes = known(np.arange(rank) if listed is None else editor.array(listed), computed)
    whole = np.zeros((2, rank), np.int64)
    whole[:, axes.reshape(-1) % rank] = known(amounts, computed).reshape(2, -1)
    refuse_if(whole[:, :2].any() or whole.min() < 0, f"'{pad.name}' pads the batch or the channels, or cuts")
    return [int(zeros) for zeros in whole[:, 2:].reshape(-1)]


def _check_maximum(editor: Editor, pool: ir.Node, pads: Sequence[int], x: ir.Value) -> None:
    """Refuses a MaxPool that would see the difference between zeros and no elements."""
    before, given = x.producer(), pool.attributes
    least = editor.scalar(optional(before, 1)) if before is not None and before.op_type == "Clip" else None
    if before is None or not (before.op_type == "Relu" or (least is not None and least >= 0.0)):
        raise NotCollapsibleError(f"'{x.name}' may be negative")
    kernel = given.get_ints("kernel_shape", ())
    plain = len(pool.outputs) == 1 and not given.get_int("ceil_mode", 0) and set(given.get_ints("dilations", ())) <= {1}
    if not plain or any(zeros >= size for zeros, size in zip(pads, (*kernel, *kernel), strict=True)):
        raise NotCollapsibleError("a window might hold padding alone")


_LAST_TWO = ({2, 3}, {-2, -1}, {2, -1}, {-2, 3})


@rule(
    "ReduceMean",
    did="ReduceMean nodes over height and width became GlobalAveragePool",
    stays="ReduceMean nodes over the last two dimensions stay",
)
def pool_from_mean(editor: Editor, mean: ir.Node) -> None:
    """ReduceMean over height and width as GlobalAveragePool.

    For ``x`` of shape ``[N, C, H, W]``::

        GlobalAveragePool(x)[n, c, 0, 0] = 1 / (H * W) * sum over h, w of x[n, c, h, w]
                                         = ReduceMean(x; axes = 2, 3; keepdims = 1)[n, c, 0, 0]

    Without ``keepdims`` the result has shape ``[N, C]``, which is ``Flatten(axis = 1)`` of the above. ReduceMean has no
    integer kernel and would be a float island; GlobalAveragePool has one (a squeeze-and-excitation net 2.7x of FP32
    for 2.1x), and in a float model it runs in the runtime's blocked layout.

    Not changed: axes that are computed or are not exactly the last two, a rank other than 4, a type other than float32.
    """
    if not _is_over_picture(editor, mean):
        return
    keepdims = mean.attributes.get_int("keepdims", 1)
    editor.become(mean, "GlobalAveragePool", [mean.inputs[0]])
    if not keepdims:
        pooled = mean.outputs[0]
        editor.append_behind(mean, "Flatten", [pooled], output=editor.hand_over(pooled), nearest=True)


def _is_over_picture(editor: Editor, mean: ir.Node) -> bool:
    """Whether the mean is over height and width; raises where it may be, and cannot be changed."""
    axes = _axes(editor, mean)
    if axes not in _LAST_TWO:
        return False
    x = operand(mean, 0)
    if known(editor.rank(x), f"the rank of '{x.name}' is not known") != _PICTURE_RANK:
        return False
    editor.require_float32(x)
    refuse_if(0 in (editor.dims(x) or ())[2:], f"'{x.name}' is empty")
    return True


def _axes(editor: Editor, mean: ir.Node) -> set[int] | None:
    """The axes, an input from operator set 18 and an attribute before; None if there are none."""
    given = optional(mean, 1)
    if given is None:
        return set(mean.attributes.get_ints("axes", ())) or None
    axes = editor.array(given)
    refuse_if(axes is None and editor.rank(mean.inputs[0]) == _PICTURE_RANK, f"its axes '{given.name}' are computed")
    return None if axes is None else {int(axis) for axis in axes.reshape(-1)}


@rule("AveragePool", did="AveragePool nodes became depthwise Convs", stays="AveragePool nodes stay", writes="Conv")
def average_pool_to_conv(editor: Editor, pool: ir.Node) -> None:
    """AveragePool over parts of the picture as a depthwise Conv.

    With a window of ``k = kh * kw`` elements and ``x = 0`` in the padding, where the padding is counted or absent::

        AveragePool(x)[n, c, i, j] = 1 / k * sum of x[n, c] over the window at (i, j)

    which is a Conv of ``group = C`` whose weights are all ``1 / k``, with the same strides, dilations and padding.
    Where the padding is not counted (``count_include_pad = 0``) the window at ``(i, j)`` holds ``r(i) * q(j) <= k``
    elements of the picture and is divided by that number. Then::

        AveragePool(x)[n, c, i, j] = map[i, j] * Conv(x)[n, c, i, j]      with  map[i, j] = k / (r(i) q(j))

    so a Mul by the constant ``map`` of shape ``[1, 1, OH, OW]`` follows, which takes over the output: it is 1 but at
    the borders, and needs a height and width that are known.

    Float has no use for it. Between integer kernels AveragePool is slow: blocks of a pool and a 1x1 Conv 0.1x to 0.6x
    of FP32, as a depthwise Conv 0.9x to 2.8x. The Mul is a float island, and still the pair wins (Inception blocks 2.6x
    for 1.5x).

    Not changed: a pool over the whole picture (as good as GlobalAveragePool), ``ceil_mode`` where it adds a window or
    might, a window in the padding alone, a rank other than 4, a type other than float32, an unknown channel count, an
    unknown height or width where the padding depends on them.
    """
    picture = editor.picture(operand(pool, 0))
    height, width = _windows(pool, picture)
    borders = _border_map(pool, picture, height, width)
    channels, size = picture.channels or 0, height.kernel * width.kernel
    weights = np.full((channels, 1, height.kernel, width.kernel), 1.0 / size, np.float32)
    inputs = [pool.inputs[0], editor.add_constant(weights, f"{pool.name}_weight")]
    editor.become(pool, "Conv", inputs, {"group": channels, **window_attributes(height, width)})
    if borders is not None:
        value = pool.outputs[0]
        factors = editor.add_constant(borders.astype(np.float32), f"{pool.name}_borders")
        editor.append_behind(pool, "Mul", [value, factors], output=editor.hand_over(value), nearest=True)


def _windows(pool: ir.Node, picture: Picture) -> tuple[Axis, Axis]:
    kernel = pool.attributes.get_ints("kernel_shape", ())
    refuse_if(len(kernel) != 2, "its kernel has no height and width")
    refuse_if(picture.channels is None, f"the channel count of '{operand(pool, 0).name}' is not known")
    height, width = window_axes(pool, kernel, picture)
    for axis, length in zip((height, width), picture[1:], strict=True):
        if pool.attributes.get_int("ceil_mode", 0) and axis.stride > 1:
            size = known(length, "ceil_mode may add a window: height or width are not known")
            refuse_if((size + axis.begin + axis.end - axis.extent) % axis.stride, "ceil_mode adds a window")
    along = ((height, picture.height), (width, picture.width))
    whole = all(length is not None and _windows_along(axis, length) == 1 for axis, length in along)
    refuse_if(whole, "it is over the whole picture")
    return height, width


def _windows_along(axis: Axis, length: int) -> int:
    return (length + axis.begin + axis.end - axis.extent) // axis.stride + 1


def _border_map(pool: ir.Node, picture: Picture, height: Axis, width: Axis) -> FloatArray | None:
    """``[1, 1, OH, OW]``: by how much the Conv is too small at each place; None if it is right everywhere."""
    if pool.attributes.get_int("count_include_pad", 0) or not any((*height[3:], *width[3:])):
        return None
    factors = []
    for axis, length in ((height, picture.height), (width, picture.width)):
        if not (axis.begin or axis.end):
            factors.append(np.ones(1))
            continue
        size = known(length, "its padding is not counted, and height or width are not known")
        starts = np.arange(_windows_along(axis, size)) * axis.stride - axis.begin
        places = starts[:, None] + np.arange(axis.kernel) * axis.dilation
        inside = ((places >= 0) & (places < size)).sum(axis=1)
        refuse_if(not inside.all(), "a window holds padding only")
        factors.append(axis.kernel / inside)
    borders = factors[0][:, None] * factors[1][None, :]
    return None if (borders == 1.0).all() else borders[None, None]


class Axis(NamedTuple):
    """Window of a Conv or pool along one axis: its extent, step and the zeros put before and behind."""

    kernel: int
    stride: int
    dilation: int
    begin: int
    end: int

    @property
    def extent(self) -> int:
        """Number of elements that the window spans."""
        return (self.kernel - 1) * self.dilation + 1


def window_axes(node: ir.Node, kernel: Sequence[int], picture: Picture) -> tuple[Axis, Axis]:
    """Window of a Conv or pool along height and width, with ``auto_pad`` resolved.

    With ``SAME_UPPER`` and ``SAME_LOWER`` an axis of length ``L`` gives ``ceil(L / stride)`` windows; the zeros that
    this takes are split in halves, an odd one goes behind (upper) or before (lower).

    Raises:
        NotCollapsibleError: The padding depends on a height or width that is not known, or is negative.
    """
    strides, dilations, pads = (node.attributes.get_ints(name, ()) for name in ("strides", "dilations", "pads"))
    mode = node.attributes.get_string("auto_pad", "NOTSET")
    axes = []
    for at in range(2):
        stride, dilation = (given[at] if given else 1 for given in (strides, dilations))
        axis = Axis(kernel[at], stride, dilation, 0, 0)
        if mode in ("SAME_UPPER", "SAME_LOWER"):
            unknown = f"its padding ({mode}) depends on a height or width that is not known"
            length = known(picture[1 + at], unknown)
            total = (-(-length // stride) - 1) * stride + axis.extent - length
            begin = (total + (mode == "SAME_LOWER")) // 2
            axis = axis._replace(begin=begin, end=total - begin)
        elif mode == "NOTSET" and pads:
            axis = axis._replace(begin=pads[at], end=pads[at + 2])
        elif mode not in ("NOTSET", "VALID"):
            raise NotCollapsibleError(f"its auto_pad is '{mode}'")
        # of SAME too: operators disagree on what it means
        refuse_if(min(axis.begin, axis.end, axis.begin + axis.end) < 0, "its padding is negative")
        axes.append(axis)
    return axes[0], axes[1]


def window_attributes(height: Axis, width: Axis) -> dict[str, Sequence[int]]:
    """The attributes of a Conv with these windows."""
    given: tuple[tuple[str, Sequence[int], int | None], ...] = (
        ("kernel_shape", (height.kernel, width.kernel), None),
        ("strides", (height.stride, width.stride), 1),
        ("dilations", (height.dilation, width.dilation), 1),
        ("pads", (height.begin, width.begin, height.end, width.end), 0),
    )
    return {name: numbers for name, numbers, default in given if any(number != default for number in numbers)}
