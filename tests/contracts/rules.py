"""For each rewrite a small net that it changes, in ONNX text, and nets that it nearly changes, with the reason.

Values declared in ``<...>`` are constants: those of `KNOWN` hold these numbers, others are random, vectors positive.
"""

import re

import numpy as np
import onnx

from kenosis_ort.rewrite import FLOAT_FORMS, INTEGER_FORMS, PREPARATION
from kenosis_ort.targets.ort_cpu.rewrites import OWN_FORMS
from tests import planning
from tests.graph.build import ready

RULES = {rule.__name__: rule for forms in (PREPARATION, FLOAT_FORMS, INTEGER_FORMS, OWN_FORMS) for rule in forms}
KNOWN = {
    "zero": 0.0, "half": 0.5, "one": 1.0, "two": 2.0, "three": 3.0, "four": 4.0, "six": 6.0, "small": 1e-3,
    "root2": 2.0**0.5, "root_less": 1.414, "negative": -1.0, "huge": 1e38, "yes": True,
    "split": [0, 2, 4, 6, 6], "joined": [0, 8, 6, 6], "cut": [0, 4, 8, 6, 6], "flat": [0, 32, 6, 6],
    "heads": [0, 0, 2, 16], "edges": [0, 0, 0, 0, 0, 0, 1, 1],
    "cuts": [0, 0, 0, 0, 0, 0, 1, -1], "channels": [0, 1, 0, 0, 0, 0, 0, 0], "whole": [0, 0, 32],
}  # fmt: skip

_RMS = "s = Mul(x, x) m = ReduceMean<axes = [-1]>(s) a = Add(m, small) r = Sqrt(a)"
_NORM = "m = ReduceMean<axes = [-1]>(x) d = Sub(x, m) s = Pow(d, two) v = ReduceMean<axes = [-1]>(s) a = Add(v, small)"
_CONV = "(float[1,8,6,6] x) => (float y) <float[8,8,1,1] w, float[8] b, float[8,8,1,1] u"
_GEMM = "(float[2,3] x) => (float y) <float[3,4] w, float[4] b, float[2,4] t>"
_NORM_3 = "float[3] g, float[3] h, float[3] i, float[3] j"
_BATCH_NORM = "y = BatchNormalization(c, g, h, i, j)"
_SKIP = "(float[2,3,4] x, float[2,3,4] z) => (float[2,3,4] y"
_SKIP_NORM = "com.microsoft.SkipLayerNormalization(x, z, g)"
_POOL = "(float[n,3,h,k] x) => (float y) { y = AveragePool"
_STEM = "=> (float y) <float[4,3,3,3] w> { y = Conv"

