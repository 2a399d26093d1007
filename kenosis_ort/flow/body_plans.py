"""Bodies of ``If``, ``Loop`` and ``Scan``: prepared, planned, calibrated and quantized each as a model of its own.

A body that no calibration sample runs has no ranges and stays float, as does one that reads values of unknown type, and
one that costs the outputs too much: what a loop rounds in its states adds up over the iterations, which no run of the
body alone shows. What is too much is told by the net in integers but for its bodies, as stock quantizes it.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import onnx

from kenosis_ort.calibration.computed_feeds import Feeds, body_feeds
from kenosis_ort.calibration.feeds import Feed, input_specs
from kenosis_ort.calibration.table import CalibrationTable
from kenosis_ort.errors import NothingToQuantizeError
from kenosis_ort.flow import samples
from kenosis_ort.flow.builder import BodyBuilder, Builder, draft
from kenosis_ort.flow.call import Call
from kenosis_ort.flow.request import Request
from kenosis_ort.graph import walk
from kenosis_ort.graph.bodies import Body, Place, has_layers, places, take_out
from kenosis_ort.graph.load import LoadedModel
from kenosis_ort.graph.shapes import types_of
from kenosis_ort.options import Stages
from kenosis_ort.passes.contract import Build
from kenosis_ort.passes.evaluator import Evaluator, Score
from kenosis_ort.passes.leave_float import multiply_accumulates
from kenosis_ort.plan import Kind, NodeDecision

_WITHOUT_INTEGERS: Final = "body-without-integers"
_STAYS_FLOAT: Final = " stays float: "
_TRIAL_FEEDS: Final = 32  # held out for the trial of bodies, beside those of the passes
_LITTLE: Final = 1.02  # times the error without bodies in integers
_MOST_RANKED: Final = 8  # bodies of which each is built without; more of them are float together
_LEAST_SHARE: Final = 0.1  # of a net's work in integers, below which leaving branches float leaves a float net
Quantize = Callable[[Call, Callable[[], Builder]], tuple[Builder, Build]]
"""Quantizes a net, with its bodies and the recipe's passes, given what drafts it."""


def with_bodies(call: Call, builder: Builder, quantize: Quantize) -> Builder:
    """The builder with those of its model's bodies that can be quantized, each as a call of its own.

    Args:
        call: What gathers on the way; takes a note about each body with layers that stays float as a whole.
        builder: Of the float model.
        quantize: Quantizes the net of a body.
    """
    data, without_layers = call.data, tuple(_without_layers(builder))
    builder = replace(builder, idle=without_layers) if without_layers else builder
    if not builder.quantizes_bodies:
        return builder
    if data is None:
        call.notes.append("Bodies of control flow stay float: there is no sample to run them on.")
        return builder

    def quantized() -> Builder:
        found: list[BodyBuilder] = []
        idle = [*without_layers]
        for owner, place, graph, body in _with_layers(builder):
            rule, why = "body-not-observed", "the type of a value that it reads is not known."
            if body is not None:
                libraries = builder.request.custom_op_libraries
                feeds_of = partial(body_feeds, builder.prepared.proto, owner, body, custom_op_libraries=libraries)
                fed = feeds_of(lambda: iter(data.feeds))
                first, why = next(fed(), None), "no calibration sample ran it."
                if first is not None:
                    _declare_ranks(body.model, first)
                    try:
                        inner, build = _quantized(call, builder.request, body, fed, quantize)
                        recipe = replace(build, quantized=onnx.ModelProto())  # how it is made is all that is kept
                        found.append(BodyBuilder(body, inner, recipe, feeds_of))
                        continue
                    except NothingToQuantizeError as error:
                        rule, why = _WITHOUT_INTEGERS, _of_it(error)
            idle += _left_float(place, graph, rule, why, call.notes)
        return replace(builder, bodies=tuple(found), idle=tuple(idle))

    with call.stage("bodies"):
        return call.attempt("The quantization of bodies", quantized, builder)


