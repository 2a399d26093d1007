"""Rules of Qualcomm's HTP, by ONNX Runtime's QNN provider, for quantized operators.

Every rule was measured on the provider's simulator (onnxruntime-qnn 2.7.0, Snapdragon X Elite) and is proved again by
its test wherever that is installed. The provider takes an operator together with the DQ before and the Q behind it;
what lacks one of them is refused, or runs in float16 where the chip has it.
"""

from __future__ import annotations

from typing import Final

from kenosis_ort.targets.model import FusionRule, Requirement, Role

_VERSIONS: Final = "onnxruntime-qnn>=2.7"
_WEIGHTED: Final = (Requirement.CONSTANT_WEIGHT, Requirement.CONSTANT_OR_NO_BIAS)

RULES: Final = (
    FusionRule(
        "qnn-conv",
        ("Conv", "ConvTranspose"),
        Role.ANCHOR,
        "Conv runs with int8 weights by channel, an int32 bias, and Q on what it writes; without that it is refused",
        requires=_WEIGHTED,
        versions=_VERSIONS,
    ),
    FusionRule(
        "qnn-gemm",
        ("Gemm",),
        Role.ANCHOR,
        "Gemm likewise, with weights by channel too; one that writes float is refused, as is alpha other than 1",
        requires=(*_WEIGHTED, Requirement.UNIT_ALPHA, Requirement.WEIGHT_RANK_2),
        versions=_VERSIONS,
    ),
    FusionRule(
        "qnn-matmul",
        ("MatMul",),
        Role.ANCHOR,
        "MatMul with a constant matrix takes int8 weights by channel",
        requires=(Requirement.CONSTANT_WEIGHT, Requirement.WEIGHT_RANK_2),
        versions=_VERSIONS,
    ),
    FusionRule(
        "qnn-matmul-activations",
        ("MatMul", "Einsum"),
        Role.BINARY,
        "a product of two activations runs on integers",
        data_inputs=None,
        versions=_VERSIONS,
    ),
    FusionRule(
        "qnn-elementwise",
        ("Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "Sum", "Mean", "PRelu"),
        Role.BINARY,
        "elementwise operators rescale internally; constants are quantized like activations",
        data_inputs=None,
        versions=_VERSIONS,
    ),
    FusionRule(
        "qnn-where",
        ("Where",),
        Role.BINARY,
        "Where chooses between two quantized values",
        data_inputs=(1, 2),
        versions=_VERSIONS,
    ),
    FusionRule(
        "qnn-sigmoid",
        ("Sigmoid",),
        Role.UNARY,
        "Sigmoid in 16 bits writes multiples of 1/65536 whatever the file says",
        versions=_VERSIONS,
        wide_output=(0.0, 65535 / 65536),
    ),
    FusionRule(
        "qnn-tanh",
        ("Tanh",),
        Role.UNARY,
        "Tanh in 16 bits writes multiples of 1/32768 whatever the file says",
        versions=_VERSIONS,
        wide_output=(-1.0, 32767 / 32768),
    ),
    FusionRule(
        "qnn-softmax",
        ("Softmax",),
        Role.UNARY,
        "Softmax in 8 bits writes as if the zero point were 0, without a word",
        versions=_VERSIONS,
        own_grid=True,
    ),
    FusionRule(
        "qnn-functions",
        (
            *("LeakyRelu", "Elu", "Selu", "HardSigmoid", "HardSwish", "Gelu", "Softplus", "Mish", "ThresholdedRelu"),
            *("Exp", "Log", "Sqrt", "Abs", "Neg", "Ceil", "Floor", "Round", "Sign", "Sin", "Cos", "Atan", "Reciprocal"),
            "LogSoftmax",
        ),
        Role.UNARY,
        "functions of one value run between DQ and Q",
        versions=_VERSIONS,
    ),
    FusionRule(
        "qnn-norms",
        (
            *("LayerNormalization", "InstanceNormalization", "BatchNormalization", "RMSNormalization"),
            *("LpNormalization", "LRN"),
        ),
        Role.UNARY,
        "normalizations run between DQ and Q; the provider quantizes their float scale and bias itself",
        versions=_VERSIONS,
    ),
    FusionRule(
        "qnn-pools",
        ("AveragePool", "GlobalAveragePool", "GlobalMaxPool", "LpPool"),
        Role.UNARY,
        "pools that compute have scales of their own in and out",
        versions=_VERSIONS,
    ),
    FusionRule(
        "qnn-reductions",
        ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2"),
        Role.UNARY,
        "reductions run between DQ and Q",
        versions=_VERSIONS,
    ),
    FusionRule(
        "qnn-concat",
        ("Concat",),
        Role.CONCAT,
        "Concat wraps around, without a word, where it reads what lies outside its output's range: one grid for all",
        data_inputs=None,
        versions=_VERSIONS,
    ),
    FusionRule(
        "qnn-moves",
        (
            *("MaxPool", "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "DepthToSpace", "SpaceToDepth"),
            *("Slice", "Split", "Expand", "Tile", "Gather", "GatherElements", "GatherND", "TopK"),
        ),
        Role.PASS_THROUGH,
        "operators that move data keep the scale",
        versions=_VERSIONS,
    ),
    FusionRule(
        "qnn-resize-nearest",
        ("Resize",),
        Role.PASS_THROUGH,
        "Resize moves data in nearest mode",
        requires=(Requirement.RESIZE_NEAREST,),
        versions=_VERSIONS,
    ),
    FusionRule(
        "qnn-resample",
        ("Resize", "Pad", "GridSample"),
        Role.UNARY,
        "what interpolates or fills has scales of its own in and out",
        data_inputs=(0,),
        versions=_VERSIONS,
    ),
    FusionRule(
        "qnn-relu",
        ("Relu", "Clip"),
        Role.ACTIVATION,
        "Relu and Clip are taken in where the quantized range lies within their bounds to the last digit, else refused",
        versions=_VERSIONS,
    ),
    FusionRule(
        "qnn-refused",
        (
            *("Erf", "Celu", "Softsign", "GroupNormalization", "MeanVarianceNormalization", "ReduceProd", "ReduceL1"),
            *("ReduceLogSumExp", "ReduceSumSquare", "Trilu", "ReverseSequence", "LSTM", "GRU", "RNN", "Attention"),
            *("MultiHeadAttention", "SkipLayerNormalization", "FastGelu", "BiasGelu"),
        ),
        Role.FLOAT,
        "the provider has no integer form of these",
        versions=_VERSIONS,
    ),
)

FACTS: Final = (
    ("qnn-whole", "every float value carries Q and DQ, the graph's outputs included: what writes float is refused"),
    ("qnn-static-shapes", "shapes are static: a symbolic dimension is refused"),
    ("qnn-relu-behind-concat", "Relu behind a Concat without Q in between is silently wrong: Q stands there"),
    ("qnn-transposed-groups", "a ConvTranspose in groups with weights by channel is wrong: one scale"),
)
