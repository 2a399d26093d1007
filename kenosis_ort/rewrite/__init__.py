"""Rewrites that leave what the float model computes unchanged, one rule a file, each with its algebra."""

from kenosis_ort.rewrite.fold_batch_norm import fold_batch_norm

PREPARATION = (fold_batch_norm,)
"""The rewrites that belong to preparation, in the order they are applied."""

__all__ = ["PREPARATION", "fold_batch_norm"]
