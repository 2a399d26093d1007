"""A corpus of small graphs that covers every operator of ONNX Runtime's two quantization registries.

Each graph reads its operator behind a Conv (so that pass-through operators see a quantized input), and most also
directly behind a graph input. `GRAPHS` maps names to builders, `OPTIONS` names to arguments of the quantizer.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnxruntime.quantization import QuantType

from tests import models, planning

SHAPE = "float[1,4,6,6]"
_NUMBERS = {"zero": 0, "half": 0.5, "low": -0.5, "six": 6, "minus": -1, "quarter": 0.25, "eighth": 0.125, "five": 5}
CONSTANTS = {
    **{name: np.float32(value) for name, value in _NUMBERS.items()},
    **{f"ones{count}": np.ones(count, np.float32) for count in (3, 4, 5, 6, 8)},
    **{f"zeros{count}": np.zeros(count, np.float32) for count in (4, 6, 8)},
    **{f"i{value}": np.array([value]) for value in range(5)},
    **{name: np.array(value) for name, value in {"one": 1, "two": 2, "ends": [0, 2], "parts": [1, 3]}.items()},
    "flat": np.array([1, -1]), "row": np.arange(5).reshape(1, 5), "even": np.arange(6) % 2 == 0,
    "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]), "scales": np.array([1, 1, 2, 2], np.float32),
}  # fmt: skip
"""Constants that the texts name; other weights are declared in front of the nodes, and random."""
CONV3 = "Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]>"
POOL = "kernel_shape = [2, 2], strides = [2, 2]"
TEXTS = {
    **{op.lower(): f"y = {op} (x)" for op in ("Relu", "Sigmoid", "LeakyRelu", "Tanh", "Erf", "HardSwish")},
    "softmax": "y = Softmax <axis = 1> (x)", "softmax_last": "f = Flatten (x) y = Softmax <axis = -1> (f)",
    "clip_0_6": "y = Clip (x, zero, six)", "clip_half": "y = Clip (x, low, half)", "clip_open": "y = Clip (x, zero)",
    "max_pool": f"y = MaxPool <{POOL}> (x)", "average_pool": f"y = AveragePool <{POOL}, pads = [0, 0, 1, 1]> (x)",
    "global_average_pool": "y = GlobalAveragePool (x)", "flatten": "y = Flatten (x)",
    "transpose": "y = Transpose <perm = [0, 2, 3, 1]> (x)", "reshape": "y = Reshape (x, flat)",
    "squeeze": "y = Squeeze (x, i0)", "unsqueeze": "y = Unsqueeze (x, i0)", "slice": "y = Slice (x, i1, i4, i2)",
    "pad": "y = Pad (x, pads, quarter)", "pad_no_value": "y = Pad (x, pads)",
    "pad_reflect": 'y = Pad <mode = "reflect"> (x, pads)', "resize": 'y = Resize <mode = "nearest"> (x, , scales)',
    "resize_linear": 'y = Resize <mode = "linear"> (x, , scales)', "gather": "y = Gather <axis = 1> (x, ends)",
    "gather_table": "<float[7,3] table> i = ArgMax <axis = 1> (x) y = Gather (table, i)",
    "gather_elements": "f = Flatten (x) y = GatherElements <axis = 1> (f, row)",
    "cum_sum": "y = CumSum (x, one)", "arg_max": "int64[1,1,6,6] y: y = ArgMax <axis = 1> (x)",
    "concat": "r = Relu (x) y = Concat <axis = 1> (x, r)",
    "concat_convs": f"<float[4,4,3,3] v, float[4,4,1,1] w> a = {CONV3} (x, v) b = Conv (x, w)"
    " y = Concat <axis = 1> (a, b)",
    "add": "r = Relu (x) y = Add (x, r)", "add_constant": "<float[1,4,1,1] w> y = Add (x, w)",
    "mul": "s = Sigmoid (x) y = Mul (x, s)", "mul_scalar": "y = Mul (x, eighth)",
    "where": "n = Neg (x) y = Where (even, x, n)", "where_constants": "g = Greater (x, zero) y = Where (g, x, minus)",
    "conv_no_bias": f"<float[3,4,3,3] w> y = {CONV3} (x, w)",
    "conv_depthwise": "<float[4,1,3,3] w, float[4] b> y = Conv <group = 4> (x, w, b)",
    "conv_stride": "<float[8,4,3,3] w, float[8] b> y = Conv <strides = [2, 2]> (x, w, b)",
    "conv_transpose": "<float[4,3,2,2] w> y = ConvTranspose <strides = [2, 2]> (x, w, ones3)",
    "gemm": "<float[5,144] w, float[5] b> f = Flatten (x) y = Gemm <transB = 1> (f, w, b)",
    "gemm_alpha_beta": "<float[5,144] w, float[5] b> f = Flatten (x)"
    " y = Gemm <transB = 1, alpha = 0.5, beta = 2.0> (f, w, b)",
    "gemm_no_trans": "<float[144,5] w> f = Flatten (x) y = Gemm (f, w, ones5)",
    "gemm_no_bias": "<float[144,5] w> f = Flatten (x) y = Gemm (f, w)",
    "gemm_relu_gemm": "<float[144,8] v, float[8] a, float[8,3] w, float[3] b> f = Flatten (x) g = Gemm (f, v, a)"
    " r = Relu (g) y = Gemm (r, w, b)",
    "matmul": "<float[6,5] w> y = MatMul (x, w)",
    "matmul_bias": "<float[6,5] w, float[5] b> m = MatMul (x, w) y = Add (m, b)",
    "matmul_two_inputs": "t = Transpose <perm = [0, 1, 3, 2]> (x) y = MatMul (x, t)",
    "batch_normalization": "<float[4] gamma, float[4] beta> y = BatchNormalization (x, gamma, beta, zeros4, ones4)",
    "instance_normalization": "y = InstanceNormalization (x, ones4, zeros4)",
    "layer_normalization": "y = LayerNormalization <axis = -1> (x, ones6, zeros6)",
    "layer_normalization_no_bias": "y = LayerNormalization <axis = -1> (x, ones6)",
    "reduce_mean": "y = ReduceMean <axes = [2, 3]> (x)", "identity": "y = Identity (x)",
    "shared_weight": "<float[4,4,1,1] w> a = Conv (x, w) s = Mul (x, five) b = Conv (s, w)"
    " y = Concat <axis = 1> (a, b)",
    "shared_bias": "<float[4,4,1,1] w, float[4] c> a = Conv (x, w, c) s = Mul (x, five) b = Conv (s, w, c)"
    " y = Concat <axis = 1> (a, b)",
    "relu_two_consumers": f"<float[4,4,3,3] w, float[4] b> r = Relu (x) c = {CONV3} (r, w, b) y = Add (c, r)",
    "conv_two_consumers": "r = Relu (x) y = Add (r, x)",
    "split": "float[1,2,6,6] y, float[1,3,6,6] q: <float[2,1,1,1] w> p, q = Split <axis = 1> (x, parts)"
    " y = Conv (p, w)",
    "top_k": "float[1,4,6,3] y, int64[1,4,6,3] i: y, i = TopK <axis = -1> (x, i3)",
    "with_loop": f"float[1,2,6,6] y: <float[2,4,1,1] w> c = Loop <body = around (int64 i, bool go, {SHAPE} carried)"
    f" => (bool go_on, {SHAPE} next) {{ next = Add (carried, x) go_on = Identity (go) }}> (two, , x) y = Conv (c, w)",
}  # fmt: skip
"""Nodes from the value ``x`` to ``y``, behind weights; outputs other than one ``y`` of floats stand in front."""
ALONE = {
    "embed_layer_norm": """(int32[1,5] ids, int32[1,5] segments) => (float[1,5,4] y)
        <float[11,8] words, float[6,8] places, float[3,8] parts_of, float[8,4] w, float[4] b> {
        e, mask = com.microsoft.EmbedLayerNormalization (ids, segments, words, places, parts_of, ones8, zeros8)
        m = MatMul (e, w) y = Add (m, b) }""",
    "lstm": """(float[3,1,4] x) => (y) <float[1,16,4] w, float[1,16,4] r, float[4,2] h, float[2] b> {
        o = LSTM <hidden_size = 4> (x, w, r) s = Squeeze (o, i1) m = MatMul (s, h) y = Add (m, b) }""",
}


def _parsed(text):
    """The model of a text, nodes named after what they write, but for those that have names."""
    used = {name: value for name, value in CONSTANTS.items() if re.search(rf"\b{name}\b", text)}
    model = planning.parse(text, used)
    for node in model.graph.node:
        node.name = node.name or f"{node.op_type}_{node.output[0]}"
    return model


def _graph(text, *, front, back=False):
    """The graph of one of `TEXTS`, a Conv in front of it and behind it where asked for."""
    outputs, colon, rest = text.rpartition(": ")
    weights, _, nodes = rest[1:].partition("> ") if rest.startswith("<") else ("", "", rest)
    declared = [weights] if weights else []
    if front:
        declared.append("float[4,4,3,3] front_w, float[4] front_b")
        nodes = f"[front] x = {CONV3} (image, front_w, front_b) {nodes}"
    if back:
        declared.append("float[4,4,1,1] back_w, float[4] back_b")
        nodes = f"{nodes} z = Conv (y, back_w, back_b)"
    head = f"({SHAPE} {'image' if front else 'x'}) => ({'z' if back else outputs if colon else 'y'})"
    return _parsed(f"{head} {f'<{chr(44).join(declared)}>' if declared else ''} {{ {nodes} }}")


Builder = Callable[[], onnx.ModelProto]
GRAPHS = {
    **models.ALL,
    **{name: partial(_graph, text, front=True) for name, text in TEXTS.items()},
    **{f"{name}_at_input": partial(_graph, text, front=False) for name, text in TEXTS.items()},
    **{
        f"{name}_conv": partial(_graph, TEXTS[name], front=True, back=True)
        for name in ("relu", "sigmoid", "leakyrelu", "tanh", "erf", "hardswish", "clip_0_6")
    },
    **{name: partial(_parsed, text) for name, text in ALONE.items()},
}


Options = dict[str, Any]
"""Arguments of stock's quantizer, as `quantize_static` names them, and the operator set."""
_S8 = QuantType.QInt8
_PLAIN = {
    "activation_type": QuantType.QUInt8, "weight_type": _S8, "per_channel": False, "reduce_range": False,
    "op_types_to_quantize": (), "nodes_to_quantize": (), "nodes_to_exclude": (), "extra_options": {},
    "opset": models.OPSET,
}  # fmt: skip
_GIVEN = {
    "u8s8": {}, "u8s8_per_channel": {"per_channel": True}, "s8s8": {"activation_type": _S8},
    "s8s8_symmetric": {"activation_type": _S8, "per_channel": True, "extra_options": {"ActivationSymmetric": True}},
    "u8u8_weight_asymmetric": {"weight_type": QuantType.QUInt8, "extra_options": {"WeightSymmetric": False}},
    "reduce_range": {"per_channel": True, "reduce_range": True},
    "keep_removable": {"extra_options": {"QDQKeepRemovableActivations": True}},
    "qdq_pair_to_weight": {"extra_options": {"AddQDQPairToWeight": True}},
    "dedicated_pairs": {"extra_options": {"DedicatedQDQPair": True}},
    "exclude_output": {"extra_options": {"OpTypesToExcludeOutputQuantization": ["Conv", "Gemm", "MatMul", "Add"]}},
    "force_no_input_check": {"extra_options": {"ForceQuantizeNoInputCheck": True}},
    "minimum_range": {"extra_options": {"MinimumRealRange": 5.0}},
    "no_bias": {"extra_options": {"QuantizeBias": False}}, "contrib_ops": {"extra_options": {"UseQDQContribOps": True}},
    "const_b_only": {"extra_options": {"MatMulConstBOnly": True}},
    "no_weight_adjust": {"extra_options": {"QDQDisableWeightAdjustForInt32Bias": True}},
    "channel_axis": {
        "per_channel": True, "extra_options": {"QDQOpTypePerChannelSupportToAxis": {"MatMul": 1, "Conv": 0}}},
    "u16s8": {"activation_type": QuantType.QUInt16},
    "u16s16_opset21": {"activation_type": QuantType.QUInt16, "weight_type": QuantType.QInt16, "opset": 21},
    "u8s4_opset21": {"weight_type": QuantType.QInt4, "opset": 21},
    "restricted_asymmetric": {"activation_type": _S8, "extra_options": {"ActivationRestrictedAsymmetric": True}},
    "some_op_types": {"op_types_to_quantize": ("Conv", "Relu", "Add")},
    "only_front": {"nodes_to_quantize": ("front", "stem", "conv0", "fc0")},
    "without_front": {"nodes_to_exclude": ("front", "stem", "conv0", "fc0")},
}  # fmt: skip
OPTIONS = {name: {**_PLAIN, **given} for name, given in _GIVEN.items()}


def feeds(model, count=2):
    """Random feeds; integer inputs stay below 3."""
    return models.feeds(model, count, high=3, dims={"batch": 2})
