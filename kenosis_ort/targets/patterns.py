"""The vocabulary of a documented fusion pattern: what a library's text says that it executes as one kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ConvolutionPattern:
    """A quantized Convolution with what stands before and behind it, as a document defines it.

    Data types go by the names that the document gives them: ``u8``, ``s8``, ``f32``, ``bf16``, ``f16``.

    Attributes:
        document: Title of the document.
        src: Types of the quantized source.
        weights: Types of the weights, as they enter the pattern.
        bias: Types of the bias, as it enters the pattern.
        dst: Types of what the pattern writes.
        binary: Operator of the model to the document's name of a binary operation of the epilogue.
        unary: The same for unary operations.
        most_operations: How many binary and unary operations the epilogue may hold, a BiasAdd at its start not counted.
        cast_before_quantize: Pairs of types between which a TypeCast may stand in front of the Quantize that ends it.
    """

    document: str
    src: tuple[str, ...]
    weights: tuple[str, ...]
    bias: tuple[str, ...]
    dst: tuple[str, ...]
    binary: Mapping[str, str]
    unary: Mapping[str, str]
    most_operations: int
    cast_before_quantize: tuple[tuple[str, str], ...]
