"""The fusion proof and numeric checks: does the runtime execute the model as planned, and right?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kenosis_ort.exports import deferred

if TYPE_CHECKING:
    from kenosis_ort.targets.proof import (
        BrokenClause,
        Cause,
        Clause,
        ConvPattern,
        FusionReport,
        KernelReport,
        PatternReport,
        Status,
    )
    from kenosis_ort.verify.fusion import Problem, check_bias_alignment, verify_fusion, verify_patterns

_NAMES: Final = {
    "kenosis_ort.targets.proof": (
        "BrokenClause Cause Clause ConvPattern FusionReport KernelReport PatternReport Status"
    ),
    "kenosis_ort.verify.fusion": "Problem check_bias_alignment verify_fusion verify_patterns",
}

__all__ = [
    "BrokenClause",
    "Cause",
    "Clause",
    "ConvPattern",
    "FusionReport",
    "KernelReport",
    "PatternReport",
    "Problem",
    "Status",
    "check_bias_alignment",
    "verify_fusion",
    "verify_patterns",
]

__getattr__ = deferred(__name__, _NAMES)
