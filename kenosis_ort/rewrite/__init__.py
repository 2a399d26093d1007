"""Rewrites that leave what the float model computes unchanged, by subject, each with its algebra."""

from typing import Final

from kenosis_ort.rewrite.activations import collapse_gelu, collapse_hard_swish, collapse_silu
from kenosis_ort.rewrite.affine import fold_batch_norm, fold_gemm_factors, fold_scale
from kenosis_ort.rewrite.attention import fuse_attention
from kenosis_ort.rewrite.channel_shuffle import fold_channel_shuffle
from kenosis_ort.rewrite.clips import collapse_clip, hard_sigmoid_to_clip, hard_swish_to_product
from kenosis_ort.rewrite.constant_nodes import drop_identity, fold_constants, inline_branch
from kenosis_ort.rewrite.integer_forms import batch_norm_to_conv, linear_to_gemm, sum_to_add
from kenosis_ort.rewrite.norms import collapse_affine_norm, collapse_layer_norm, spell_norm
from kenosis_ort.rewrite.pools import average_pool_to_conv, fold_padding, lrn_to_pool, pool_from_mean
from kenosis_ort.rewrite.residuals import residual_to_sum, split_skip_norm
from kenosis_ort.rewrite.rule import Rule
from kenosis_ort.rewrite.transposes import cancel_transposes

PREPARATION: Final = (drop_identity, fold_constants, inline_branch, fold_gemm_factors, fold_batch_norm)
"""The rewrites that belong to preparation, in the order they are applied."""

FLOAT_FORMS: Final[tuple[Rule, ...]] = (
    cancel_transposes,
    collapse_clip,
    fold_padding,
    collapse_silu,
    collapse_gelu,
    collapse_hard_swish,
    fold_scale,
    collapse_layer_norm,
    collapse_affine_norm,
    spell_norm,
    split_skip_norm,
    residual_to_sum,
    pool_from_mean,
    lrn_to_pool,
    fuse_attention,
)
"""The rewrites into operators that quantize better, in the order they are applied after `PREPARATION`."""

OPTIONAL_FORMS = (collapse_silu,)
"""Applied only where the caller names them: a QuickGelu between Q and DQ is faster than Sigmoid and Mul in integer on
some processors (Zen 5: 2.92x for 2.66x) and slower on others (Xeon with AMX: YOLOX-Nano 0.94x for 1.05x of FP32)."""

USUAL_FORMS: Final = tuple(form for form in FLOAT_FORMS if form not in OPTIONAL_FORMS)
BLOCK_FORMS: Final = (*PREPARATION, *USUAL_FORMS)  # of what gets weights in blocks, all else float

INTEGER_FORMS = (
    batch_norm_to_conv,
    average_pool_to_conv,
    sum_to_add,
    hard_swish_to_product,
    hard_sigmoid_to_clip,
    linear_to_gemm,
    fold_channel_shuffle,
)
"""The rewrites that pay between integer kernels only: each takes the names of its candidates from a placement plan."""
