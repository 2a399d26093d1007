"""What OpenVINO's CPU plugin, and oneDNN inside it, do with quantized operators.

Every rule was measured on OpenVINO 2026.4.1 and is proved again by its test on whatever OpenVINO is installed. Speeds
quoted are of whole nets or blocks against OpenVINO in float32, one thread.
"""

from __future__ import annotations

from typing import Final

from kenosis_ort.targets.model import FusionRule, Requirement, Role

_WEIGHTED: Final = (Requirement.CONSTANT_WEIGHT, Requirement.CONSTANT_OR_NO_BIAS)
_VERSIONS: Final = "openvino>=2025"

EPILOGUE: Final = (
    *("Relu", "Clip", "LeakyRelu", "PRelu", "Sigmoid", "HardSwish", "Gelu", "Tanh", "Elu", "Mish"),
    *("Abs", "Sqrt", "Round", "Neg"),
)
"""Activations that a Conv or linear layer computes behind its sum."""

GATES: Final = ("Sigmoid",)
"""Functions f of ``x * f(x)`` that it computes as one."""

CONSTANT_STEPS: Final = ("Add", "Mul", "Sub", "Div", "Max")
"""Operators with a constant operand that it computes."""

STEM: Final = "stem of a mobile net, few channels and then depthwise: int8 loses accuracy there and gains little time"
"""Why such a stem stays float: `onednn-float-stem` says at what price."""

RULES: Final = (
    FusionRule(
        "onednn-conv",
        ("Conv",),
        Role.ANCHOR,
        "Conv with dequantized data and int8 weights runs on int8, with its whole epilogue, and writes bytes or float",
        requires=_WEIGHTED,
        versions=_VERSIONS,
    ),
    FusionRule(
        "onednn-linear",
        ("Gemm", "MatMul"),
        Role.ANCHOR,
        "a linear layer with int8 weights runs on int8, with bias and epilogue, and writes bytes or float",
        requires=(*_WEIGHTED, Requirement.UNIT_ALPHA, Requirement.NO_TRANS_A, Requirement.WEIGHT_RANK_2),
        versions=_VERSIONS,
    ),
    FusionRule(
        "onednn-residual",
        ("Add",),
        Role.BINARY,
        "Q on both inputs of a residual Add, none between it and its Relu (3.5x; without Q on the branch 3 Adds more)",
        data_inputs=None,
        requires=(Requirement.NO_CONSTANT,),
        versions=_VERSIONS,
    ),
    FusionRule(
        "onednn-mul",
        ("Mul",),
        Role.BINARY,
        "a product of two values reads and writes bytes in one pass",
        data_inputs=None,
        requires=(Requirement.NO_CONSTANT,),
        versions=_VERSIONS,
    ),
    FusionRule(
        "onednn-concat",
        ("Concat",),
        Role.CONCAT,
        "Concat of values of one scale moves bytes; of several, each is requantized in a pass of its own",
        data_inputs=None,
        versions=_VERSIONS,
    ),
    FusionRule(
        "onednn-average-pool",
        ("GlobalAveragePool", "AveragePool"),
        Role.UNARY,
        "an average pool reads and writes bytes; without Q behind it the Conv behind it runs in float",
        versions=_VERSIONS,
    ),
    FusionRule(
        "onednn-moves",
        (
            *("MaxPool", "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "DepthToSpace", "SpaceToDepth"),
            *("Slice", "Split", "Gather", "Expand", "Tile"),
        ),
        Role.PASS_THROUGH,
        "operators that move bytes keep the scale; a Q behind them would requantize in a pass of its own",
        versions=_VERSIONS,
    ),
    FusionRule(
        "onednn-resize",
        ("Resize",),
        Role.PASS_THROUGH,
        "Resize moves bytes in nearest mode",
        requires=(Requirement.RESIZE_NEAREST,),
        versions=_VERSIONS,
    ),
    FusionRule(
        "onednn-epilogue",
        EPILOGUE,
        Role.ACTIVATION,
        "an activation is part of the kernel before it; with Q in between it is a pass of its own (2.8x for 2.4x)",
        versions=_VERSIONS,
    ),
    FusionRule(
        "onednn-float-activations",
        (
            *("HardSigmoid", "Softplus", "Exp", "Log", "Erf", "Selu", "Celu", "ThresholdedRelu", "Softsign"),
            *("Swish", "QuickGelu", "FastGelu", "BiasGelu", "Reciprocal", "Pow", "Min", "Max", "Sum", "Mean"),
            *("Sub", "Div"),
        ),
        Role.ISLAND,
        "these are float passes of their own between integer kernels",
        data_inputs=None,
        versions=_VERSIONS,
    ),
    FusionRule(
        "onednn-float-passes",
        ("ReduceMean", "ReduceMax", "ReduceSum", "GlobalMaxPool", "Pad", "Identity", "Dropout", "Cast", "LRN",
         "BatchNormalization", "ConvTranspose"),
        Role.ISLAND,
        "these run in float between dequantize and quantize; ConvTranspose is float whatever its types",
        versions=_VERSIONS,
    ),
    FusionRule(
        "onednn-float",
        ("LayerNormalization", "InstanceNormalization", "GroupNormalization", "SimplifiedLayerNormalization",
         "RMSNormalization", "SkipLayerNormalization", "LpNormalization", "MeanVarianceNormalization", "Softmax",
         "LogSoftmax", "LSTM", "GRU", "RNN", "Attention", "MultiHeadAttention", "Einsum", "TopK", "Where"),
        Role.FLOAT,
        "quantizing around these does not pay",
        versions=_VERSIONS,
    ),
)  # fmt: skip

FACTS: Final = (
    (
        "moves-keep-grid",
        "behind an operator that moves bytes stands no Q: it would requantize in a pass of its own (5 %)",
    ),
    (
        "onednn-tiles-slow-exponential",
        "kernels for matrix tiles are slow at an exponential: a Max holds it apart (a SiLU detector 2.4x for 1.9x)",
    ),
    ("onednn-deferred-q", "Q belongs behind the whole epilogue: 2.74x for 2.02x on a SiLU detector, and 2 dB more"),
    ("onednn-uint8-weights-float", "a Conv with uint8 weights runs in float"),
    ("onednn-clip-on-weights-float", "a Conv whose weights pass a Clip runs in float"),
    ("onednn-qoperator-per-channel-wrong", "QLinearConv with scales by channel does not import, or is silently wrong"),
    (
        "onednn-strides-behind-dequantize-float",
        "pointwise Convs that stride over a value they alone read run in float; behind a MaxPool of 1x1 they do not",
    ),
    (
        "onednn-float-stem",
        "a mobile net's stem runs on int8, and stays float for accuracy (MobileNetV1, trained: 3.3 dB for no time)",
    ),
    ("onednn-hard-sigmoid-slow", "HardSigmoid is a slow float node with two changes of layout; a Clip is none"),
)
