"""Channels of a picture rounded up to a multiple of 4 in front of a stem Conv.

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
import onnx
import onnx.numpy_helper

from kenosis_ort.rewrite.integer_form import IntegerForm
from kenosis_ort.rewrite.matching import NotCollapsibleError
from kenosis_ort.rewrite.rule import integer_rule
from kenosis_ort.targets.ort_cpu.rewrites.space_to_depth_stem import MULTIPLE_OF_STEM, is_over_few_channels

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
