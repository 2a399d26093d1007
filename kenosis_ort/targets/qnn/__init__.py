"""Target ``qnn``: Qualcomm's HTP, by ONNX Runtime's QNN provider.

Every rule was measured on the provider's simulator (onnxruntime-qnn 2.7.0, Snapdragon X Elite) and is proved again by
its test wherever that is installed. The provider takes an operator together with the DQ before and the Q behind it;
what lacks one of them is refused, or runs in float16 where the chip has it.

The accuracy passes are evaluated on ONNX Runtime's CPU provider, which computes the same integers but for roundings, in
a hundredth of the simulator's time.
"""

from typing import Final

from onnx import TensorProto

from kenosis_ort.targets.model import Hooks, Target
from kenosis_ort.targets.qnn.htp_proof import missing, prove
from kenosis_ort.targets.vocabulary import WEIGHTED, DataTypes, Requirement, Role, rule

_WHY_NOT: Final = missing()

RULES: Final = (
    rule("qnn-conv", "Conv ConvTranspose", Role.ANCHOR,
        "Conv runs with int8 weights by channel, an int32 bias, and Q on what it writes; without that it is refused",
        requires=WEIGHTED),
    rule("qnn-gemm", "Gemm", Role.ANCHOR,
        "Gemm likewise, with weights by channel too; one that writes float is refused, as is alpha other than 1",
        requires=(*WEIGHTED, Requirement.UNIT_ALPHA, Requirement.WEIGHT_RANK_2)),
    rule("qnn-matmul", "MatMul", Role.ANCHOR,
        "MatMul with a constant matrix takes int8 weights by channel",
        requires=(Requirement.CONSTANT_WEIGHT, Requirement.WEIGHT_RANK_2)),
    rule("qnn-matmul-activations", "MatMul Einsum", Role.BINARY,
        "a product of two activations runs on integers", data_inputs=None),
    rule("qnn-elementwise", "Add Sub Mul Div Pow Min Max Sum Mean PRelu", Role.BINARY,
        "elementwise operators rescale internally; constants are quantized like activations", data_inputs=None),
    rule("qnn-where", "Where", Role.BINARY,
        "Where chooses between two quantized values", data_inputs=(1, 2)),
    rule("qnn-sigmoid", "Sigmoid", Role.UNARY,
        "Sigmoid in 16 bits writes multiples of 1/65536 whatever the file says", wide_output=(0.0, 65535 / 65536)),
    rule("qnn-tanh", "Tanh", Role.UNARY,
        "Tanh in 16 bits writes multiples of 1/32768 whatever the file says", wide_output=(-1.0, 32767 / 32768)),
    rule("qnn-softmax", "Softmax", Role.UNARY,
        "Softmax in 8 bits writes as if the zero point were 0, without a word", own_grid=True),
    rule("qnn-functions",
        "LeakyRelu Elu Selu HardSigmoid HardSwish Gelu Softplus Mish ThresholdedRelu Exp Log Sqrt "
        "Abs Neg Ceil Floor Round Sign Sin Cos Atan Reciprocal LogSoftmax", Role.UNARY,
        "functions of one value run between DQ and Q"),
    rule("qnn-norms",
        "LayerNormalization InstanceNormalization BatchNormalization RMSNormalization "
        "LpNormalization LRN", Role.UNARY,
        "normalizations run between DQ and Q; the provider quantizes their float scale and bias itself"),
    rule("qnn-pools", "AveragePool GlobalAveragePool GlobalMaxPool LpPool", Role.UNARY,
        "pools that compute have scales of their own in and out"),
    rule("qnn-reductions", "ReduceMean ReduceSum ReduceMax ReduceMin ReduceL2", Role.UNARY,
        "reductions run between DQ and Q"),
    rule("qnn-concat", "Concat", Role.CONCAT,
        "Concat wraps around, without a word, where it reads what lies outside its output's range: one grid for all",
        data_inputs=None),
    rule("qnn-moves",
        "MaxPool Reshape Transpose Flatten Squeeze Unsqueeze DepthToSpace SpaceToDepth Slice Split "
        "Expand Tile Gather GatherElements GatherND TopK", Role.PASS_THROUGH,
        "operators that move data keep the scale"),
    rule("qnn-resize-nearest", "Resize", Role.PASS_THROUGH,
        "Resize moves data in nearest mode", requires=(Requirement.RESIZE_NEAREST,)),
    rule("qnn-resample", "Resize Pad GridSample", Role.UNARY,
        "what interpolates or fills has scales of its own in and out", data_inputs=(0,)),
    rule("qnn-relu", "Relu Clip", Role.ACTIVATION,
        "Relu and Clip are taken in where the quantized range lies within their bounds to the last digit, else refused"
    ),
    rule("qnn-refused",
        "Erf Celu Softsign GroupNormalization MeanVarianceNormalization ReduceProd ReduceL1 "
        "ReduceLogSumExp ReduceSumSquare Trilu ReverseSequence LSTM GRU RNN Attention "
        "MultiHeadAttention SkipLayerNormalization FastGelu BiasGelu", Role.FLOAT,
        "the provider has no integer form of these"),
)  # fmt: skip

FACTS: Final = (
    ("qnn-whole", "every float value carries Q and DQ, the graph's outputs included: what writes float is refused"),
    ("qnn-static-shapes", "shapes are static: a symbolic dimension is refused"),
    ("qnn-relu-behind-concat", "Relu behind a Concat without Q in between is silently wrong: Q stands there"),
    ("qnn-transposed-groups", "a ConvTranspose in groups with weights by channel is wrong: one scale"),
)  # fmt: skip

QNN: Final = Target(
    name="qnn",
    rules=RULES,
    absorbs=("Relu", "Clip"),
    clamps=("Relu", "Clip"),
    whole=True,
    static_shapes=True,
    concat_share_limit=1.0,
    head_float_share=0.0,
    types=DataTypes(
        activations=(TensorProto.UINT8, TensorProto.UINT16),
        mixed=True,
        only_these=True,
        why="HTP takes uint8 or uint16 activations, int8 weights by channel or uint8 ones",
    ),
    float_forms=(
        *("collapse_clip", "collapse_gelu", "collapse_hard_swish", "fold_scale", "collapse_layer_norm"),
        *("collapse_affine_norm", "split_skip_norm", "pool_from_mean"),
    ),
    kernel_forms=(),
    min_opset=20,  # Gelu
    facts=FACTS,
    hooks=Hooks(prove=None if _WHY_NOT else prove, why_unasked=_WHY_NOT or "the simulator of HTP tells no times"),
)

__all__ = ["QNN"]
