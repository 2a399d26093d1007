"""Activation ranges: from a table, from samples, or from made-up samples with the trust in them.

Calibration on made-up samples: the ranges, and how far they can be relied on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx

from kenosis_ort.calibration.config import CalibrationConfig
from kenosis_ort.calibration.feeds import Part
from kenosis_ort.calibration.synthetic import SyntheticReader
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.calibration.trust import CalibrationTrust, collect_with_trust, net_evidence, probe_feeds
from kenosis_ort.flow import steps
from kenosis_ort.flow.accuracy import part_to_fit
from kenosis_ort.flow.call import Call
from kenosis_ort.flow.layouts import Layout, LayoutDraft
from kenosis_ort.flow.request import Request
from kenosis_ort.flow.samples import KeepingReader
from kenosis_ort.flow.weight_passes import channels_to_follow
from kenosis_ort.quantizer.stock import CalibrationDataReader
from kenosis_ort.report.sections import TensorTrust, TrustSummary

_UNSTABLE = 0.3  # spread of a range over seeds beyond which the report says so


def calibrate_made_up(
    original: onnx.ModelProto,
    proto: onnx.ModelProto,
    request: Request,
    reader: SyntheticReader,
    data: KeepingReader,
    *,
    config: CalibrationConfig,
    tensors: Sequence[str],
    seen_as: Mapping[str, Callable[[Any], Any]],
    channels: Mapping[str, int],
) -> tuple[CalibrationTable, CalibrationTrust]:
    """Ranges that hold more than the samples show, and the trust in each.

    Args:
        original: The model as it came, with its BatchNormalizations.
        proto: The prepared model.
        request: What the caller wants.
        reader: The synthetic reader.
        data: The reader around it, which is read.
        config: How to collect.
        tensors: Activations whose ranges are needed.
        seen_as: As in `collect`.
        channels: As in `collect`.
    """
    libraries = request.custom_op_libraries
    evidence = net_evidence(original, probe_feeds(reader), custom_op_libraries=libraries)
    return collect_with_trust(
        proto,
        data,
        provenance=reader.provenance,
        samples=len(reader),
        tensors=tensors,
        evidence=evidence,
        config=config,
        providers=request.calibration_providers,
        custom_op_libraries=libraries,
        progress=request.progress,
        seen_as=seen_as,
        channels=channels,
    )


def trust_summary(trust: CalibrationTrust) -> TrustSummary:
    """The trust as the report shows it, the least stable tensors first."""
    tensors = sorted(trust.tensors.items(), key=lambda item: -item[1].spread)
    return TrustSummary(
        verdict=trust.verdict.value,
        reason="; ".join(trust.causes) or "every range is bounded by the net or the same for every seed",
        source="mixed" if trust.real_samples else "synthetic",
        advice="; ".join(trust.supply),
        tensors=tuple(
            TensorTrust(
                name,
                found.source.value,
                1.0 - min(found.spread, 1.0),
                "its range changes with the seed" if found.spread > _UNSTABLE else "",
            )
            for name, found in tensors
        ),
    )


def find_ranges(
    call: Call,
    drafted: LayoutDraft,
    layout: Layout,
    reader: CalibrationDataReader | None,
    data: KeepingReader | None,
) -> CalibrationTable:
    """The ranges of the weights as they came: from the table where there is one, else they go there.

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
    cached = None if cache is None else cache.table_for(layout, data)
    if cached is not None:
        if cached.made_up:
            call.notes.append(
                "The ranges are of made-up samples; the run that wrote the cache reported how far to trust them."
            )
        return cached
    table = _collected(call, drafted, layout, reader, data)
    if cache is None:
        return table
    if cache.table is not None:
        cache.check_data(table.data_fingerprint)
        call.notes.append(
            "Calibrated again: the calibration cache is of an earlier version, which had changed the weights before."
        )
        return table
    cache.keep(replace(table, cached=None if data is None else data.cached))
    if data is not None and len(data.cached):
        call.notes.append(
            f"The calibration cache holds {len(data.cached)} of the samples ({data.cached.bytes / 2**20:.1f} MB), so "
            "that it can take the reader's place. kenosis_ort.calibrate with keep_samples=False writes one without."
        )
    return table


def _collected(
    call: Call,
    drafted: LayoutDraft,
    layout: Layout,
    reader: CalibrationDataReader | None,
    data: KeepingReader | None,
) -> CalibrationTable:
    """The ranges; for made-up samples wider ones than seen where that is called for, with the trust in them."""
    builder, request = layout.builder, layout.builder.request
    proto, seen_as = builder.prepared.proto, builder.seen_as()
    config = steps.calibration_config(request)
    plain = request.stock_reason is not None or config.is_chunked or config.strided
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
