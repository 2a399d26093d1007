"""Calibration on made-up samples, with or without a few real ones: ranges, and how far to trust them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import onnx

from kenosis_ort.calibration.collector import Progress, collect
from kenosis_ort.calibration.config import CalibrationConfig
from kenosis_ort.calibration.feeds import Feed, sample_feeds
from kenosis_ort.calibration.observer import Array
from kenosis_ort.calibration.provenance import Provenance
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.calibration.trust.assess import NetEvidence, assess
from kenosis_ort.calibration.trust.batch_norms import fit_batch_norms, predicted_ranges
from kenosis_ort.calibration.trust.bounds import hard_bounds
from kenosis_ort.calibration.trust.model import CalibrationTrust
from kenosis_ort.calibration.trust.silence import silent_outputs

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
        """Returns the feed of an index."""

    def __len__(self) -> int: ...


def net_evidence(
    source: onnx.ModelProto,
    feeds: Sequence[Feed],
    *,
    custom_op_libraries: Sequence[str] = (),
) -> NetEvidence:
    """Returns what a model's BatchNormalizations and its answers say about samples.

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
    """Returns the few samples that `net_evidence` needs."""
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
    """Returns the sizes of as equal groups as possible."""
    groups = min(count, most)
    return [count // groups + (index < count % groups) for index in range(groups)] if groups else []
