"""The runtime's operators of a residual and the norm behind it, split in two.

``SkipLayerNormalization`` and ``SkipSimplifiedLayerNormalization`` of ``com.microsoft``, which offline tools for
transformers write, are by definition::

    s = input + skip + bias                                      (bias may be absent; s is their last output)
    SkipLayerNormalization           = LayerNormalization(s; gamma, beta, epsilon)
    SkipSimplifiedLayerNormalization = RMSNormalization(s; gamma, epsilon)
                                     = s / sqrt(mean(s * s) + epsilon) * gamma

over the last dimension, and so are written as Sum and LayerNormalization, or Sum and RMSNormalization. On a CPU the
joined kernels are slower: over ``[128, 768]`` (one AVX512 thread) 1380 microseconds for 56, and 81 for 36. The residual
is written as Sum since the runtime joins an Add with its norm again. Before operator set 23, which has
RMSNormalization, the second quotient is written in the arithmetic that the runtime makes its own operator from.

Not split: a mean or deviation that is used, an operator set before 17 (for LayerNormalization), a type other than
float32.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx

from kenosis_ort.graph.attributes import attribute_float
from kenosis_ort.graph.prepare import RewriteResult
from kenosis_ort.graph.walk import MICROSOFT, opset_of
from kenosis_ort.rewrite.editing import Editor
from kenosis_ort.rewrite.matching import NotCollapsibleError
from kenosis_ort.rewrite.rms_quotient import write_rms_quotient

_LAYER_NORM_OPSET, _RMS_NORM_OPSET = 17, 23
_LAYER_NORM, _RMS_NORM = "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"
_EPSILON = 1e-12  # the default of both operators


def split_skip_norm(model: onnx.ModelProto, *, keep_values: Collection[str] = ()) -> RewriteResult:
    """Splits every joined residual and norm of the main graph, in place.

    The node keeps its name and becomes the norm, or the last node of its arithmetic.

    Args:
        model: The model to change, its types and shapes inferred.
        keep_values: Values that must keep existing with their meaning; all of them do.
    """
    if not any(node.op_type in (_LAYER_NORM, _RMS_NORM) for node in model.graph.node):
        return RewriteResult()
    editor = Editor(model, keep_values)
    opset = opset_of(model)
    for joined in editor.index.nodes:
        if joined.domain != MICROSOFT or joined.op_type not in (_LAYER_NORM, _RMS_NORM):
            continue
        try:
            _check(editor, joined, opset)
        except NotCollapsibleError as reason:
            editor.refuse(joined, reason)
            continue
        _split(editor, joined, opset)
    return editor.finish(
        "joined residuals and norms (SkipLayerNormalization) became Sum and norm, which are faster",
        "joined residuals and norms (SkipLayerNormalization) stay",
    )


def _check(editor: Editor, joined: onnx.NodeProto, opset: int) -> None:
    if joined.op_type == _LAYER_NORM and opset < _LAYER_NORM_OPSET:
        raise NotCollapsibleError(f"LayerNormalization needs operator set {_LAYER_NORM_OPSET}, the model has {opset}")
    for statistic in joined.output[1:3]:
        if statistic and (editor.index.readers.get(statistic) or editor.index.is_pinned(statistic)):
            raise NotCollapsibleError(f"its statistic '{statistic}' is needed")
    gamma = editor.index.constant(joined.input[2])  # of the type of all the rest
    if gamma is None or gamma.data_type != onnx.TensorProto.FLOAT:
        editor.require_float32(joined.input[2])


def _split(editor: Editor, joined: onnx.NodeProto, opset: int) -> None:
    gamma = joined.input[2]
    beta = _input(joined, 3) if joined.op_type == _LAYER_NORM else []
    bias = _input(joined, 4 if joined.op_type == _LAYER_NORM else 3)
    total = joined.output[3] if len(joined.output) > 3 else ""
    epsilon = attribute_float(joined, "epsilon", _EPSILON)
    del joined.output[1:]
    total = editor.insert_before(joined, "Sum", [*joined.input[:2], *bias], output=total)
    if joined.op_type == _LAYER_NORM:
        editor.become(joined, "LayerNormalization", [total, gamma, *beta], {"axis": -1, "epsilon": epsilon})
    elif opset >= _RMS_NORM_OPSET:
        editor.become(joined, "RMSNormalization", [total, gamma], {"axis": -1, "epsilon": epsilon})
    else:
        editor.become(joined, "Mul", [write_rms_quotient(editor, joined, total, epsilon, opset), gamma])


def _input(node: onnx.NodeProto, position: int) -> list[str]:
    """Returns an optional input in a list, an empty one without it."""
    return [name for name in node.input[position : position + 1] if name]