EXAMPLES = {
    "drop_identity": ("Relu Relu",
     "(float[2,3] x) => (float y) { a = Relu(x) b = Identity(a) c = Dropout(b) y = Relu(c) }"),
    "fold_constants": ("MatMul",
     "(float[2,3] x) => (float y) <float[4,3] w> { t = Transpose<perm = [1,0]>(w) y = MatMul(x, t) }"),
    "inline_branch": ("Relu", """(float[2] x) => (float y) <bool yes> { y = If(yes) <
        then_branch = t () => (float[2] p) { p = Relu(x) }, else_branch = e () => (float[2] q) { q = Neg(x) }> }"""),
    "fold_gemm_factors": ("Transpose Gemm", """(float[3,2] x) => (float y) <float[3,4] w, float[4] b>
        { y = Gemm<alpha = 0.5, beta = 2.0, transA = 1>(x, w, b) }"""),
    "fold_batch_norm": ("Conv", f"""{_CONV}, float[8] g, float[8] h, float[8] i, float[8] j>
        {{ c = Conv(x, w, b) y = BatchNormalization(c, g, h, i, j) }}"""),
    "cancel_transposes": ("Relu Add ReduceMean Conv", """(float[1,4,5,6] x) => (float y) <float[4] b, float[3,4,1,1] w>
        { t = Transpose<perm = [0,2,3,1]>(x) r = Relu(t) a = Add(r, b) m = ReduceMean<axes = [1,2]>(a)
        u = Transpose<perm = [0,3,1,2]>(m) y = Conv(u, w) }"""),
    "collapse_clip": ("Clip", "(float[2,3] x) => (float y) { m = Max(x, zero) y = Min(m, four) }"),
    "fold_padding": ("Conv", """(float[1,8,6,6] x) => (float y) <float[4,8,3,3] w, int64[8] edges>
        { p = Pad(x, edges) y = Conv<strides = [2,2]>(p, w) }"""),
    "collapse_silu": ("QuickGelu", "(float[2,3] x) => (float y) { a = Mul(x, two) s = Sigmoid(a) y = Mul(x, s) }"),
    "collapse_gelu": ("Gelu",
     "(float[2,3] x) => (float y) { a = Div(x, root2) e = Erf(a) s = Add(e, one) p = Mul(x, s) y = Mul(p, half) }"),
    "collapse_hard_swish": ("HardSwish",
     "(float[2,3] x) => (float y) { a = Add(x, three) c = Clip(a, zero, six) p = Mul(x, c) y = Div(p, six) }"),
    "fold_scale": ("Conv",
     f"{_CONV}, float[8,1,1] k, float[8,1,1] t> {{ c = Conv(x, w, b) d = Mul(c, k) y = Add(d, t) }}"),
    "collapse_layer_norm": ("LayerNormalization", f"""(float[2,5] x) => (float y) <float[5] g, float[5] h>
        {{ {_NORM} r = Sqrt(a) q = Div(d, r) p = Mul(q, g) y = Add(p, h) }}"""),
    "collapse_affine_norm": ("LayerNormalization",
     f"""(float[2,5] x) => (float y) <float[5] g, float[5] h> {{ {_NORM} r = Sqrt(a)
        i = Reciprocal(r) k = Mul(i, g) o = Mul(x, k) n = Mul(m, k) t = Sub(h, n) y = Add(o, t) }}"""),
    "spell_norm": ("Pow ReduceMean Add Sqrt Div Mul",
     f"(float[2,5] x) => (float y) <float[5] g> {{ {_RMS} i = Reciprocal(r) q = Mul(x, i) y = Mul(q, g) }}"),
    "split_skip_norm": ("Sum LayerNormalization",
     """(float[2,3,4] x, float[2,3,4] z) => (float[2,3,4] y) <float[4] g, float[4] h>
        { y = com.microsoft.SkipLayerNormalization(x, z, g, h) }"""),
    "residual_to_sum": ("Sum LayerNormalization",
     "(float[2,3,4] x, float[2,3,4] z) => (float y) <float[4] g> { s = Add(x, z) y = LayerNormalization(s, g) }"),
    "pool_from_mean": ("GlobalAveragePool Flatten",
     "(float[1,3,4,4] x) => (float y) { y = ReduceMean<axes = [2,3], keepdims = 0>(x) }"),
    "lrn_to_pool": ("Mul Unsqueeze AveragePool Squeeze Mul Add Sqrt Sqrt Mul Div",
     "(float[1,5,4,4] x) => (float y) { y = LRN<size = 3, alpha = 0.1>(x) }"),
    "fuse_attention": ("Attention", """(float[1,2,3,4] q, float[1,2,5,4] k, float[1,2,5,4] v) => (float y)
        { t = Transpose<perm = [0,1,3,2]>(k) s = MatMul(q, t) w = Softmax<axis = -1>(s) y = MatMul(w, v) }"""),
    "batch_norm_to_conv": ("Relu Conv",
     """(float[1,4,3,3] x) => (float y) <float[4] g, float[4] h, float[4] i, float[4] j>
        { r = Relu(x) y = BatchNormalization(r, g, h, i, j) }"""),
    "average_pool_to_conv": ("Conv",
     "(float[1,4,6,6] x) => (float y) { y = AveragePool<kernel_shape = [2,2], strides = [2,2]>(x) }"),
    "sum_to_add": ("Add Add", "(float[2,3] x, float[2,3] z, float[3] v) => (float y) { y = Sum(x, z, v) }"),
    "hard_swish_to_product": ("Add Clip Mul Conv", f"{_CONV}> {{ h = HardSwish(x) y = Conv(h, w, b) }}"),
    "hard_sigmoid_to_clip": ("Conv Clip", f"{_CONV}> {{ c = Conv(x, w, b) y = HardSigmoid(c) }}"),
    "linear_to_gemm": ("Reshape Gemm Reshape",
     "(float[n,4,3] x) => (float[n,4,5] y) <float[3,5] w, float[5] b> { m = MatMul(x, w) y = Add(m, b) }"),
    "fold_channel_shuffle": ("Conv Conv",
     f"""{_CONV}, int64[5] split, int64[4] joined> {{ c = Conv(x, w, b) r = Reshape(c, split)
        t = Transpose<perm = [0,2,1,3,4]>(r) j = Reshape(t, joined) y = Conv(j, u) }}"""),
    "space_to_depth_stem": ("SpaceToDepth Conv",
     "(float[1,3,8,8] x) => (float y) <float[4,3,2,2] w, float[4] b> { y = Conv<strides = [2,2]>(x, w, b) }"),
    "pad_stem_channels": ("Pad Conv",
     "(float[1,3,8,8] x) => (float y) <float[4,3,3,3] w, float[4] b> { y = Conv(x, w, b) }"),
    "pad_depthwise": ("Conv Relu Conv Conv",
     """(float[1,4,5,5] x) => (float y) <float[24,4,1,1] w, float[24] b, float[24,1,3,3] d, float[4,24,1,1] u>
        { c = Conv(x, w, b) r = Relu(c) e = Conv<group = 24>(r, d) y = Conv(e, u) }"""),
}  # fmt: skip
"""For each rule the operators of the result, and the net."""

