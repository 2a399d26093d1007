"""The sweep: one pass over a data reader, statistics of every observed tensor, memory flat in the samples."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import onnx

from kenosis_ort.calibration.cached_samples import CachedSamples, feed_digest, model_fingerprint
from kenosis_ort.calibration.config import CalibrationConfig
from kenosis_ort.calibration.feeds import (
    Feed,
    Part,
    Sample,
    check_feed,
    input_specs,
    mark_chunks,
    reader_length,
    sample_feeds,
    strided_feeds,
)
from kenosis_ort.calibration.minmax import HistogramCollector, MinMaxCollector, SketchCollector, constant_statistics
from kenosis_ort.calibration.observer import Array, Bundle, ChannelCollector, Collector, Observer, Parted
from kenosis_ort.calibration.part_session import (
    ObservedModel,
    SessionSettings,
    element_types,
    initializer_arrays,
)
from kenosis_ort.calibration.segments import DerivingCollector, Functions, functions_of, unions_of, united
from kenosis_ort.calibration.stages import StagedModel
from kenosis_ort.calibration.statistics import TensorStatistics
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import CalibrationError, did_you_mean
from kenosis_ort.graph.canonical import in_order
from kenosis_ort.runtime.session import Closing

_log = logging.getLogger(__name__)

_BUNDLE = 64  # samples that run through a model of many weights together

Progress = Callable[[int, "int | None"], None]

_OBSERVED_TYPES: dict[int, str] = {onnx.TensorProto.FLOAT: "float32", onnx.TensorProto.FLOAT16: "float16"}


def collect(
    proto: onnx.ModelProto,
    reader: Any,
    *,
    tensors: Sequence[str],
    config: CalibrationConfig | None = None,
    providers: Sequence[Any] | None = None,
    custom_op_libraries: Sequence[str] = (),
    progress: Progress | None = None,
    threads: int = 0,
    seen_as: Mapping[str, Callable[[Array], Array]] | None = None,
    part: Part = MappingProxyType({}),
    channels: Mapping[str, int] = MappingProxyType({}),
    keep: int = 0,
) -> CalibrationTable:
    """Runs the float model on calibration data and returns statistics of chosen tensors.

    Args:
        proto: The float model with its weights in memory, at an opset and IR version that the runtime reads. It is
            not changed.
        reader: A ``CalibrationDataReader`` or an iterable of feeds; read once.
        tensors: Names of the tensors to observe: node outputs, graph inputs or initializers of the main graph, in any
            order. Those that are not float32 or float16 are left out of the table.
        config: Method and settings; MinMax by default.
        providers: The runtime's execution providers; the CPU by default.
        custom_op_libraries: Shared libraries with custom operators to register.
        progress: Called with (samples done, samples in all or None) before the first and after each sample.
        threads: Number of threads; 0 leaves it to the runtime.
        seen_as: By tensor name, what stands for its values in the statistics: a function of the array of one sample
            that puts a finite value in the place of those that all consumers take alike, such as an attention mask's
            minus infinity in front of a Softmax. Such a tensor may be infinite. That of a gate's input is of each
            element by itself.
        part: Samples that get a table of their own too, in the same sweep; none with a moving average. Where it cuts
            one, whose rows have to be samples of their own, the model runs on the rows of each cut by themselves.
        channels: Axes of the channels by tensor name, of tensors whose range is collected by channel too.
        keep: Number of samples that the table keeps; with 0 it says nothing about samples.

    Returns:
        The table. A tensor that was empty in every sample has the range (0, 0).

    Raises:
        CalibrationError: A tensor is unknown; the reader yields nothing, or feeds of wrong names, types or shapes;
            the model fails on a sample, or computes NaN or infinity.
    """
    config = config or CalibrationConfig()
    with Sweep(
        proto,
        tensors=tensors,
        config=config,
        providers=providers,
        custom_op_libraries=custom_op_libraries,
        threads=threads,
        seen_as=seen_as,
        part={} if config.moving_average else part,
        channels=channels,
        keep=keep,
    ) as sweep:
        sweep.read(reader, progress)
        return sweep.table(model_fingerprint(proto))


class Sweep(Closing):
    """Statistics of chosen tensors of one model, over as many readers as are read; memory flat in the samples.

    A context manager; `close` it otherwise. Arguments as for `collect`.

    Attributes:
        samples: Feeds read so far.
        data_digest: Sum of the digests of all feeds read so far.
        part_samples: Samples of the part, cuts of a sample counted each.
        part_digest: Sum of the digests of these.
    """

    def __init__(
        self,
        proto: onnx.ModelProto,
        *,
        tensors: Sequence[str],
        config: CalibrationConfig,
        providers: Sequence[Any] | None = None,
        custom_op_libraries: Sequence[str] = (),
        threads: int = 0,
        seen_as: Mapping[str, Callable[[Array], Array]] | None = None,
        part: Part = MappingProxyType({}),
        channels: Mapping[str, int] = MappingProxyType({}),
        keep: int = 0,
    ) -> None:
        self._tensors = tuple(dict.fromkeys(tensors))
        self._config = config
        self._inputs = input_specs(proto)
        proto = in_order(proto)
        groups = _classify(proto, tensors)
        settings = SessionSettings(
            providers=tuple(providers or ()),
            custom_op_libraries=tuple(custom_op_libraries),
            threads=threads,
            optimize=not config.bit_exact,
        )
        self._model = ObservedModel(proto, settings)
        try:
            types = _types(self._model, proto, groups)
            computed, fed, constant = (_observable(names, types) for names in groups)
            self._functions = _functions(proto, {**computed, **fed}, config, channels, seen_as or ())
            made = {name for functions in self._functions.values() for name in functions}
            apart = {*made, *channels, *(seen_as or ())}
            whole = not (config.moving_average or config.bit_exact or config.sketch)
            self._unions = unions_of(proto.graph, computed, apart) if whole else {}
            made.update(self._unions)
            fetched = {name: dtype for name, dtype in computed.items() if name not in made}
            ordered = {name for name in seen_as or () if name not in self._functions}  # a function of the array
            ordered.update(name for name, axis in channels.items() if axis not in (1, -3))
            self._staged = StagedModel(
                self._model, proto, fetched, types, config.fetch_budget, fetched.keys() - ordered
            )
        except BaseException:
            self.close()
            raise
        arrays = initializer_arrays(proto, set(constant))
        self._constant = {name: constant_statistics(arrays[name], dtype, config) for name, dtype in constant.items()}
        self._takes_bundles = self._staged.is_heavy and not config.moving_average
        self._kinds = {n: dtype for n, dtype in (*computed.items(), *fed.items()) if n not in self._unions}
        self._fed = fed
        self._threads, self._seen_as, self._axes, self._keep = threads, seen_as or {}, channels, keep
        self.start_again(part)

    def start_again(self, part: Part = MappingProxyType({}), cut: int | None = None) -> None:
        """Forgets all that was read; the sessions stay.

        Args:
            part: As for `collect`, of what is read from now on.
            cut: A digest from which on no sample is kept, where others are known to come before.
        """
        self.samples = 0
        self.data_digest = 0
        self.part_samples = 0
        self.part_digest = 0
        self._cuts = dict(part)
        inner = {name: seen for name, seen in self._seen_as.items() if name in self._functions}
        fresh = partial(_collector, self._kinds, self._config, self._axes, self._functions, inner)
        self._collector = fresh()
        self._part = Parted(fresh(), self._collector) if self._cuts else None
        self._cached = CachedSamples(self._keep)
        if cut is not None:
            self._cached.cut_at(cut)
        taken: Collector = self._part or self._collector
        outer = {name: seen for name, seen in self._seen_as.items() if name not in inner}
        self._observer = Observer(self._staged, self._fed, taken, threads=self._threads, seen_as=outer)

    def close(self) -> None:
        """Ends the sessions' temporary files; the statistics stay."""
        self._model.close()

    def read(self, reader: Any, progress: Progress | None = None, *, first: int = 0) -> None:
        """Takes all that a reader has left into account; its end is the end of a chunk.

        Args:
            reader: As for `collect`.
            progress: As for `collect`.
            first: What messages call the reader's first sample.

        Raises:
            CalibrationError: As `collect`; that there is no sample only where none was read before either.
        """
        required, optional = self._inputs
        feeds: Iterator[Feed | None]
        total: int | None
        if not required and not optional:
            feeds, total = iter([{}, None]), 1
        else:
            total, strided = reader_length(reader), self._config.strided
            feeds = (
                strided_feeds(reader, strided)
                if strided
                else mark_chunks(sample_feeds(reader), self._config.max_intermediate_outputs)
            )
        if progress is not None:
            progress(0, total)
        # Samples are observed in bundles where that is faster, with digests of all of them and of the part.
        before = self.samples
        bundle = Bundle()
        for feed in feeds:
            if feed is None:
                bundle = self._observed(bundle)
                self._collector.end_chunk()
                continue
            number = first + self.samples - before
            checked = check_feed(feed, required, optional, number)
            known: int | None = getattr(feed, "digest", None)
            digest = feed_digest(checked) if known is None else known
            for piece, chosen in self._pieces(checked):
                if chosen:
                    self.part_samples += 1
                    of_piece = digest if piece is checked else feed_digest(piece)
                    self.part_digest = (self.part_digest + of_piece) % 2**256
                if self._takes_bundles:
                    bundle.append(piece, number, chosen)
                else:
                    self._turn(chosen)
                    self._observer.observe(piece, number)
            if self._keep:
                self._cached.add(Sample(checked, getattr(feed, "index", None), digest))
            self.data_digest = (self.data_digest + digest) % 2**256
            self.samples += 1
            if bundle.samples >= _BUNDLE:
                bundle = self._observed(bundle)
            if progress is not None:
                progress(self.samples - bundle.samples - before, total)
        self._observed(bundle)
        if self._takes_bundles and progress is not None:
            progress(self.samples - before, total)
        if self.samples == 0:
            raise CalibrationError(
                "No data is collected: the calibration data reader yields no sample.",
                fix="Return at least one {input name: array} from get_next(); a reader that was read to its end "
                "must be made anew or rewound.",
            )

    def _pieces(self, feed: dict[str, Any]) -> list[tuple[dict[str, Any], bool]]:
        """Inputs of the model from the next sample, and whether it belongs to the part."""
        cuts = self._cuts.get(self.samples)
        return [(cut.of(feed), cut.chosen) for cut in cuts] if cuts else [(feed, cuts is not None)]

    def _turn(self, chosen: bool) -> None:
        if self._part is not None:
            self._part.is_chosen = chosen

    def _observed(self, bundle: Bundle) -> Bundle:
        """Takes the latest samples into account together; returns an empty bundle."""
        if len(bundle.feeds):
            self._observer.observe_all(bundle.feeds, bundle.numbers, lambda place: self._turn(bundle.chosen[place]))
        return Bundle()

    def table(self, fingerprint: str) -> CalibrationTable:
        """The table of what was read so far.

        Args:
            fingerprint: The model's, from `model_fingerprint`.
        """
        found, of_part = self.statistics(), self.statistics_of_part()
        own = self._cached if self._keep else None
        whole = CalibrationTable(found, self._config, self.samples, fingerprint, f"{self.data_digest:064x}", cached=own)
        if of_part is None:
            return whole
        part = CalibrationTable(of_part, self._config, self.part_samples, fingerprint, f"{self.part_digest:064x}")
        return replace(whole, part=part)

    def statistics(self) -> dict[str, TensorStatistics]:
        """The statistics so far, by tensor name, in the order asked for."""
        collector: Collector = self._part or self._collector
        return self._named(collector.statistics())

    def statistics_of_part(self) -> dict[str, TensorStatistics] | None:
        """The same of the part alone; None where there is no part."""
        return None if self._part is None else self._named(self._part.chosen.statistics())

    def _named(self, found: dict[str, TensorStatistics]) -> dict[str, TensorStatistics]:
        found = united({**found, **self._constant}, self._unions)
        return {name: found[name] for name in self._tensors if name in found}


