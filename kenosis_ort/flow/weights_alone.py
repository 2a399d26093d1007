"""Recipes that quantize weights alone: in blocks of 4 or 8 bits, activations float; nothing is calibrated or placed."""

from collections.abc import Sequence
from functools import partial
from typing import Final

from kenosis_ort.accuracy.metric import Budget
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import OptionError
from kenosis_ort.flow.call import Call
from kenosis_ort.flow.finish import compare, finish
from kenosis_ort.flow.improve import measured
from kenosis_ort.flow.request import Request
from kenosis_ort.flow.samples import KeepingReader, feeds_wanted
from kenosis_ort.flow.speed import made_up
from kenosis_ort.graph.load import LoadedModel
from kenosis_ort.passes.contract import Build
from kenosis_ort.passes.evaluator import Feed, split_feeds
from kenosis_ort.plan import Kind, NodeDecision, PlacementPlan
from kenosis_ort.report.quantization_report import QuantizationReport
from kenosis_ort.report.sections import MeasureSummary
from kenosis_ort.weights.block_model import BlockModel, nodes_in_blocks, weights_in_blocks

FORM: Final = "weight-only"
_FLOAT: Final = "the recipe quantizes weights of linear layers and embeddings alone"


def weight_only(call: Call, data: KeepingReader | None) -> QuantizationReport:
    """Quantizes the weights of linear layers and embeddings, writes and reports.

    Where the recipe has a budget that 4 bits do not keep, 8 are delivered.

    Args:
        call: What gathers on the way.
        data: Samples that rounding follows; None rounds to nearest.

    Raises:
        OptionError: The target or the format has no such form.
        NothingToQuantizeError: There is no linear layer and no embedding.
    """
    request = call.request
    _check_form(request)
    with call.stage("calibrate"):
        feeds: list[Feed] = [] if data is None else list(data.peek(feeds_wanted(request)))
    fit, held_out = split_feeds(feeds)
    if call.validation is not None:
        fit, held_out = list(feeds), list(call.validation.some())
    if held_out:
        call.evaluator = call.evaluator_on(call.loaded.proto, held_out)
    bits, recipe = request.recipe.weight_only, request.recipe
    made = _made(call, bits, fit or feeds)
    build = _build(call, made)
    call.measure = _measured(call, build)
    if recipe.mixed_precision and bits < 8 and call.measure is not None and call.measure.kept is False:
        call.notes.append(
            f"{bits} bits do not keep the budget of {Budget(recipe.accuracy_budget)}: all weights have 8."
        )
        made = _made(call, 8, fit or feeds)
        build = _build(call, made)
        call.measure = _measured(call, build)
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
    return finish(call, call.loaded.proto, build, feeds, samples, compare(call, build, feeds))


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


def _made(call: Call, bits: int, feeds: Sequence[Feed]) -> BlockModel:
    request = call.request
    with call.stage("quantize"):
        return weights_in_blocks(
            call.loaded.proto,
            feeds,
            bits=bits,
            nodes_to_exclude=request.nodes_to_exclude,
            custom_op_libraries=request.custom_op_libraries,
            progress=request.progress,
        )


def _build(call: Call, made: BlockModel) -> Build:
    request = call.request
    prove = request.target.hooks.prove if request.verify else None
    fusion = None
    if prove is not None:
        with call.stage("verify"):
            fusion = prove(made.model, custom_op_libraries=request.custom_op_libraries)
    plan = PlacementPlan(request.target.name)
    return Build(call.loaded.proto, CalibrationTable({}), {}, plan, made.model, fusion)


def _measured(call: Call, build: Build) -> MeasureSummary | None:
    return call.attempt("The measure of what is lost", partial(measured, call, build), None)
