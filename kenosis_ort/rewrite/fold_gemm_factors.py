"""The factors of a Gemm, folded into its constants, and its transposed first operand as a Transpose.

With constants ``B`` and ``C``, by the definition of the operator::

    Gemm(A, B, C; alpha, beta) = alpha A B + beta C = Gemm(A, alpha B, beta C; 1, 1)
    Gemm(A, B, C; beta = 0)    = Gemm(A, B)
    Gemm(A, B, C; transA)      = Gemm(Transpose(A), B, C)

and a ``C`` of one number is as many of them as the result has columns. The runtime's integer kernel knows neither
factors nor a transposed first operand, and wants one bias a column. The arithmetic is float64, rounded once to float32.

Not folded: weights that are not constant, a ``beta`` in front of a ``C`` that is not constant, types other than
float32, results that are not finite.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper

from kenosis_ort.graph.attributes import attribute_float, attribute_int
from kenosis_ort.rewrite.editing import Editor
from kenosis_ort.rewrite.matching import NotCollapsibleError
from kenosis_ort.rewrite.rule import float_rule

Array = npt.NDArray[np.generic]


@float_rule(
    "Gemm",
    did="Gemm nodes had their factors folded into their constants",
    stays="Gemm nodes keep a factor that is not 1",
)
def fold_gemm_factors(editor: Editor, node: onnx.NodeProto) -> None:
    """Gives every Gemm of constant weights the factors 1 and a first operand that is not transposed, in place."""
    weights = editor.array(node.input[1])
    if weights is None or weights.dtype != np.float32 or weights.ndim != 2:
        return
    _fold(editor, node, weights)


def _fold(editor: Editor, node: onnx.NodeProto, weights: Array) -> None:
    alpha, beta = attribute_float(node, "alpha", 1.0), attribute_float(node, "beta", 1.0)
    name = node.input[2] if len(node.input) > 2 else ""
    bias = editor.array(name) if name else None
    columns = weights.shape[0 if attribute_int(node, "transB", 0) else 1]
    dropped = bool(name) and beta == 0.0
    widened = bias is not None and bias.size == 1 and columns > 1
    transposed = bool(attribute_int(node, "transA", 0))
    if alpha == 1.0 and (beta == 1.0 or not name) and not (widened or transposed):
        return
    if name and beta not in (0.0, 1.0) and bias is None:
        raise NotCollapsibleError(f"beta multiplies '{name}', which is not a constant")
    new_weights = _scaled(weights, alpha) if alpha != 1.0 else None
    new_bias = None
    if bias is not None and not dropped and (widened or beta != 1.0):
        new_bias = _scaled(np.broadcast_to(bias.reshape(-1), (columns,)) if widened else bias, beta)
    if new_weights is not None:
        editor.index.store_constant(node, 1, new_weights, f"{node.input[1]}_scaled")
    if new_bias is not None:
        editor.index.store_constant(node, 2, new_bias, f"{name}_scaled")
    if dropped:
        editor.index.release(node, name)
        del node.input[2:]
    if transposed:
        _transpose_first(editor, node)
    kept = [a for a in node.attribute if a.name == "transB"]
    del node.attribute[:]
    node.attribute.extend(kept)
    editor.done += 1


def _transpose_first(editor: Editor, node: onnx.NodeProto) -> None:
    first = node.input[0]
    node.input[0] = editor.insert_before(node, "Transpose", [first], perm=[1, 0])
    editor.index.readers[node.input[0]] = [node]
    editor.index.release(node, first)


def _scaled(array: Array, factor: float) -> onnx.TensorProto:
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        scaled = (array.astype(np.float64) * factor).astype(np.float32)
    if not np.isfinite(scaled).all():
        raise NotCollapsibleError("the folded constants would not be finite")
    return onnx.numpy_helper.from_array(scaled)
