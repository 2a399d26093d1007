"""Nodes that compute the same thing on every run, replaced by what they compute.

A node whose inputs are all constant has constant outputs: ``f(c)`` is stored in the place of ``f``. The runtime itself
computes them, all in one run of a model that holds only these nodes, so the stored values are exactly the ones
that it would compute later. ``Shape`` of a value whose shape is known is constant too.

It matters for quantization: a weight that passes through Transpose, Reshape or Unsqueeze is a weight only once this is
done, and small integer arithmetic on shapes would otherwise hide the amounts of a Pad.

Not folded: control flow, random operators, custom domains, DequantizeLinear and its kin (weights that are
stored quantized stay so), values that the caller names, and results that are larger than their
inputs by more than a fixed amount (a ConstantOfShape or an Expand is smaller as a node).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import onnxruntime

from kenosis_ort.graph.external_data import tensor_bytes
from kenosis_ort.graph.index import GraphIndex
from kenosis_ort.graph.prepare import RewriteResult
from kenosis_ort.graph.walk import MAIN_DOMAINS, subgraphs

_log = logging.getLogger(__name__)

_GROWTH_LIMIT = 64 * 1024
"""Bytes by which a folded result may exceed its inputs."""

_SIZE_LIMIT = 2**30
"""Bytes of constants that one run may hold; beyond it nothing more is folded."""

_NEVER = frozenset(
    {
        "Bernoulli",
        "Constant",
        "DequantizeLinear",
        "Dropout",
        "DynamicQuantizeLinear",
        "Multinomial",
        "QuantizeLinear",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
    }
)


def fold_constants(model: onnx.ModelProto, *, keep_values: Collection[str] = ()) -> RewriteResult:
    """Replaces constant nodes of the main graph by initializers of the same value names, in place.

    Args:
        model: The model to change, its nodes in topological order, its shapes inferred.
        keep_values: Values whose nodes stay.
    """
    index = GraphIndex(model, keep_values)
    types = _tensor_types(model.graph)
    sizes = {name: tensor_bytes(tensor) or 0 for name, tensor in index.constants.items()}
    known = set(index.constants)
    candidates: list[onnx.NodeProto] = []
    total = 0
    for node in index.nodes:
        if not _may_fold(node, index):
            continue
        if _is_static_shape(node, types):
            tensor = _shape_tensor(node, types)
            sizes[node.output[0]] = tensor_bytes(tensor) or 0
        elif not all(name in known for name in node.input if name):
            continue
        grown = _output_bytes(node, types)
        given = sum(sizes[name] for name in set(node.input) if name in sizes)
        if grown is None or grown > given + _GROWTH_LIMIT or total + given + grown > _SIZE_LIMIT:
            continue
        total += given + grown
        for name in node.output:
            if name:
                known.add(name)
                sizes[name] = grown
        candidates.append(node)
    if not candidates:
        return RewriteResult()
    computed = _compute(model, candidates, index, types)
    if computed is None:
        return RewriteResult()
    return _store(index, candidates, computed)