def _quantized(call: Call, outer: Request, body: Body, fed: Feeds, quantize: Quantize) -> tuple[Builder, Build]:
    """A body's builder and build; raises NothingToQuantizeError where nothing in it can be quantized."""
    request = of_body(outer, body)
    loaded, most = LoadedModel(body.model, None, str(body.place)), request.most_feeds(body.model)
    data = samples.KeepingReader(fed(), input_specs(body.model), keep=most)
    inner = Call(loaded=loaded, request=request, wanted=call.wanted, data=data, executor=call.executor)
    made = quantize(inner, partial(draft, body.model, request, call))
    call.warnings += [text for text in inner.warnings if text not in call.warnings]
    call.passes += [replace(p, reason=f"{p.reason}; in {body.place}") for p in inner.passes]
    call.notes += [note for note in inner.notes if _STAYS_FLOAT in note]
    return made


def _left_float(place: Place, graph: onnx.GraphProto, rule: str, why: str, notes: list[str]) -> Iterator[NodeDecision]:
    """Yields what is decided for the nodes of a body that stays float as a whole, after a note that says so."""
    notes.append(f"{str(place)[:1].upper()}{str(place)[1:]}{_STAYS_FLOAT}{why}")
    for node in (node for nested in walk.all_graphs(graph) for node in nested.node if node.op_type != "Constant"):
        yield NodeDecision(node.name, node.op_type, Kind.FLOAT, rule, f"it is in {place}: {why.rstrip('.')}")


def _without_layers(builder: Builder) -> Iterator[NodeDecision]:
    """Yields what is decided for the nodes of bodies in which nothing is looked for."""
    for owner in walk.owners(builder.prepared.proto) if builder.planner is not None else ():
        for place, graph in places(owner):
            if not has_layers(graph):
                yield from _left_float(place, graph, _WITHOUT_INTEGERS, "there is no Conv, Gemm or MatMul in it.", [])
            elif not builder.quantizes_bodies:
                yield from _left_float(place, graph, _WITHOUT_INTEGERS, "extra_options['EnableSubgraph'] is off.", [])


def _of_it(error: NothingToQuantizeError) -> str:
    return f"{error.what.replace(' of the model', ' of it')}."


class Trial(NamedTuple):
    """Yardstick for bodies in integers: the net in integers but for them, without any pass.

    Attributes:
        fit: Samples that bodies get their ranges of for the trial.
        evaluator: Knows others, which no pass of the main graph is fitted to.
        reference: The score of that net.
        work: Multiply-accumulates of the layers of the main graph that run in integer.
    """

    fit: Sequence[Feed]
    evaluator: Evaluator
    reference: Score
    work: float

    def costly(self, builder: Builder, build: Build) -> dict[str, str]:
        """The bodies, by place, that cost more than the passes gained, each with what it costs.

        Args:
            builder: Of the net with its bodies.
            build: What it made.
        """
        tried = self._tried(builder)
        seen = tuple(each.seeing(lambda: iter(self.fit)) for each in builder.bodies)
        builder = replace(builder, bodies=seen)

        def without(places: Collection[str]) -> Score:
            rest = replace(builder, bodies=tuple(b for b in seen if str(b.body.place) not in places))
            return self.evaluator.score(rest.quantize(build.table, build.keep_float, build.corrections).quantized)

        if not tried or not self._is_costly(score := without(())):
            return {}

        alone = {place: without([place]) for place in tried} if 1 < len(tried) <= _MOST_RANKED else {}
        ranked = sorted(alone, key=lambda place: alone[place].error)
        for count in range(1, len(ranked)):
            left = alone[ranked[0]] if count == 1 else without(ranked[:count])
            if not self._is_costly(left):
                tried = ranked[:count]
                break
        else:
            left = without(tried)
        if not left.error < score.error:
            return {}
        cost = f"{10 * math.log10(score.error / left.error):.1f} dB" if left.error > 0 else "all that is lost"
        together = f" together with {len(tried) - 1} more" if len(tried) > 1 else ""
        why = f"in integers it costs the outputs {cost}{together} on {len(self.evaluator.feeds)} samples."
        return dict.fromkeys(tried, why)

    def _is_costly(self, score: Score) -> bool:
        return self.reference.is_better(score) and score.error > _LITTLE * self.reference.error

    def _tried(self, builder: Builder) -> list[str]:
        """The places of loops, whose errors add up, and of branches unless these are nearly all of the net."""
        kinds = {node.name: node.op_type for node in walk.owners(builder.prepared.proto)}
        branches = {str(b.body.place): b for b in builder.bodies if kinds[b.body.place.owner] == "If"}
        inside = sum(_work(b.builder, b.quantize()) for b in branches.values())
        exempt = branches if self.work < _LEAST_SHARE * (self.work + inside) else {}
        return [place for b in builder.bodies if (place := str(b.body.place)) not in exempt]


