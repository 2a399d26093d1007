"""Targets: one file or folder a runtime, each imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from kenosis_ort.checks import word
from kenosis_ort.errors import OptionError, did_you_mean
from kenosis_ort.exports import deferred

if TYPE_CHECKING:
    from kenosis_ort.targets.model import Hooks, Target, TimedRuntime
    from kenosis_ort.targets.vocabulary import DataTypes, FusionRule, Requirement, Role

DEFAULT_TARGET: Final = "ort-cpu"

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

_HOMES: Final = {
    **dict.fromkeys(("DataTypes", "FusionRule", "Requirement", "Role"), "kenosis_ort.targets.vocabulary"),
    **dict.fromkeys(("Hooks", "Target", "TimedRuntime"), "kenosis_ort.targets.model"),
}
__getattr__ = deferred(__name__, _HOMES)

_CONSTANTS: Final = {
    "ort-cpu": "ORT_CPU",
    "onednn": "ONEDNN",
    "tensorrt": "TENSORRT",
    "arm": "ARM",
    "qnn": "QNN",
    "ort-web": "ORT_WEB",
}
"""The constant that holds a target, by the target's name; its module is named after it."""


class _Shipped(Mapping[str, "Target"]):
    """The targets by name."""

    def __getitem__(self, name: str) -> Target:
        constant = _CONSTANTS[name]
        target: Target = getattr(importlib.import_module(f"kenosis_ort.targets.{constant.lower()}"), constant)
        return target

    def __iter__(self) -> Iterator[str]:
        return iter(_CONSTANTS)

    def __len__(self) -> int:
        return len(_CONSTANTS)


TARGETS: Final[Mapping[str, Target]] = _Shipped()
"""The targets that come with the package, by name."""


def get_target(given: str | Target) -> Target:
    """The target of a name; one from outside the package as it is.

    Raises:
        OptionError: There is none of that name, or it is no name (then also a TypeError).
    """
    from kenosis_ort.targets.model import Target

    if isinstance(given, Target):
        return given
    name = word("target", given)
    if name not in _CONSTANTS:
        raise OptionError(
            f"unknown target '{name}'.{did_you_mean(name, TARGETS)}",
            where="target",
            fix=f"one of {sorted(TARGETS)}, or a kenosis_ort.targets.Target",
        )
    return TARGETS[name]
