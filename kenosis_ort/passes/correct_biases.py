"""Bias correction: quantization moves the mean of each output channel; the bias moves it back.

Sources: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019, section 4.2
(the shift), and Finkelstein, Almog, Grobman, "Fighting Quantization Bias With Bias", 2019 (measured on data).

A layer's shift depends on what the layers before it do, so it is measured one layer at a time with all earlier ones
corrected already. Rebuilding the model for each layer would cost as many passes as there are layers. Either way taken
here is one pass over the quantized model and one over the float model:

* Where samples can be stacked, the quantized model corrects itself, in one run over all of them.
* Elsewhere the quantized model is cut behind each layer and run part by part over all samples, and the shift is added
  to the layer's output before the next part runs.

Means are compared behind the layer's activation (see `accuracy.channel_statistics`). Both are of the same samples, so
the difference is known much better than either mean; what its standard error still leaves open is taken off it, so that
a layer whose shift is noise is left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import onnx
from onnx import numpy_helper

from kenosis_ort.accuracy.channel_statistics import Response, activation_behind, float_ranks
from kenosis_ort.calibration.part_session import ObservedModel, SessionSettings, run
from kenosis_ort.calibration.parts import cut_behind, estimate_bytes
from kenosis_ort.graph.live import LiveGraph
from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.view import GraphView, optional
from kenosis_ort.passes.channel_means import Corrected, Feed, FloatMeans, feeds_within, shifts_in_one_run
from kenosis_ort.passes.contract import Candidate, Context, Overlay, Pass, Skipped, State, Statistics
from kenosis_ort.passes.layers import Float64, bias_of, layers
from kenosis_ort.passes.recipe import setting

_log = logging.getLogger(__name__)


_LEAST_SAMPLES, _MOST_SAMPLES = 16, 128
_WANTED_BYTES = 2**29  # of what is alive at a time: fewer samples are taken where they need more
_CHEAP_BYTES = 2**27  # of layer outputs in all: more than the least number of samples as long as they stay below


def bias_shifts(
    graph: GraphView,
    quantized: onnx.ModelProto,
    feeds: Sequence[Feed],
    *,
    nodes: Collection[str] | None = None,
    custom_op_libraries: Sequence[str] = (),
    float_means: FloatMeans | None = None,
) -> dict[str, Float64]:
    """Correction of the mean of each output channel.

    Args:
        graph: The float model that was quantized, every layer with a bias of its own (`with_biases`).
        quantized: The quantized model, in QDQ form, nodes in topological order under their float names. Not changed.
        feeds: Samples. Of many, some are used: `chosen_feeds`.
        nodes: Names of the layers to correct (the integer ones), None for all.
        custom_op_libraries: Shared libraries of custom operators to register.
        float_means: Knows, and keeps, means of the float model from one call to the next.

    Returns:
        Shifts in the units of the output, float64 (channels,), by layer name, for `with_shifts`.

    Raises:
        CalibrationError: A model fails on a sample.
    """
    targets = _targets(graph, quantized, nodes)
    feeds = chosen_feeds(graph.proto, feeds, [t.activation.value for t in targets])
    if not targets or not feeds:
        return {}
    means, libraries = float_means or FloatMeans(), tuple(custom_op_libraries)
    found = shifts_in_one_run(graph.proto, quantized, feeds, targets, means, libraries)
    return _layer_by_layer(graph, quantized, feeds, targets, means, libraries) if found is None else found


def _layer_by_layer(
    graph: GraphView,
    quantized: onnx.ModelProto,
    feeds: Sequence[Feed],
    targets: Sequence[Corrected],
    float_means: FloatMeans,
    libraries: tuple[str, ...],
) -> dict[str, Float64]:
    """The shifts with a run of each part of the model for each sample; what is alive between parts is held."""
    axes = {t.activation.output: t.axis for t in targets}
    statistics = float_means.one_by_one(graph.proto, feeds, axes, libraries)
    by_value = {t.quantized: t for t in targets if t.activation.output in statistics}
    shifts: dict[str, Float64] = {}
    alive: list[dict[str, Any]] = [dict(feed) for feed in feeds]
    parts = cut_behind(quantized, list(by_value))
    with ObservedModel(quantized, SessionSettings((), libraries)) as observed:
        for at, part in enumerate(parts):
            # Run the part on all samples, and let go of what no later one reads.
            later = {name for rest in parts[at + 1 :] for name in rest.inputs}
            outputs = list(dict.fromkeys([*part.observed, *part.passed_on]))
            session = observed.segment(part, outputs, alive[0] if alive else {})
            for number, known in enumerate(alive):
                known.update(run(session, outputs, {n: known[n] for n in session.inputs if n in known}, number))
                for name in known.keys() - later - set(part.observed):
                    del known[name]
            # Shift the layers' outputs that it ends with, which the next part reads.
            for name in part.observed:
                target, arrays = by_value[name], [known[name] for known in alive]
                response = Response(graph, target.activation, arrays[0].ndim, target.axis)
                shift = response.shift_for(arrays, statistics[target.activation.output].sample_means)
                shifts[target.layer] = shift
                for known, array in zip(alive, arrays, strict=True):
                    array += shift.reshape([-1 if a == target.axis else 1 for a in range(array.ndim)]).astype(
                        array.dtype
                    )
                    if name not in later:
                        del known[name]
    return shifts


def chosen_feeds(model: onnx.ModelProto, feeds: Sequence[Feed], values: Sequence[str]) -> list[Feed]:
    """Evenly spaced feeds: 16 samples, more (up to 128) where they cost next to nothing, fewer where memory is short.

    A sample is one entry of a batch; a feed is never cut. At least one feed is returned if there is any.

    Args:
        model: The float model, shapes inferred.
        feeds: What there is.
        values: The layer outputs to look at; their size in a feed stands for its cost.
    """
    if not feeds:
        return []
    shapes = [np.shape(value) for value in feeds[0].values()]
    batch = max((shape[0] for shape in shapes if len(shape) > 1), default=1)
    cost = sum(estimate_bytes(model, feeds[0], values).values())
    affordable = _CHEAP_BYTES // cost if cost else 0
    count = max(-(-_LEAST_SAMPLES // max(batch, 1)), min(affordable, _MOST_SAMPLES // max(batch, 1)), 1)
    fitting = feeds_within(_WANTED_BYTES, model, feeds[0], values)
    count = int(min(count, max(fitting, 1 if batch > 1 else 2)))  # two samples tell what is chance
    if count >= len(feeds):
        return list(feeds)
    return [feeds[int(at)] for at in np.linspace(0, len(feeds) - 1, count).round()]


def _targets(graph: GraphView, quantized: onnx.ModelProto, nodes: Collection[str] | None) -> list[Corrected]:
    """The layers with a bias whose output, and the activation behind it, are float tensors of known rank."""
    outputs = {node.name: str(node.output[0]) for node in quantized.graph.node if node.name and node.output}
    ranks = float_ranks(graph.proto)
    found = []
    for layer in layers(graph, nodes):
        if bias_of(layer, graph) is None:
            continue
        node = layer.node if layer.operator != "MatMul" else graph.readers(layer.output)[0]
        activation = activation_behind(graph, node.outputs[0])
        rank = ranks.get(activation.output, 0)
        if node.name in outputs and rank >= 2 and layer.channel_axis % rank:
            axis = layer.channel_axis % rank
            found.append(Corrected(layer.name, outputs[node.name], activation, axis, rank))
    return found


def with_biases(model: onnx.ModelProto, *, nodes: Collection[str] | None = None) -> onnx.ModelProto:
    """Gives every Conv, ConvTranspose and Gemm a bias of its own, so that bias correction has something to move.

    A plan names biases by value, so this comes before planning. A bias costs an integer kernel nothing.

    Args:
        model: The prepared float model. Not changed.
        nodes: Names of the layers concerned, None for all.

    Returns:
        A copy; the model given where nothing had to change.
    """
    graph = LiveGraph(model, copied=True)
    for layer in layers(graph, nodes):
        present = None if layer.bias is None else graph.content(layer.bias)
        if layer.operator == "MatMul" or (present is None and optional(layer.node, 2) is not None):
            continue  # nothing to put it on, or computed at run time
        bias = np.zeros(layer.channels_out, np.float32)
        if layer.bias is not None and present is not None:
            is_row = present.shape[-1:] == (present.size,) == (layer.channels_out,)
            if present.size > 1 and (not is_row or graph.is_read_once(layer.bias)):
                continue  # a Gemm's matrix of biases, or it has one
            bias = np.broadcast_to(present.reshape(-1), (layer.channels_out,)).astype(np.float32)
        graph.store_array(layer.node, 2, bias, f"{layer.weight.name}_bias")
    return graph.write()


def with_shifts(graph: GraphView, shifts: Mapping[str, Float64], overlay: Overlay = MappingProxyType({})) -> Overlay:
    """An overlay in which the outputs of layers are shifted.

    Args:
        graph: The float model.
        shifts: What is added to each output channel, by node name; of nodes with a bias of their own.
        overlay: What layers have in place of the model's constants before.
    """
    by_name = {layer.name: layer for layer in layers(graph, shifts)}
    found = {node: dict(tensors) for node, tensors in overlay.items()}
    for node, shift in shifts.items():
        layer, own = by_name[node], found.setdefault(node, {})
        bias = bias_of(layer, graph)
        assert bias is not None
        name = bias.name or ""
        before = array_in(own[name]) if name in own else graph.content(bias)
        by = (shift / layer.node.attributes.get_float("beta", 1.0)).reshape(before.shape)
        own[name] = numpy_helper.from_array((before.astype(np.float64) + by).astype(np.float32), name)
    return found


@dataclass(frozen=True)
class BiasCorrection(Pass):
    """The mean error of each output channel moves into the layer's bias.

    Attributes:
        bias_correction: Biases corrected for the mean error of quantization.
    """

    name: ClassVar[str] = "bias_correction"
    title: ClassVar[str] = "Bias correction"
    fits_means: ClassVar[bool] = True

    bias_correction: bool = setting("bias_correction")

    def apply(self, state: State, statistics: Statistics, context: Context) -> Candidate | Skipped:
        build = state.built
        shifts = bias_shifts(
            state.prepared.graph,
            build.quantized,
            context.fit,
            nodes=set(build.plan.integer_nodes()),
            custom_op_libraries=context.custom_op_libraries,
            float_means=context.memory.setdefault("float means", FloatMeans()),
        )
        shifted = context.with_corrections(state, with_shifts(state.prepared.graph, shifts, build.corrections))
        return Candidate(replace(shifted, uncorrected=build.corrections))
