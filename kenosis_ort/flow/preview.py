"""Parts of a quantization on their own: the plan without data, the calibration table without a model, layers' times.

Calibration piece by piece: what is done is kept on disk. Tables of pieces merge to the bit, so that it does not matter
where a piece ends: a run that was killed goes on with the samples behind the last one that its checkpoint holds.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import onnx

from kenosis_ort.bench.op_times import profile_in_fresh_sessions
from kenosis_ort.calibration import readers
from kenosis_ort.calibration.cached_samples import feed_digest
from kenosis_ort.calibration.feeds import InputSpec, check_feed, input_specs, sample_feeds
from kenosis_ort.calibration.synthetic import SyntheticReader
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import CalibrationError, OptionError, warn_caller
from kenosis_ort.flow import body_plans, calibrate, finish, samples, weights_alone
from kenosis_ort.flow.builder import draft, for_integers
from kenosis_ort.flow.call import Journal
from kenosis_ort.flow.fit import fitted, with_open_defaults
from kenosis_ort.flow.request import Request, calibration_config
from kenosis_ort.graph import load
from kenosis_ort.graph.constants import meant_as_defaults
from kenosis_ort.graph.outside import weights_on_disk
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.quantizer.stock import CalibrationDataReader
from kenosis_ort.report.evidence import LayerTime, OpTimes, layer_times
from kenosis_ort.storage.writing import write_text
from kenosis_ort.targets import Target
from kenosis_ort.verify import verify_fusion

Source = str | os.PathLike[str] | onnx.ModelProto
_RUNS: Final = 30


def planned_layers(source: Source, request: Request) -> tuple[LayerTime, ...]:
    """The layers of a float model as a call would lay them out, before calibration; none without a plan.

    Args:
        source: The float model.
        request: Of the call.
    """
    builder = for_integers(load.load_model(source, custom_op_libraries=request.custom_op_libraries), request)
    if builder.view is None or not builder.plan:
        return ()
    return finish.layers_of(builder.view, builder.plan, builder.request.target, None)


def running_layers(
    source: Source,
    feeds: Sequence[Mapping[str, Any]],
    *,
    threads: int,
    budget_s: float,
    custom_op_libraries: Sequence[str],
    target: str | Target | None,
) -> tuple[LayerTime, ...]:
    """The layers of a quantized model as the runtime runs them, measured.

    Args:
        source: The quantized model, of any origin.
        feeds: What it is run on.
        threads: Threads of a session.
        budget_s: Seconds of running.
        custom_op_libraries: Libraries with custom operators to register.
        target: Whose runtime is asked; None for the one that the file says.
    """
    fusion = verify_fusion(source, custom_op_libraries=custom_op_libraries, threads=threads, target=target)
    times = profile_in_fresh_sessions(
        source, feeds, threads=threads, runs=_RUNS, budget_s=budget_s, custom_op_libraries=custom_op_libraries
    )
    return layer_times(fusion, {}, None, OpTimes((), times, threads, _RUNS))


_log = logging.getLogger(__name__)
_PIECE_S: Final = 30.0
_SHARDS: Final = 64  # that are sent to a cluster at a time
_SCHEMA: Final = 1
Inputs = tuple[tuple[InputSpec, ...], tuple[InputSpec, ...]]


class Piecewise:
    """Collects from a source in pieces.

    Args:
        collect: Returns the table of some samples or shards.
        checkpoint: The file that holds what is done.
        piece_s: Seconds after which what is done is written.
    """

    def __init__(
        self,
        collect: Callable[[Any], CalibrationTable],
        checkpoint: Path,
        *,
        piece_s: float = _PIECE_S,
    ) -> None:
        self._collect, self._checkpoint, self._piece_s = collect, checkpoint, piece_s
        self._table: CalibrationTable | None = None  # of all samples so far
        self._shards = 0  # that it holds, where they are read by workers

    def run(self, source: Any, inputs: Inputs, defaults: Mapping[str, Any], *, away: bool) -> CalibrationTable:
        """The table of a whole source.

        Args:
            source: A reader, `Shards`, or an iterable of feeds.
            inputs: The model's inputs, by which feeds are checked.
            defaults: Values of inputs that a feed may leave out.
            away: Workers read the shards.

        Raises:
            CalibrationError: As collecting raises; or the checkpoint is no table, or of another model or other samples.
        """
        self._resume()
        pieces = self._of_shards(source) if away else self._of_samples(source, inputs, defaults)
        for piece in pieces:
            self._add(self._collect(piece))
        if self._table is None:
            raise CalibrationError(
                "No data is collected: the calibration data reader yields no sample.",
                fix="Pass a reader that yields at least one feed; one that was read before has to be rewound.",
            )
        return self._table

    def forget(self) -> None:
        """Removes the checkpoint, once the table is where it belongs."""
        self._checkpoint.unlink(missing_ok=True)

    def _of_shards(self, shards: readers.Shards) -> Iterator[readers.Shards]:
        while self._shards < shards.count:
            numbers = range(self._shards, min(self._shards + _SHARDS, shards.count))
            self._shards = numbers.stop
            yield shards.some(numbers)

    def _of_samples(self, source: Any, inputs: Inputs, defaults: Mapping[str, Any]) -> Iterator[Iterator[Any]]:
        feeds = sample_feeds(source)
        self._skip(feeds, inputs, defaults)
        ahead = next(feeds, None)  # no piece is empty
        while ahead is not None:
            yield self._piece(ahead, feeds)
            ahead = next(feeds, None)

    def _piece(self, feed: Any, feeds: Iterator[Any]) -> Iterator[Any]:
        """Yields a sample and those behind it, for some seconds."""
        begun = time.monotonic()
        while feed is not None:
            yield feed
            feed = None if time.monotonic() - begun >= self._piece_s else next(feeds, None)

    def _skip(self, feeds: Iterator[Any], inputs: Inputs, defaults: Mapping[str, Any]) -> None:
        """Skips the samples that the checkpoint holds.

        Raises:
            CalibrationError: These are other samples.
        """
        table = self._table
        if table is None:
            return
        digest = 0
        for number, feed in zip(range(table.samples), feeds, strict=False):
            digest = (digest + feed_digest({**defaults, **check_feed(feed, *inputs, number)})) % 2**256
        if f"{digest:064x}" != table.data_fingerprint:
            raise self._unfit("it holds other samples than the reader begins with")

    def _add(self, table: CalibrationTable) -> None:
        try:
            self._table = table if self._table is None else self._table.merge(table)
        except CalibrationError as error:
            raise self._unfit(error.what) from error
        raw = {"schema": _SCHEMA, "shards": self._shards, "table": json.loads(self._table.to_json())}
        write_text(self._checkpoint, json.dumps(raw), "the checkpoint")
        _log.info("%d samples are kept in %s", self._samples, self._checkpoint)

    def _resume(self) -> None:
        self._table, self._shards = None, 0
        if not self._checkpoint.exists():
            return
        try:
            raw = json.loads(self._checkpoint.read_text(encoding="utf-8"))
            if raw["schema"] != _SCHEMA:
                raise self._unfit(f"it is of schema {raw['schema']}, and this version reads {_SCHEMA}")
            self._table, self._shards = CalibrationTable.from_json(json.dumps(raw["table"])), int(raw["shards"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = error.what if isinstance(error, CalibrationError) else repr(error)
            raise self._unfit(f"it is damaged: {what}") from error
        _log.info("%d samples are done already", self._samples)

    @property
    def _samples(self) -> int:
        return 0 if self._table is None else self._table.samples

    def _unfit(self, why: str) -> CalibrationError:
        return CalibrationError(
            f"What an earlier calibration left cannot be gone on with: {why}.",
            where=str(self._checkpoint),
            fix="Delete the file, and calibrate from the beginning.",
        )


def plan_only(source: Source, request: Request) -> PlacementPlan:
    """The plan as far as it needs no ranges; empty where stock's placement is used."""
    with _opened(source, request) as loaded:
        if request.recipe.weight_only:
            return weights_alone.planned_weights(loaded, request)
        builder = draft(loaded.proto, fitted(loaded.proto, request), Journal()).for_integers()
        for text in builder.request.complaints:
            warn_caller(text)
        return replace(builder.plan, nodes=(*builder.plan.nodes, *body_plans.planned_in_bodies(builder)))