OPSETS = {"collapse_gelu": 20, "fuse_attention": 23, "inline_branch": 13}
"""Operator sets of examples other than 17."""

NAMED = frozenset(rule.__name__ for forms in (INTEGER_FORMS, OWN_FORMS) for rule in forms)
"""Rules that are given the names of the nodes that may change."""

ANY_TYPE = frozenset({"drop_identity", "fold_constants", "inline_branch", "fold_batch_norm", "cancel_transposes"})
"""Rules that change nets of any floating type."""

NEAR_MISSES = (
    ("cancel_transposes", "m = ReduceMean<axes = [1,2]>(a)", "m = Split<axis = 3>(a)", ""),
    ("cancel_transposes", "m = ReduceMean<axes = [1,2]>(a)", "m = LpNormalization<axis = 3>(a)", ""),
    ("cancel_transposes", "(float y)", "(float y, float t, float m)", ""),
    ("cancel_transposes", "float[4] b", "float[1,1,1,1,4] b", ""),
    ("collapse_clip", "m = Max(x, zero) y = Min(m, four)", "y = Max(x, z)", ""),
    ("collapse_clip", "m = Max(x, zero) y = Min(m, four)", "y = Clip(x, zero, four)", ""),
    ("collapse_clip", "(float y)", "(float y) <float[1,1,1] zero>", "more dimensions"),
    ("fold_padding", "Pad(x, edges)", "Pad<mode = \"edge\">(x, edges)", "does not pad with a constant"),
    ("fold_padding", "Pad(x, edges)", "Pad(x, edges, one)", "does not pad with zeros"),
    ("fold_padding", "p = Pad(x, edges)", "e = Abs(edges) p = Pad(x, e)", "is computed"),
    ("fold_padding", "edges", "cuts", "or cuts"), ("fold_padding", "edges", "channels", "the batch or the channels"),
    ("fold_padding", "strides = [2,2]", "auto_pad = \"SAME_UPPER\"", "its auto_pad is 'SAME_UPPER'"),
    ("collapse_silu", "Mul(x, s)", "Mul(s, s)", ""), ("collapse_silu", "Mul(x, s)", "Mul(z, s)", ""),
    ("collapse_silu", "Mul(x, two)", "Div(two, x)", ""),
    ("collapse_silu", "(float y)", "(float y) <float[3] two>", "is not one constant number"),
    ("collapse_silu", "two", "zero", "is not one constant number"),
    ("collapse_silu", "Mul(x, two)", "Mul(x, z)", "is not one constant number"),
    ("collapse_silu", "(float y)", "(float y) <float[1,1,1] two>", "more dimensions"),
    ("collapse_gelu", "root2", "one", ""), ("collapse_gelu", "root2", "root_less", ""),
    ("collapse_gelu", "Mul(p, half)", "Mul(p, six)", "is not 0.5 * x * (1 + Erf)"),
    ("collapse_gelu", "Mul(x, s)", "Mul(z, s)", "is not 0.5 * x * (1 + Erf)"),
    ("collapse_gelu", "Add(e, one)", "Sub(one, e)", "is not 0.5 * x * (1 + Erf)"),
    ("collapse_gelu", "Add(e, one)", "Relu(e)", "is not 0.5 * x * (1 + Erf)"),
    ("collapse_gelu", "(float y)", "(float y) <float[1,1,1] one>", "more dimensions"),
    ("collapse_hard_swish", "y = Div(p, six)", "y = Div(p, four)", ""),
    ("collapse_hard_swish", "zero, six", "one, six", ""),
    ("collapse_hard_swish", "Clip(a, zero, six)", "Clip(a, zero)", ""),
    ("collapse_hard_swish", "Clip(a, zero, six)", "Clip(a, six, zero)", ""),
    ("collapse_hard_swish", "p = Mul(x, c) y = Div(p, six)", "y = Abs(c)", ""),
    ("collapse_hard_swish", "Add(x, three)", "Sub(three, x)", ""),
    ("collapse_hard_swish", "a = Add(x, three)", "h = ReduceMax<keepdims = 0>(x) a = Add(h, three)", ""),
    ("collapse_hard_swish", "(float y)", "(float y) <float[1,1,1] three>", "more dimensions"),
    ("collapse_layer_norm", "axes = [-1]", "axes = [0]", "not over the last dimensions"),
    ("collapse_layer_norm", "float[2,5] x", "float[2,k] x", "the last dimensions of 'x' are not known"),
    ("collapse_layer_norm", "5]", "1]", "over a single element"),
    ("collapse_layer_norm", "<float[5] g", "<float[1,1,1] small, float[5] g", "more dimensions"),
    ("collapse_layer_norm", "Pow(d, two)", "Pow(d, three)", ""),
    ("collapse_layer_norm", "s = Pow(d, two)", "e = Relu(d) s = Mul(d, e)", ""),
    ("collapse_layer_norm", "Add(v, small)", "Add(v, negative)", ""),
    ("collapse_layer_norm", "v = ReduceMean<axes = [-1]>(s)", "v = ReduceMean<axes = [-1, 0]>(s)", ""),
    ("collapse_layer_norm", "m = ReduceMean<axes = [-1]>", "m = ReduceMean<axes = [-1], keepdims = 0>", ""),
    ("collapse_layer_norm", "Div(d, r)", "Div(x, r)", ""),
    ("collapse_layer_norm", "r = Sqrt(a)", "b = Sqrt(a) r = Exp(b)", ""),
    ("collapse_affine_norm", "float[5] g", "float[1,5] g", "is not a constant vector of the last dimension"),
    ("collapse_affine_norm", "float[5] h", "float h", "is not a constant vector of the last dimension"),
    ("collapse_affine_norm", "[-1]", "[0]", ""), ("collapse_affine_norm", "Mul(m, k)", "Mul(d, k)", ""),
    ("spell_norm", "float[5] g", "float[2,5] g", ""), ("spell_norm", "y = Mul(q, g)", "y = Abs(q)", ""),
    ("spell_norm", "[-1]", "[-2, -1]", ""), ("pool_from_mean", "axes = [2,3]", "axes = [1,2]", ""),
    ("pool_from_mean", "axes = [2,3]", "axes = [3]", ""), ("pool_from_mean", "axes = [2,3], ", "", ""),
    ("pool_from_mean", "float[1,3,4,4] x", "float[1,3,4,4,2] x", ""),
    ("pool_from_mean", "float[1,3,4,4] x", "float[1,3,0,4] x", "'x' is empty"),
    ("lrn_to_pool", "size = 3", "size = 4", "its size is even"),
    ("lrn_to_pool", "size = 3", "size = 3, bias = 0.0", "bias or its alpha is not positive"),
    ("lrn_to_pool", "alpha = 0.1", "alpha = -1.0", "bias or its alpha is not positive"),
    ("lrn_to_pool", "float[1,5,4,4] x", "float[1,5,4] x", "not known to have 4 dimensions"),
    ("fold_scale", "float[8,1,1] k", "float[8,1] k", ""), ("fold_scale", "float[8,1,1] k", "float[1,1,8,1,1] k", ""),
    ("fold_scale", "Mul(c, k)", "Mul(c, c)", ""), ("fold_scale", "Mul(c, k)", "Div(k, c)", ""),
    ("fold_scale", "d = Mul(c, k)", "d = Div(c, zero)", "not be finite"),
    ("fold_batch_norm", "(c, g, h, i, j)", "<training_mode = 1>(c, g, h, i, j)", "training mode"),
    ("fold_batch_norm", "y = BatchNormalization(c, g", "k = Abs(g) y = BatchNormalization(c, k", "not constant"),
    ("batch_norm_to_conv", "(r, g, h, i, j)", "<training_mode = 1>(r, g, h, i, j)", "training mode"),
    ("batch_norm_to_conv", "float[1,4,3,3] x", "float[1,4,3] x", "3 dimensions"),
    ("batch_norm_to_conv", "y = BatchNormalization(r, g", "k = Abs(g) y = BatchNormalization(r, k", "not constant"),
    ("batch_norm_to_conv", "j", "negative", "not finite"),
    ("batch_norm_to_conv", "BatchNormalization(r, g, h, i, j)", "Mul(r, r)", ""),
    ("fuse_attention", "axis = -1", "axis = 2", "last dimension"),
    ("fuse_attention", "float[1,2,3,4] q", "float[2,2,3,4] q", "broadcast"),
    ("fuse_attention", "s = MatMul(q, t)", "o = MatMul(q, t) s = Mul(o, negative)", "its scale is -1.0"),
    ("fuse_attention", "y = MatMul(w, v)", "y = Abs(w)", ""),
    ("sum_to_add", "Sum(x, z, v)", "Sum(x)", "one operand only"),
    ("hard_sigmoid_to_clip", "HardSigmoid(c)", "HardSigmoid<alpha = -0.1>(c)", "not positive"),
    ("hard_sigmoid_to_clip", "c = Conv(x, w, b)", "a = Abs(w) c = Conv(x, a, b)", "are not constant"),
    ("hard_sigmoid_to_clip", "Conv(x, w, b)", "Abs(x)", ""),
    ("hard_sigmoid_to_clip", "y = HardSigmoid(c)", "g = HardSigmoid(c) y = Mul(c, g)", "is needed elsewhere"),
    ("linear_to_gemm", "float[n,4,3] x", "float[2,4,3] x", ""),
    ("linear_to_gemm", "float[n,4,3] x", "float[n,3] x", ""),
    ("linear_to_gemm", "float[5] b", "float[1] b", "is not one number a column"),
    ("linear_to_gemm", "float[5] b", "float[4,5] b", "is not one number a column"),
    ("linear_to_gemm", "float[5] b", "float[1,1,1,5] b", "adds dimensions"),
    ("linear_to_gemm", "[n,4,5] y)", "[n,4,5] y, float[n,4,5] m)", "'m' is needed elsewhere"),
    ("space_to_depth_stem", "strides = [2,2]", "strides = [1,1]", ""),
    ("space_to_depth_stem", "strides = [2,2]", "strides = [2,1]", "its stride is 2 x 1"),
    ("space_to_depth_stem", "strides = [2,2]", "strides = [2,2], dilations = [2,1]", "dilated"),
    ("space_to_depth_stem", "[4,3,2,2] w", "[4,3,1,1] w", "more than double"),
    ("space_to_depth_stem", "float[1,3,8,8] x", "float[1,3,8,7] x", "8 x 7 is no multiple"),
    ("space_to_depth_stem", "float[1,3,8,8] x", "float[1,3,h,8] x", "height and width of 'x' are not known"),
    ("pad_stem_channels", "[4,3,3,3] w", "[4,3,7,7] w", "its window has 49 elements"),
    ("pad_stem_channels", "[4,3,3,3] w", "[4,3,1,1] w", "its window has 1 elements"),
    ("pad_stem_channels", ",3,8,8] x) => (float y) <float[4,3,", ",4,8,8] x) => (float y) <float[4,4,", ""),
    ("average_pool_to_conv", "kernel_shape = [2,2]", "kernel_shape = [6,6]", "over the whole picture"),
    ("average_pool_to_conv", "[2,2]>", "[2,2], pads = [0,0,1,1], ceil_mode = 1>", "ceil_mode adds a window"),
    ("average_pool_to_conv", "float[1,4,6,6] x", "float[1,c,6,6] x", "channel count of 'x' is not known"),
    ("hard_swish_to_product", "y = Conv(h, w, b)", "s = Add(h, x) y = Conv(s, u)", "does not keep a factor"),
    ("hard_swish_to_product", "y = Conv(h, w, b)", "s = Mul(h, h) y = Conv(s, u)", "does not keep a factor"),
    ("hard_swish_to_product", "y = Conv(h, w, b)", "s = Sigmoid(h) y = Conv(s, u)", "does not keep a factor"),
    ("hard_swish_to_product", "y = Conv(h, w, b)", "t = Conv(h, u) y = Mul(h, t)", "is needed as it is"),
    ("hard_swish_to_product", "y = Conv(h, w, b)", "k = Abs(u) y = Conv(h, k)", "are not constant"),
    ("hard_swish_to_product", "y = Conv(h, w, b)", "p = GlobalAveragePool(h) s = Mul(h, p) y = Conv(s, u)",
     "multiplies it with what comes from it"),
    ("hard_swish_to_product", "h = HardSwish(x)", "g = HardSigmoid(x) a = Abs(x) h = Mul(a, g)", ""),
    ("fuse_attention", "s = MatMul(q, t)", "o = MatMul(q, t) s = Mul(o, zero)", "its scale is 0.0"),
    ("fuse_attention", "w = Softmax<axis = -1>(s)", "o = Where(yes, s, negative) w = Softmax<axis = -1>(o)",
     "small enough"),
    ("residual_to_sum", "(float y)", "(float y, float s)", ""),
    ("space_to_depth_stem", ",3,8,8] x) => (float y) <float[4,3", ",4,8,8] x) => (float y) <float[4,4", ""),
    ("space_to_depth_stem", ",3,8,8] x) => (float y) <float[4,3", ",9,8,8] x) => (float y) <float[4,9", ""),
    ("pad_stem_channels", ",3,8,8] x) => (float y) <float[4,3", ",9,8,8] x) => (float y) <float[4,9", ""),
    ("pad_depthwise", "24", "12", ""), ("pad_depthwise", "24", "32", ""),
    ("pad_depthwise", "24", "17", "17 channels would become 32"),
    ("pad_depthwise", "(float y)", "(float y, float[1,24,3,3] e)", "its channels reach 'e', which is needed as it is"),
    ("pad_depthwise", "y = Conv(e, u)", "y = Softmax<axis = 1>(e)", "(Softmax) may need its channels as they are"),
    ("pad_depthwise", "y = Conv(e, u)", "y = Concat<axis = 1>(e, e)", "(Concat)"),
    ("pad_depthwise", "y = Conv(e, u)", "y = ReduceMean<axes = [1]>(e)", "(ReduceMean)"),
    ("pad_depthwise", "y = Conv(e, u)", "y = Conv<group = 2>(e, d)", "splits its channels into groups"),
    ("pad_depthwise", "c = Conv(x, w, b)", "k = Abs(w) c = Conv(x, k, b)", "the weights of 'Conv_c' are not constant"),
)  # fmt: skip
"""Rule, what of its example is written differently and how, and the reason that is told; none is without a word.

Numbers of `KNOWN` need not be declared, and ``z`` that is nothing else is ``Relu(x)``.
"""

