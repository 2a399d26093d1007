"""From statistics over groups of samples to ranges, and to the verdict.

How deep in a net a tensor stands.

``trusted``, ``usable`` or ``do not ship``: the rules.

They rest on what was measured on trained nets. Gaussian noise brings about BatchNormalization misfits of 0.3 to 25 and
ruins some nets altogether; made-up photographs and fitted features 0.05 to 0.3, and cost less than a point of
accuracy. An input scale off by two costs little, one off by a hundred ruins everything.

How far ranges can be trusted that were found with few or no real samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import reduce

import numpy as np
import onnx

from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.calibration.table_format import Known, Provenance
from kenosis_ort.calibration.trust.growth import extend, growth_between, hard_bounds
from kenosis_ort.graph.constants import LAYERS, Is, having

Range = tuple[float, float]


class TrustLevel(str, Enum):
    """Whether a model calibrated that way may be shipped."""

    TRUSTED = "trusted"
    USABLE = "usable"
    DO_NOT_SHIP = "do not ship"


class RangeSource(str, Enum):
    """How a tensor's range was found."""

    MEASURED = "measured"
    EXTENDED = "measured, and extended for what the samples do not show"
    BATCH_NORM = "predicted from the statistics of a BatchNormalization"
    BOUND = "measured, up to what the operator cannot exceed"
    REAL = "measured on real samples, and extended towards the made-up ones"


@dataclass(frozen=True)
class TensorAssessment:
    """The range of one tensor.

    Attributes:
        source: How it was found.
        depth: Where the tensor stands: 0 for inputs, 1 for the last layer.
        measured: Range over all samples.
        used: Range to quantize with.
        spread: Standard deviation of the range's ends over groups of samples with other seeds, as a share of its width.
    """

    source: RangeSource
    depth: float
    measured: Range
    used: Range
    spread: float


@dataclass(frozen=True)
class CalibrationTrust:
    """How far the ranges of a model can be trusted.

    Attributes:
        verdict: Of the model.
        causes: Why it is not better, the tensors or inputs named; empty where trusted.
        supply: What the caller could give to make it better.
        inputs: What was assumed about each input.
        tensors: By tensor name.
        samples: Number of made-up samples.
        real_samples: Number of real samples.
        real_needed: Number of real samples after which ranges hardly changed; None where they still did, or without.
        misfit: Median misfit of the model's BatchNormalizations, see `BatchNormFit`; None without any.
    """

    verdict: TrustLevel
    causes: tuple[str, ...] = ()
    supply: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    tensors: Mapping[str, TensorAssessment] = field(default_factory=dict)
    samples: int = 0
    real_samples: int = 0
    real_needed: int | None = None
    misfit: float | None = None


Because = Callable[[TrustLevel, str, str], None]

_NATURAL_MISFIT = 0.4
_WORTHLESS_MISFIT = 1.0
_UNSTABLE = 0.3  # spread of a range over groups of samples, as a share of its width
_FEW, _MANY = 0.1, 0.35  # shares of unstable tensors
_NAMED = 3
_ENOUGH_REAL = 8