def calibrate_only(
    source: Source,
    request: Request,
    reader: CalibrationDataReader,
    *,
    keep_samples: bool,
    resume: bool = False,
) -> CalibrationTable:
    """Collects the statistics that quantization needs, and writes them to the request's cache path if it has one.

    Args:
        source: The float model.
        request: What the caller wants.
        reader: The data.
        keep_samples: Keep some of the samples in the table.
        resume: Keep what is done beside the table, and go on with what is there; it has a cache path.

    Raises:
        OptionError: A range depends on the order of all samples, which cannot be collected in pieces.
    """
    path = request.cache_path
    with _opened(source, request) as loaded:
        if not resume or path is None:
            table = _calibrated(loaded, request, reader, keep_samples=keep_samples)
            if path is not None:
                table.save(path)
            return table
        if calibration_config(request).depends_on_order:
            raise OptionError(
                "a moving average depends on the order of all samples, and cannot be collected in pieces",
                where="resume",
                fix="leave out CalibMovingAverage and CalibStridedMinMax",
            )
        away = request.executor is not None and isinstance(reader, readers.Shards)
        collect = _counting_on(partial(_calibrated, loaded, keep_samples=keep_samples), request)
        pieces = Piecewise(collect, path.with_name(f"{path.name}.part"))
        table = pieces.run(reader, input_specs(loaded.proto), meant_as_defaults(loaded.proto), away=away)
    table.save(path)
    pieces.forget()
    return table