_POOLED = "(float[1,3,6,6] x) => (float y) <int64[8] edges> { r = Relu(x) p = Pad(r, edges) y = MaxPool"

OTHER_NETS = (
    ("cancel_transposes", """(float[1,4,5,6] x) => (float y) { t = Transpose<perm = [0,2,3,1]>(x) r = Relu(t)
        y = Transpose<perm = [0,2,3,1]>(r) }""", ""),
    ("fold_padding", f"{_POOLED}<kernel_shape = [1,1]>(p) }}", "padding alone"),
    ("fold_padding", f"{_POOLED}<kernel_shape = [3,3], ceil_mode = 1>(p) }}", "padding alone"),
    ("fold_padding", f"{_POOLED.replace('Relu', 'Abs')}<kernel_shape = [3,3]>(p) }}", "'r' may be negative"),
    ("fold_scale", f"{_GEMM} {{ c = Gemm<alpha = 2.0>(x, w, b) y = Mul(c, three) }}", "alpha or beta is not 1"),
    ("fold_scale", f"{_GEMM} {{ c = Gemm<alpha = 2.0>(x, w, b) y = Mul(c, zero) }}", "alpha or beta is not 1"),
    ("fold_scale", f"{_GEMM} {{ c = Gemm(x, w, t) y = Mul(c, three) }}", "is not one number a channel"),
    ("fold_gemm_factors", f"{_GEMM} {{ c = Gemm(x, w) y = Gemm<beta = 0.5>(x, w, c) }}", "not a constant"),
    ("fold_gemm_factors", "(float[3,3] x) => (float y) { y = Gemm<alpha = 2.0>(x, x) }", ""),
    ("fold_gemm_factors", "(float[2,3] x) => (float y) <float[3,4] huge> { y = Gemm<alpha = 99.0>(x, huge) }",
     "finite"),
    ("fold_batch_norm", f"(float[2,3,3] x) => (float y) <float[3,3] w, {_NORM_3}> {{ c = MatMul(x, w) {_BATCH_NORM} }}",
     "is not known to give a matrix"),
    ("fold_batch_norm", (f"(float[1,3,4,4] x) => (float y) <float[3,3,1,1] w, float[1,3,4,4] a, {_NORM_3}>"
     f"{{ d = Conv(x, w) c = Add(d, a) {_BATCH_NORM} }}"), "is not one number a channel"),
    ("collapse_hard_swish", "(float[2,3] x) => (float y) { g = HardSigmoid(x) y = Mul(x, g) }",
     "alpha 0.2 and beta 0.5 are not those of HardSwish"),
    ("collapse_hard_swish", ("(float[2,3] x) => (float y, float g) "
     "{ g = HardSigmoid<alpha = 0.16666667, beta = 0.5>(x) y = Mul(x, g) }"), "'g' is needed elsewhere"),
    ("hard_sigmoid_to_clip", f"{_GEMM} {{ c = Gemm<alpha = 2.0>(x, w, b) y = HardSigmoid(c) }}", "factors of its own"),
    ("split_skip_norm", f"{_SKIP}, float[2,3,1] m) <float[4] g> {{ y, m = {_SKIP_NORM} }}",
     "its statistic 'm' is needed"),
    ("split_skip_norm", f"{_SKIP}, float[2,3,1] d, float[2,3,4] s) <float[4] g> {{ y, m, d, s = {_SKIP_NORM} }}",
     "its statistic 'd' is needed"),
    ("average_pool_to_conv", f"{_POOL}<kernel_shape = [3,3], strides = [2,2], ceil_mode = 1>(x) }}",
     "ceil_mode may add a window"),
    ("average_pool_to_conv", f"{_POOL}<kernel_shape = [3,3], pads = [1,1,1,1]>(x) }}", "padding is not counted"),
    ("average_pool_to_conv", f"{_POOL}<kernel_shape = [3,3], auto_pad = \"SAME_UPPER\">(x) }}",
     "depends on a height or width"),
    ("average_pool_to_conv", "(float[n,3,4] x) => (float y) { y = AveragePool<kernel_shape = [2]>(x) }",
     "3 dimensions"),
    ("average_pool_to_conv", ("(float[n,3,3,3] x) => (float y) "
     "{ y = AveragePool<kernel_shape = [1,1], strides = [3,1], auto_pad = \"SAME_UPPER\">(x) }"),
     "padding is negative"),
    ("space_to_depth_stem", f"(float[1,6,8,8] x) {_STEM}<strides = [2,2], group = 2>(x, w) }}", ""),
    ("space_to_depth_stem", f"(float[n,3,15,15] x) {_STEM}<strides = [5,5]>(x, w) }}", "its stride is 5 x 5"),
    ("space_to_depth_stem", f"(float[n,3,9,9] x) {_STEM}<strides = [3,3]>(x, w) }}", "its stride is 3 x 3"),
    ("space_to_depth_stem", f"(float[n,3,h,8] x) {_STEM}<strides = [2,2], auto_pad = \"SAME_UPPER\">(x, w) }}",
     "depends on a height or width"),
    ("space_to_depth_stem", f"(float[n,3,8,8] x, float[4,3,3,3] k) {_STEM}<strides = [2,2]>(x, k) }}",
     "weights are not constant"),
    ("pad_stem_channels", f"(float[n,3,8,8] x, float[4,3,3,3] k) {_STEM}(x, k) }}", "weights are not constant"),
    ("pad_stem_channels", f"(float[1,6,8,8] x) {_STEM}<group = 2>(x, w) }}", ""),
    ("pad_stem_channels", "(float[1,3,8] x) => (float y) <float[4,3,3] w> { y = Conv(x, w) }", ""),
    ("pad_depthwise", ("(float[1,24,5,5] x) => (float y) <float[24,1,3,3] d, float[4,24,1,1] u> "
     "{ e = Conv<group = 24>(x, d) y = Conv(e, u) }"), "its channels reach 'x', which is needed as it is"),
    ("pad_depthwise", ("(float[1,4,5,5] x, float[1,24,9,9] a) => (float y) <float[24,4,1,1] w, float[24,1,3,3] d> "
     "{ c = Conv(x, w) e = Conv<group = 24>(c, d) y = Conv(a, e) }"), "takes its channels for weights"),
)  # fmt: skip
"""Rule, another net that it leaves as it is, and the reason as in `NEAR_MISSES`."""


