"""What a model knows about its activations without any data: BatchNormalization's own statistics.

A BatchNormalization's output has mean ``beta`` and deviation ``|gamma|`` by channel on the data that it was trained
on. Taken as normal, that gives ranges for equalization, and the mean input of the next layer, hence the mean error
that rounded weights make: ``(w_quantized - w) * E[x]``. Source: Nagel et al., "Data-Free Quantization Through Weight
Equalization and Bias Correction", ICCV 2019, sections 4.1.3 and 4.2.1.

Padding is not taken into account: at the borders the mean input is smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper

from kenosis_ort.accuracy.biases import bias_of
from kenosis_ort.accuracy.channel_statistics import ChannelStatistics
from kenosis_ort.accuracy.grids import weight_grids
from kenosis_ort.accuracy.layers import Float64, array_of, layers
from kenosis_ort.graph.attributes import attribute_float
from kenosis_ort.graph.index import GraphIndex
from kenosis_ort.graph.walk import MAIN_DOMAINS

_POINTS = np.linspace(-6.0, 6.0, 601)
_DENSITY = np.exp(-(_POINTS**2) / 2.0)  # a fine grid integrates kinks to 1e-4, which Gauss-Hermite points do to 1e-2
_KEEP_MEANS = frozenset({"Identity", "Dropout", "AveragePool", "GlobalAveragePool"})


def batch_norm_statistics(model: onnx.ModelProto, *, deviations: float = 4.0) -> dict[str, ChannelStatistics]:
    """Returns statistics of the outputs of BatchNormalization nodes.

    Folding gives the layer in front the name of that output, so the statistics are those of the folded layer.

    Args:
        model: The float model before its BatchNormalization is folded.
        deviations: How many deviations from the mean count as the range: 3 to 4 for accuracy, more clips less.

    Returns:
        Statistics by value, without sample means.
    """
    index = GraphIndex(model)
    found = {}
    for node in index.nodes:
        if node.op_type != "BatchNormalization" or node.domain not in MAIN_DOMAINS:
            continue
        if any(index.constant(name) is None for name in node.input[1:3]):
            continue
        gamma, beta = (array_of(index, name).astype(np.float64).reshape(-1) for name in node.input[1:3])
        reach = deviations * np.abs(gamma)
        none = np.zeros((0, beta.size))
        found[str(node.output[0])] = ChannelStatistics(beta - reach, beta + reach, beta, beta**2 + gamma**2, none)
    return found


def analytic_shifts(
    model: onnx.ModelProto,
    quantized: onnx.ModelProto,
    statistics: Mapping[str, ChannelStatistics],
    *,
    nodes: Collection[str] | None = None,
) -> dict[str, Float64]:
    """Returns by how much the mean of each output channel has to be moved for its rounded weights.

    Unlike `bias_correction.bias_shifts` it runs nothing, and knows of no error but that of weights.

    Args:
        model: The prepared float model, every layer with a bias of its own (`with_biases`). Not changed.
        quantized: The quantized model under the float model's node names. Not changed.
        statistics: By value: of layer outputs (`batch_norm_statistics`) or of layer inputs (measured). Their means
            and variances are taken through the activations to the next layer.
        nodes: Names of the layers to correct, None for all.

    Returns:
        Shifts by layer name, for `with_shifts`; only of layers the mean of whose input is known.
    """
    index = GraphIndex(model)
    means = _means(index, statistics)
    grids = weight_grids(quantized)
    shifts = {}
    for layer in layers(index):
        mean = means.get(str(layer.node.input[0]))
        known = layer.name in grids and mean is not None and (nodes is None or layer.name in nodes)
        if not known or mean is None or not bias_of(layer, index) or mean.size != layer.channels_in:
            continue
        lost = layer.canonical(array_of(index, layer.weight)) - grids[layer.name].dequantized(layer)
        alpha = attribute_float(layer.node, "alpha", 1.0) if layer.node.op_type == "Gemm" else 1.0
        shifts[layer.name] = alpha * (lost.sum(axis=2) * layer.by_group(mean)).sum(axis=1)
        if layer.node.op_type == "ConvTranspose":
            del shifts[layer.name]  # each place gets some of the taps only
    return shifts


def _means(index: GraphIndex, statistics: Mapping[str, ChannelStatistics]) -> dict[str, Float64]:
    """Returns the mean by channel of every value that it can be worked out for."""
    means = {name: s.mean for name, s in statistics.items()}
    for node in index.nodes:
        if node.domain not in MAIN_DOMAINS or not node.output or node.output[0] in means:
            continue
        inputs = [str(name) for name in node.input]
        function = _function(index, node)
        if inputs and inputs[0] in statistics and function is not None:
            means[str(node.output[0])] = _mean_of(function, statistics[inputs[0]])
        elif _keeps_means(index, node) and inputs[0] in means:
            means[str(node.output[0])] = means[inputs[0]]
        elif node.op_type == "Add" and all(name in means for name in inputs):
            a, b = (means[name] for name in inputs)
            if a.shape == b.shape:
                means[str(node.output[0])] = a + b
    return means


def _keeps_means(index: GraphIndex, node: onnx.NodeProto) -> bool:
    producer = index.producers.get(node.input[0]) if node.input else None
    pooled = producer is not None and producer.op_type == "GlobalAveragePool"
    return node.op_type in _KEEP_MEANS or (node.op_type == "Flatten" and pooled)


def _function(index: GraphIndex, node: onnx.NodeProto) -> Callable[[Float64], npt.NDArray[np.float64]] | None:
    """Returns an activation as a function of arrays, None for other nodes."""
    if node.op_type == "Relu":
        return lambda x: np.maximum(x, 0.0)
    if node.op_type == "LeakyRelu":
        alpha = attribute_float(node, "alpha", 0.01)
        return lambda x: np.where(x < 0.0, alpha * x, x)
    if node.op_type == "HardSwish":
        return lambda x: x * np.clip(x / 6.0 + 0.5, 0.0, 1.0)
    if node.op_type == "Clip":
        ends = [str(name) for name in node.input[1:3]]
        if any(name and index.constant(name) is None for name in ends) or len(ends) != 2:
            return None
        low, high = (
            float(array_of(index, name).reshape(-1)[0]) if name else end
            for name, end in zip(ends, (-np.inf, np.inf), strict=True)
        )
        return lambda x: np.clip(x, low, high)
    return None


def _mean_of(function: Callable[[Float64], npt.NDArray[np.float64]], before: ChannelStatistics) -> Float64:
    """Returns the mean of a function of normal numbers of these means and variances."""
    deviation = np.sqrt(np.maximum(before.second_moment - before.mean**2, 0.0))
    values = function(before.mean[:, None] + deviation[:, None] * _POINTS)
    return np.asarray(values @ _DENSITY / _DENSITY.sum())
