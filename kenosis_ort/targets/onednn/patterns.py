"""What oneDNN's developer guide says about quantized Convolutions, clause by clause.

Source: oneDNN developer guide, Graph extension, "Quantized Convolution Fusion Patterns"; the operations of the epilogue
are those of its "Binary Fusions" and "Unary Fusions", to which the text refers.
"""

from __future__ import annotations

from typing import Final

from kenosis_ort.targets.patterns import ConvolutionPattern

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
