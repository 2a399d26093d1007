"""A linear layer over more than two dimensions as Gemm between two Reshapes.

With ``W`` of shape ``[K, N]`` and ``b`` of ``[N]``, the last dimension of ``x`` is multiplied row by row::

    Add(MatMul(x, W), b) = Reshape(Gemm(Reshape(x, [-1, K]), W, b), [..., N])

where ``...`` are the leading dimensions of ``x``. Layers that read the same ``x`` share the first Reshape, so that it
is quantized once, and the shape of the second.

The runtime does the same at load where it knows all dimensions. Where it does not (a batch or a sequence of any
length, as transformers are exported), an integer MatMul stays one and its bias becomes an Add in float, dequantized on
every run: a layer of 256 to 1024 units takes 5 % longer over 128 rows, and 18 % over one row. In two dimensions it
always makes a Gemm. So only products with unknown leading dimensions change, and only the named ones: in a float
model nothing is gained.

Not changed: a product that is needed before its bias, weights or a bias that are not constant, a bias that is not one
number a column, types other than float32.

The factors of a Gemm, folded into its constants, and its transposed first operand as a Transpose.

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

from collections.abc import Collection

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper

from kenosis_ort.graph.opset import RewriteResult
from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.walk import attribute_float, attribute_int, opset_of
from kenosis_ort.rewrite.matching import Editor, NotCollapsibleError, other_operand
from kenosis_ort.rewrite.rule import IntegerForm, float_rule, has_candidate

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
    attributes = [a for a in node.attribute if a.name == "transB"]
    del node.attribute[:]
    node.attribute.extend(attributes)
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


_PART_OF_SHAPE_OPSET = 15


def linear_to_gemm(
    model: onnx.ModelProto, *, nodes: Collection[str], keep_values: Collection[str] = ()
) -> RewriteResult:
    """Turns each named MatMul, with the Add of a bias behind it, into Gemm between Reshapes, in place.

    The Gemm keeps the name of the MatMul; the Add goes, and a Reshape writes its output.

    Args:
        model: The model to change, its nodes named, its types and shapes inferred.
        nodes: Names of the MatMuls that may change.
        keep_values: Values that must keep existing with their meaning.
    """
    if opset_of(model) < _PART_OF_SHAPE_OPSET or not has_candidate(model, nodes, "MatMul"):
        return RewriteResult()
    form = IntegerForm(model, nodes, keep_values)
    layers = _Layers(form)
    for product in form.candidates("MatMul"):
        weights = form.index.constant(product.input[1])
        dims = form.dims(product.input[0])
        if weights is None or len(weights.dims) != 2 or dims is None or len(dims) < 3 or None not in dims[:-1]:
            continue
        try:
            bias = _bias(form, product, weights.dims[1])
        except NotCollapsibleError as reason:
            form.refuse(product, reason)
            continue
        if bias is not None:
            layers.change(product, *bias)
    return form.finish("MatMul and Add became Gemm", "MatMul nodes with an Add behind them stay")


def _bias(form: IntegerForm, product: onnx.NodeProto, columns: int) -> tuple[onnx.NodeProto, str] | None:
    """The Add of a constant behind a product, and the constant; None if there is none."""
    adds = form.readers(product.output[0], "Add")
    constant = other_operand(adds[0], product.output[0]) if len(adds) == 1 else None
    tensor = form.index.constant(constant or "")
    if constant is None or tensor is None:
        return None
    form.require_closed([product], adds[0])
    form.require_float32(product.input[0])
    if tensor.dims[-1:] != [columns] or any(dim != 1 for dim in tensor.dims[:-1]):
        raise NotCollapsibleError(f"its bias '{constant}' is not one number a column")
    if len(tensor.dims) > (form.rank(product.input[0]) or 0):
        raise NotCollapsibleError(f"its bias '{constant}' adds dimensions")
    return adds[0], constant


class _Layers:
    """Changes the layers of one model, which share what they can."""

    def __init__(self, form: IntegerForm) -> None:
        self.form = form
        self._rows: dict[str, str] = {}
        self._leading: dict[str, str] = {}
        self._shapes: dict[tuple[str, int], str] = {}

    def change(self, product: onnx.NodeProto, add: onnx.NodeProto, bias: str) -> None:
        form, x, output = self.form, product.input[0], add.output[0]
        height, columns = form.index.constants[product.input[1]].dims
        rows, shape = self._as_rows(product, x, height), self._shape(product, x, columns)
        vector = form.index.constants[bias]
        form.index.remove(add)
        form.merged[add.name] = product.name
        form.index.take_over_output(product, output)
        form.become(product, "Gemm", [rows, product.input[1], bias])
        if len(vector.dims) != 1:
            flat = array_in(vector).reshape(-1)
            form.index.store_constant(product, 2, onnx.numpy_helper.from_array(flat), f"{product.name}_bias")
        form.insert_behind(product, "Reshape", shape)

    def _as_rows(self, product: onnx.NodeProto, x: str, height: int) -> str:
        """``x`` as a matrix."""
        if x not in self._rows:
            shape = self.form.add_constant(np.array([-1, height], np.int64), f"{product.name}_rows")
            self._rows[x] = self.form.insert_before(product, "Reshape", [x, shape])
        return self._rows[x]

    def _shape(self, product: onnx.NodeProto, x: str, columns: int) -> str:
        """The shape of the product, computed only where several dimensions are unknown."""
        if (x, columns) not in self._shapes:
            dims = (self.form.dims(x) or ())[:-1]
            if dims.count(None) == 1:
                known = np.array([*(-1 if dim is None else dim for dim in dims), columns], np.int64)
                shape = self.form.add_constant(known, f"{product.name}_shape")
            else:
                width = self.form.add_constant(np.array([columns], np.int64), f"{product.name}_columns")
                shape = self.form.insert_before(product, "Concat", [self._leading_of(product, x), width], axis=0)
            self._shapes[x, columns] = shape
        return self._shapes[x, columns]

    def _leading_of(self, product: onnx.NodeProto, x: str) -> str:
        if x not in self._leading:
            self._leading[x] = self.form.insert_before(product, "Shape", [x], end=-1)
        return self._leading[x]
