"""Targets: one folder a runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kenosis_ort.exports import deferred

if TYPE_CHECKING:
    from kenosis_ort.targets.model import DataTypes, FusionRule, Hooks, Requirement, Role, Target, TimedRuntime
    from kenosis_ort.targets.shipped import TARGETS, get_target

DEFAULT_TARGET: Final = "ort-cpu"
_NAMES: Final = {
    "kenosis_ort.targets.model": "DataTypes FusionRule Hooks Requirement Role Target TimedRuntime",
    "kenosis_ort.targets.shipped": "TARGETS get_target",
}

__all__ = [
    "DEFAULT_TARGET",
    "TARGETS",
    "DataTypes",
    "FusionRule",
    "Hooks",
    "Requirement",
    "Role",
    "Target",
    "TimedRuntime",
    "get_target",
]

__getattr__ = deferred(__name__, _NAMES)
