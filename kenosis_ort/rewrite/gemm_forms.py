"""Linear layers as the Gemm that integer kernels know, and sums of residuals in the operator that is the fastest."""

import numpy as np
import numpy.typing as npt

from kenosis_ort.graph.view import ir, optional
from kenosis_ort.rewrite.rule import Editor, NotCollapsibleError, operand, other_operand, rule

Array = npt.NDArray[np.generic]


@rule(
    "Gemm",
    did="Gemm nodes had their factors folded into their constants",
    stays="Gemm nodes keep a factor that is not 1",
)
def fold_gemm_factors(editor: Editor, node: ir.Node) -> None:
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
    weights = editor.array(node.inputs[1])
    if weights is None or weights.dtype != np.float32 or weights.ndim != 2:
        return
    alpha, beta = node.attributes.get_float("alpha", 1.0), node.attributes.get_float("beta", 1.0)
    addend = optional(node, 2)
    bias = editor.array(addend)
    columns = weights.shape[0 if node.attributes.get_int("transB", 0) else 1]
    dropped = addend is not None and beta == 0.0
    widened = bias is not None and bias.size == 1 and columns > 1
    transposed = bool(node.attributes.get_int("transA", 0))
    if alpha == 1.0 and (beta == 1.0 or addend is None) and not (widened or transposed):
        return
    if addend is not None and beta not in (0.0, 1.0) and bias is None:
        raise NotCollapsibleError(f"beta multiplies '{addend.name}', which is not a constant")
    new_weights = _scaled(weights, alpha) if alpha != 1.0 else None
    new_bias = None
    if bias is not None and not dropped and (widened or beta != 1.0):
        new_bias = _scaled(np.broadcast_to(bias.reshape(-1), (columns,)) if widened else bias, beta)
    if new_weights is not None:
        editor.store_array(node, 1, new_weights, f"{operand(node, 1).name}_scaled")
    if addend is not None and new_bias is not None:
        editor.store_array(node, 2, new_bias, f"{addend.name}_scaled")
    if dropped:
        editor.read(node, 2, None)
        node.resize_inputs(2)
    if transposed:
        editor.read(node, 0, editor.insert_before(node, "Transpose", [node.inputs[0]], perm=[1, 0]))
    for name in [name for name in node.attributes if name != "transB"]:
        editor.set_attribute(node, name, None)
    editor.done += 1


def _scaled(array: Array, factor: float) -> Array:
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        scaled = (array.astype(np.float64) * factor).astype(np.float32)
    if not np.isfinite(scaled).all():
        raise NotCollapsibleError("the folded constants would not be finite")
    return scaled


_PART_OF_SHAPE_OPSET = 15


