"""The fusion proof and numeric checks: does the runtime execute the model as planned, and right?"""

from kenosis_ort.targets.pattern_report import BrokenClause, Clause, ConvPattern, PatternReport
from kenosis_ort.targets.proof import Cause, FusionReport, KernelReport, Status
from kenosis_ort.verify.fusion import verify_fusion, verify_patterns
from kenosis_ort.verify.numerics import (
    OutputComparison,
    Problem,
    check_bias_alignment,
    compare_outputs,
    sqnr_db,
)

__all__ = [
    "BrokenClause",
    "Cause",
    "Clause",
    "ConvPattern",
    "FusionReport",
    "KernelReport",
    "OutputComparison",
    "PatternReport",
    "Problem",
    "Status",
    "check_bias_alignment",
    "compare_outputs",
    "sqnr_db",
    "verify_fusion",
    "verify_patterns",
]