def trial_of_bodies(call: Call, builder: Builder, table: CalibrationTable, prepared: onnx.ModelProto) -> Trial | None:
    """The trial of a net's bodies; None where there is nothing to compare with, or the caller asks for them.

    Args:
        call: What gathers on the way.
        builder: Of the net before any pass, its bodies float.
        table: The ranges of its activations.
        prepared: The prepared float model.
    """
    request, data = call.request, call.data
    explicit = request.explicit_option or request.extra_options.get("EnableSubgraph") or request.stages != Stages()
    if data is None or explicit or request.target.whole or not builder.plan.integer_nodes():
        return None
    build = builder.build(table)
    if not build.is_quantized or not build.is_whole:
        return None
    wanted = request.feeds_wanted
    (fit, evaluator), further = call.divide(prepared, call.feeds), data.feeds[wanted:]
    fit, held_out = [*fit, *further[::2]], [*evaluator.feeds, *further[1::2][:_TRIAL_FEEDS]]
    evaluator = call.evaluator_on(prepared, held_out or fit)
    return Trial(fit, evaluator, evaluator.score(build.quantized), _work(builder, build))


def _work(builder: Builder, build: Build) -> float:
    work = multiply_accumulates(builder.prepared.proto)
    return sum(work.get(name, 0.0) for name in build.plan.integer_nodes())


def without_bodies(call: Call, builder: Builder, costly: Mapping[str, str]) -> Builder:
    """The builder with some of its bodies float, by their places, each with the reason."""
    idle, staying = [*builder.idle], []
    for each in builder.bodies:
        place = each.body.place
        if (why := costly.get(str(place))) is None:
            staying.append(each)
            continue
        idle += _left_float(place, each.body.model.graph, "body-costs-accuracy", why, call.notes)
        for at, outcome in enumerate(call.passes):
            if outcome.reason.endswith(f"; in {place}"):
                call.passes[at] = replace(outcome, kept=False, reason=f"{outcome.reason}, which stays float")
    return replace(builder, bodies=tuple(staying), idle=tuple(idle))


def planned_in_bodies(builder: Builder) -> tuple[NodeDecision, ...]:
    """Plan of the nodes in a model's bodies as far as it needs no data."""
    found = [*_without_layers(builder)]
    for _, place, graph, body in _with_layers(builder):
        if body is not None:
            try:
                inner = draft(body.model, of_body(builder.request, body), builder.journal).for_integers()
                found += (*inner.plan.nodes, *planned_in_bodies(inner))
            except NothingToQuantizeError as error:
                found += _left_float(place, graph, _WITHOUT_INTEGERS, _of_it(error), [])
    return tuple(found)


def _with_layers(builder: Builder) -> Iterator[tuple[onnx.NodeProto, Place, onnx.GraphProto, Body | None]]:
    """Yields the bodies that are worth a look, with the nodes that own them; None where a type is not known."""
    outer, libraries = builder.prepared.proto, builder.request.custom_op_libraries
    for owner in walk.owners(outer) if builder.quantizes_bodies else ():
        for place, graph in places(owner):
            if has_layers(graph):
                types = types_of(outer, walk.outer_names(graph), libraries)
                yield owner, place, graph, take_out(outer, place, graph, types)


def of_body(request: Request, body: Body) -> Request:
    """The request for a body: all of its inputs carry data proper, and no output is the caller's."""
    names = tuple(value.name for value in body.model.graph.input)
    recipe = replace(request.recipe, mixed_precision=False)  # whose budget is of the whole model's outputs
    return replace(
        request,
        primary_inputs=names,
        cache_path=None,
        progress=None,
        metric=None,
        eval_reader=None,
        recipe=recipe,
        caches=(),
    )


def _declare_ranks(model: onnx.ModelProto, feed: Mapping[str, Any]) -> None:
    """Gives inputs that are declared without a shape, as states of loops are, the rank that they are fed with."""
    for value in model.graph.input:
        tensor = value.type.tensor_type
        if value.type.HasField("tensor_type") and not tensor.HasField("shape"):
            tensor.shape.SetInParent()
            for _ in range(np.ndim(feed[value.name])):
                tensor.shape.dim.add()
