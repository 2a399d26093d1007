"""What a calibration table was collected on: a model, perhaps with weights changed before, and how to change them."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Statistics = Mapping[str, npt.NDArray[np.float64]]


@dataclass(frozen=True, eq=False)
class WeightChange:
    """A pass that changed weights before the ranges were collected; with its statistics it can be done again.

    Attributes:
        name: The pass.
        statistics: By value, the fields of its statistics by channel.
    """

    name: str
    statistics: Mapping[str, Statistics]

    def to_dict(self) -> dict[str, Any]:
        """Returns it as plain JSON data, numbers to the bit."""
        packed = {v: {k: _packed(a) for k, a in fields.items()} for v, fields in self.statistics.items()}
        return {"name": self.name, "statistics": packed}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> WeightChange:
        """Reads what `to_dict` returned."""
        unpacked = {v: {k: _unpacked(a) for k, a in fields.items()} for v, fields in raw["statistics"].items()}
        return cls(str(raw["name"]), unpacked)


@dataclass(frozen=True, eq=False)
class TableOrigin:
    """What a table was collected on.

    Attributes:
        model_fingerprint: Of the prepared model before its weights were changed.
        changes: What changed them, in order.
        settings: The options under which that was decided; None where nothing was tried, and anything may be.
        biases: Layers without a bias got one, so that it can be corrected.
        made_up: All samples were made up.
    """

    model_fingerprint: str
    changes: tuple[WeightChange, ...] = ()
    settings: str | None = None
    biases: bool = False
    made_up: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Returns it as plain JSON data."""
        return {
            "model_fingerprint": self.model_fingerprint,
            "changes": [change.to_dict() for change in self.changes],
            "settings": self.settings,
            "biases": self.biases,
            "made_up": self.made_up,
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> TableOrigin:
        """Reads what `to_dict` returned."""
        return cls(
            str(raw["model_fingerprint"]),
            tuple(map(WeightChange.from_dict, raw["changes"])),
            None if raw["settings"] is None else str(raw["settings"]),
            bool(raw["biases"]),
            bool(raw["made_up"]),
        )


def _packed(array: npt.NDArray[np.float64]) -> dict[str, Any]:
    content = np.ascontiguousarray(array, "<f8").tobytes()
    return {"shape": list(array.shape), "base64": base64.b64encode(content).decode()}


def _unpacked(raw: Mapping[str, Any]) -> npt.NDArray[np.float64]:
    content = np.frombuffer(base64.b64decode(raw["base64"]), "<f8")
    return content.reshape([int(size) for size in raw["shape"]]).astype(np.float64)
