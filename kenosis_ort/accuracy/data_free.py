"""What a model knows about its activations without any data: BatchNormalization's own statistics.

A BatchNormalization's output has mean ``beta`` and deviation ``|gamma|`` by channel on the data that it was trained
on. Taken as normal, that gives ranges for equalization. Source: Nagel et al., "Data-Free Quantization Through Weight
Equalization and Bias Correction", ICCV 2019, section 4.1.3.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx.numpy_helper

from kenosis_ort.accuracy.channel_statistics import ChannelStatistics
from kenosis_ort.accuracy.layers import array_of
from kenosis_ort.graph.index import GraphIndex
from kenosis_ort.graph.walk import MAIN_DOMAINS


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
