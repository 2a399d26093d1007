"""What gathers on the way through a quantization, for the report."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnxruntime as ort

from kenosis_ort.flow.request import Request
from kenosis_ort.graph.load import LoadedModel
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.report.model import CalibrationSummary, OutputQuality, QuantizationReport
from kenosis_ort.report.sections import PassOutcome, SpeedSummary, TrustSummary
from kenosis_ort.verify.report_model import FusionReport


@dataclass
class Course:
    """What gathers on the way to the report."""

    loaded: LoadedModel
    request: Request
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    nothing_integer: bool = False
    passes: tuple[PassOutcome, ...] = ()
    speed: SpeedSummary | None = None
    trust: TrustSummary | None = None
    size_before: int = 0
    size_after: int = 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def report(
        self,
        plan: PlacementPlan,
        fusion: FusionReport | None,
        calibration: CalibrationSummary,
        outputs: tuple[OutputQuality, ...] = (),
    ) -> QuantizationReport:
        return QuantizationReport(
            model_input=self.loaded.name,
            model_output=str(self.request.output),
            target=self.request.target.name,
            options=self.request.choices,
            plan=plan,
            fusion=fusion,
            calibration=calibration,
            notes=tuple(self.notes),
            warnings=tuple(self.warnings),
            size_before=self.size_before,
            size_after=self.size_after,
            seconds=self.seconds,
            outputs=outputs,
            recipe=self.request.recipe,
            passes=self.passes,
            speed=self.speed,
            trust=self.trust,
            versions={"onnxruntime": ort.__version__, "onnx": onnx.__version__, "numpy": np.__version__},
        )
