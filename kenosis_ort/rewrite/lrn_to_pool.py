"""Local response normalization as a moving average over the squares.

Over the channels ``c - l ... c + l`` around each one, with ``size = 2 l + 1`` and zeros beyond the first and the last::

    LRN(x)[c] = x[c] / (bias + alpha / size * sum over the window of x^2) ^ beta

and the sum divided by ``size`` is what AveragePool computes along the channels, with padding counted::

    m      = Squeeze(AveragePool(Unsqueeze(x * x, 1); kernel = size x 1 x 1, pads = l, count_include_pad = 1), 1)
    LRN(x) = x / (alpha * m + bias) ^ beta

The channels become the depth of a picture of one channel, so heights and widths need not be known. With
``r = Sqrt(s)``, ``s ^ 0.75`` is ``r * Sqrt(r)``; other exponents than 0.25, 0.5, 0.75 and 1 are left to Pow.

The runtime's own LRN computes a power per element in scalar code. In its place, a window of 5 (one AVX512 thread) takes
0.76 ms for 12.9 over 64 channels of 56 x 56, and 0.46 ms for 9.7 over 192 of 28 x 28. A 1x1 Conv with a band matrix
for weights is as fast up to 100 channels and half as fast at 256; and it would be quantized, which squares suffer
from. None of the operators above runs in integer: their neighbours may, and lose no accuracy by it.

Not changed: an even size, which the runtime does not run; a bias or an alpha that is not positive, for which the power
may be undefined; a rank other than 4; a type other than float32.
"""

from __future__ import annotations

import math

import numpy as np
import onnx

from kenosis_ort.graph.attributes import attribute_float, attribute_int
from kenosis_ort.rewrite.editing import Editor
from kenosis_ort.rewrite.matching import NotCollapsibleError
from kenosis_ort.rewrite.rule import float_rule

_OPSET = 13  # Unsqueeze and Squeeze with axes as an input
_RANK = 4


@float_rule(
    "LRN",
    did="LRN nodes became a moving average over squares, which is several times as fast",
    stays="LRN nodes stay",
    least_opset=_OPSET,
)
def lrn_to_pool(editor: Editor, norm: onnx.NodeProto) -> None:
    """Turns every LRN of the main graph into a pool over squares, a power and a quotient, in place.

    The node keeps its name and becomes the quotient.
    """
    _check(editor, norm)
    _write(editor, norm)


def _check(editor: Editor, norm: onnx.NodeProto) -> None:
    editor.require_float32(norm.input[0])
    if editor.rank(norm.input[0]) != _RANK:
        raise NotCollapsibleError(f"'{norm.input[0]}' is not known to have {_RANK} dimensions")
    if attribute_int(norm, "size", 0) % 2 != 1:
        raise NotCollapsibleError("its size is even")
    if attribute_float(norm, "bias", 1.0) <= 0.0 or attribute_float(norm, "alpha", 1e-4) <= 0.0:
        raise NotCollapsibleError("its bias or its alpha is not positive")


def _write(editor: Editor, norm: onnx.NodeProto) -> None:
    x, size = norm.input[0], attribute_int(norm, "size", 0)
    alpha, beta, bias = (
        attribute_float(norm, name, default) for name, default in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0))
    )

    def constant(number: float, name: str) -> str:
        return editor.add_constant(np.array(number, np.float32), f"{norm.name}_{name}")

    axis = editor.add_constant(np.array([1], np.int64), f"{norm.name}_axis")
    depth = editor.insert_before(norm, "Unsqueeze", [editor.insert_before(norm, "Mul", [x, x]), axis])
    beside = size // 2
    pool = editor.insert_before(
        norm,
        "AveragePool",
        [depth],
        kernel_shape=(size, 1, 1),
        pads=(beside, 0, 0, beside, 0, 0),
        count_include_pad=1,
    )
    mean = editor.insert_before(norm, "Squeeze", [pool, axis])
    scaled = editor.insert_before(norm, "Mul", [mean, constant(alpha, "alpha")])
    shifted = editor.insert_before(norm, "Add", [scaled, constant(bias, "bias")])
    editor.become(norm, "Div", [x, _power(editor, norm, shifted, beta)])


def _power(editor: Editor, norm: onnx.NodeProto, base: str, exponent: float) -> str:
    """Returns the value of ``base ^ exponent``, by square roots where they do."""
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