KERNELS = {
    "average_pool_to_conv": ("QLinearConv QLinearConv QLinearConv",
     "m = AveragePool<kernel_shape = [3,3], pads = [1,1,1,1], count_include_pad = 1>(c)"),
    "batch_norm_to_conv": ("QLinearConv QLinearConv QLinearConv",
     "a = Relu(c) n = BatchNormalization(a, g, h, i, j) m = Relu(n)"),
    "collapse_clip": ("QLinearConv QLinearConv", "l = Max(c, zero) m = Min(l, half)"),
    "fold_padding": ("QLinearConv QLinearConv", "m = Pad(c, edges)"),
    "collapse_silu": ("QLinearConv QuickGelu QLinearConv", "s = Sigmoid(c) m = Mul(c, s)"),
    "collapse_gelu": ("QLinearConv Gelu QLinearConv",
     "a = Div(c, root2) t = Erf(a) s = Add(t, one) p = Mul(c, s) m = Mul(p, half)"),
    "collapse_hard_swish": ("QLinearConv HardSigmoid Mul QLinearConv",
     "a = Add(c, three) l = Clip(a, zero, six) p = Mul(c, l) m = Div(p, six)"),
    "fold_scale": ("QLinearConv QLinearConv", "d = Mul(c, k) a = Add(d, t) m = Relu(a)"),
    "sum_to_add": ("QLinearConv QLinearConv QLinearConv QLinearAdd QLinearAdd QLinearConv",
     "d = Conv(x, u, b) f = Conv(x, v, e) s = Sum(c, d, f) m = Relu(s)"),
    "hard_swish_to_product": ("QLinearConv QLinearAdd QLinearMul QLinearConv", "m = HardSwish(c)"),
    "hard_sigmoid_to_clip": ("QLinearConv QLinearConv", "m = HardSigmoid(c)"),
    "pool_from_mean": ("QLinearConv QLinearGlobalAveragePool QLinearConv", "m = ReduceMean<axes = [2,3]>(c)"),
    "lrn_to_pool": ("QLinearConv Mul Unsqueeze AveragePool Squeeze Mul Add Sqrt Sqrt Mul Div QLinearConv",
     "m = LRN<size = 5, alpha = 0.01, bias = 2.0>(c)"),
    "pad_stem_channels": ("Pad QLinearConv QLinearConv",
     """(float[n,3,12,12] x) => (float[n,8,r,s] y) <float[16,3,3,3] w, float[8,16,3,3] u>
        { c = Conv(x, w) r = Relu(c) y = Conv(r, u) }"""),
    "space_to_depth_stem": ("SpaceToDepth QLinearConv QLinearConv",
     """(float[n,3,16,16] x) => (float[n,8,r,s] y) <float[16,3,2,2] w, float[8,16,3,3] u>
        { c = Conv<strides = [2,2]>(x, w) r = Relu(c) y = Conv(r, u) }"""),
}  # fmt: skip
"""The kernels, but for conversions and transposes, that the runtime has for a quantized net after the rule.

The net is a text, or what stands between two Convs, from ``c`` to ``m``.
"""


