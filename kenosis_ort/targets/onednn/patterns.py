"""What oneDNN's developer guide says about quantized Convolutions, clause by clause.

Source: oneDNN developer guide, Graph extension, "Quantized Convolution Fusion Patterns"; the operations of the epilogue
are those of its "Binary Fusions" and "Unary Fusions", to which the text refers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


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


QUANTIZED_CONVOLUTION: Final = ConvolutionPattern(
    document="oneDNN, Quantized Convolution Fusion Patterns",
    src=("u8", "s8"),
    weights=("s8", "f32"),
    bias=("f32", "bf16", "f16"),
    dst=("u8", "s8", "bf16", "f16", "f32"),
    binary={
        "Add": "Add",
        "Sub": "Subtract",
        "Max": "Maximum",
        "Min": "Minimum",
        "Mul": "Multiply",
        "Div": "Divide",
    },
    unary={
        "Abs": "Abs",
        "Clip": "Clamp",
        "Elu": "Elu",
        "Exp": "Exp",
        "Gelu": "GELU",
        "HardSigmoid": "HardSigmoid",
        "HardSwish": "HardSwish",
        "LeakyRelu": "LeakyReLU",
        "Log": "Log",
        "Mish": "Mish",
        "Relu": "ReLU",
        "Round": "Round",
        "Sigmoid": "Sigmoid",
        "Softplus": "SoftPlus",
        "Sqrt": "Sqrt",
        "Tanh": "Tanh",
    },
    most_operations=4,
    cast_before_quantize=(("bf16", "f32"),),
)
