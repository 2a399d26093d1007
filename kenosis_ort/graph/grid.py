"""Constants that an 8-bit grid holds exactly.

Widths of integers: their bounds, and the graph's word on how many bits of its container a tensor uses.

Source: Pappalardo et al., "QONNX", 2022, equations 2 and 3; `qonnx.core.modelwrapper` for the annotation's key.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx

_LEVELS = 255
_TOLERANCE = 1e-6  # of the largest value: what float32 leaves of a quotient such as 25 / 9


class ExactGrid(NamedTuple):
    """Values as multiples of one step.

    Attributes:
        step: The step, positive.
        low: The least multiple among the values and 0.
        multiples: Which multiple each value is, of the shape of the values.
    """

    step: float
    low: int
    multiples: npt.NDArray[np.int64]


def exact_grid(values: npt.NDArray[np.generic]) -> ExactGrid | None:
    """The coarsest grid of at most 256 steps, 0 among them, that holds all values; None if there is none.

    Args:
        values: Finite numbers of any shape.
    """
    numbers = np.asarray(values, np.float64)
    distinct = np.unique(numbers)
    if not distinct.size or not np.isfinite(distinct).all():
        return None
    largest = float(np.abs(distinct).max())
    if largest == 0.0:
        return ExactGrid(1.0, 0, np.zeros(numbers.shape, np.int64))
    if distinct.size > _LEVELS + 1:
        return None
    for count in range(1, _LEVELS + 1):
        scaled = distinct * (count / largest)
        whole = np.rint(scaled)
        if max(whole[-1], 0.0) - min(whole[0], 0.0) > _LEVELS:
            return None
        if np.abs(scaled - whole).max() <= _TOLERANCE * count:
            return ExactGrid(
                largest / count, int(min(whole[0], 0.0)), np.rint(numbers * (count / largest)).astype(np.int64)
            )
    return None


ANNOTATION: Final = "finn_datatype"
"""The key under which QONNX' tools keep a tensor's data type, as ``INT4``, in the graph's quantization annotation."""


def integer_bounds(bits: int, *, signed: bool, narrow: bool = False) -> tuple[int, int]:
    """The least and the largest integer of a width."""
    if signed:
        return -(2 ** (bits - 1)) + narrow, 2 ** (bits - 1) - 1
    return 0, 2**bits - 1 - narrow


def width_of(low: int, high: int, *, signed: bool) -> tuple[int, bool] | None:
    """(bits, narrow) of a range of integers, None where no width has these bounds."""
    if high < 1:
        return None
    bits = high.bit_length() + signed
    for narrow in (False, True):
        if integer_bounds(bits, signed=signed, narrow=narrow) == (low, high):
            return bits, narrow
    return None


def annotate(graph: onnx.GraphProto, tensor: str, datatype: str) -> None:
    """Annotates a tensor with its number of bits; an earlier annotation is replaced."""
    for entry in graph.quantization_annotation:
        if entry.tensor_name == tensor:
            for pair in entry.quant_parameter_tensor_names:
                if pair.key == ANNOTATION:
                    pair.value = datatype
                    return
            break
    else:
        entry = graph.quantization_annotation.add(tensor_name=tensor)
    entry.quant_parameter_tensor_names.add(key=ANNOTATION, value=datatype)


def declared_datatypes(graph: onnx.GraphProto) -> dict[str, str]:
    """The data type that the graph says of each tensor, as ``INT4``."""
    return {
        entry.tensor_name: pair.value
        for entry in graph.quantization_annotation
        for pair in entry.quant_parameter_tensor_names
        if pair.key == ANNOTATION
    }
