"""Rewrites that leave what the float model computes unchanged, one rule a file, each with its algebra."""

from kenosis_ort.rewrite.drop_identity import drop_identity
from kenosis_ort.rewrite.fold_batch_norm import fold_batch_norm
from kenosis_ort.rewrite.fold_constants import fold_constants

PREPARATION = (drop_identity, fold_constants, fold_batch_norm)
"""The rewrites that belong to preparation, in the order they are applied."""

__all__ = ["PREPARATION", "drop_identity", "fold_batch_norm", "fold_constants"]
