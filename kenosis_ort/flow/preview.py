"""Parts of a quantization on their own: the plan without data, the calibration table without a model written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import onnx

from kenosis_ort.calibration.feeds import input_specs
from kenosis_ort.calibration.shards import Shards
from kenosis_ort.calibration.synthetic import SyntheticReader
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import OptionError, warn_caller
from kenosis_ort.flow import steps
from kenosis_ort.flow.bodies import planned_in_bodies
from kenosis_ort.flow.layouts import draft
from kenosis_ort.flow.piecewise import Piecewise
from kenosis_ort.flow.request import Request
from kenosis_ort.flow.samples import KeepingReader, feeds_kept, with_open_defaults
from kenosis_ort.flow.weight_only import planned_weights
from kenosis_ort.flow.weight_passes import channels_to_follow
from kenosis_ort.graph.constants import meant_as_defaults
from kenosis_ort.graph.load import LoadedModel, load_model
from kenosis_ort.graph.outside import weights_on_disk
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.quantizer.stock import CalibrationDataReader

Source = str | os.PathLike[str] | onnx.ModelProto


def plan_only(source: Source, request: Request) -> PlacementPlan:
    """Returns the plan as far as it needs no ranges; empty where stock's placement is used."""
    with _opened(source, request) as loaded:
        if request.recipe.weight_only:
            return planned_weights(loaded, request)
        drafted = draft(loaded, request)
        layout = drafted.complete(drafted.builder.prepared)
        for text in layout.builder.request.complaints:
            warn_caller(text)
        return replace(layout.plan, nodes=(*layout.plan.nodes, *planned_in_bodies(layout.builder)))


def calibrate_only(
    source: Source, request: Request, reader: CalibrationDataReader, *, keep_samples: bool
) -> CalibrationTable:
    """Collects what quantization needs to know of the data, and writes it to the request's cache path if it has one.

    Args:
        source: The float model.
        request: What the caller wants.
        reader: The data.
        keep_samples: Keep some of the samples in the table.
    """
    with _opened(source, request) as loaded:
        table = _calibrated(loaded, request, reader, keep_samples=keep_samples)
    if request.cache_path is not None:
        table.save(request.cache_path)
    return table


def _calibrated(
    loaded: LoadedModel, request: Request, reader: CalibrationDataReader, *, keep_samples: bool
) -> CalibrationTable:
    defaults = meant_as_defaults(loaded.proto)
    data = KeepingReader(reader, input_specs(loaded.proto), keep=0, defaults=defaults)
    drafted = draft(loaded, with_open_defaults(loaded.proto, request, data))
    layout = drafted.complete(drafted.builder.prepared)
    builder = layout.builder
    for text in builder.request.complaints:
        warn_caller(text)
    away = request.executor is not None and isinstance(reader, Shards)  # workers read them
    found = steps.calibrate(
        builder.prepared.proto,
        builder.request,
        reader if away else data,
        layout.tensors,
        builder.seen_as(),
        channels=channels_to_follow(drafted, layout, all_passes=True),
        keep=feeds_kept(loaded.proto, request, for_all=True) if keep_samples else 0,
        defaults=defaults,
    )
    return replace(found, made_up=isinstance(reader, SyntheticReader))


def calibrate_in_pieces(
    source: Source,
    request: Request,
    reader: CalibrationDataReader,
    *,
    resume: bool,
    settled: float | None,
    keep_samples: bool,
) -> CalibrationTable:
    """Does what `calibrate_only` does, with what is done kept on disk, or only as far as samples change anything.

    Args:
        source: The float model.
        request: What the caller wants.
        reader: The data.
        resume: Keep what is done beside the table, and go on with what is there.
        settled: As for `Piecewise`.
        keep_samples: As for `calibrate_only`.

    Raises:
        OptionError: A range depends on the order of all samples.
    """
    if steps.calibration_config(request).depends_on_order:
        raise OptionError(
            "a moving average depends on the order of all samples, and cannot be collected in pieces",
            where="resume, stop_when_settled",
            fix="leave out CalibMovingAverage and CalibStridedMinMax",
        )
    path, told = request.cache_path, request.progress
    done = 0

    def collect(piece: Any) -> CalibrationTable:
        nonlocal done
        before = done
        progress = None if told is None else lambda now, _: told(before + now, None)
        table = _calibrated(loaded, replace(request, progress=progress), piece, keep_samples=keep_samples)
        done += table.samples
        return table

    checkpoint = None if path is None or not resume else path.with_name(f"{path.name}.part")
    pieces = Piecewise(collect, checkpoint=checkpoint, settled=settled)
    away = request.executor is not None and isinstance(reader, Shards)
    with _opened(source, request) as loaded:
        table = pieces.run(reader, input_specs(loaded.proto), meant_as_defaults(loaded.proto), away=away)
    if path is not None:
        table.save(path)
    pieces.forget()
    return table


@contextmanager
def _opened(source: Source, request: Request) -> Iterator[LoadedModel]:
    """Loads a model; the weights of a large one stay on disk, and so do those that are made of them inside."""
    loaded = load_model(source, custom_op_libraries=request.custom_op_libraries, lazily=True)
    with weights_on_disk(loaded.proto):
        yield loaded
