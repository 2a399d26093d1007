"""Activation ranges: from the cache, from samples, or from made-up samples with the trust in them."""

from __future__ import annotations

from kenosis_ort.calibration.origin import TableOrigin
from kenosis_ort.calibration.synthetic import SyntheticReader
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.flow import steps
from kenosis_ort.flow.accuracy import numbers_to_fit
from kenosis_ort.flow.cache import settings_of
from kenosis_ort.flow.call import Call
from kenosis_ort.flow.layouts import Layout
from kenosis_ort.flow.samples import KeepingReader
from kenosis_ort.flow.trust import calibrate_made_up, trust_summary
from kenosis_ort.quantizer.stock import CalibrationDataReader


def find_ranges(
    call: Call,
    layout: Layout,
    reader: CalibrationDataReader | None,
    data: KeepingReader | None,
) -> CalibrationTable:
    """Returns the ranges, from the cache where there is one and it is of this model; else they go there.

    Args:
        call: What gathers on the way, the cache among it.
        layout: The model whose ranges are needed, and what was done to its weights.
        reader: Where samples come from.
        data: The reader around it, which is read.

    Raises:
        CalibrationError: There are neither samples nor a cache, or they do not fit.
    """
    cache, request = call.cache, layout.builder.request
    cached = None if cache is None else cache.table_for(layout, data)
    if cached is not None:
        if cached.origin is not None and cached.origin.made_up:
            call.notes.append(
                "The ranges are of made-up samples; the run that wrote the cache said how far to trust them."
            )
        return cached
    table = _collected(call, layout, reader, data)
    if cache is None:
        return table
    if cache.table is not None:
        cache.check_data(table.data_fingerprint)
        call.notes.append(
            "Calibrated again: the calibration cache is of the weights as they came, and passes changed them here."
        )
        return table
    origin = TableOrigin(
        cache.model_fingerprint,
        layout.changes,
        settings_of(request),
        biases=layout.biases,
        made_up=call.trust is not None and call.trust.source == "synthetic",
    )
    cache.keep(table, origin)
    return table


def _collected(
    call: Call,
    layout: Layout,
    reader: CalibrationDataReader | None,
    data: KeepingReader | None,
) -> CalibrationTable:
    """Returns the ranges; for made-up samples wider ones than seen where that is called for, with the trust in them."""
    builder, request = layout.builder, layout.builder.request
    proto, seen_as = builder.prepared.proto, builder.seen_as()
    config = steps.calibration_config(request)
    plain = request.dictated is not None or config.is_chunked or config.strided
    if plain or data is None or not isinstance(reader, SyntheticReader):
        part = () if plain or data is None or not config.keeps_histogram else numbers_to_fit(request, data)
        return steps.calibrate(proto, request, data, layout.tensors, seen_as, part)
    table, trust = calibrate_made_up(
        call.loaded.proto,
        proto,
        request,
        reader,
        data,
        config=config,
        tensors=layout.tensors,
        seen_as=seen_as,
        weights_changed=bool(layout.changes),
    )
    call.trust = trust_summary(trust)
    if call.trust.verdict == "do not ship":
        call.warnings.append(
            f"The made-up calibration samples do not fit this net: {call.trust.reason}. Fix: {call.trust.advice}."
        )
    return table
