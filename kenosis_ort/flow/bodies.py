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
from kenosis_ort.flow.builder import BodyBuilder, Builder
from kenosis_ort.flow.layouts import Layout, draft_of
from kenosis_ort.flow.request import Request
from kenosis_ort.graph.bodies import Body, Place, has_layers, owners, places, take_out
from kenosis_ort.graph.walk import all_graphs, outer_names
from kenosis_ort.plan import Kind, NodeDecision

NOT_RUN: Final = "no calibration sample ran it."

Open = Callable[[Body, Feeds], BodyBuilder | None]
"""Quantizes a body, those nested in it too; None where nothing in it can be quantized."""


def with_bodies(builder: Builder, feeds: Feeds, open_builder: Open, notes: list[str]) -> Builder:
    """Returns the builder with those of its model's bodies that can be quantized.

    Args:
        builder: Of the float model.
        feeds: What feeds the model.
        open_builder: Quantizes one of them.
        notes: Takes a sentence about each body that stays float as a whole.
    """
    body_builders: list[BodyBuilder] = []
    idle: list[NodeDecision] = []
    for owner, place, graph in _with_layers(builder):
        body = _taken_out(builder, place, graph)
        why = "the type of a value that it reads is not known."
        if body is not None:
            libraries = builder.request.custom_op_libraries
            fed = body_feeds(builder.prepared.proto, owner, body, feeds, custom_op_libraries=libraries)
            first, why = next(fed(), None), NOT_RUN
            if first is not None:
                _declare_ranks(body.model, first)
                body_builder = open_builder(body, fed)
                body_builders += [body_builder] if body_builder is not None else []
                continue
        notes.append(f"{str(place)[:1].upper()}{str(place)[1:]} stays float: {why}")
        nodes = (node for nested in all_graphs(graph) for node in nested.node if node.op_type != "Constant")
        reason = f"it is in {place}: {why.rstrip('.')}"
        idle += [NodeDecision(node.name, node.op_type, Kind.FLOAT, "body-not-observed", reason) for node in nodes]
    return replace(builder, bodies=tuple(body_builders), idle=tuple(idle))


def planned_in_bodies(builder: Builder) -> tuple[NodeDecision, ...]:
    """Returns what is planned for the nodes in a model's bodies as far as it needs no data."""
    found: list[NodeDecision] = []
    for _, place, graph in _with_layers(builder):
        body = _taken_out(builder, place, graph)
        layout = None if body is None else _layout(builder, body)
        if layout is not None:
            found += (*layout.plan.nodes, *planned_in_bodies(layout.builder))
    return tuple(found)


def _with_layers(builder: Builder) -> Iterator[tuple[onnx.NodeProto, Place, onnx.GraphProto]]:
    """Yields the bodies that are worth a look, with the nodes that own them."""
    if not builder.quantizes_bodies:
        return
    for owner in owners(builder.prepared.proto):
        for place, graph in places(owner):
            if has_layers(graph):
                yield owner, place, graph


def _taken_out(builder: Builder, place: Place, graph: onnx.GraphProto) -> Body | None:
    outer = builder.prepared.proto
    types = value_types(outer, outer_names(graph), builder.request.custom_op_libraries)
    return take_out(outer, place, graph, types)


def of_body(request: Request, body: Body) -> Request:
    """Returns the request for a body: all of its inputs carry data proper, and no output is the caller's."""
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


def _layout(outer: Builder, body: Body) -> Layout | None:
    """Returns a body's layout without data, None where nothing in it can be quantized."""
    try:
        drafted = draft_of(body.model, of_body(outer.request, body), outer.stage)
        return drafted.complete(drafted.builder.prepared)
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
