"""The kinds of input that can be made up."""

from __future__ import annotations

from kenosis_ort.calibration.synthetic.kinds import InputKind

from .markdown import code


def kind_list() -> str:
    """Returns the kinds in one sentence's worth of code words."""
    return ", ".join(code(kind.value) for kind in InputKind) + "."
