"""Arithmetic with a constant, one operator after the other, as one ``x * scale + shift``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx

FloatArray = npt.NDArray[np.float64]


def affine_step(
    node: onnx.NodeProto, value: str, scale: FloatArray, shift: FloatArray, constant: FloatArray
) -> tuple[FloatArray, FloatArray] | None:
    """Returns scale and shift with one more Mul, Add, Sub or Div behind them.

    Args:
        node: The operator, of two operands.
        value: Its operand that holds ``x * scale + shift``.
        scale: Factor so far, by channel.
        shift: Summand so far, by channel.
        constant: Its other operand, by channel. Overflow gives infinity, which is for the caller to refuse.

    Returns:
        The new pair; None where the constant is divided by the value, which is not affine.
    """
    swapped = node.input[0] != value
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        if node.op_type == "Mul":
            return scale * constant, shift * constant
        if node.op_type == "Add":
            return scale, shift + constant
        if node.op_type == "Sub":
            return (-scale, constant - shift) if swapped else (scale, shift - constant)
        return None if swapped else (scale / constant, shift / constant)
