"""From statistics over groups of samples to ranges, and to the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import numpy as np
import onnx

from kenosis_ort.calibration.provenance import Provenance
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.calibration.trust.bounds import hard_bounds
from kenosis_ort.calibration.trust.depth import depths
from kenosis_ort.calibration.trust.growth import extend, growth_between
from kenosis_ort.calibration.trust.model import CalibrationTrust, Range, RangeSource, TensorTrust
from kenosis_ort.calibration.trust.verdict import judge

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
    """Returns a table with the ranges to quantize with, and how far they can be trusted.

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
    trusts: dict[str, TensorTrust] = {}
    for name in whole.tensors:
        at = depth.get(name, 0.0)
        synthetic, natural = ([table.range_of(name) for table in tables] for tables in (made_up, real))
        used, spread, source = _range(synthetic, natural, at, evidence.ranges.get(name), (len(made_up), whole.samples))
        measured = whole.range_of(name)
        limited = _limit(used, measured, bounds.get(name))
        if limited != used and source is RangeSource.EXTENDED:
            source = RangeSource.BOUND
        trusts[name] = TensorTrust(source, at, measured, limited, spread)
    needed = real_samples_needed(real)
    misfits = evidence.misfits
    verdict, causes, supply = judge(
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
    """Returns after how many real samples the ranges of nearly all tensors had settled; None if they had not.

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
    """Returns a range within what the operator can return, and that has no sign the samples never showed."""
    least, most = bound or (-math.inf, math.inf)
    if measured[0] >= 0:
        least = max(least, 0.0 if used[0] < 0 else used[0])
    if measured[1] <= 0:
        most = min(most, 0.0 if used[1] > 0 else used[1])
    low, high = max(used[0], least), min(used[1], most)
    return (low, high) if low <= high else measured