def _counting_on(
    collect: Callable[[Request, Any], CalibrationTable], request: Request
) -> Callable[[Any], CalibrationTable]:
    """Collector of pieces whose progress counts those before it."""
    callback, done = request.progress, 0

    def collected(piece: Any) -> CalibrationTable:
        nonlocal done
        before = done
        progress = None if callback is None else lambda now, _: callback(before + now, None)
        table = collect(replace(request, progress=progress), piece)
        done += table.samples
        return table

    return collected


def _calibrated(
    loaded: load.LoadedModel, request: Request, reader: CalibrationDataReader, *, keep_samples: bool
) -> CalibrationTable:
    defaults = meant_as_defaults(loaded.proto)
    data = samples.KeepingReader(reader, input_specs(loaded.proto), keep=0, defaults=defaults)
    request = with_open_defaults(loaded.proto, fitted(loaded.proto, request), data)
    drafted = draft(loaded.proto, request, Journal())
    builder = drafted.for_integers()
    for text in builder.request.complaints:
        warn_caller(text)
    away = request.executor is not None and isinstance(reader, readers.Shards)  # workers read them
    found = calibrate.calibrate(
        builder,
        data.reader if away else data,
        channels=calibrate.channels_to_follow(drafted, builder, all_passes=True),
        keep=samples.most_feeds(loaded.proto, request, for_all=True) if keep_samples else 0,
        defaults=defaults,
    )
    return replace(found, made_up=isinstance(reader, SyntheticReader))


@contextmanager
def _opened(source: Source, request: Request) -> Iterator[load.LoadedModel]:
    """Loads a model; the weights of a large one stay on disk, and so do those that are made of them inside."""
    loaded = load.load_model(source, custom_op_libraries=request.custom_op_libraries, lazily=True)
    with weights_on_disk(loaded.proto):
        yield loaded
