"""Linear layers as the Gemm that integer kernels know, and sums of residuals in the operator that is the fastest."""

from collections.abc import Collection

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.graph.view import ir, optional
from kenosis_ort.rewrite.norms import LAYER_NORM_OPSET, RMS_NORM_OPSET, norm_around
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


_RANK = 3


@rule(
    "LayerNormalization",
    "Sqrt",
    did="residuals in front of a LayerNormalization are added by Sum, which the runtime does not join with it",
    stays="residuals in front of a LayerNormalization stay",
)
def residual_to_sum(editor: Editor, node: ir.Node) -> None:
    """The Add of a residual in front of a LayerNormalization as Sum.

    ``Add(a, b) = a + b`` is ``Sum(a, b)``, to the bit. The runtime joins an Add and the LayerNormalization behind it
    into one kernel of its own, ``SkipLayerNormalization``, which is slower than the two: 175 for 20 microseconds over
    ``[128, 256]``, 1380 for 56 over ``[128, 768]`` (one AVX512 thread). It does not join a Sum. A BERT-like encoder of
    256 units ran at 1.17x of its own float speed, and at 2.7x for 1.9x once its linear layers were integer.

    The runtime joins what this rule changes: three dimensions, both operands of the same shape, the sum read by the
    norm alone. Dimensions that are not known count as possibly the same. Where one operand is an Add itself (a bias),
    only the last one changes. Two integer kernels in front of such a Sum want it as an Add again, which is a rule of
    its own (`sum_to_add`).

    Not changed: sums with a further reader, which the runtime leaves alone; types other than float32.
    """
    value, readers = _normalized(editor, node)
    residual = editor.producer(value, "Add")
    if value is None or residual is None or not _is_joined(editor, residual, readers):
        return
    if editor.element_type(value) != onnx.TensorProto.FLOAT:
        editor.refuse(residual, f"'{value.name}' is not known to be float32")
        return
    editor.become(residual, "Sum", list(residual.inputs))


def _normalized(editor: Editor, node: ir.Node) -> tuple[ir.Value | None, Collection[ir.Node]]:
    """The input of the norm that a node is, or is part of, with the nodes that read it there; None for none.

    Before operator set 17 the norms are still arithmetic, of which the runtime makes the operator at load.
    """
    if node.op_type == "LayerNormalization":
        return node.inputs[0], (node,)
    norm = norm_around(editor, node)
    return (norm.x, norm.inner) if norm is not None and norm.centred else (None, ())


def _is_joined(editor: Editor, residual: ir.Node, readers: Collection[ir.Node]) -> bool:
    """Whether the runtime may join the Add with the only norm that reads it."""
    output = residual.outputs[0]
    members = {id(node) for node in readers}
    elsewhere = any(id(node) not in members for node in editor.readers(output))
    if elsewhere or output.is_graph_output() or editor.is_captured(output):
        return False
    left, right = (_shape(editor, value) for value in residual.inputs)
    if left is None or right is None:
        return all(shape is None or len(shape) == _RANK for shape in (left, right))
    same = all(a == b or a is None or b is None for a, b in zip(left, right, strict=False))
    return len(left) == len(right) == _RANK and same


def _shape(editor: Editor, value: ir.Value | None) -> tuple[int | None, ...] | None:
    constant = editor.constant(value)
    return editor.dims(value) if constant is None else tuple(constant.dims)


_LAYER_NORM, _RMS_NORM = "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"
_EPSILON = 1e-12  # the default of both operators


