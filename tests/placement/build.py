"""What the placement tests ask of a plan."""

from collections.abc import Mapping
from typing import Any

import onnx

from kenosis_ort.graph.view import GraphView
from kenosis_ort.options import PlacementOptions
from kenosis_ort.placement.constraints import constrain
from kenosis_ort.placement.eligibility import NodeClass, classify
from kenosis_ort.plan import How, Kind, PlacementPlan
from kenosis_ort.targets.ort_cpu import ORT_CPU
from tests.planning import parse, prepared

IMAGE = "float[1,3,8,8] x"
CONV = "kernel_shape=[3,3], pads=[1,1,1,1]"


def view_of(model: onnx.ModelProto | str, weights: Mapping[str, Any] | None = None) -> GraphView:
    return GraphView(prepared(parse(model, weights) if isinstance(model, str) else model))


def classes_of(
    model: onnx.ModelProto | str,
    weights: Mapping[str, Any] | None = None,
    *,
    protected: Mapping[str, str] | None = None,
    **options: Any,
) -> dict[str, NodeClass]:
    """Returns the class of each node."""
    view = view_of(model, weights)
    return classify(constrain(view, ORT_CPU, PlacementOptions(**options)), protected or {})


def nodes_of(plan: PlacementPlan, kind: Kind) -> list[str]:
    return [n.node for n in plan.nodes if n.kind is kind]


def pairs(plan: PlacementPlan) -> dict[str, str | None]:
    """Returns the values that get Q/DQ with the value whose parameters they take (None: their own)."""
    return {v: d.provider for v, d in plan.quantized_values()}


def how(plan: PlacementPlan, value: str, consumer: str) -> How:
    """Returns how a node ("" for the graph's outputs) reads a value."""
    (found,) = {d.how for d in plan.decisions if d.edge.value == value and d.edge.consumer == consumer}
    return found
