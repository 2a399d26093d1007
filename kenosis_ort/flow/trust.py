"""Calibration on made-up samples: the ranges, and how far they can be relied on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx

from kenosis_ort.calibration.config import CalibrationConfig
from kenosis_ort.calibration.synthetic import SyntheticReader
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.calibration.trust import CalibrationTrust, collect_with_trust, net_evidence, probe_feeds
from kenosis_ort.flow.request import Request
from kenosis_ort.flow.samples import KeepingReader
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
    """Returns ranges that hold more than the samples show, and the trust in each.

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
    """Returns the trust as the report shows it, the least stable tensors first."""
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
