"""The net between two passes: the float model, what it is quantized to, and what passes changed on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx

from kenosis_ort.calibration.channels import Rescaling
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.graph.prepare import PreparedModel
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.targets.proof import FusionReport


@dataclass(frozen=True)
class Build:
    """One quantized model with what led to it.

    Attributes:
        float_model: The float model that was quantized: prepared, rewritten, perhaps equalized or bias corrected.
        table: The activation ranges.
        keep_float: Nodes left float beyond what the rules say, with the reason.
        plan: The placement; empty where stock's is used.
        quantized: The result, not written yet.
        fusion: The fusion proof; None without verification.
        notes: What the repair after verification did.
    """

    float_model: onnx.ModelProto
    table: CalibrationTable
    keep_float: Mapping[str, str]
    plan: PlacementPlan
    quantized: onnx.ModelProto
    fusion: FusionReport | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class State:
    """What a pass is given, and what it returns changed.

    Attributes:
        prepared: The float model. The first passes change its weights in ways that are exact in float; for those after
            them, it is what layers left float go back to, and corrections are in ``build.float_model``.
        build: What it is quantized to; None for those first passes.
        rescaled: Values whose channels a pass has scaled, and how; by name.
        is_told: `rescaled` says all that the passes made of the values; else any of them may have changed.
        uncorrected: The float model of the build before its biases were corrected; None where they were not, or where
            weights have changed since.
    """

    prepared: PreparedModel
    build: Build | None = None
    rescaled: Mapping[str, Rescaling] = field(default_factory=dict)
    is_told: bool = True
    uncorrected: onnx.ModelProto | None = None

    @property
    def built(self) -> Build:
        """The build, for passes that come after those that change weights."""
        assert self.build is not None
        return self.build


def noted(state: State, notes: Sequence[str]) -> State:
    """Returns a state with further notes for the report; one without a build takes none."""
    if not notes or state.build is None:
        return state
    return replace(state, build=replace(state.build, notes=(*state.build.notes, *notes)))