def net(text, opset=17):
    """Returns the model of a text, vectors positive."""
    declared = r"\b(?:float|int64|bool)(?:\[[\d,]*\])? "
    known = {
        k: v for k, v in KNOWN.items() if re.search(rf"\b{k}\b", text) and not re.search(rf"{declared}{k}\b", text)
    }
    if re.search(r"\bz\)|\(z,", text) and " z" not in text.split("=>")[0]:
        text = text.replace("{ ", "{ z = Relu(x) ", 1)
    weights = {name: np.float32(value) if isinstance(value, float) else value for name, value in known.items()}
    model = planning.parse(f"net {text}", weights, opset=opset)
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        number = np.broadcast_to(KNOWN[tensor.name], array.shape) if tensor.name in KNOWN else array
        if array.ndim < 2 and tensor.name not in KNOWN:
            number = np.abs(array) + 0.1
        tensor.CopyFrom(onnx.numpy_helper.from_array(number.astype(array.dtype), tensor.name))
    return model


def between_convs(middle):
    """Returns the text of a net of two Convs and what stands between them, from ``c`` to ``m``."""
    sizes = {**dict.fromkeys("wuv", "16,16,1,1"), **dict.fromkeys("beghij", "16"), **dict.fromkeys("kt", "16,1,1")}
    nodes = f"c = Conv(x, w, b) {middle} y = Conv(m, u, e)"
    computed = re.findall(r"(\w+) = \w+[(<]", nodes)
    used = [name for name in sizes if re.search(rf"\b{name}\b", nodes) and name not in computed]
    held = ", ".join(f"float[{sizes[name]}] {name}" for name in used)
    return f"(float[n,16,6,6] x) => (float[n,16,r,s] y) <{held}> {{ {nodes} }}"


def prepared(model, opset=13):
    """Returns a model as a rewrite gets it: named nodes, constants as initializers, shapes inferred."""
    return ready(model, min_opset=max(opset, 13)).proto


def example(rule, old="", new="", *, opset=0):
    """Returns the example of a rule, prepared, with part of its text replaced."""
    text = EXAMPLES[rule][1]
    assert old in text, f"'{old}' is not in the example of {rule}"
    return prepared(net(text.replace(old, new) if old else text, OPSETS.get(rule, 17)), opset)
