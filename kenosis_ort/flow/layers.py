"""Kernel, path and time of each layer: by estimate before there is a file, of the file as the runtime runs it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

import onnx

from kenosis_ort.bench.profile import profile_in_fresh_sessions
from kenosis_ort.flow.layouts import layout_of
from kenosis_ort.flow.request import Request
from kenosis_ort.graph.load import load_model
from kenosis_ort.graph.view import GraphView
from kenosis_ort.placement.cost import estimate
from kenosis_ort.plan import PlacementPlan
from kenosis_ort.report.evidence import LayerTime, OpTimes, layer_times
from kenosis_ort.targets import Target
from kenosis_ort.targets.proof import FusionReport
from kenosis_ort.verify import verify_fusion

Source = str | os.PathLike[str] | onnx.ModelProto
_RUNS: Final = 30


def layers_of(
    view: GraphView, plan: PlacementPlan, target: Target, fusion: FusionReport | None, times: OpTimes | None = None
) -> tuple[LayerTime, ...]:
    """Returns the layers of a model as planned.

    Args:
        view: The prepared model.
        plan: Its placement.
        target: With the costs of the machine that the file is made for, where it has any.
        fusion: What the runtime made of the file; None where it was not asked.
        times: What was measured; None where nothing was.
    """
    if target.costs is None or not target.costs.shows_times:
        return layer_times(fusion, {}, None, times)
    cost = estimate(view, plan, target.costs)
    between = cost.run_us + sum(cost.borders_us.values())
    return layer_times(fusion, {n.node: (n.op_type, n.planned_us) for n in cost.nodes}, between, times)


def planned_layers(source: Source, request: Request) -> tuple[LayerTime, ...]:
    """Returns the layers of a float model as a call would lay them out, before calibration; none without a plan.

    Args:
        source: The float model.
        request: Of the call.
    """
    layout = layout_of(load_model(source, custom_op_libraries=request.custom_op_libraries), request)
    view = layout.builder.view
    return () if view is None or not layout.plan else layers_of(view, layout.plan, layout.builder.request.target, None)


def running_layers(
    source: Source,
    feeds: Sequence[Mapping[str, Any]],
    *,
    threads: int,
    budget_s: float,
    custom_op_libraries: Sequence[str],
    target: str | Target | None,
) -> tuple[LayerTime, ...]:
    """Returns the layers of a quantized model as the runtime runs them, measured.

    Args:
        source: The quantized model, of any origin.
        feeds: What it is run on.
        threads: Threads of a session.
        budget_s: Seconds of running.
        custom_op_libraries: Libraries with custom operators to register.
        target: Whose runtime is asked; None for the one that the file says.
    """
    fusion = verify_fusion(source, custom_op_libraries=custom_op_libraries, threads=threads, target=target)
    times = profile_in_fresh_sessions(
        source, feeds, threads=threads, runs=_RUNS, budget_s=budget_s, custom_op_libraries=custom_op_libraries
    )
    return layer_times(fusion, {}, None, OpTimes((), times, threads, _RUNS))