def _collector(
    dtypes: Mapping[str, str],
    config: CalibrationConfig,
    axes: Mapping[str, int],
    functions: Functions,
    seen_as: Mapping[str, Callable[[Array], Array]],
) -> Collector:
    if config.uses_histogram:
        inner: Collector = HistogramCollector(dtypes)
    else:
        extremes = SketchCollector(dtypes, config) if config.sketch else MinMaxCollector(dtypes, config)
        inner = DerivingCollector(extremes, functions, seen_as) if functions else extremes
    return ChannelCollector(inner, axes) if axes else inner


def _functions(
    proto: onnx.ModelProto,
    observed: Mapping[str, str],
    config: CalibrationConfig,
    channels: Collection[str],
    seen_as: Collection[str],
) -> Functions:
    """Values whose ranges follow from others; none where all elements count, or ranges are to be stock's."""
    if config.uses_histogram or config.bit_exact or config.moving_average:
        return {}
    return functions_of(proto.graph, observed, channels, seen_as)


def _classify(proto: onnx.ModelProto, tensors: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Splits tensor names into computed ones in graph order, graph inputs, and initializers."""
    wanted = dict.fromkeys(tensors)
    graph = proto.graph
    initializers = {t.name for t in graph.initializer}
    inputs = {v.name for v in graph.input} - initializers
    outputs = dict.fromkeys(itertools.chain.from_iterable(node.output for node in graph.node))
    for name in wanted:
        if not name or (name not in initializers and name not in inputs and name not in outputs):
            raise CalibrationError(
                "A tensor to observe is not in the model's main graph."
                f"{did_you_mean(name, [*outputs, *inputs, *initializers])}",
                where=f"tensor '{name}'",
            )
    return (
        [name for name in outputs if name in wanted],
        [name for name in wanted if name in inputs],
        [name for name in wanted if name in initializers],
    )


def _types(model: ObservedModel, proto: onnx.ModelProto, groups: Sequence[Sequence[str]]) -> dict[str, int]:
    """Element types by value name; the runtime says those of observed tensors without an annotation."""
    known = element_types(proto)
    unknown = [name for names in groups for name in names if name not in known]
    known.update(model.ask_types(unknown))
    return known


def _observable(names: Sequence[str], types: Mapping[str, int]) -> dict[str, str]:
    """The numpy types of those tensors that are float32 or float16."""
    skipped = [name for name in names if types[name] not in _OBSERVED_TYPES]
    if skipped:
        _log.debug("tensors of a type that is not calibrated, left out: %s", ", ".join(skipped))
    return {name: _OBSERVED_TYPES[types[name]] for name in names if types[name] in _OBSERVED_TYPES}
