"""Activation ranges: from a table, from samples, or from made-up samples with the trust in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from kenosis_ort.calibration.collector import Points, collect
from kenosis_ort.calibration.feeds import Part
from kenosis_ort.calibration.readers import is_made_up
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import CalibrationError, warn_caller
from kenosis_ort.flow.builder import Builder
from kenosis_ort.flow.call import Call
from kenosis_ort.flow.request import calibration_config
from kenosis_ort.passes.contract import Pass
from kenosis_ort.quantizer.stock import CalibrationDataReader


def calibrate(
    builder: Builder,
    reader: CalibrationDataReader | None,
    *,
    part: Part = MappingProxyType({}),
    channels: Mapping[str, int] = MappingProxyType({}),
    keep: int = 0,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> CalibrationTable:
    """The table of the samples; ``part`` and ``defaults`` as in `collect_on`, the others as in `Points`."""
    if reader is None:
        raise CalibrationError(
            "neither calibration_data_reader nor an existing calibration_cache_path was given",
            fix="pass a reader (ArrayReader, ImageFolderReader, SyntheticReader or your own), or recipe='data-free'",
        )
    run, executor, points = collect, builder.request.executor, _points(builder, channels, keep)
    if executor is not None and points.config.depends_on_order:
        warn_caller("A moving average depends on the order of the samples: it is calibrated here, not on the executor.")
    elif executor is not None:
        from kenosis_ort.cluster.sweep import collect_on  # loads asyncio

        run = partial(collect_on, executor, defaults=defaults)
    return run(builder.prepared.proto, reader, points, part=part, progress=builder.request.progress)


def _points(builder: Builder, channels: Mapping[str, int], keep: int = 0) -> Points:
    request, providers = builder.request, builder.request.calibration_providers or ()
    more: Mapping[str, Any] = {"providers": providers, "channels": channels, "keep": keep}
    return builder.points(builder.tensors, calibration_config(request), **more)


def find_ranges(call: Call, drafted: Builder, builder: Builder, every: Sequence[Pass]) -> CalibrationTable:
    """The ranges of the weights as they came: from the table where there is one, else they go there.

    Args:
        call: What gathers on the way, samples and table among it; its samples are read.
        drafted: The net whose weights passes may change.
        builder: The same in forms for integers, whose ranges are needed.
        every: The passes that change weights of all recipes, which a table that is kept is for.

    Raises:
        CalibrationError: There are neither samples nor a table, or they do not fit.
    """
    cache, data, cached = call.cache, call.data, None
    if cache is not None:
        config = calibration_config(builder.request)
        cached = cache.table_for(builder.prepared.proto, builder.tensors, config, data)
    if cached is not None:
        made_up = "The ranges are of made-up samples; the run that wrote the cache reported how far to trust them."
        call.notes += [made_up] if cached.made_up else []
        return cached
    table = _collected(call, drafted, builder, call.wanted if cache is None else every)
    if cache is None:
        return table
    replace(table, cached=None if data is None else data.cached).save(cache.path)
    if data is not None and len(data.cached):
        call.notes.append(
            f"The calibration cache holds {len(data.cached)} of the samples ({data.cached.bytes / 2**20:.1f} MB), so "
            "that it can take the reader's place. kenosis_ort.calibrate with keep_samples=False writes one without."
        )
    return table


def _collected(call: Call, drafted: Builder, builder: Builder, followed: Sequence[Pass]) -> CalibrationTable:
    """The ranges; for made-up samples wider ones than seen where that is called for, with the trust in them."""
    config, data = calibration_config(builder.request), call.data
    plain = builder.request.stock_reason is not None or config.is_chunked or config.strided
    channels = {} if plain else drafted.channels_to_follow(builder, followed)
    if plain or data is None or not is_made_up(data.reader):
        part = {} if plain else call.part_to_fit(builder.prepared.proto)
        return calibrate(builder, data, part=part, channels=channels)
    from kenosis_ort.calibration.synthetic.net_evidence import net_evidence
    from kenosis_ort.calibration.synthetic.reader import probe_feeds
    from kenosis_ort.calibration.trust import collect_with_trust

    reader, libraries = data.reader, builder.request.custom_op_libraries
    table, call.trust = collect_with_trust(
        builder.prepared.proto,
        data,
        _points(builder, channels),
        provenance=reader.provenance,
        samples=len(reader),
        evidence=net_evidence(call.loaded.proto, probe_feeds(reader), custom_op_libraries=libraries),
        progress=builder.request.progress,
    )
    return replace(table, made_up=call.trust.source == "synthetic")
