"""Parts of a quantization on their own: the plan without data, the calibration table without a model, layers' times.

Calibration piece by piece: what is done is kept on disk. Tables of pieces merge to the bit, so that it does not matter
where a piece ends: a run that was killed goes on with the samples behind the last one that its checkpoint holds.
"""

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import onnx

from kenosis_ort.bench.harness import profile_in_fresh_sessions
from kenosis_ort.calibration import readers
from kenosis_ort.calibration.cached_samples import feed_digest
from kenosis_ort.calibration.feeds import check_feed, input_specs, sample_feeds
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import CalibrationError, OptionError, warn_caller
from kenosis_ort.flow import body_plans, calibrate, finish, improve, samples
from kenosis_ort.flow.builder import draft, for_integers
from kenosis_ort.flow.call import Call
from kenosis_ort.flow.fit import opened, with_open_defaults
from kenosis_ort.flow.request import Progress, Request, calibration_config
from kenosis_ort.graph.constants import meant_as_defaults
from kenosis_ort.passes.order import WEIGHT_PASSES
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.quantizer.stock import CalibrationDataReader
from kenosis_ort.report.evidence import LayerTime, OpTimes, layer_times
from kenosis_ort.verify import verify_fusion

Source = str | os.PathLike[str] | onnx.ModelProto
_RUNS: Final = 30


def planned_layers(source: Source, request: Request) -> tuple[LayerTime, ...]:
    """The layers of a float model as a call would lay them out, before calibration; none without a plan.

    Args:
        source: The float model.
        request: Of the call.
    """
    with _opened(source, request) as call:
        builder = for_integers(call.loaded.proto, call.request, call)
    if not builder.plan:
        return ()
    return finish.layers_of(builder.prepared.graph, builder.plan, builder.request.target, None)


def running_layers(
    source: Source, request: Request, feeds: Sequence[Mapping[str, Any]], *, budget_s: float, target: Any
) -> tuple[LayerTime, ...]:
    """The layers of a quantized model as the runtime runs them, measured.

    Args:
        source: The quantized model, of any origin.
        request: Of the call: its threads and libraries.
        feeds: What it is run on.
        budget_s: Seconds of running.
        target: Whose runtime is asked; None for the one that the file says.
    """
    threads, libraries = request.speed.threads, request.custom_op_libraries
    fusion = verify_fusion(source, custom_op_libraries=libraries, threads=threads, target=target)
    times = profile_in_fresh_sessions(
        source, feeds, threads=threads, runs=_RUNS, budget_s=budget_s, custom_op_libraries=libraries
    )
    return layer_times(fusion, {}, None, OpTimes((), times, threads, _RUNS))


_log = logging.getLogger(__name__)
_PIECE_S: Final = 30.0
"""Seconds after which what is done is written."""


def plan_only(source: Source, request: Request) -> PlacementPlan:
    """The plan as far as it needs no ranges; empty where stock's placement is used."""
    with _opened(source, request) as call:
        if call.request.recipe.weight_only:
            return improve.planned_weights(call.loaded, call.request)
        builder = draft(call.loaded.proto, call.request, call).for_integers()
        return replace(builder.plan, nodes=(*builder.plan.nodes, *body_plans.planned_in_bodies(builder)))


def calibrate_only(
    source: Source, request: Request, reader: CalibrationDataReader, *, keep_samples: bool, resume: bool = False
) -> CalibrationTable:
    """Collects the statistics that quantization needs, and writes them to the request's cache path if it has one.

    Args:
        source: The float model.
        request: What the caller wants.
        reader: The data.
        keep_samples: Keep some of the samples in the table.
        resume: Keep what is done beside the table, and go on with what is there; it has a cache path.

    Raises:
        CalibrationError, OptionError: As `_in_pieces`.
    """
    path = request.cache_path
    with _opened(source, request) as call:
        if resume and path is not None:
            return _in_pieces(call, reader, path, keep_samples=keep_samples)
        table = _calibrated(call, reader, keep_samples=keep_samples)
        if path is not None:
            table.save(path)
        return table