@rule(
    "MatMul",
    did="MatMul and Add became Gemm",
    stays="MatMul nodes with an Add behind them stay",
    least_opset=_PART_OF_SHAPE_OPSET,
    whole=True,
    writes="Gemm",
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
        weights = editor.constant(product.inputs[1])
        dims = editor.dims(product.inputs[0])
        if weights is None or len(weights.dims) != 2 or dims is None or len(dims) < 3 or None not in dims[:-1]:
            continue
        try:
            bias = _bias(editor, product, weights.dims[1])
        except NotCollapsibleError as reason:
            editor.refuse(product, reason)
            continue
        if bias is not None:
            layers.change(product, *bias)


def _bias(editor: Editor, product: ir.Node, columns: int) -> tuple[ir.Node, ir.Value] | None:
    """The Add of a constant behind a product, and the constant; None if there is none."""
    adds = editor.readers_of(product.outputs[0], "Add")
    constant = other_operand(adds[0], product.outputs[0]) if len(adds) == 1 else None
    tensor = editor.constant(constant)
    if constant is None or tensor is None:
        return None
    editor.require_closed([product], adds[0])
    editor.require_float32(operand(product, 0))
    if tensor.dims[-1:] != [columns] or any(dim != 1 for dim in tensor.dims[:-1]):
        raise NotCollapsibleError(f"its bias '{constant.name}' is not one number a column")
    if len(tensor.dims) > (editor.rank(product.inputs[0]) or 0):
        raise NotCollapsibleError(f"its bias '{constant.name}' adds dimensions")
    return adds[0], constant


class _Layers:
    """Changes the layers of one model, which share what they can."""

    def __init__(self, editor: Editor) -> None:
        self.editor = editor
        self._rows: dict[ir.Value, ir.Value] = {}
        self._leading: dict[ir.Value, ir.Value] = {}
        self._shapes: dict[tuple[ir.Value, int], ir.Value] = {}

    def change(self, product: ir.Node, add: ir.Node, bias: ir.Value) -> None:
        editor, x, output = self.editor, operand(product, 0), add.outputs[0]
        weights, vector = editor.array(product.inputs[1]), editor.array(bias)
        assert weights is not None, "`linear_to_gemm` read them"
        assert vector is not None, "`_bias` found it"
        height, columns = weights.shape
        rows, shape = self._as_rows(product, x, height), self._shape(product, x, columns)
        editor.drop([add], product.name)
        editor.take_over_output(product, output)
        editor.become(product, "Gemm", [rows, product.inputs[1], bias])
        if vector.ndim != 1:
            editor.store_array(product, 2, vector.reshape(-1), f"{product.name}_bias")
        value = product.outputs[0]
        editor.append_behind(product, "Reshape", [value, shape], output=editor.hand_over(value), nearest=True)

    def _as_rows(self, product: ir.Node, x: ir.Value, height: int) -> ir.Value:
        """``x`` as a matrix."""
        if x not in self._rows:
            shape = self.editor.add_constant(np.array([-1, height], np.int64), f"{product.name}_rows")
            self._rows[x] = self.editor.insert_before(product, "Reshape", [x, shape])
        return self._rows[x]

    def _shape(self, product: ir.Node, x: ir.Value, columns: int) -> ir.Value:
        """The shape of the product, computed only where several dimensions are unknown."""
        if (x, columns) not in self._shapes:
            dims = (self.editor.dims(x) or ())[:-1]
            if dims.count(None) == 1:
                known = np.array([*(-1 if dim is None else dim for dim in dims), columns], np.int64)
                shape = self.editor.add_constant(known, f"{product.name}_shape")
            else:
                width = self.editor.add_constant(np.array([columns], np.int64), f"{product.name}_columns")
                if x not in self._leading:
                    self._leading[x] = self.editor.insert_before(product, "Shape", [x], end=-1)
                shape = self.editor.insert_before(product, "Concat", [self._leading[x], width], axis=0)
            self._shapes[x, columns] = shape
        return self._shapes[x, columns]


@rule("Sum", did="Sum nodes became Add", stays="Sum nodes stay", writes="Add")
def sum_to_add(editor: Editor, node: ir.Node) -> None:
    """Sum as Add.

    ``Sum(a, b) = a + b`` is ``Add(a, b)``, and ``Sum(a, b, c, ...)`` is ``Add(Add(Add(a, b), c), ...)``: the runtime's
    Sum adds in this order too, with the same broadcasting, so the result is the same to the bit.

    Sum has no integer kernel, Add has one, into which the Relu behind a residual vanishes (a residual net 2.4x of FP32
    for 1.6x). A Sum between float nodes had better stay one: the runtime fuses an Add and the LayerNormalization behind
    it into a kernel that is slower than the two.

    Not changed: a Sum of one value, types other than float32.
    """
    inputs = list(node.inputs)
    if len(inputs) < 2:
        raise NotCollapsibleError("it has one operand only")
    for position in range(len(inputs)):
        editor.require_float32(operand(node, position))
    total = inputs[0]
    for value in inputs[1:-1]:
        total = editor.insert_before(node, "Add", [total, value])
    editor.become(node, "Add", [total, inputs[-1]])
