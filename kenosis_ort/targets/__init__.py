"""Targets: one declarative file a runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kenosis_ort.errors import OptionError, did_you_mean
from kenosis_ort.targets.model import FusionRule, Requirement, Role, Target
from kenosis_ort.targets.ort_cpu import ORT_CPU

TARGETS: Final[Mapping[str, Target]] = {ORT_CPU.name: ORT_CPU}


def get_target(name: str) -> Target:
    """Returns the target of that name.

    Raises:
        OptionError: There is none.
    """
    if name not in TARGETS:
        raise OptionError(
            f"unknown target '{name}'.{did_you_mean(name, TARGETS)}", where="target", fix=f"one of {sorted(TARGETS)}"
        )
    return TARGETS[name]


__all__ = ["TARGETS", "FusionRule", "Requirement", "Role", "Target", "get_target"]
