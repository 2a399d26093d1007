"""The sweep: one run of the float model over a reader, statistics of observed tensors, memory flat in the samples."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx

from kenosis_ort.calibration import feeds as sources, part_session
from kenosis_ort.calibration.accumulators import Collector, SeenAs
from kenosis_ort.calibration.cached_samples import CachedSamples, feed_digest, model_fingerprint
from kenosis_ort.calibration.derived import Array, Functions, functions_of, unions_of, united
from kenosis_ort.calibration.feeds import Feed, Part, Sample, no_sample
from kenosis_ort.calibration.methods import CalibrationConfig
from kenosis_ort.calibration.parts import StagedModel
from kenosis_ort.calibration.statistics import TensorStatistics
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import CalibrationError, did_you_mean
from kenosis_ort.graph.canonical import in_order
from kenosis_ort.graph.shapes import types_of
from kenosis_ort.runtime.machine import machine
from kenosis_ort.runtime.session import Closing, as_array
from kenosis_ort.storage.spool import Spool

_log = logging.getLogger(__name__)

_BUNDLE = 64  # samples that run through a model of many weights together
_SHARE = 1 << 18  # elements below which a thread of its own costs more than it saves
_CALL = 1 << 12  # elements that take as long as calling a collector does

Progress = Callable[[int, "int | None"], None]
_Bundle = tuple["list[Any] | Spool", list[tuple[int, bool]]]
"""What is to run through the model together: feeds, and the sample and the part that each is of."""

_OBSERVED_TYPES: dict[int, str] = {onnx.TensorProto.FLOAT: "float32", onnx.TensorProto.FLOAT16: "float16"}


@dataclass(frozen=True)
class Points:
    """Points of a model to observe, and how a sweep over samples does so.

    Attributes:
        tensors: Names of the tensors to observe: node outputs, graph inputs or initializers of the main graph, in any
            order. Those that are not float32 or float16 are left out of the table.
        config: Method and settings; MinMax by default.
        providers: The runtime's execution providers; the CPU by default.
        custom_op_libraries: Shared libraries with custom operators to register.
        threads: Number of threads; 0 leaves it to the runtime.
        seen_as: By tensor name, what stands for its values in the statistics: a function of the array of one sample
            that puts a finite value in the place of those that all consumers take alike, such as an attention mask's
            minus infinity in front of a Softmax. Such a tensor may be infinite. That of a gate's input is of each
            element by itself.
        channels: Axes of the channels by tensor name, of tensors whose range is collected by channel too.
        keep: Number of samples that the table keeps; with 0 it says nothing about samples.
    """

    tensors: Sequence[str]
    config: CalibrationConfig = field(default_factory=CalibrationConfig)
    providers: Sequence[Any] = ()
    custom_op_libraries: Sequence[str] = ()
    threads: int = 0
    seen_as: SeenAs = field(default_factory=dict)
    channels: Mapping[str, int] = field(default_factory=dict)
    keep: int = 0


def collect(
    proto: onnx.ModelProto,
    reader: Any,
    points: Points,
    *,
    part: Part = MappingProxyType({}),
    progress: Progress | None = None,
) -> CalibrationTable:
    """Runs the float model on calibration data and returns statistics of chosen tensors.

    Args:
        proto: The float model with its weights in memory, at an opset and IR version that the runtime reads. It is
            not changed.
        reader: A ``CalibrationDataReader`` or an iterable of feeds; read once.
        points: What is observed, and how.
        part: Samples that get a table of their own too, in the same sweep; none with a moving average. Where it cuts
            one, whose rows have to be samples of their own, the model runs on the rows of each cut by themselves.
        progress: Called with (samples done, samples in all or None) before the first and after each sample.

    Returns:
        The table. A tensor that was empty in every sample has the range (0, 0).

    Raises:
        CalibrationError: A tensor is unknown; the reader yields nothing, or feeds of wrong names, types or shapes;
            the model fails on a sample, or computes NaN or infinity.
    """
    with Sweep(proto, points, {} if points.config.moving_average else part) as sweep:
        sweep.read(reader, progress)
        return sweep.table(model_fingerprint(proto))


class Sweep(Closing):
    """Statistics at points of one model, over as many readers as are read; memory flat in the samples.

    A context manager; `close` it otherwise.

    Args:
        proto: As for `collect`.
        points: What is observed, and how.
        part: As for `collect`.

    Attributes:
        samples: Feeds read so far.
        data_digest: Sum of the digests of all feeds read so far.
        part_samples: Samples of the part, cuts of a sample counted each.
        part_digest: Sum of the digests of these.
    """

    def __init__(self, proto: onnx.ModelProto, points: Points, part: Part = MappingProxyType({})) -> None:
        self._points = points
        config, channels, seen_as = points.config, points.channels, points.seen_as
        self._inputs = sources.input_specs(proto)
        proto = in_order(proto)
        groups = _classify(proto, points.tensors)
        providers, libraries = tuple(points.providers), tuple(points.custom_op_libraries)
        settings = part_session.SessionSettings(providers, libraries, points.threads, optimize=not config.bit_exact)
        self._model = part_session.ObservedModel(proto, settings)
        types = part_session.element_types(proto)  # the runtime says those of tensors without an annotation
        unknown = [name for names in groups for name in names if name not in types]
        asked = types_of(proto, unknown, libraries)
        types.update((name, asked[name].tensor_type.elem_type if name in asked else 0) for name in unknown)
        computed, fed, constant = (_observable(names, types) for names in groups)
        # Values that follow from others: none where all elements count, or ranges are to be stock's.
        functions: Functions = {}
        if not (config.uses_histogram or config.bit_exact or config.moving_average):
            functions = functions_of(proto.graph, {**computed, **fed}, channels, seen_as)
        made = {name for of_one in functions.values() for name in of_one}
        whole = not (config.moving_average or config.bit_exact or config.sketch)
        self._unions = unions_of(proto.graph, computed, {*made, *channels, *seen_as}) if whole else {}
        fetched = {n: dtype for n, dtype in computed.items() if n not in made and n not in self._unions}
        self._staged = StagedModel(self._model, proto, fetched, types, config.fetch_budget)
        constants = Collector(constant, replace(config, method="minmax", sketch=False))
        for name, array in part_session.initializer_arrays(proto, set(constant)).items():
            constants.add(name, array)
        constants.end_chunk()
        self._constant = constants.statistics()
        kinds = {n: dtype for n, dtype in (*computed.items(), *fed.items()) if n not in self._unions}
        self._fresh = partial(Collector, kinds, config, channels, functions, seen_as)
        self._fed = tuple(fed)
        self._adder = _Adder(points.threads or machine().cores)
        self.start_again(part)

    def start_again(self, part: Part = MappingProxyType({}), cut: int | None = None) -> None:
        """Forgets all that was read; the sessions stay.

        Args:
            part: As for `collect`, of what is read from now on.
            cut: A digest from which on no sample is kept, where others are known to come before.
        """
        self.samples = self.data_digest = self.part_samples = self.part_digest = 0
        self._cuts = dict(part)
        self._others = self._fresh()
        self._chosen = self._fresh() if self._cuts else None
        self._cached = CachedSamples(self._points.keep)
        if cut is not None:
            self._cached.cut_at(cut)

    def close(self) -> None:
        """Ends the sessions' temporary files; the statistics stay."""
        self._model.close()

    def read(self, reader: Any, progress: Progress | None = None, *, first: int = 0, least: int = 1) -> None:
        """Takes all that a reader has left into account; its end is the end of a chunk.

        Args:
            reader: As for `collect`.
            progress: As for `collect`.
            first: What messages call the reader's first sample.
            least: How many samples there have to be, with those that were read before.

        Raises:
            CalibrationError: As `collect`.
        """
        # The feeds, with None behind each chunk; a model without inputs runs once.
        required, optional = self._inputs
        feeds: Iterator[Feed | None]
        total: int | None
        if not required and not optional:
            feeds, total = iter([{}, None]), 1
        else:
            total, config = sources.reader_length(reader), self._points.config
            feeds = (
                sources.strided_feeds(reader, config.strided)
                if config.strided
                else sources.mark_chunks(sources.sample_feeds(reader), config.max_intermediate_outputs)
            )
        if progress is not None:
            progress(0, total)
        # Samples are observed in bundles, of one each unless more are faster, with digests of all and of the part.
        before, together = self.samples, _BUNDLE if self._staged.is_heavy else 1
        bundle, waiting = self._bundle(), 0
        for feed in feeds:
            if feed is None:
                bundle, waiting = self._observed(*bundle), 0
                for collector in self._collectors:
                    collector.end_chunk()
                continue
            number = first + self.samples - before
            checked = sources.check_feed(feed, required, optional, number)
            known: int | None = getattr(feed, "digest", None)
            digest = feed_digest(checked) if known is None else known
            cuts = self._cuts.get(self.samples)  # where the sample is of the part, or cut
            pieces = [(cut.of(checked), cut.chosen) for cut in cuts] if cuts else [(checked, cuts is not None)]
            for piece, chosen in pieces:
                if chosen:
                    self.part_samples += 1
                    of_piece = digest if piece is checked else feed_digest(piece)
                    self.part_digest = (self.part_digest + of_piece) % 2**256
                bundle[0].append(piece)
                bundle[1].append((number, chosen))
            # What identifies the data, and the samples that are kept.
            if self._points.keep:
                self._cached.add(Sample(checked, getattr(feed, "index", None), digest))
            self.data_digest = (self.data_digest + digest) % 2**256
            self.samples += 1
            waiting += 1
            if waiting >= together:
                bundle, waiting = self._observed(*bundle), 0
            if progress is not None:
                progress(self.samples - waiting - before, total)
        # What is left of a bundle, and that there was something.
        self._observed(*bundle)
        if together > 1 and progress is not None:
            progress(self.samples - before, total)
        if self.samples < least:
            raise no_sample()

    @property
    def _collectors(self) -> list[Collector]:
        return [self._others] if self._chosen is None else [self._chosen, self._others]

    def _bundle(self) -> _Bundle:
        return Spool() if self._staged.is_heavy else [], []

    def _observed(self, feeds: list[Any] | Spool, origins: list[tuple[int, bool]]) -> _Bundle:
        """Takes the latest samples into account, part by part of the model; returns an empty bundle.

        Args:
            feeds: What the model runs on.
            origins: The number of the sample that each is of, and whether it is of the part.

        Raises:
            CalibrationError: The model fails on one, or computes NaN or infinity.
        """

        def take(place: int, arrays: dict[str, Array]) -> None:
            number, chosen = origins[place]
            collector = self._collectors[0 if chosen else -1]
            if broken := self._adder.add(arrays, collector.add):
                given = {name: as_array(value) for name, value in feeds[place].items()}  # tells more than what follows
                bad = [name for name, a in given.items() if a.dtype.kind == "f" and not np.isfinite(a).all()]
                raise _non_finite(bad or broken, number)

        for place, feed in enumerate(feeds):
            take(place, {name: as_array(feed[name]) for name in self._fed if name in feed})
        self._staged.run(feeds, [number for number, _ in origins], take)
        return self._bundle()

    def table(self, fingerprint: str) -> CalibrationTable:
        """The table of what was read so far.

        Args:
            fingerprint: The model's, from `model_fingerprint`.
        """
        own, config = self._cached if self._points.keep else None, self._points.config
        digest, of_part = f"{self.data_digest:064x}", f"{self.part_digest:064x}"
        whole = CalibrationTable(self.statistics(), config, self.samples, fingerprint, digest, cached=own)
        if self._chosen is None:
            return whole
        found = self._named(self._chosen.statistics())
        return replace(whole, part=CalibrationTable(found, config, self.part_samples, fingerprint, of_part))

    def statistics(self) -> dict[str, TensorStatistics]:
        """The statistics so far, by tensor name, in the order asked for."""
        found = self._others.statistics()
        if self._chosen is not None:
            found = {n: s.merge(found[n], weights=(1, 1)) for n, s in self._chosen.statistics().items()}
        return self._named(found)

    def _named(self, found: dict[str, TensorStatistics]) -> dict[str, TensorStatistics]:
        found = united({**found, **self._constant}, self._unions)
        return {name: found[name] for name in dict.fromkeys(self._points.tensors) if name in found}


