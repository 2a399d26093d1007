"""Frozen options: what the caller said, what was left open, and the checked `extra_options`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, get_args

from kenosis_ort.checks import MOST_THREADS, choice, flag, real, whole
from kenosis_ort.errors import OptionError, did_you_mean

OutputPolicy = Literal["auto", "float", "int8"]
Evidence = Literal["none", "light", "full"]
Tuning = Literal["off", "model", "measure"]


class Unset:
    """Type of `UNSET`: the caller said nothing, the host decides."""

    def __repr__(self) -> str:
        return "<host default>"


UNSET: Final = Unset()


@dataclass(frozen=True)
class Stages:
    """The switchable Kenosis stages (Kenosis paper, "The Kenosis Optimization Pipeline", stages 2 to 7).

    Stage 1, self-calibration, is the choice of a `SyntheticReader` as calibration reader.

    Attributes:
        weights: Weight scales and rounding in float64 (off: stock's arithmetic).
        bias: int32 bias at exactly ``input_scale * weight_scale`` in float64, with overflow widening and a
            private copy where consumers disagree (off: no widening, a bias that overflows is clipped).
        nudge: Activation ranges snapped so that 0.0 is exact and absorbed activations stay absorbable
            (off: stock's scale and zero point).
        placement: Fusion-aware placement (off: stock's node-by-node placement).
        protect_inputs: Tensors that derive from secondary inputs or hold shapes stay float.
        protect_outputs: Graph outputs and the zone behind the last heavy operator stay float.
    """

    weights: bool = True
    bias: bool = True
    nudge: bool = True
    placement: bool = True
    protect_inputs: bool = True
    protect_outputs: bool = True

    def __post_init__(self) -> None:
        for field_ in fields(self):
            object.__setattr__(self, field_.name, flag(f"stages.{field_.name}", getattr(self, field_.name)))

    @classmethod
    def none(cls) -> Stages:
        """All stages off: the result is stock ONNX Runtime's."""
        return cls(**{f.name: False for f in fields(cls)})


# Every key that onnxruntime.quantization reads from extra_options (1.31), so that a typo is an error.
KNOWN_EXTRA_OPTIONS: Final = frozenset(
    {
        "ActivationSymmetric",
        "ActivationRestrictedAsymmetric",
        "AddQDQPairToWeight",
        "BlockSize",
        "CalibMaxIntermediateOutputs",
        "CalibMovingAverage",
        "CalibMovingAverageConstant",
        "CalibPercentile",
        "CalibStridedMinMax",
        "CalibTensorRangeSymmetric",
        "DedicatedQDQPair",
        "EnableSubgraph",
        "ForceQuantizeNoInputCheck",
        "MatMulConstBOnly",
        "MinimumRealRange",
        "OpTypesToExcludeOutputQuantization",
        "QDQDisableWeightAdjustForInt32Bias",
        "QDQKeepRemovableActivations",
        "QDQOpTypePerChannelSupportToAxis",
        "QuantizeBias",
        "SmoothQuant",
        "SmoothQuantAlpha",
        "SmoothQuantFolding",
        "TensorQuantOverrides",
        "UseQDQContribOps",
        "WeightSymmetric",
        "scenario",
        "extra.Sigmoid.nnapi",
    }
)

# Options by which the caller dictates where Q/DQ goes: honoured to the letter, by stock's own placement.
PLACEMENT_OPTIONS: Final = (
    "AddQDQPairToWeight",
    "BlockSize",
    "DedicatedQDQPair",
    "EnableSubgraph",
    "ForceQuantizeNoInputCheck",
    "OpTypesToExcludeOutputQuantization",
    "QDQKeepRemovableActivations",
    "QDQOpTypePerChannelSupportToAxis",
    "TensorQuantOverrides",
    "UseQDQContribOps",
)


def check_extra_options(extra_options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a copy of ``extra_options``.

    Raises:
        OptionError: An unknown key, with the closest known one.
    """
    options = dict(extra_options or {})
    for key in options:
        if key not in KNOWN_EXTRA_OPTIONS:
            raise OptionError(
                f"unknown extra_options key '{key}'.{did_you_mean(str(key), KNOWN_EXTRA_OPTIONS)}",
                where="extra_options",
                fix="remove it or correct its spelling; stock ONNX Runtime ignores unknown keys silently",
            )
    return options


def dictated_placement(extra_options: Mapping[str, Any]) -> str | None:
    """Returns the first option by which the caller dictates the placement, or None."""
    for key in PLACEMENT_OPTIONS:
        if extra_options.get(key):
            return key
    if extra_options.get("QuantizeBias") is False:
        return "QuantizeBias"
    return None


@dataclass(frozen=True)
class PlacementOptions:
    """What the planner has to know of the caller's wishes.

    Attributes:
        op_types: Operator types the caller named, None if none were.
        nodes_to_exclude: Names of nodes that stay float.
        activation_signed: int8 instead of uint8 activations.
        activation_symmetric: The caller asked for symmetric activation ranges.
        per_channel: Weight scales by channel.
        protect_inputs: Stage 6.
        protect_outputs: Stage 7 with its policy; None if the stage is off.
        primary_inputs: Names of the inputs that carry the data proper; None to tell by shape and name.
        keep_float: Nodes that verification found not to run in integer, with the reason.
    """

    op_types: frozenset[str] | None = None
    nodes_to_exclude: frozenset[str] = frozenset()
    activation_signed: bool = False
    activation_symmetric: bool = False
    per_channel: bool = True
    protect_inputs: bool = True
    protect_outputs: OutputPolicy | None = "auto"
    primary_inputs: tuple[str, ...] | None = None
    keep_float: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SpeedOptions:
    """How much measuring goes into the promise that the result is not slower than the float model.

    Attributes:
        tune: ``model``: regions follow from the target's table; ``measure``: a few candidate plans are timed on this
            machine as well; ``off``: neither.
        budget_s: Seconds that ``measure`` may take.
        threads: Threads of the sessions that are timed, as in deployment; 0 for the runtime's default.
        promise: The result is timed against the float model and replaced where it is slower.
        cache: Folder of the tuning cache; None for none.

    Raises:
        OptionError: A value is unknown or out of range.
    """

    tune: Tuning = "model"
    budget_s: float = 30.0
    threads: int = 1
    promise: bool = True
    cache: Path | None = None

    def __post_init__(self) -> None:
        choice("tune", self.tune, among=get_args(Tuning))
        object.__setattr__(self, "budget_s", real("tune_budget_s", self.budget_s, above=0))
        object.__setattr__(self, "threads", whole("threads", self.threads, most=MOST_THREADS))
        object.__setattr__(self, "promise", flag("promise", self.promise))