@rule(
    _LAYER_NORM,
    _RMS_NORM,
    did="joined residuals and norms (SkipLayerNormalization) became Sum and norm, which are faster",
    stays="joined residuals and norms (SkipLayerNormalization) stay",
)
def split_skip_norm(editor: Editor, joined: ir.Node) -> None:
    """The runtime's operators of a residual and the norm behind it, split in two.

    ``SkipLayerNormalization`` and ``SkipSimplifiedLayerNormalization`` of ``com.microsoft``, which offline tools for
    transformers write, are by definition::

        s = input + skip + bias                                      (bias may be absent; s is their last output)
        SkipLayerNormalization           = LayerNormalization(s; gamma, beta, epsilon)
        SkipSimplifiedLayerNormalization = RMSNormalization(s; gamma, epsilon)
                                         = s / sqrt(mean(s * s) + epsilon) * gamma

    over the last dimension, and so are written as Sum and LayerNormalization, or Sum and RMSNormalization. On a CPU the
    joined kernels are slower: over ``[128, 768]`` (one AVX512 thread) 1380 microseconds for 56, and 81 for 36. The
    residual is written as Sum since the runtime joins an Add with its norm again. Before operator set 23, which has
    RMSNormalization, the second quotient is written in the arithmetic that the runtime makes its own operator from.

    Not split: a mean or deviation that is used, an operator set before 17 (for LayerNormalization), a type other than
    float32.
    """
    opset, is_centred = editor.opset(), joined.op_type == _LAYER_NORM
    if is_centred and opset < LAYER_NORM_OPSET:
        raise NotCollapsibleError(f"LayerNormalization needs operator set {LAYER_NORM_OPSET}, the model has {opset}")
    for statistic in joined.outputs[1:3]:
        if statistic.name and (editor.readers(statistic) or editor.is_pinned(statistic)):
            raise NotCollapsibleError(f"its statistic '{statistic.name}' is needed")
    gamma = operand(joined, 2)  # of the type of all the rest
    stored = editor.constant(gamma)
    if stored is None or stored.data_type != onnx.TensorProto.FLOAT:
        editor.require_float32(gamma)
    beta = _input(joined, 3) if is_centred else []
    bias = _input(joined, 4 if is_centred else 3)
    total = joined.outputs[3] if len(joined.outputs) > 3 and joined.outputs[3].name else None
    total = None if total is None else editor.hand_over(total)
    epsilon = joined.attributes.get_float("epsilon", _EPSILON)
    joined.resize_outputs(1)
    total = editor.insert_before(joined, "Sum", [*joined.inputs[:2], *bias], output=total)
    if is_centred:
        editor.become(joined, "LayerNormalization", [total, gamma, *beta], {"axis": -1, "epsilon": epsilon})
    elif opset >= RMS_NORM_OPSET:
        editor.become(joined, "RMSNormalization", [total, gamma], {"axis": -1, "epsilon": epsilon})
    else:
        editor.become(joined, "Mul", [write_rms_quotient(editor, joined, total, epsilon, opset), gamma])


def _input(node: ir.Node, position: int) -> list[ir.Value]:
    """An optional input in a list, an empty one without it."""
    return [value for value in node.inputs[position : position + 1] if value is not None]


_AXES_INPUT_OPSET = 18


def write_rms_quotient(editor: Editor, node: ir.Node, x: ir.Value, epsilon: float, opset: int) -> ir.Value:
    """Puts the quotient of an RMS norm in front of a node that does not read it yet.

    ``x / sqrt(mean(x^2) + epsilon)`` over the last dimension is written as Pow, ReduceMean, Add, Sqrt and Div. With a
    Mul by a constant behind it, the runtime makes its operator for RMS norms from exactly this, which is not one of
    ONNX and so cannot be written into a model; from other spellings, such as a Mul by the Reciprocal of the root, it
    does not (31 microseconds for 12 over ``[128, 256]``).

    Args:
        editor: The model, of the operator set ``opset``.
        node: The node.
        x: The float32 value that is divided.
        epsilon: What is added under the root.
        opset: The version of the main operator set.

    Returns:
        The quotient.
    """
    two = editor.add_constant(np.array(2.0, np.float32), f"{node.name}_two")
    small = editor.add_constant(np.array(epsilon, np.float32), f"{node.name}_epsilon")
    square = editor.insert_before(node, "Pow", [x, two])
    if opset >= _AXES_INPUT_OPSET:
        axes = editor.add_constant(np.array([-1], np.int64), f"{node.name}_axes")
        mean = editor.insert_before(node, "ReduceMean", [square, axes], keepdims=1)
    else:
        mean = editor.insert_before(node, "ReduceMean", [square], axes=(-1,), keepdims=1)
    root = editor.insert_before(node, "Sqrt", [editor.insert_before(node, "Add", [mean, small])])
    return editor.insert_before(node, "Div", [x, root])


@rule("Sum", did="Sum nodes became Add", stays="Sum nodes stay")
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