class _Adder:
    """Adds tensors to a collector, several at a time.

    Args:
        threads: Number of threads that work on tensors.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def add(self, arrays: Mapping[str, Array], take: Callable[[str, Array], bool]) -> list[str]:
        """Adds arrays; returns the names of those with NaN or infinity, in order."""
        shares = _shares({name: array.size for name, array in arrays.items()}, self._threads)

        def added(names: list[str]) -> list[str]:
            return [name for name in names if not take(name, arrays[name])]

        others = [self._pool.submit(added, names) for names in shares[1:]]
        broken = {*added(shares[0]), *(name for other in others for name in other.result())}
        return [name for name in arrays if name in broken]

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        """Threads beside the caller's; they end with the object."""
        return ThreadPoolExecutor(self._threads - 1, initializer=np.seterr, initargs=("ignore",))  # as the caller's


def _non_finite(names: list[str], sample: int) -> CalibrationError:
    more = f" (and {len(names) - 1} tensors after it)" if len(names) > 1 else ""
    return CalibrationError(
        f"The float model computes NaN or infinity on the calibration data{more}.",
        where=f"tensor '{names[0]}', sample {sample}",
        fix="Check this sample's preprocessing; where the model means it (a mask of minus infinity), exclude the node.",
    )


def _shares(sizes: Mapping[str, int], threads: int) -> list[list[str]]:
    """The names dealt out to as many threads as they are worth, about as much work to each."""
    work = sum(sizes.values()) + _CALL * len(sizes)
    count = max(min(threads, work // _SHARE, len(sizes)), 1)
    shares: list[tuple[int, list[str]]] = [(0, []) for _ in range(count)]
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        least = min(range(count), key=lambda at: shares[at][0])
        load, names = shares[least]
        shares[least] = (load + sizes[name] + _CALL, [*names, name])
    return [names for _, names in shares]


def _classify(proto: onnx.ModelProto, tensors: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Splits tensor names into computed ones in graph order, graph inputs, and initializers."""
    wanted = dict.fromkeys(tensors)
    graph = proto.graph
    initializers = {t.name for t in graph.initializer}
    inputs = {v.name for v in graph.input} - initializers
    outputs = dict.fromkeys(name for node in graph.node for name in node.output if name)
    known = dict.fromkeys([*outputs, *inputs, *initializers])
    for name in wanted:
        if name not in known:
            raise CalibrationError(
                f"A tensor to observe is not in the model's main graph.{did_you_mean(name, known)}",
                where=f"tensor '{name}'",
                fix="Name a node's output, an input or an initializer.",
            )
    return (
        [name for name in outputs if name in wanted],
        [name for name in wanted if name in inputs],
        [name for name in wanted if name in initializers],
    )


def _observable(names: Sequence[str], types: Mapping[str, int]) -> dict[str, str]:
    """The numpy types of those tensors that are float32 or float16."""
    skipped = [name for name in names if types[name] not in _OBSERVED_TYPES]
    if skipped:
        _log.debug("tensors of a type that is not calibrated, left out: %s", ", ".join(skipped))
    return {name: _OBSERVED_TYPES[types[name]] for name in names if types[name] in _OBSERVED_TYPES}
