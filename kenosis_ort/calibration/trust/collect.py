"""Calibration on made-up samples, with or without a few real ones: ranges, and how far to trust them.

Outputs that answer nothing: a detector that finds nothing in all of the made-up samples shows no range of finding.

The last layers of such a net work on what it was trained to find. A text detector that is shown photographs without
text says zero everywhere, and its last layers keep to a part of the range that they have on text.

What the BatchNormalizations of a model know about its natural inputs, against what made-up samples do.

Each stores the mean and variance of every channel over the training data. Made-up samples that bring about other ones
are not natural there; and since the shape of a channel's distribution changes less than its scale, the range on natural
data follows: the normalized extremes of the made-up samples, scaled to the stored deviation.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.calibration.collector import Progress, collect
from kenosis_ort.calibration.config import CalibrationConfig
from kenosis_ort.calibration.feeds import Feed, sample_feeds
from kenosis_ort.calibration.observer import Array
from kenosis_ort.calibration.part_session import ObservedModel, SessionSettings, initializer_arrays, run
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.calibration.table_format import Provenance
from kenosis_ort.calibration.trust.assess import CalibrationTrust, NetEvidence, assess
from kenosis_ort.calibration.trust.growth import hard_bounds

Range = tuple[float, float]

_LIVE = 1e-3  # least stored deviation, as a share of the median
_EXCITED = 0.02  # least measured deviation, as a share of the stored one
_MOST_DEVIATIONS = 16.0
_KEEPING = frozenset({"Relu", "Clip", "LeakyRelu", "MaxPool", "Identity", "Dropout"})


@dataclass(frozen=True)
class BatchNormFit:
    """How natural the samples look to one BatchNormalization.

    Attributes:
        node: Its name.
        tensor: Its output.
        misfit: Median over the live channels of ``ln(s / s0)**2 + ((m - m0) / s0)**2``; 0 for equal statistics, 0.5 for
            half the deviation.
        range: Of its output on natural data, predicted.
    """

    node: str
    tensor: str
    misfit: float
    range: Range


class _Moments:
    """Sums over samples, by channel."""

    def __init__(self) -> None:
        self.count = 0
        self.total: Any = 0.0
        self.squares: Any = 0.0
        self.low: Any = np.inf
        self.high: Any = -np.inf

    def add(self, array: npt.NDArray[Any]) -> None:
        values = np.moveaxis(array, 1, 0).reshape(array.shape[1], -1).astype(np.float64)
        self.count += values.shape[1]
        self.total = self.total + values.sum(axis=1)
        self.squares = self.squares + (values * values).sum(axis=1)
        self.low, self.high = np.minimum(self.low, values.min(axis=1)), np.maximum(self.high, values.max(axis=1))


def fit_batch_norms(
    proto: onnx.ModelProto, feeds: Iterable[Mapping[str, Any]], *, custom_op_libraries: tuple[str, ...] = ()
) -> tuple[BatchNormFit, ...]:
    """Compares the statistics at all BatchNormalizations with the stored ones.

    Args:
        proto: The float model before BatchNormalizations are folded.
        feeds: A few samples.
        custom_op_libraries: Shared libraries with custom operators.

    Returns:
        One entry for each BatchNormalization of constant parameters, in graph order.
    """
    nodes = [node for node in proto.graph.node if node.op_type == "BatchNormalization" and len(node.input) == 5]
    arrays = initializer_arrays(proto, {name for node in nodes for name in node.input[1:]})
    nodes = [node for node in nodes if all(name in arrays for name in node.input[1:])]
    if not nodes:
        return ()
    names = list(dict.fromkeys(node.input[0] for node in nodes))
    moments = {name: _Moments() for name in names}
    settings = SessionSettings(custom_op_libraries=custom_op_libraries)
    with ObservedModel(proto, settings) as model:
        session = model.session(names)
        for index, feed in enumerate(feeds):
            for name, array in zip(names, run(session, names, dict(feed), index), strict=True):
                moments[name].add(array)
    return tuple(_fit(node, arrays, moments[node.input[0]]) for node in nodes if moments[node.input[0]].count)


def _fit(node: onnx.NodeProto, arrays: Mapping[str, Any], seen: _Moments) -> BatchNormFit:
    gamma, beta, mean0, variance0 = (arrays[name].astype(np.float64) for name in node.input[1:])
    epsilon = next((a.f for a in node.attribute if a.name == "epsilon"), 1e-5)
    stored = np.sqrt(np.maximum(variance0, 0.0) + epsilon)
    mean = seen.total / seen.count
    spread = np.sqrt(np.maximum(seen.squares / seen.count - mean * mean, 0.0))
    live = stored > _LIVE * np.median(stored)
    cost = np.log(np.maximum(spread, 1e-12) / stored) ** 2 + ((mean - mean0) / stored) ** 2
    excited = live & (spread > _EXCITED * stored)
    scale = np.maximum(spread, 1e-30)
    ends = [np.clip((end - mean) / scale, -_MOST_DEVIATIONS, _MOST_DEVIATIONS) for end in (seen.low, seen.high)]
    normalized = np.stack([np.where(gamma > 0, gamma * e, gamma * f) for e, f in (ends, ends[::-1])]) + beta
    used = normalized[:, excited] if excited.any() else beta[None, :].repeat(2, axis=0)
    return BatchNormFit(
        node.name,
        node.output[0],
        float(np.median(cost[live])),
        (float(used[0].min()), float(used[1].max())),
    )


def predicted_ranges(
    proto: onnx.ModelProto, fits: Iterable[BatchNormFit], bounds: Mapping[str, Range]
) -> dict[str, Range]:
    """The ranges on natural data of the outputs of BatchNormalizations and of activations behind them.

    Args:
        proto: The model that the fits were made on.
        fits: From `fit_batch_norms`.
        bounds: What an operator's output cannot exceed, from `hard_bounds`.
    """
    out = {fit.tensor: fit.range for fit in fits}
    for node in proto.graph.node:
        if node.op_type in _KEEPING and node.input and node.input[0] in out:
            low, high = out[node.input[0]]
            least, most = bounds.get(node.output[0], (-np.inf, np.inf))
            if node.op_type == "LeakyRelu":
                low *= next((a.f for a in node.attribute if a.name == "alpha"), 0.01) if low < 0 else 1.0
            out[node.output[0]] = (min(max(low, least), most), max(min(high, most), least))
    return out


_YES: Final = 0.5
"""Probability that a yes begins with: an output of its own yes or no says no below it."""
_LEAST_SAMPLES: Final = 4
_SAME: Final = 1e-4  # change between samples, as a share of the output's size
_YES_OR_NO: Final = frozenset({"Sigmoid", "HardSigmoid"})


def silent_outputs(
    proto: onnx.ModelProto, feeds: Sequence[Mapping[str, Any]], *, custom_op_libraries: Iterable[str] = ()
) -> dict[str, str]:
    """The outputs that answer nothing to any of the samples, by name, with the end of a sentence about them.

    Those are outputs of a Sigmoid none of whose numbers reaches a yes, and outputs that do not depend on the sample.

    Args:
        proto: The float model.
        feeds: A few samples; of fewer than four nothing is said.
        custom_op_libraries: Shared libraries with custom operators.
    """
    names = [value.name for value in proto.graph.output if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT]
    if len(feeds) < _LEAST_SAMPLES or not names:
        return {}
    with ObservedModel(proto, SessionSettings(custom_op_libraries=tuple(custom_op_libraries))) as model:
        session = model.session(names)
        answers = [run(session, names, dict(feed), index) for index, feed in enumerate(feeds)]
    made_by = {name: node.op_type for node in proto.graph.node for name in node.output}
    bounds = hard_bounds(proto)
    found = {}
    for name, arrays in zip(names, zip(*answers, strict=True), strict=True):
        if not all(array.size for array in arrays):
            continue
        top = max(float(array.max()) for array in arrays)
        if made_by.get(name) in _YES_OR_NO and bounds.get(name) == (0.0, 1.0) and top < _YES:
            found[name] = f"never rises above {top:.2g} of 1"
        elif _is_same(arrays):
            found[name] = "is the same for all samples"
    return found


def _is_same(arrays: Sequence[np.ndarray[Any, Any]]) -> bool:
    if len({array.shape for array in arrays}) > 1:
        return False
    stacked = np.stack(arrays).astype(np.float64)
    change, size = float(np.abs(stacked - stacked[0]).max()), float(np.abs(stacked).max())
    return size > 0 and change <= _SAME * size


_log = logging.getLogger(__name__)

_GROUPS = 4
_REAL_GROUPS = 8
_PROBED_FEEDS = 16
_FITTING = 0.5  # misfit up to which a BatchNormalization's prediction takes the place of the measurement


@runtime_checkable
class MadeUpReader(Protocol):
    """A reader whose samples are made up, such as `SyntheticReader`."""

    @property
    def provenance(self) -> Provenance:
        """Where the samples come from."""

    def feed(self, index: int) -> Feed:
        """The feed of an index."""

    def __len__(self) -> int: ...


def net_evidence(
    source: onnx.ModelProto,
    feeds: Sequence[Feed],
    *,
    custom_op_libraries: Sequence[str] = (),
) -> NetEvidence:
    """Evidence about samples from a model's BatchNormalizations and outputs.

    Args:
        source: The float model before BatchNormalizations are folded.
        feeds: A few samples.
        custom_op_libraries: Shared libraries with custom operators.
    """
    fits = fit_batch_norms(source, feeds, custom_op_libraries=tuple(custom_op_libraries))
    good = [fit for fit in fits if fit.misfit <= _FITTING]
    ranges = predicted_ranges(source, good, hard_bounds(source))
    silent = silent_outputs(source, feeds, custom_op_libraries=custom_op_libraries)
    return NetEvidence({fit.node or fit.tensor: fit.misfit for fit in fits}, ranges, silent)


def collect_with_trust(
    proto: onnx.ModelProto,
    reader: Any,
    *,
    provenance: Provenance,
    samples: int,
    tensors: Sequence[str],
    evidence: NetEvidence | None = None,
    config: CalibrationConfig | None = None,
    providers: Sequence[Any] | None = None,
    custom_op_libraries: Sequence[str] = (),
    progress: Progress | None = None,
    threads: int = 0,
    seen_as: Mapping[str, Callable[[Array], Array]] | None = None,
    channels: Mapping[str, int] = MappingProxyType({}),
) -> tuple[CalibrationTable, CalibrationTrust]:
    """Runs the float model on made-up samples, in groups, and returns ranges and how far they can be trusted.

    Args:
        proto: The float model to calibrate, as `collect` takes it.
        reader: Hands out the feeds, the real ones first; a `SyntheticReader`, or one that hands its feeds on.
        provenance: `SyntheticReader.provenance`.
        samples: Number of feeds in all.
        tensors: Names of the tensors to observe.
        evidence: From `net_evidence`.
        config: Method and settings.
        providers: The runtime's execution providers.
        custom_op_libraries: Shared libraries with custom operators.
        progress: Called with (samples done, samples in all).
        threads: Number of threads; 0 leaves it to the runtime.
        seen_as: What stands for the values of some tensors, as `collect` takes it.
        channels: Axes of the channels of those whose range is collected by channel, likewise.

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
        return collect(
            proto,
            _Some(feeds, count),
            tensors=tensors,
            config=config,
            providers=providers,
            custom_op_libraries=custom_op_libraries,
            progress=report,
            threads=threads,
            seen_as=seen_as,
            channels=channels,
        )

    real = [table(count) for count in _parts(provenance.real, _REAL_GROUPS)]
    made_up = [table(count) for count in _parts(samples - provenance.real, _GROUPS)]
    found, trust = assess(proto, made_up, real, provenance=provenance, evidence=evidence)
    _log.info(
        "calibration on %d made-up and %d real samples: %s", trust.samples, trust.real_samples, trust.verdict.value
    )
    return found, trust


def probe_feeds(reader: MadeUpReader) -> list[Feed]:
    """The few samples that `net_evidence` needs."""
    return [reader.feed(index) for index in range(min(len(reader), _PROBED_FEEDS))]


class _Some:
    """The next few feeds of an iterator."""

    def __init__(self, feeds: Iterator[Feed], count: int) -> None:
        self._feeds, self._count = feeds, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Feed]:
        return itertools.islice(self._feeds, self._count)


def _parts(count: int, most: int) -> list[int]:
    """The sizes of as equal groups as possible."""
    groups = min(count, most)
    return [count // groups + (index < count % groups) for index in range(groups)] if groups else []