def _in_pieces(call: Call, reader: CalibrationDataReader, path: Path, *, keep_samples: bool) -> CalibrationTable:
    """The table of all samples, collected some seconds at a time; the file beside it, ``.part``, becomes it in the end.

    Raises:
        CalibrationError: That file holds other samples than the reader begins with, or is of another model.
        OptionError: A range depends on the order of all samples, which cannot be collected in pieces.
    """
    request, proto, part = call.request, call.loaded.proto, path.with_name(f"{path.name}.part")
    if calibration_config(request).depends_on_order:
        raise OptionError(
            "a moving average depends on the order of all samples, and cannot be collected in pieces",
            where="resume",
            fix="leave out CalibMovingAverage and CalibStridedMinMax",
        )

    def refusal(why: str) -> CalibrationError:
        return CalibrationError(
            f"What an earlier calibration left cannot be gone on with: {why.rstrip('.')}.",
            where=str(part),
            fix="Delete the file, and calibrate from the beginning.",
        )

    inputs, defaults = input_specs(proto), meant_as_defaults(proto)
    feeds = sample_feeds(readers.for_model(reader, chain(*inputs)))
    # What is done, and the samples behind it.
    done, counted = None, 0
    if part.exists():
        try:
            done = CalibrationTable.load(part)
        except CalibrationError as error:
            raise refusal(f"it is damaged: {error.what}") from error
        digest = 0
        for number, feed in zip(range(done.samples), feeds, strict=False):
            digest = (digest + feed_digest({**defaults, **check_feed(feed, *inputs, number)})) % 2**256
        if f"{digest:064x}" != done.data_fingerprint:
            raise refusal("it holds other samples than the reader begins with")
        _log.info("%d samples are done already", done.samples)
    # The others, piece by piece; no piece is empty.
    for ahead in feeds:
        if request.progress is not None:
            call.request = replace(request, progress=partial(_count_on, request.progress, counted))
        found = _calibrated(call, _for_a_while(chain([ahead], feeds)), keep_samples=keep_samples)
        counted += found.samples
        try:
            done = found if done is None else done.merge(found)
        except CalibrationError as error:
            raise refusal(error.what) from error
        done.save(part)
        _log.info("%d samples are kept in %s", done.samples, part)
    if done is None:
        raise CalibrationError(
            "No data is collected: the calibration data reader yields no sample.",
            fix="Pass a reader that yields at least one feed; one that was read before has to be rewound.",
        )
    os.replace(part, path)
    return done


def _for_a_while(feeds: Iterable[Any]) -> Iterator[Any]:
    begun = time.monotonic()
    for feed in feeds:
        yield feed
        if time.monotonic() - begun >= _PIECE_S:
            break


def _count_on(progress: Progress, before: int, now: int, _: int | None) -> None:
    progress(before + now, None)


def _calibrated(call: Call, reader: CalibrationDataReader, *, keep_samples: bool) -> CalibrationTable:
    proto = call.loaded.proto
    defaults = meant_as_defaults(proto)
    data = samples.KeepingReader(reader, input_specs(proto), keep=0, defaults=defaults)
    request = with_open_defaults(proto, call.request, data)
    drafted = draft(proto, request, call)
    builder = drafted.for_integers()
    away = request.executor is not None and isinstance(reader, readers.Shards)  # workers read them
    found = calibrate.calibrate(
        builder,
        data.reader if away else data,
        channels=drafted.channels_to_follow(builder, WEIGHT_PASSES),
        keep=request.most_feeds(proto, for_all=True) if keep_samples else 0,
        defaults=defaults,
    )
    return replace(found, made_up=readers.is_made_up(reader))


@contextmanager
def _opened(source: Source, request: Request) -> Iterator[Call]:
    """A call with its model; what is complained of is told once it has succeeded."""
    with opened(source, request) as call:
        yield call
    for text in dict.fromkeys(call.warnings):
        warn_caller(text)
