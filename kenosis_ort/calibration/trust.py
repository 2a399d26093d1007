"""Calibration on made-up samples, with or without a few real ones: ranges, and how far they can be trusted.

The verdict's rules rest on what was measured on trained nets. Gaussian noise brings about BatchNormalization misfits of
0.3 to 25 and ruins some nets altogether; made-up photographs and fitted features 0.05 to 0.3, and cost less than a
point of accuracy. An input scale off by two costs little, one off by a hundred ruins everything.

Ranges are extended for what the samples do not show, by an extreme-value fit over groups of samples. The largest values
of equal groups of samples scatter like a Gumbel variable of some scale, and the largest value of ``k`` times as many
samples is ``scale * ln(k)`` larger (E. J. Gumbel, "Statistics of Extremes", 1958). Made-up samples excite deep layers
less than natural ones: there the range is extended as if by many more samples. Measured on ten trained nets, natural
ranges are 0.6 to 1 times those of made-up samples in the first third of the layers, and 1 to 1.6 times in the last.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import onnx

from kenosis_ort.calibration.collector import Points, Progress, collect
from kenosis_ort.calibration.feeds import Known, Provenance, sample_feeds
from kenosis_ort.calibration.synthetic.net_evidence import NetEvidence, Range, hard_bounds
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.calibration.trust_summary import RangeSource, TensorTrust, TrustSummary
from kenosis_ort.graph.constants import LAYERS, Is, having

_log = logging.getLogger(__name__)

TRUSTED, USABLE, DO_NOT_SHIP = _LEVELS = ("trusted", "usable", "do not ship")
"""Whether a model calibrated that way may be shipped."""
_GROUPS = 4
_REAL_GROUPS = 8


_NATURAL_MISFIT = 0.4
_WORTHLESS_MISFIT = 1.0
_UNSTABLE = 0.3  # spread of a range over groups of samples, as a share of its width
_FEW, _MANY = 0.1, 0.35  # shares of unstable tensors
_NAMED = 3
_ENOUGH_REAL = 8

Finding = tuple[str, str, str]
"""What a model may be used for at most, the cause, and what the caller could supply."""


def verdict_on(
    spreads: Mapping[str, float], provenance: Provenance, evidence: NetEvidence, *, real: int, needed: int | None
) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """The verdict, what caused it, and what the caller could supply.

    Args:
        spreads: Standard deviation of the ends of a range over groups of samples with other seeds, as a share of its
            width, by tensor name.
        provenance: Where the samples come from.
        evidence: What the model itself says about them.
        real: Number of real samples or groups.
        needed: After how many of them the ranges had settled.
    """
    found: list[Finding] = []
    if not real:
        found += _of_made_up(provenance, evidence)
    elif needed is None and real < _ENOUGH_REAL:
        cause = f"ranges changed up to the last of {real} real samples"
        found.append((USABLE, cause, "more real samples"))
    unstable = sorted((n for n, spread in spreads.items() if spread > _UNSTABLE), key=lambda n: -spreads[n])
    share = len(unstable) / max(len(spreads), 1)
    if share > _FEW:
        level = DO_NOT_SHIP if share > _MANY else USABLE
        cause = f"the ranges of {len(unstable)} of {len(spreads)} tensors change with the seed: {_some(unstable)}"
        found.append((level, cause, "more samples (samples=256), or ten real ones"))
    worst = max((level for level, _, _ in found), key=_LEVELS.index, default=TRUSTED)
    return worst, tuple(cause for _, cause, _ in found), tuple(dict.fromkeys(remedy for _, _, remedy in found))


def _of_made_up(provenance: Provenance, evidence: NetEvidence) -> Iterator[Finding]:
    """Yields what is wrong with samples none of which is real."""
    scale, misfits = "or mean= and std= of the preprocessing", evidence.misfits
    for name, how in provenance.known.items():
        given = f"input_ranges={{'{name}': (low, high)}}, {scale}"
        if how is Known.GUESS:
            yield DO_NOT_SHIP, f"the scale of input '{name}' is a guess", f"{given}, or ten real samples"
        elif how is Known.CONVENTION:
            yield USABLE, f"the scale of input '{name}' follows from convention only", given
    middle = float(np.median(list(misfits.values()))) if misfits else math.inf
    if not provenance.natural and middle > _NATURAL_MISFIT:
        cause = "tokens, sound, states or features were made up, and no BatchNormalization says that they are natural"
        yield USABLE, cause, "ten real samples"
    if misfits and middle > _NATURAL_MISFIT:
        odd = _some(sorted(misfits, key=lambda name: -misfits[name]))
        level = DO_NOT_SHIP if middle > _WORTHLESS_MISFIT else USABLE
        cause = f"the samples do not look natural to the BatchNormalizations (misfit {middle:.2f}), {odd} first"
        yield level, cause, f"input_ranges= {scale}, or ten real samples"
    for name, how_silent in evidence.silent.items():
        cause = f"output '{name}' {how_silent}: what the net is made for is not in the made-up samples"
        yield DO_NOT_SHIP, cause, "ten real samples"


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


def assess(
    proto: onnx.ModelProto,
    made_up: Sequence[CalibrationTable],
    real: Sequence[CalibrationTable] = (),
    *,
    provenance: Provenance,
    evidence: NetEvidence | None = None,
) -> tuple[CalibrationTable, TrustSummary]:
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
    ranges: dict[str, Range] = {}
    spreads: dict[str, float] = {}
    trusts: list[TensorTrust] = []
    for name in whole.tensors:
        at = depth.get(name, 0.0)
        synthetic, natural = ([table.range_of(name) for table in tables] for tables in (made_up, real))
        used, spread, source = _range(synthetic, natural, at, evidence.ranges.get(name), whole.samples)
        measured = whole.range_of(name)
        limited = _limit(used, measured, bounds.get(name))
        if limited != used and source is RangeSource.EXTENDED:
            source = RangeSource.BOUND
        ranges[name], spreads[name] = limited, spread
        why = "its range changes with the seed" if spread > _UNSTABLE else ""
        trusts.append(TensorTrust(name, source.value, 1.0 - min(spread, 1.0), why))
    needed = real_samples_needed(real)
    level, causes, supply = verdict_on(spreads, provenance, evidence, real=len(real), needed=needed)
    trust = TrustSummary(
        verdict=level,
        reason="; ".join(causes) or "every range is bounded by the net or the same for every seed",
        source="mixed" if real else "synthetic",
        advice="; ".join(supply),
        tensors=tuple(sorted(trusts, key=lambda trust: -spreads[trust.tensor])),
    )
    return whole.with_ranges(ranges), trust


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
    made_up: Sequence[Range], real: Sequence[Range], depth: float, predicted: Range | None, samples: int
) -> tuple[Range, float, RangeSource]:
    growth = extend(made_up or real, depth)
    if real:
        low, high = min(r[0] for r in real), max(r[1] for r in real)
        return growth_between((low, high), growth, len(real), samples), growth.spread, RangeSource.REAL
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


# ---- growth ----------------------------------------------------------------------------------------------------------

_GUMBEL = math.sqrt(6) / math.pi  # scale of a Gumbel variable of unit deviation
_DECADES_OF_SAMPLES = 1.0  # by which the last layer's range is extended; 3 and 5 help some nets and harm others
_MOST_GROWTH = 0.5  # of a range's width, on each side


@dataclass(frozen=True)
class Growth:
    """The range of one tensor over groups of samples.

    Attributes:
        measured: Over all samples.
        extended: For many more samples.
        spread: Standard deviation of the groups' ends, the larger of both, as a share of the measured width; 0 for a
            constant tensor.
    """

    measured: Range
    extended: Range
    spread: float


def extend(groups: Sequence[Range], depth: float) -> Growth:
    """The range of a tensor, extended for what the samples do not show.

    Args:
        groups: Its range over each of some equal groups of samples.
        depth: Where the tensor stands in the net: 0 for inputs, 1 for the last layer.
    """
    ends = np.asarray(groups, np.float64)
    low, high = float(ends[:, 0].min()), float(ends[:, 1].max())
    width = high - low
    if len(groups) < 2 or width <= 0:
        return Growth((low, high), (low, high), 0.0)
    below, above = (float(deviation) for deviation in ends.std(axis=0, ddof=1))
    reach = _GUMBEL * math.log(10.0) * _DECADES_OF_SAMPLES * depth
    extended = (low - min(reach * below, _MOST_GROWTH * width), high + min(reach * above, _MOST_GROWTH * width))
    return Growth((low, high), extended, max(below, above) / width)


def growth_between(real: Range, made_up: Growth, real_samples: int, samples: int) -> Range:
    """The range of a few real samples, extended towards that of the made-up ones.

    Made-up samples say how ranges grow with their number, and how far at most; they excite the first layers more than
    real ones do, so that their own range would waste resolution.

    Args:
        real: Over the real samples.
        made_up: Over the made-up samples.
        real_samples: Number of real samples or groups.
        samples: Number of samples in all.
    """
    low, high = real
    width = made_up.measured[1] - made_up.measured[0]
    reach = _GUMBEL * made_up.spread * width * math.log(max(samples / max(real_samples, 1), 1.0))
    least, most = made_up.extended
    return max(min(low, least), low - reach), min(max(high, most), high + reach)


# ---- collection ------------------------------------------------------------------------------------------------------


def collect_with_trust(
    proto: onnx.ModelProto,
    reader: Any,
    points: Points,
    *,
    provenance: Provenance,
    samples: int,
    evidence: NetEvidence | None = None,
    progress: Progress | None = None,
) -> tuple[CalibrationTable, TrustSummary]:
    """Runs the float model on made-up samples, in groups, and returns ranges and how far they can be trusted.

    Args:
        proto: The float model to calibrate, as `collect` takes it.
        reader: Hands out the feeds, the real ones first; a `SyntheticReader`, or one that hands its feeds on.
        points: As for `collect`.
        provenance: `SyntheticReader.provenance`.
        samples: Number of feeds in all.
        evidence: From `net_evidence`.
        progress: Called with (samples done, samples in all).

    Raises:
        CalibrationError: As `collect`; or the method depends on the order of the samples.
    """
    feeds = sample_feeds(reader)
    done = 0

    def table(count: int) -> CalibrationTable:
        nonlocal done
        before = done

        def report(now: int, _: int | None) -> None:
            if progress is not None:
                progress(before + now, samples)

        done += count
        return collect(proto, itertools.islice(feeds, count), points, progress=report)

    real = [table(count) for count in _parts(provenance.real, _REAL_GROUPS)]
    made_up = [table(count) for count in _parts(samples - provenance.real, _GROUPS)]
    found, trust = assess(proto, made_up, real, provenance=provenance, evidence=evidence)
    _log.info("calibration on %d samples, %d of them real: %s", found.samples, provenance.real, trust.verdict)
    return found, trust


def _parts(count: int, most: int) -> list[int]:
    """The sizes of as equal groups as possible."""
    return [len(part) for part in np.array_split(np.arange(count), min(count, most))] if count else []
