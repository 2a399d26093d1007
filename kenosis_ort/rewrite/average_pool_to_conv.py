"""AveragePool over parts of the picture as a depthwise Conv.

With a window of ``k = kh * kw`` elements and ``x = 0`` in the padding, where the padding is counted or absent::

    AveragePool(x)[n, c, i, j] = 1 / k * sum of x[n, c] over the window at (i, j)

which is a Conv of ``group = C`` whose weights are all ``1 / k``, with the same strides, dilations and padding. Where
the padding is not counted (``count_include_pad = 0``) the window at ``(i, j)`` holds ``r(i) * q(j) <= k`` elements of
the picture and is divided by that number. Then::

    AveragePool(x)[n, c, i, j] = map[i, j] * Conv(x)[n, c, i, j]      with  map[i, j] = k / (r(i) q(j))

so a Mul by the constant ``map`` of shape ``[1, 1, OH, OW]`` follows, which takes over the output: it is 1 but at the
borders, and needs a height and width that are known.

Float has no use for it. Between integer kernels AveragePool is slow: blocks of a pool and a 1x1 Conv 0.1x to 0.6x of
FP32, as a depthwise Conv 0.9x to 2.8x. The Mul is a float island, and still the pair wins (Inception blocks 2.6x for
1.5x).

Not changed: a pool over the whole picture (as good as GlobalAveragePool), ``ceil_mode`` where it adds a window or
might, a window in the padding alone, a rank other than 4, a type other than float32, an unknown channel count, an
unknown height or width where the padding depends on them.
"""

from __future__ import annotations

import numpy as np
import onnx

from kenosis_ort.graph.attributes import attribute, attribute_int
from kenosis_ort.rewrite.integer_form import (
    Axis,
    FloatArray,
    IntegerForm,
    Picture,
    window_attributes,
    window_axes,
)
from kenosis_ort.rewrite.matching import NotCollapsibleError
from kenosis_ort.rewrite.rule import integer_rule


@integer_rule("AveragePool", did="AveragePool nodes became depthwise Convs", stays="AveragePool nodes stay")
def average_pool_to_conv(form: IntegerForm, pool: onnx.NodeProto) -> None:
    """Turns each named AveragePool into a depthwise Conv, with a Mul behind it where its borders need one, in place.

    The Conv keeps the name; the last of the two keeps the output.
    """
    picture = form.picture(pool.input[0])
    height, width = _windows(pool, picture)
    borders = _border_map(pool, picture, height, width)
    _apply(form, pool, picture.channels or 0, height, width, borders)


def _windows(pool: onnx.NodeProto, picture: Picture) -> tuple[Axis, Axis]:
    kernel = attribute(pool, "kernel_shape")
    if kernel is None or len(kernel.ints) != 2:
        raise NotCollapsibleError("its kernel has no height and width")
    if picture.channels is None:
        raise NotCollapsibleError(f"the channel count of '{pool.input[0]}' is not known")
    height, width = window_axes(pool, kernel.ints, picture)
    for axis, length in zip((height, width), picture[1:], strict=True):
        if attribute_int(pool, "ceil_mode", 0) and axis.stride > 1:
            if length is None:
                raise NotCollapsibleError("ceil_mode may add a window: height or width are not known")
            if (length + axis.begin + axis.end - axis.extent) % axis.stride:
                raise NotCollapsibleError("ceil_mode adds a window")
    if all(
        length is not None and _windows_along(axis, length) == 1
        for axis, length in ((height, picture.height), (width, picture.width))
    ):
        raise NotCollapsibleError("it is over the whole picture")
    return height, width


def _windows_along(axis: Axis, length: int) -> int:
    return (length + axis.begin + axis.end - axis.extent) // axis.stride + 1


def _border_map(pool: onnx.NodeProto, picture: Picture, height: Axis, width: Axis) -> FloatArray | None:
    """Returns ``[1, 1, OH, OW]``: by how much the Conv is too small at each place; None if it is right everywhere."""
    if attribute_int(pool, "count_include_pad", 0) or not any((*height[3:], *width[3:])):
        return None
    factors = []
    for axis, length in ((height, picture.height), (width, picture.width)):
        if not (axis.begin or axis.end):
            factors.append(np.ones(1))
            continue
        if length is None:
            raise NotCollapsibleError("its padding is not counted, and height or width are not known")
        starts = np.arange(_windows_along(axis, length)) * axis.stride - axis.begin
        places = starts[:, None] + np.arange(axis.kernel) * axis.dilation
        inside = ((places >= 0) & (places < length)).sum(axis=1)
        if not inside.all():
            raise NotCollapsibleError("a window holds padding only")
        factors.append(axis.kernel / inside)
    borders = factors[0][:, None] * factors[1][None, :]
    return None if (borders == 1.0).all() else borders[None, None]


def _apply(
    form: IntegerForm, pool: onnx.NodeProto, channels: int, height: Axis, width: Axis, borders: FloatArray | None
) -> None:
    size = height.kernel * width.kernel
    weights = np.full((channels, 1, height.kernel, width.kernel), 1.0 / size, np.float32)
    inputs = [pool.input[0], form.add_constant(weights, f"{pool.name}_weight")]
    form.become(pool, "Conv", inputs, {"group": channels, **window_attributes(height, width)})
    if borders is not None:
        form.insert_behind(pool, "Mul", form.add_constant(borders.astype(np.float32), f"{pool.name}_borders"))
