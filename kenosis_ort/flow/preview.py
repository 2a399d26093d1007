"""Parts of a quantization on their own: the plan without data, the calibration table without a model written."""

from __future__ import annotations

import os

import onnx

from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import warn_caller
from kenosis_ort.flow import steps
from kenosis_ort.flow.lay_out import lay_out
from kenosis_ort.flow.request import Request
from kenosis_ort.graph.load import load_model
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.quantizer.stock import CalibrationDataReader

Source = str | os.PathLike[str] | onnx.ModelProto


def plan_only(source: Source, request: Request) -> PlacementPlan:
    """Returns the plan as far as it needs no ranges; empty where stock's placement is used."""
    layout = lay_out(load_model(source, custom_op_libraries=request.custom_op_libraries), request)
    for text in layout.workshop.request.complaints:
        warn_caller(text)
    return layout.plan


def calibrate_only(source: Source, request: Request, reader: CalibrationDataReader) -> CalibrationTable:
    """Collects the statistics and writes them to the request's cache path."""
    layout = lay_out(load_model(source, custom_op_libraries=request.custom_op_libraries), request)
    workshop = layout.workshop
    for text in workshop.request.complaints:
        warn_caller(text)
    return steps.calibrate(workshop.prepared.proto, workshop.request, reader, layout.tensors, workshop.seen_as())
