"""Recipes that quantize weights alone: in blocks of 4 or 8 bits, activations float; nothing is calibrated or placed."""

from functools import partial
from typing import Final

from kenosis_ort.accuracy.metric import Budget
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import OptionError
from kenosis_ort.flow import finish, improve
from kenosis_ort.flow.call import Call
from kenosis_ort.flow.request import Request
from kenosis_ort.flow.samples import feeds_wanted
from kenosis_ort.flow.speed import made_up
from kenosis_ort.graph.load import LoadedModel
from kenosis_ort.passes.contract import Build
from kenosis_ort.passes.evaluator import Feed, split_feeds
from kenosis_ort.plan import Kind, NodeDecision, PlacementPlan
from kenosis_ort.report.quantization_report import QuantizationReport
from kenosis_ort.weights.block_model import nodes_in_blocks, weights_in_blocks

FORM: Final = "weight-only"
_FLOAT: Final = "the recipe quantizes weights of linear layers and embeddings alone"


def weight_only(call: Call) -> QuantizationReport:
    """Quantizes the weights of linear layers and embeddings, writes and reports.

    Where the recipe has a budget that 4 bits do not keep, 8 are delivered.

    Args:
        call: What gathers on the way; its samples are those that rounding follows, without any it is to nearest.

    Raises:
        OptionError: The target or the format has no such form.
        NothingToQuantizeError: There is no linear layer and no embedding.
    """
    request, data = call.request, call.data
    _check_form(request)
    with call.stage("calibrate"):
        feeds: list[Feed] = [] if data is None else list(data.peek(feeds_wanted(request)))
    fit, held_out = split_feeds(feeds)
    if call.validation is not None:
        fit, held_out = list(feeds), list(call.validation.some())
    if held_out:
        call.evaluator = call.evaluator_on(call.loaded.proto, held_out)
    bits, recipe = request.recipe.weight_only, request.recipe
    for stored in (bits, 8):
        with call.stage("quantize"):
            made = weights_in_blocks(
                call.loaded.proto,
                fit or feeds,
                bits=stored,
                nodes_to_exclude=request.nodes_to_exclude,
                custom_op_libraries=request.custom_op_libraries,
                progress=request.progress,
            )
        with call.stage("verify"):
            fusion = request.proof(made.model) if request.verify else None
        plan = PlacementPlan(request.target.name)
        build = Build(call.loaded.proto, CalibrationTable({}), {}, plan, made.model, fusion)
        call.measure = call.attempt("The measure of what is lost", partial(improve.measured, call, build), None)
        keeps = not recipe.mixed_precision or call.measure is None or call.measure.kept is not False
        if keeps or stored == 8:
            break
        call.notes.append(
            f"{bits} bits do not keep the budget of {Budget(recipe.accuracy_budget)}: all weights have 8."
        )
    call.notes += made.notes
    low = sum(layer.bits < 8 for layer in made.layers)
    call.notes.append(
        f"Weights alone: {low} of {len(made.layers)} layers and embeddings have {bits} bits, the others 8; activations "
        "are float."
        if low
        else f"Weights alone: {len(made.layers)} layers and embeddings have 8 bits; activations are float."
    )
    samples = len(feeds)
    if not feeds and (feeds := made_up(call)):
        call.notes.append("Outputs were compared on made-up samples: real ones were not given.")
    return finish.finish(call, call.loaded.proto, build, feeds, samples, finish.compare(call, build, feeds))


def planned_weights(loaded: LoadedModel, request: Request) -> PlacementPlan:
    """Plan of a recipe of weights alone, by node; the bits of the most sensitive layers need samples.

    Raises:
        OptionError: The target or the format has no such form.
        NothingToQuantizeError: There is no linear layer and no embedding.
    """
    _check_form(request)
    model, chosen = nodes_in_blocks(
        loaded.proto, nodes_to_exclude=request.nodes_to_exclude, custom_op_libraries=request.custom_op_libraries
    )
    bits = request.recipe.weight_only
    stored = f"its weights have {bits} bits in blocks, its data are float"
    stored += ", or 8 where samples show that they are worth it" if bits < 8 else ""
    kinds = {True: (Kind.INTEGER, "weights-in-blocks", stored), False: (Kind.FLOAT, "weights-alone", _FLOAT)}
    nodes = tuple(NodeDecision(n.name, n.op_type, *kinds[n.name in chosen]) for n in model.graph.node)
    return PlacementPlan(request.target.name, nodes=nodes)


def _check_form(request: Request) -> None:
    timed = request.target.hooks.time
    if timed is None or FORM not in timed.other_forms or request.format != "qdq":
        raise OptionError(
            f"target '{request.target.name}' in format '{request.format}' has no form of weights alone",
            where="recipe",
            fix="target='ort-cpu' with format='qdq', or another recipe",
        )