def verdict_on(
    tensors: Mapping[str, TensorAssessment],
    known: Mapping[str, Known],
    misfits: Mapping[str, float],
    *,
    silent: Mapping[str, str],
    natural: bool,
    real: int,
    needed: int | None,
) -> tuple[TrustLevel, tuple[str, ...], tuple[str, ...]]:
    """The verdict, what caused it, and what the caller could supply.

    Args:
        tensors: By tensor name.
        known: How well the scale of each input is known, by its name.
        misfits: Of BatchNormalizations by the node's name.
        silent: Outputs that answer nothing to the samples, by name, and how that shows.
        natural: Whether the samples are made after what the inputs are in nature.
        real: Number of real samples or groups.
        needed: After how many of them the ranges had settled.
    """
    worst, causes, supply = TrustLevel.TRUSTED, [], []

    def because(verdict: TrustLevel, cause: str, remedy: str) -> None:
        nonlocal worst
        if list(TrustLevel).index(verdict) > list(TrustLevel).index(worst):
            worst = verdict
        causes.append(cause)
        if remedy not in supply:
            supply.append(remedy)

    if real:
        if needed is None and real < _ENOUGH_REAL:
            because(TrustLevel.USABLE, f"ranges changed up to the last of {real} real samples", "more real samples")
    else:
        fitted = bool(misfits) and float(np.median(list(misfits.values()))) <= _NATURAL_MISFIT
        _assess_inputs(known, because)
        if not natural and not fitted:
            because(
                TrustLevel.USABLE,
                "tokens, sound, states or features were made up, and no BatchNormalization says that they are natural",
                "ten real samples",
            )
        _assess_batch_norms(misfits, because)
        for name, how in silent.items():
            because(
                TrustLevel.DO_NOT_SHIP,
                f"output '{name}' {how}: what the net is made for is not in the made-up samples",
                "ten real samples",
            )
    unstable = sorted((n for n, t in tensors.items() if t.spread > _UNSTABLE), key=lambda n: -tensors[n].spread)
    share = len(unstable) / max(len(tensors), 1)
    if share > _FEW:
        because(
            TrustLevel.DO_NOT_SHIP if share > _MANY else TrustLevel.USABLE,
            f"the ranges of {len(unstable)} of {len(tensors)} tensors change with the seed: {_some(unstable)}",
            "more samples (samples=256), or ten real ones",
        )
    return worst, tuple(causes), tuple(supply)


def _assess_inputs(known: Mapping[str, Known], because: Because) -> None:
    for name, how in known.items():
        if how is Known.GUESS:
            because(
                TrustLevel.DO_NOT_SHIP,
                f"the scale of input '{name}' is a guess",
                f"input_ranges={{'{name}': (low, high)}}, or mean= and std= of the preprocessing, or ten real samples",
            )
        elif how is Known.CONVENTION:
            because(
                TrustLevel.USABLE,
                f"the scale of input '{name}' follows from convention only",
                f"input_ranges={{'{name}': (low, high)}}, or mean= and std= of the preprocessing",
            )


def _assess_batch_norms(misfits: Mapping[str, float], because: Because) -> None:
    if not misfits:
        return
    middle = float(np.median(list(misfits.values())))
    if middle > _NATURAL_MISFIT:
        odd = sorted(misfits, key=lambda name: -misfits[name])
        because(
            TrustLevel.DO_NOT_SHIP if middle > _WORTHLESS_MISFIT else TrustLevel.USABLE,
            f"the samples do not look natural to the BatchNormalizations (misfit {middle:.2f}), {_some(odd)} first",
            "input_ranges= or mean= and std= of the preprocessing, or ten real samples",
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:_NAMED])
    return shown + (" and others" if len(names) > _NAMED else "")


_DEEPER = LAYERS | having(Is.RECURRENT) | {"Attention"}


def depths(proto: onnx.ModelProto) -> dict[str, float]:
    """The depth of every tensor of the main graph: layers on the longest way to it, as a share of the most.

    Layers are Conv, Gemm, MatMul and recurrent ones; the inputs' depth is 0.
    """
    layers: dict[str, int] = {value.name: 0 for value in proto.graph.input}
    for node in proto.graph.node:
        deepest = max((layers.get(name, 0) for name in node.input), default=0)
        layers.update(dict.fromkeys(node.output, deepest + (node.op_type in _DEEPER)))
    most = max(layers.values(), default=0)
    return {name: count / most if most else 0.0 for name, count in layers.items()}


_MOST_CHANGE = 2.0  # of a range's width, by a BatchNormalization
_SETTLED = 0.05  # change of a range, as a share of its width
_SETTLED_SHARE = 0.95  # of the tensors


@dataclass(frozen=True)
class NetEvidence:
    """What the net says about a few samples.

    Attributes:
        misfits: Of its BatchNormalizations, by name of the node, see `fit_batch_norms`.
        ranges: Predicted ranges by tensor name; empty where weights were changed since.
        silent: Outputs that answer nothing, by name, see `silent_outputs`.
    """

    misfits: Mapping[str, float]
    ranges: Mapping[str, Range]
    silent: Mapping[str, str] = field(default_factory=dict)


