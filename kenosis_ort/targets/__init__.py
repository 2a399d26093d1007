"""Targets: one folder a runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kenosis_ort.checks import word
from kenosis_ort.errors import OptionError, did_you_mean
from kenosis_ort.targets.arm import ARM
from kenosis_ort.targets.model import DataTypes, FusionRule, Requirement, Role, Target, TimedRuntime
from kenosis_ort.targets.onednn import ONEDNN
from kenosis_ort.targets.ort_cpu import ORT_CPU
from kenosis_ort.targets.ort_web import ORT_WEB
from kenosis_ort.targets.qnn import QNN
from kenosis_ort.targets.tensorrt import TENSORRT

TARGETS: Final[Mapping[str, Target]] = {
    target.name: target for target in (ORT_CPU, ONEDNN, TENSORRT, ARM, QNN, ORT_WEB)
}
"""The targets that come with the package, by name."""

DEFAULT_TARGET: Final = ORT_CPU.name


def get_target(said: str | Target) -> Target:
    """Returns the target of a name; one from outside the package as it is.

    Raises:
        OptionError: There is none of that name, or it is no name (then also a TypeError).
    """
    if isinstance(said, Target):
        return said
    name = word("target", said)
    if name not in TARGETS:
        raise OptionError(
            f"unknown target '{name}'.{did_you_mean(name, TARGETS)}",
            where="target",
            fix=f"one of {sorted(TARGETS)}, or a kenosis_ort.targets.Target",
        )
    return TARGETS[name]


__all__ = [
    "DEFAULT_TARGET",
    "TARGETS",
    "DataTypes",
    "FusionRule",
    "Requirement",
    "Role",
    "Target",
    "TimedRuntime",
    "get_target",
]
