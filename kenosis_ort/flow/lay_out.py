"""Everything before calibration: checks, preparation, rewrites, and the plan as far as it needs no data."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import onnx

from kenosis_ort.errors import NothingToQuantizeError
from kenosis_ort.flow import steps
from kenosis_ort.flow.names import check_names, renamed
from kenosis_ort.flow.request import Request
from kenosis_ort.flow.workshop import Stage, Workshop, untimed
from kenosis_ort.graph.load import LoadedModel, check_not_quantized
from kenosis_ort.graph.prepare import PreparedModel
from kenosis_ort.plan import PlacementPlan

Refine = Callable[[PreparedModel, Collection[str]], PreparedModel]


@dataclass(frozen=True)
class Layout:
    """What is known before calibration.

    Attributes:
        workshop: The prepared and rewritten model; its request says where stock's placement has to do.
        plan: The placement as far as it needs no ranges; empty for stock's.
        tensors: Activations whose ranges are needed.
        nothing_integer: Nothing in the model can run in integer, so that stock's placement is used.
    """

    workshop: Workshop
    plan: PlacementPlan
    tensors: tuple[str, ...]
    nothing_integer: bool = False


def lay_out(loaded: LoadedModel, request: Request, stage: Stage = untimed, *, refine: Refine | None = None) -> Layout:
    """Prepares, rewrites and plans a model.

    Args:
        loaded: The model.
        request: What the caller wants.
        stage: Times a named stage.
        refine: Changes the weights of the prepared model before it is planned, where the plan decides the placement;
            takes it and the names of the nodes that will run in integer.

    Raises:
        KenosisError: The model or the names in the request are not usable, or nothing can be quantized.
    """
    check_names(loaded.proto, request)
    if not request.is_stock:
        check_not_quantized(loaded.proto)
        if request.dictated is None and _has_dequantized_weights(loaded.proto):
            request = request.with_stock_placement("the model brings quantized weights of its own")
    layout = _lay_out(loaded.proto, request, stage, refine)
    if not layout.tensors:
        raise nothing_to_quantize(loaded.name, layout.workshop.request)
    return layout


def _lay_out(proto: onnx.ModelProto, request: Request, stage: Stage, refine: Refine | None) -> Layout:
    with stage("prepare"):
        prepared = steps.prepare_model(proto, request)
    excluded, named = (renamed(names, prepared) for names in (request.nodes_to_exclude, request.nodes_to_quantize))
    workshop = Workshop(prepared, request, excluded, named, stage)
    with stage("plan"):
        planner = workshop.planner()
        plan = steps.make_plan(planner, request)
    if planner is None:
        return Layout(workshop, plan, tuple(workshop.tensors_to_observe(plan)))
    if not plan.integer_nodes():
        why = f"no node can run in integer on {request.target.name}: {_why_nothing(plan)}"
        return replace(_lay_out(proto, request.with_stock_placement(why), stage, refine), nothing_integer=True)
    refined = prepared if refine is None else refine(prepared, set(plan.integer_nodes()))
    with stage("rewrite"):
        rewritten = steps.rewrite_for_integers(refined, planner, request, excluded) or refined
    if rewritten is not prepared:
        workshop = replace(workshop, prepared=rewritten)
        with stage("plan"):
            plan = steps.make_plan(workshop.planner(), request)
    return Layout(workshop, plan, tuple(workshop.tensors_to_observe(plan)))


def nothing_to_quantize(name: str, request: Request) -> NothingToQuantizeError:
    """Returns the error for a model of which nothing is left to quantize."""
    return NothingToQuantizeError(
        f"no node of the model can be quantized ({request.dictated or 'nothing matches the options'})",
        where=name,
        fix="check op_types_to_quantize, nodes_to_quantize and nodes_to_exclude; deploy the float model otherwise",
    )


def _has_dequantized_weights(proto: onnx.ModelProto) -> bool:
    return any(node.op_type == "DequantizeLinear" for node in proto.graph.node)


def _why_nothing(plan: PlacementPlan) -> str:
    heavy = [n for n in plan.nodes if n.op_type in ("Conv", "Gemm", "MatMul")]
    return f"'{heavy[0].node}' ({heavy[0].op_type}): {heavy[0].reason}" if heavy else "no Conv, Gemm or MatMul"