def assess(
    proto: onnx.ModelProto,
    made_up: Sequence[CalibrationTable],
    real: Sequence[CalibrationTable] = (),
    *,
    provenance: Provenance,
    evidence: NetEvidence | None = None,
) -> tuple[CalibrationTable, CalibrationTrust]:
    """A table with the ranges to quantize with, and how far they can be trusted.

    Args:
        proto: The calibrated model.
        made_up: Tables of equal groups of made-up samples.
        real: Tables of real samples, one a sample or a group, in their order.
        provenance: Where the samples come from.
        evidence: What the model itself says about the samples.

    Raises:
        CalibrationError: The tables are not of the same model, settings and tensors.
    """
    whole = reduce(CalibrationTable.merge, (*real, *made_up))
    bounds, depth = hard_bounds(proto), depths(proto)
    evidence = evidence or NetEvidence({}, {})
    trusts: dict[str, TensorAssessment] = {}
    for name in whole.tensors:
        at = depth.get(name, 0.0)
        synthetic, natural = ([table.range_of(name) for table in tables] for tables in (made_up, real))
        used, spread, source = _range(synthetic, natural, at, evidence.ranges.get(name), (len(made_up), whole.samples))
        measured = whole.range_of(name)
        limited = _limit(used, measured, bounds.get(name))
        if limited != used and source is RangeSource.EXTENDED:
            source = RangeSource.BOUND
        trusts[name] = TensorAssessment(source, at, measured, limited, spread)
    needed = real_samples_needed(real)
    misfits = evidence.misfits
    verdict, causes, supply = verdict_on(
        trusts,
        provenance.known,
        misfits,
        silent=evidence.silent,
        natural=provenance.natural,
        real=len(real),
        needed=needed,
    )
    trust = CalibrationTrust(
        verdict=verdict,
        causes=causes,
        supply=supply,
        inputs=provenance.inputs,
        tensors=trusts,
        samples=sum(table.samples for table in made_up),
        real_samples=sum(table.samples for table in real),
        real_needed=needed,
        misfit=float(np.median(list(misfits.values()))) if misfits else None,
    )
    return whole.with_ranges({name: t.used for name, t in trusts.items()}), trust


def real_samples_needed(real: Sequence[CalibrationTable]) -> int | None:
    """Number of real samples after which the ranges of nearly all tensors had settled; None if they had not.

    Settled means that what came after changed the range by less than 5 % of its width; at least a third of the
    samples has to come after.

    Args:
        real: Tables of consecutive samples.
    """
    if len(real) < 3:
        return None
    names = list(real[0].tensors)
    ends = np.array([[table.range_of(name) for name in names] for table in real])
    low, high = np.minimum.accumulate(ends[:, :, 0]), np.maximum.accumulate(ends[:, :, 1])
    width = np.maximum(high[-1] - low[-1], 1e-30)
    missing = np.maximum(low - low[-1], high[-1] - high) / width
    settled = (missing <= _SETTLED).mean(axis=1) >= _SETTLED_SHARE
    first = int(np.argmax(settled)) + 1
    if first > math.ceil(len(real) * 2 / 3):
        return None
    return sum(table.samples for table in real[:first])


def _range(
    made_up: Sequence[Range], real: Sequence[Range], depth: float, predicted: Range | None, counts: tuple[int, int]
) -> tuple[Range, float, RangeSource]:
    growth = extend(made_up or real, depth)
    if real:
        low, high = min(r[0] for r in real), max(r[1] for r in real)
        return growth_between((low, high), growth, len(real), counts[1]), growth.spread, RangeSource.REAL
    if predicted is not None and growth.measured[0] != growth.measured[1]:
        low, high = growth.measured
        reach = _MOST_CHANGE * (high - low)
        used = max(predicted[0], low - reach), min(predicted[1], high + reach)
        if used[1] - used[0] >= (high - low) / (2 * _MOST_CHANGE):
            return used, growth.spread, RangeSource.BATCH_NORM
    source = RangeSource.MEASURED if growth.extended == growth.measured else RangeSource.EXTENDED
    return growth.extended, growth.spread, source


def _limit(used: Range, measured: Range, bound: Range | None) -> Range:
    """A range within what the operator can return, and that has no sign the samples never showed."""
    least, most = bound or (-math.inf, math.inf)
    if measured[0] >= 0:
        least = max(least, 0.0 if used[0] < 0 else used[0])
    if measured[1] <= 0:
        most = min(most, 0.0 if used[1] > 0 else used[1])
    low, high = max(used[0], least), min(used[1], most)
    return (low, high) if low <= high else measured
