"""Target ``tensorrt``: NVIDIA TensorRT, explicit quantization, by its documents.

Nothing here was run: there is no prover and no timing, and each rule names the clause that it rests on, in our words.
Its test checks that files are made as the clause says.

Documents, the first in part by what the others and ONNX Runtime's quantizer restate of it: [1] TensorRT, "Working with
Quantized Types", explicit quantization. [2] TensorFlow Quantization Toolkit, "Add custom QDQ insertion cases".
[3] Model Optimizer, ``modelopt.onnx.quantization.int8``. [4] the ONNX parser's checks of zero points.
"""

from typing import Final

from onnx import TensorProto

from kenosis_ort.targets.model import Target
from kenosis_ort.targets.vocabulary import WEIGHTED, DataTypes, Requirement, Role, rule

_ACTIVATIONS: Final = (
    "Relu", "Clip", "LeakyRelu", "PRelu", "Sigmoid", "Tanh", "Elu", "Selu", "HardSigmoid", "HardSwish", "Softplus",
    "Gelu",
)  # fmt: skip
_PLACEMENT: Final = "[1], Q/DQ layer-placement recommendations"

_RULES: Final = (
    rule("trt-weighted-inputs", "Conv ConvTranspose Gemm MatMul", Role.ANCHOR,
        "all inputs of these operators are quantized", requires=WEIGHTED,
        source=f"{_PLACEMENT}: quantize all inputs of weighted operations"),
    rule("trt-add-all-int8", "Add Mul", Role.BINARY,
        "an operator without weights that reads int8 writes int8", data_inputs=None,
        requires=(Requirement.NO_CONSTANT,),
        source=f"{_PLACEMENT}: quantize inputs and outputs of element-wise operations in a network of int8"),
    rule("trt-pool-int8", "AveragePool GlobalAveragePool", Role.UNARY,
        "an average pool that reads int8 writes int8", source="[3], default operators of int8"),
    rule("trt-concat-int8", "Concat", Role.CONCAT,
        "a Concat that reads int8 writes int8", data_inputs=None, source=f"{_PLACEMENT}: operations without weights"),
    rule("trt-commuting",
        "MaxPool Reshape Transpose Flatten Squeeze Unsqueeze Slice Expand Tile Gather Split "
        "DepthToSpace SpaceToDepth", Role.PASS_THROUGH,
        "Q and DQ move over these: the scale is the same in and out", requires=(Requirement.ONE_OUTPUT,),
        source="[1], Q/DQ propagation: max pooling and data movement commute with Q and DQ"),
    rule("trt-fused-activations", (*_ACTIVATIONS, "BatchNormalization"), Role.ISLAND,
        "part of the kernel before them: no Q in front of them",
        source=f"{_PLACEMENT}: do not simulate batch normalization and ReLU fusions in the training framework"),
    rule("trt-float-operators",
        "Softmax LogSoftmax LayerNormalization InstanceNormalization GroupNormalization LSTM GRU "
        "RNN Einsum TopK ArgMax Where CumSum NonMaxSuppression", Role.FLOAT,
        "these have no int8 implementation", source="[1], supported types by operation"),
    rule("trt-float-between",
        "Sub Div Pow Min Max Sum Mean Reciprocal Sqrt Exp Erf Abs Neg Mish Pad Resize Upsample "
        "Identity Dropout Cast LRN Softsign ReduceMean ReduceMax ReduceSum GlobalMaxPool LpPool "
        "GlobalLpPool", Role.ISLAND,
        "these stay in float between DQ and Q", data_inputs=None,
        source="[3], default operators of int8: they are not among them"),
)  # fmt: skip

TENSORRT: Final = Target(
    name="tensorrt",
    rules=_RULES,
    absorbs=(*_ACTIVATIONS, "BatchNormalization"),
    gates=("Sigmoid", "HardSigmoid"),
    longest_epilogue=4,
    residual="shortcut",
    float_output=("Conv", "ConvTranspose", "Gemm", "MatMul"),
    float_where="unread",
    bias="float",
    head_float_share=0.0,
    types=DataTypes(
        activation=TensorProto.INT8,
        activations=(TensorProto.INT8,),
        weights=(TensorProto.INT8,),
        only_these=True,
        symmetric=True,
        weight_symmetric=True,
        why="TensorRT takes int8 with zero point 0 alone",
    ),
    float_forms=("collapse_clip", "collapse_hard_swish", "fold_scale", "collapse_layer_norm", "pool_from_mean"),
    kernel_forms=("sum_to_add",),
    facts=(
        ("trt-int8-zero-point-0", "activations and weights are int8 with zero point 0 ([1], quantization scheme; [4])"),
        ("trt-weights-by-channel", "weights have a scale a channel, axis 0, ConvTranspose axis 1 ([1], granularity)"),
        ("trt-no-output-q", f"the outputs of weighted operators are not quantized for their own sake ({_PLACEMENT})"),
        ("trt-shortcut-alone", "of a residual Add the shortcut alone is quantized: Conv, Add and Relu are one ([2])"),
        ("trt-float-bias", "biases are float: no DQ of an int32 bias ([1], supported inputs of Dequantize)"),
        ("trt-no-integer-operators", "QLinear and Integer operators are not read ([4])"),
        ("trt-standard-operators", "operators of com.microsoft are not read ([4])"),
    ),
)
