"""Parts of a quantization on their own: the plan without data, the calibration table, times of layers."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import onnx

from kenosis_ort.bench.kernel_times import profile_in_fresh_sessions
from kenosis_ort.calibration import readers
from kenosis_ort.calibration.feeds import input_specs
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import warn_caller
from kenosis_ort.flow import body_plans, calibrate, finish, improve, samples
from kenosis_ort.flow.builder import draft, for_integers
from kenosis_ort.flow.call import Call
from kenosis_ort.flow.fit import opened, with_open_defaults
from kenosis_ort.flow.request import Request
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


def plan_only(source: Source, request: Request) -> PlacementPlan:
    """The plan as far as it needs no ranges; empty where stock's placement is used."""
    with _opened(source, request) as call:
        if call.request.recipe.weight_only:
            return improve.planned_weights(call.loaded, call.request)
        builder = draft(call.loaded.proto, call.request, call).for_integers()
        return replace(builder.plan, nodes=(*builder.plan.nodes, *body_plans.planned_in_bodies(builder)))


def calibrate_only(
    source: Source, request: Request, reader: CalibrationDataReader, *, keep_samples: bool
) -> CalibrationTable:
    """Collects the statistics that quantization needs, and writes them to the request's cache path if it has one.

    Args:
        source: The float model.
        request: What the caller wants.
        reader: The data.
        keep_samples: Keep some of the samples in the table.
    """
    with _opened(source, request) as call:
        table = _calibrated(call, reader, keep_samples=keep_samples)
        if request.cache_path is not None:
            table.save(request.cache_path)
        return table


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
