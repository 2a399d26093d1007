"""Linear layers as the Gemm that integer kernels know."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper

from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.walk import attribute_float, attribute_int
from kenosis_ort.rewrite.rule import Editor, NotCollapsibleError, other_operand, rule

Array = npt.NDArray[np.generic]


@rule(
    "Gemm",
    did="Gemm nodes had their factors folded into their constants",
    stays="Gemm nodes keep a factor that is not 1",
)
def fold_gemm_factors(editor: Editor, node: onnx.NodeProto) -> None:
    """The factors of a Gemm, folded into its constants, and its transposed first operand as a Transpose.

    With constants ``B`` and ``C``, by the definition of the operator::

        Gemm(A, B, C; alpha, beta) = alpha A B + beta C = Gemm(A, alpha B, beta C; 1, 1)
        Gemm(A, B, C; beta = 0)    = Gemm(A, B)
        Gemm(A, B, C; transA)      = Gemm(Transpose(A), B, C)

    and a ``C`` of one number is as many of them as the result has columns. The runtime's integer kernel knows neither
    factors nor a transposed first operand, and wants one bias a column. The arithmetic is float64, rounded once to
    float32.

    Not folded: weights that are not constant, a ``beta`` in front of a ``C`` that is not constant, types other than
    float32, results that are not finite.
    """
    weights = editor.array(node.input[1])
    if weights is None or weights.dtype != np.float32 or weights.ndim != 2:
        return
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
        editor.store_constant(node, 1, new_weights, f"{node.input[1]}_scaled")
    if new_bias is not None:
        editor.store_constant(node, 2, new_bias, f"{name}_scaled")
    if dropped:
        editor.release(node, name)
        del node.input[2:]
    if transposed:
        editor.read(node, 0, editor.insert_before(node, "Transpose", [node.input[0]], perm=[1, 0]))
    attributes = [a for a in node.attribute if a.name == "transB"]
    del node.attribute[:]
    node.attribute.extend(attributes)
    editor.done += 1


def _scaled(array: Array, factor: float) -> onnx.TensorProto:
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        scaled = (array.astype(np.float64) * factor).astype(np.float32)
    if not np.isfinite(scaled).all():
        raise NotCollapsibleError("the folded constants would not be finite")
    return onnx.numpy_helper.from_array(scaled)


_PART_OF_SHAPE_OPSET = 15


@rule(
    "MatMul",
    did="MatMul and Add became Gemm",
    stays="MatMul nodes with an Add behind them stay",
    least_opset=_PART_OF_SHAPE_OPSET,
    whole=True,
)
def linear_to_gemm(editor: Editor) -> None:
    """A linear layer over more than two dimensions as Gemm between two Reshapes.

    With ``W`` of shape ``[K, N]`` and ``b`` of ``[N]``, the last dimension of ``x`` is multiplied row by row::

        Add(MatMul(x, W), b) = Reshape(Gemm(Reshape(x, [-1, K]), W, b), [..., N])

    where ``...`` are the leading dimensions of ``x``. Layers that read the same ``x`` share the first Reshape, so that
    it is quantized once, and the shape of the second.

    The runtime does the same at load where it knows all dimensions. Where it does not (a batch or a sequence of any
    length, as transformers are exported), an integer MatMul stays one and its bias becomes an Add in float, dequantized
    on every run: a layer of 256 to 1024 units takes 5 % longer over 128 rows, and 18 % over one row. In two dimensions
    it always makes a Gemm. So only products with unknown leading dimensions change, and only the named ones: in a float
    model nothing is gained.

    Not changed: a product that is needed before its bias, weights or a bias that are not constant, a bias that is not
    one number a column, types other than float32.
    """
    layers = _Layers(editor)
    for product in filter(editor.may_change, editor.find("MatMul")):
        weights = editor.constant(product.input[1])
        dims = editor.dims(product.input[0])
        if weights is None or len(weights.dims) != 2 or dims is None or len(dims) < 3 or None not in dims[:-1]:
            continue
        try:
            bias = _bias(editor, product, weights.dims[1])
        except NotCollapsibleError as reason:
            editor.refuse(product, reason)
            continue
        if bias is not None:
            layers.change(product, *bias)


def _bias(editor: Editor, product: onnx.NodeProto, columns: int) -> tuple[onnx.NodeProto, str] | None:
    """The Add of a constant behind a product, and the constant; None if there is none."""
    adds = editor.readers_of(product.output[0], "Add")
    constant = other_operand(adds[0], product.output[0]) if len(adds) == 1 else None
    tensor = editor.constant(constant or "")
    if constant is None or tensor is None:
        return None
    editor.require_closed([product], adds[0])
    editor.require_float32(product.input[0])
    if tensor.dims[-1:] != [columns] or any(dim != 1 for dim in tensor.dims[:-1]):
        raise NotCollapsibleError(f"its bias '{constant}' is not one number a column")
    if len(tensor.dims) > (editor.rank(product.input[0]) or 0):
        raise NotCollapsibleError(f"its bias '{constant}' adds dimensions")
    return adds[0], constant


class _Layers:
    """Changes the layers of one model, which share what they can."""

    def __init__(self, editor: Editor) -> None:
        self.editor = editor
        self._rows: dict[str, str] = {}
        self._leading: dict[str, str] = {}
        self._shapes: dict[tuple[str, int], str] = {}

    def change(self, product: onnx.NodeProto, add: onnx.NodeProto, bias: str) -> None:
        editor, x, output = self.editor, product.input[0], add.output[0]
        height, columns = editor.constants[product.input[1]].dims
        rows, shape = self._as_rows(product, x, height), self._shape(product, x, columns)
        vector = editor.constants[bias]
        editor.drop([add], product.name)
        editor.take_over_output(product, output)
        editor.become(product, "Gemm", [rows, product.input[1], bias])
        if len(vector.dims) != 1:
            flat = array_in(vector).reshape(-1)
            editor.store_constant(product, 2, onnx.numpy_helper.from_array(flat), f"{product.name}_bias")
        editor.insert_behind(product, "Reshape", shape)

    def _as_rows(self, product: onnx.NodeProto, x: str, height: int) -> str:
        """``x`` as a matrix."""
        if x not in self._rows:
            shape = self.editor.add_constant(np.array([-1, height], np.int64), f"{product.name}_rows")
            self._rows[x] = self.editor.insert_before(product, "Reshape", [x, shape])
        return self._rows[x]

    def _shape(self, product: onnx.NodeProto, x: str, columns: int) -> str:
        """The shape of the product, computed only where several dimensions are unknown."""
        if (x, columns) not in self._shapes:
            dims = (self.editor.dims(x) or ())[:-1]
            if dims.count(None) == 1:
                known = np.array([*(-1 if dim is None else dim for dim in dims), columns], np.int64)
                shape = self.editor.add_constant(known, f"{product.name}_shape")
            else:
                width = self.editor.add_constant(np.array([columns], np.int64), f"{product.name}_columns")
                shape = self.editor.insert_before(product, "Concat", [self._leading_of(product, x), width], axis=0)
            self._shapes[x, columns] = shape
        return self._shapes[x, columns]

    def _leading_of(self, product: onnx.NodeProto, x: str) -> str:
        if x not in self._leading:
            self._leading[x] = self.editor.insert_before(product, "Shape", [x], end=-1)
        return self._leading[x]
