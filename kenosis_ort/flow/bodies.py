"""Bodies of ``If``, ``Loop`` and ``Scan``: prepared, planned, calibrated and quantized each as a model of its own.

A body that no calibration sample runs has no ranges and stays float, as does one that reads values of unknown type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import onnx

from kenosis_ort.calibration.bodies import Feeds, body_feeds, value_types
from kenosis_ort.errors import NothingToQuantizeError
from kenosis_ort.flow.lay_out import Layout, draft_of
from kenosis_ort.flow.request import Request
from kenosis_ort.flow.workshop import BodyShop, Workshop
from kenosis_ort.graph.bodies import Body, Place, has_layers, owners, places, take_out
from kenosis_ort.graph.walk import all_graphs, outer_names
from kenosis_ort.plan import Kind, NodeDecision

NOT_RUN: Final = "no calibration sample ran it."

Open = Callable[[Body, Feeds], BodyShop | None]
"""Quantizes a body, those nested in it too; None where nothing in it can be quantized."""


def with_bodies(workshop: Workshop, feeds: Feeds, open_shop: Open, notes: list[str]) -> Workshop:
    """Returns the workshop with those of its model's bodies that can be quantized.

    Args:
        workshop: Of the float model.
        feeds: What feeds the model.
        open_shop: Quantizes one of them.
        notes: Takes a sentence about each body that stays float as a whole.
    """
    shops: list[BodyShop] = []
    idle: list[NodeDecision] = []
    for owner, place, graph in _with_layers(workshop):
        body = _taken_out(workshop, place, graph)
        why = "the type of a value that it reads is not known."
        if body is not None:
            libraries = workshop.request.custom_op_libraries
            fed = body_feeds(workshop.prepared.proto, owner, body, feeds, custom_op_libraries=libraries)
            first, why = next(fed(), None), NOT_RUN
            if first is not None:
                _declare_ranks(body.model, first)
                shop = open_shop(body, fed)
                shops += [shop] if shop is not None else []
                continue
        notes.append(f"{str(place)[:1].upper()}{str(place)[1:]} stays float: {why}")
        nodes = (node for nested in all_graphs(graph) for node in nested.node if node.op_type != "Constant")
        reason = f"it is in {place}: {why.rstrip('.')}"
        idle += [NodeDecision(node.name, node.op_type, Kind.FLOAT, "body-not-observed", reason) for node in nodes]
    return replace(workshop, bodies=tuple(shops), idle=tuple(idle))


def planned_in_bodies(workshop: Workshop) -> tuple[NodeDecision, ...]:
    """Returns what is planned for the nodes in a model's bodies as far as it needs no data."""
    found: list[NodeDecision] = []
    for _, place, graph in _with_layers(workshop):
        body = _taken_out(workshop, place, graph)
        layout = None if body is None else _layout(workshop, body)
        if layout is not None:
            found += (*layout.plan.nodes, *planned_in_bodies(layout.workshop))
    return tuple(found)


def _with_layers(workshop: Workshop) -> Iterator[tuple[onnx.NodeProto, Place, onnx.GraphProto]]:
    """Yields the bodies that are worth a look, with the nodes that own them."""
    if not workshop.quantizes_bodies:
        return
    for owner in owners(workshop.prepared.proto):
        for place, graph in places(owner):
            if has_layers(graph):
                yield owner, place, graph


def _taken_out(workshop: Workshop, place: Place, graph: onnx.GraphProto) -> Body | None:
    outer = workshop.prepared.proto
    types = value_types(outer, outer_names(graph), workshop.request.custom_op_libraries)
    return take_out(outer, place, graph, types)


def of_body(request: Request, body: Body) -> Request:
    """Returns the request for a body: all of its inputs carry data proper, and no output is the caller's."""
    names = tuple(value.name for value in body.model.graph.input)
    recipe = replace(request.recipe, mixed_precision=False)  # whose budget is of the whole model's outputs
    return replace(
        request, primary_inputs=names, cache_path=None, progress=None, metric=None, eval_reader=None, recipe=recipe
    )


def _layout(outer: Workshop, body: Body) -> Layout | None:
    """Returns a body's layout without data, None where nothing in it can be quantized."""
    try:
        drafted = draft_of(body.model, of_body(outer.request, body), outer.stage)
        return drafted.complete(drafted.workshop.prepared)
    except NothingToQuantizeError:
        return None


def _declare_ranks(model: onnx.ModelProto, feed: Mapping[str, Any]) -> None:
    """Gives inputs that are declared without a shape, as states of loops are, the rank that they are fed with."""
    for value in model.graph.input:
        tensor = value.type.tensor_type
        if value.type.HasField("tensor_type") and not tensor.HasField("shape"):
            tensor.shape.SetInParent()
            for _ in range(np.ndim(feed[value.name])):
                tensor.shape.dim.add()
