"""Small reports to test with."""

from __future__ import annotations

from typing import Any

from kenosis_ort.plan import Decision, Edge, How, Kind, NodeDecision, PlacementPlan, Role
from kenosis_ort.report import CalibrationSummary, OptionChoice, OutputQuality, QuantizationReport
from kenosis_ort.verify.report_model import FusionReport, KernelReport, Status


def kernel(node: str, **changes: Any) -> KernelReport:
    values: dict[str, Any] = {
        "op_type": "Conv",
        "kernel": "com.microsoft.QLinearConv",
        "integer": True,
        "status": Status.INTEGER,
    }
    values.update(changes)
    values["status"] = Status(values["status"])
    return KernelReport(node=node, **values)


def fusion(*kernels: KernelReport) -> FusionReport:
    return FusionReport(kernels=kernels, runtime_version="1.2.3", overhead={"Transpose": 2})


def plan(*integer: str) -> PlacementPlan:
    return PlacementPlan(
        target="ort-cpu",
        decisions=tuple(
            Decision(Edge(f"{node}.in", node, 0), Role.ACTIVATION, How.OWN, "rule", "because") for node in integer
        ),
        nodes=tuple(NodeDecision(node, "Conv", Kind.INTEGER, "rule", "because") for node in integer),
    )


def report(**changes: Any) -> QuantizationReport:
    values: dict[str, Any] = {
        "model_input": "in.onnx",
        "model_output": "out.onnx",
        "target": "ort-cpu",
        "options": {"per_channel": OptionChoice(True, "host default")},
        "plan": plan("stem", "head"),
        "fusion": fusion(
            kernel("stem", absorbed=("stem_relu",)),
            kernel("stem_relu", op_type="Relu", kernel="", integer=False, status="absorbed"),
            kernel("head", integer=False, kernel="Conv", status="float", reason="no Q on its output"),
        ),
        "calibration": CalibrationSummary("minmax", 8, 5, 0.25),
        "notes": ("opset raised from 9 to 13",),
        "warnings": ("one [odd] thing",),
        "size_before": 4_000_000,
        "size_after": 1_000_000,
        "seconds": {"calibrate": 0.25, "quantize": 0.5},
        "outputs": (OutputQuality("logits", 31.25),),
        "versions": {"onnxruntime": "1.2.3"},
    }
    values.update(changes)
    return QuantizationReport(**values)
