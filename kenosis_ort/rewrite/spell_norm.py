"""A norm in arithmetic, in the spelling that the runtime makes an operator from.

Where the operator set has no operator for a norm (before 17 for LayerNormalization, before 23 for RMSNormalization),
it stays in arithmetic, and the runtime makes an operator of its own from it at load. It knows some spellings only, so::

    d * d                -> Pow(d, 2)
    d * Reciprocal(root) -> Div(d, root)

The square is the same to the bit, the quotient to a rounding. An RMS norm over ``[128, 256]`` takes 12 microseconds
for 31 (one AVX512 thread).

Not changed: norms over other dimensions than the last or without a constant scale behind them, which the runtime does
not know in any spelling; a type other than float32; an inner value that is needed elsewhere.
"""

from __future__ import annotations

import numpy as np
import onnx

from kenosis_ort.graph.walk import opset_of
from kenosis_ort.rewrite.collapse_layer_norm import LAYER_NORM_OPSET, RMS_NORM_OPSET, Norm, norm_around
from kenosis_ort.rewrite.editing import Editor
from kenosis_ort.rewrite.matching import other_operand
from kenosis_ort.rewrite.rule import float_rule


@float_rule(
    "Sqrt",
    did="norms in arithmetic are spelled as the runtime knows them",
    stays="norms stay in a spelling that it does not know",
)
def spell_norm(editor: Editor, root: onnx.NodeProto) -> None:
    """Spells the norms of the main graph that stay in arithmetic as the runtime knows them, in place."""
    opset = opset_of(editor.model)
    norm = None if opset >= RMS_NORM_OPSET else norm_around(editor, root)
    if norm is None or (norm.centred and opset >= LAYER_NORM_OPSET) or not _is_scaled(editor, norm):
        return
    products = [node for node in norm.inner if node.op_type == "Mul"]
    inverses = [node for node in norm.inner if node.op_type == "Reciprocal"]
    if not products and not inverses:
        return
    editor.require_float32(norm.x)
    editor.require_closed(norm.inner, norm.last)
    for product in products:
        two = editor.add_constant(np.array(2.0, np.float32), f"{product.name}_two")
        editor.rewrite(product, "Pow", [product.input[0], two])
    for inverse in inverses:
        divided = other_operand(norm.last, inverse.output[0])
        editor.index.remove(inverse)
        editor.merged[inverse.name] = norm.last.name
        editor.rewrite(norm.last, "Div", [divided or norm.x, root.output[0]])
    editor.done += 1


def _is_scaled(editor: Editor, norm: Norm) -> bool:
    """Tells whether the norm is over the last dimension, with a constant vector as its scale."""
    output = norm.last.output[0]
    scales = editor.readers(output, "Mul") if editor.index.is_private(output) else []
    scale = editor.index.constant(other_operand(scales[0], output) or "") if scales else None
    return norm.axes == (-1,) and scale is not None and len(scale.dims) == 1
