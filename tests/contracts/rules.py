"""For each rewrite a small net that it changes, in ONNX text, and nets that it nearly changes, with the reason.

Values declared in ``<...>`` are constants: those of `KNOWN` hold these numbers, all others are random and positive.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import onnx

from kenosis_ort.graph.opset import Rewrite, prepare
from kenosis_ort.rewrite import FLOAT_FORMS, INTEGER_FORMS, PREPARATION
from kenosis_ort.runtime.limits import runtime_limits
from kenosis_ort.targets.ort_cpu.rewrites import OWN_FORMS
from tests import planning

RULES: Final[Mapping[str, Rewrite]] = {
    rule.__name__: rule for forms in (PREPARATION, FLOAT_FORMS, INTEGER_FORMS, OWN_FORMS) for rule in forms
}
KNOWN: Final[Mapping[str, Any]] = {
    "zero": 0.0, "half": 0.5, "one": 1.0, "two": 2.0, "three": 3.0, "four": 4.0, "six": 6.0, "small": 1e-3,
    "root2": 2.0**0.5, "yes": True, "split": [0, 2, 4, 6, 6], "joined": [0, 8, 6, 6],
}  # fmt: skip

_RMS = "s = Mul(x, x) m = ReduceMean<axes = [-1]>(s) a = Add(m, small) r = Sqrt(a)"
_NORM = "m = ReduceMean<axes = [-1]>(x) d = Sub(x, m) s = Pow(d, two) v = ReduceMean<axes = [-1]>(s) a = Add(v, small)"
_CONV = "(float[1,8,6,6] x) => (float y) <float[8,8,1,1] w, float[8] b, float[8,8,1,1] u"

EXAMPLES: Final[Mapping[str, tuple[str, str]]] = {
    "drop_identity": (
        "Relu Relu",
        """(float[2,3] x) => (float y)
        { a = Relu(x) b = Identity(a) c = Dropout(b) y = Relu(c) }""",
    ),
    "fold_constants": (
        "MatMul",
        """(float[2,3] x) => (float y) <float[4,3] w>
        { t = Transpose<perm = [1,0]>(w) y = MatMul(x, t) }""",
    ),
    "inline_branch": (
        "Relu",
        """(float[2] x) => (float y) <bool yes> { y = If(yes) <
        then_branch = t () => (float[2] p) { p = Relu(x) }, else_branch = e () => (float[2] q) { q = Neg(x) }> }""",
    ),
    "fold_gemm_factors": (
        "Transpose Gemm",
        """(float[3,2] x) => (float y) <float[3,4] w, float[4] b>
        { y = Gemm<alpha = 0.5, beta = 2.0, transA = 1>(x, w, b) }""",
    ),
    "fold_batch_norm": (
        "Conv",
        f"""{_CONV}, float[8] g, float[8] h, float[8] i, float[8] j>
        {{ c = Conv(x, w, b) y = BatchNormalization(c, g, h, i, j) }}""",
    ),
    "collapse_clip": (
        "Clip",
        """(float[2,3] x) => (float y) <float zero, float four>
        { m = Max(x, zero) y = Min(m, four) }""",
    ),
    "collapse_silu": (
        "QuickGelu",
        """(float[2,3] x) => (float y) <float two>
        { a = Mul(x, two) s = Sigmoid(a) y = Mul(x, s) }""",
    ),
    "collapse_gelu": (
        "Gelu",
        """(float[2,3] x) => (float y) <float root2, float one, float half>
        { a = Div(x, root2) e = Erf(a) s = Add(e, one) p = Mul(x, s) y = Mul(p, half) }""",
    ),
    "collapse_hard_swish": (
        "HardSwish",
        """(float[2,3] x) => (float y) <float zero, float three, float six>
        { a = Add(x, three) c = Clip(a, zero, six) p = Mul(x, c) y = Div(p, six) }""",
    ),
    "fold_scale": (
        "Conv",
        f"""{_CONV}, float[8,1,1] k, float[8,1,1] t>
        {{ c = Conv(x, w, b) d = Mul(c, k) y = Add(d, t) }}""",
    ),
    "collapse_layer_norm": (
        "LayerNormalization",
        f"""(float[2,5] x) => (float y) <float two, float small, float[5] g, float[5] h>
        {{ {_NORM} r = Sqrt(a) q = Div(d, r) p = Mul(q, g) y = Add(p, h) }}""",
    ),
    "collapse_affine_norm": (
        "LayerNormalization",
        f"""(float[2,5] x) => (float y) <float two, float small, float[5] g, float[5] h> {{ {_NORM} r = Sqrt(a)
        i = Reciprocal(r) k = Mul(i, g) o = Mul(x, k) n = Mul(m, k) t = Sub(h, n) y = Add(o, t) }}""",
    ),
    "spell_norm": (
        "Pow ReduceMean Add Sqrt Div Mul",
        f"""(float[2,5] x) => (float y) <float small, float[5] g>
        {{ {_RMS} i = Reciprocal(r) q = Mul(x, i) y = Mul(q, g) }}""",
    ),
    "split_skip_norm": (
        "Sum LayerNormalization",
        """(float[2,3,4] x, float[2,3,4] z) => (float[2,3,4] y) <float[4] g, float[4] h>
        { y = com.microsoft.SkipLayerNormalization(x, z, g, h) }""",
    ),
    "residual_to_sum": (
        "Sum LayerNormalization",
        "(float[2,3,4] x, float[2,3,4] z) => (float y) <float[4] g> { s = Add(x, z) y = LayerNormalization(s, g) }",
    ),
    "pool_from_mean": (
        "GlobalAveragePool Flatten",
        """(float[1,3,4,4] x) => (float y)
        { y = ReduceMean<axes = [2,3], keepdims = 0>(x) }""",
    ),
    "lrn_to_pool": (
        "Mul Unsqueeze AveragePool Squeeze Mul Add Sqrt Sqrt Mul Div",
        "(float[1,5,4,4] x) => (float y) { y = LRN<size = 3, alpha = 0.1>(x) }",
    ),
    "fuse_attention": (
        "Attention",
        """(float[1,2,3,4] q, float[1,2,5,4] k, float[1,2,5,4] v) => (float y)
        { t = Transpose<perm = [0,1,3,2]>(k) s = MatMul(q, t) w = Softmax<axis = -1>(s) y = MatMul(w, v) }""",
    ),
    "batch_norm_to_conv": (
        "Relu Conv",
        """(float[1,4,3,3] x) => (float y) <float[4] g, float[4] h, float[4] i, float[4] j>
        { r = Relu(x) y = BatchNormalization(r, g, h, i, j) }""",
    ),
    "average_pool_to_conv": (
        "Conv",
        """(float[1,4,6,6] x) => (float y)
        { y = AveragePool<kernel_shape = [2,2], strides = [2,2]>(x) }""",
    ),
    "sum_to_add": ("Add Add", "(float[2,3] x, float[2,3] z, float[3] v) => (float y) { y = Sum(x, z, v) }"),
    "hard_swish_to_product": ("Add Clip Mul Conv", f"{_CONV}> {{ h = HardSwish(x) y = Conv(h, w, b) }}"),
    "hard_sigmoid_to_clip": ("Conv Clip", f"{_CONV}> {{ c = Conv(x, w, b) y = HardSigmoid(c) }}"),
    "linear_to_gemm": (
        "Reshape Gemm Reshape",
        "(float[n,4,3] x) => (float[n,4,5] y) <float[3,5] w, float[5] b> { m = MatMul(x, w) y = Add(m, b) }",
    ),
    "fold_channel_shuffle": (
        "Conv Conv",
        f"""{_CONV}, int64[5] split, int64[4] joined> {{ c = Conv(x, w, b) r = Reshape(c, split)
        t = Transpose<perm = [0,2,1,3,4]>(r) j = Reshape(t, joined) y = Conv(j, u) }}""",
    ),
    "space_to_depth_stem": (
        "SpaceToDepth Conv",
        "(float[1,3,8,8] x) => (float y) <float[4,3,2,2] w, float[4] b> { y = Conv<strides = [2,2]>(x, w, b) }",
    ),
    "pad_stem_channels": (
        "Pad Conv",
        """(float[1,3,8,8] x) => (float y) <float[4,3,3,3] w, float[4] b>
        { y = Conv(x, w, b) }""",
    ),
    "pad_depthwise": (
        "Conv Relu Conv Conv",
        """(float[1,4,5,5] x) => (float y) <float[24,4,1,1] w, float[24] b, float[24,1,3,3] d, float[4,24,1,1] u>
        { c = Conv(x, w, b) r = Relu(c) e = Conv<group = 24>(r, d) y = Conv(e, u) }""",
    ),
}  # fmt: skip
"""For each rule the operators of the result, and the net."""

OPSETS: Final[Mapping[str, int]] = {"collapse_gelu": 20, "fuse_attention": 23, "inline_branch": 13}
"""Operator sets of examples other than 17."""

NAMED: Final = frozenset(rule.__name__ for forms in (INTEGER_FORMS, OWN_FORMS) for rule in forms)
"""Rules that are given the names of the nodes that may change."""

ANY_TYPE: Final = frozenset({"drop_identity", "fold_constants", "inline_branch", "fold_batch_norm"})
"""Rules that change nets of any floating type."""


def net(text: str, opset: int = 17) -> onnx.ModelProto:
    """Returns the model of a text, constants positive."""
    model = planning.parse(f"net {text}", opset=opset)
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        known = np.asarray(KNOWN[tensor.name], array.dtype).reshape(array.shape) if tensor.name in KNOWN else None
        filled = known if known is not None else np.abs(array) + np.asarray(0.1, array.dtype)
        tensor.CopyFrom(onnx.numpy_helper.from_array(filled.astype(array.dtype), tensor.name))
    return model


def prepared(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a model as a rewrite gets it: named nodes, constants as initializers, shapes inferred."""
    limits = runtime_limits()
    return prepare(model, min_opset=13, max_ir=limits.max_ir, max_opset=limits.max_opset).proto


def example(rule: str) -> onnx.ModelProto:
    """Returns the example of a rule, prepared."""
    return prepared(net(EXAMPLES[rule][1], OPSETS.get(rule, 17)))
