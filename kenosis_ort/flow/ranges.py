"""Activation ranges: from a table, from samples, or from made-up samples with the trust in them."""

from __future__ import annotations

from dataclasses import replace

from kenosis_ort.calibration.feeds import Part
from kenosis_ort.calibration.synthetic import SyntheticReader
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.flow import steps
from kenosis_ort.flow.accuracy import part_to_fit
from kenosis_ort.flow.call import Call
from kenosis_ort.flow.layouts import Draft, Layout
from kenosis_ort.flow.samples import KeepingReader
from kenosis_ort.flow.trust import calibrate_made_up, trust_summary
from kenosis_ort.flow.weight_passes import channels_to_follow
from kenosis_ort.quantizer.stock import CalibrationDataReader


def find_ranges(
    call: Call,
    drafted: Draft,
    layout: Layout,
    reader: CalibrationDataReader | None,
    data: KeepingReader | None,
) -> CalibrationTable:
    """Returns the ranges of the weights as they came: from the table where there is one, else they go there.

    Args:
        call: What gathers on the way, the table among it.
        drafted: The model that passes may change.
        layout: The same in forms for integers, whose ranges are needed.
        reader: Where samples come from.
        data: The reader around it, which is read.

    Raises:
        CalibrationError: There are neither samples nor a table, or they do not fit.
    """
    cache = call.cache
    held = None if cache is None else cache.table_for(layout, data)
    if held is not None:
        if held.made_up:
            call.notes.append(
                "The ranges are of made-up samples; the run that wrote the cache said how far to trust them."
            )
        return held
    table = _collected(call, drafted, layout, reader, data)
    if cache is None:
        return table
    if cache.table is not None:
        cache.check_data(table.data_fingerprint)
        call.notes.append(
            "Calibrated again: the calibration cache is of an earlier version, which had changed the weights before."
        )
        return table
    cache.keep(replace(table, kept=None if data is None else data.kept))
    if data is not None and len(data.kept):
        call.notes.append(
            f"The calibration cache holds {len(data.kept)} of the samples ({data.kept.bytes / 2**20:.1f} MB), so that "
            "it can take the reader's place. kenosis_ort.calibrate with keep_samples=False writes one without."
        )
    return table


def _collected(
    call: Call,
    drafted: Draft,
    layout: Layout,
    reader: CalibrationDataReader | None,
    data: KeepingReader | None,
) -> CalibrationTable:
    """Returns the ranges; for made-up samples wider ones than seen where that is called for, with the trust in them."""
    builder, request = layout.builder, layout.builder.request
    proto, seen_as = builder.prepared.proto, builder.seen_as()
    config = steps.calibration_config(request)
    plain = request.dictated is not None or config.is_chunked or config.strided
    channels = {} if plain else channels_to_follow(drafted, layout, all_passes=call.cache is not None)
    if plain or data is None or not isinstance(reader, SyntheticReader):
        part: Part = {}
        if not plain and data is not None:
            part = part_to_fit(call, proto, data)
        return steps.calibrate(proto, request, data, layout.tensors, seen_as, part, channels)
    table, trust = calibrate_made_up(
        call.loaded.proto,
        proto,
        request,
        reader,
        data,
        config=config,
        tensors=layout.tensors,
        seen_as=seen_as,
        channels=channels,
    )
    call.trust = trust_summary(trust)
    return replace(table, made_up=call.trust.source == "synthetic")
