"""Forms that pay between integer kernels alone: scales by channel as Convs, linear layers as Gemm, sums as Add."""

import numpy as np

from kenosis_ort.graph.view import ir
from kenosis_ort.rewrite.affine import STEPS, affine_step, by_channel, scale_of_norm
from kenosis_ort.rewrite.rule import (
    Editor,
    FloatArray,
    NotCollapsibleError,
    known,
    operand,
    other_operand,
    refuse_if,
    rule,
)


@rule(
    "BatchNormalization",
    *STEPS,
    did="scales and shifts by channel became depthwise 1x1 Convs",
    stays="scales and shifts by channel stay as they are",
    writes="Conv",
)
def batch_norm_to_conv(editor: Editor, node: ir.Node) -> None:
    """A scale and shift by channel, standing alone, as a depthwise 1x1 Conv.

    A BatchNormalization that no weights in front of it can take up (pre-activation nets, DenseNet) computes, with scale
    ``g``, shift ``b``, mean ``m`` and variance ``v`` of channel ``c``::

        y[n, c, i, j] = g[c] * (x[n, c, i, j] - m[c]) / sqrt(v[c] + epsilon) + b[c]
                      = s[c] * x[n, c, i, j] + t[c]       with  s = g / sqrt(v + epsilon),  t = b - s * m

    which is a Conv of ``group = C`` with weights ``s`` of shape ``[C, 1, 1, 1]`` and bias ``t``. The same holds for a
    chain of Mul, Div, Add and Sub by constants of shape ``[C, 1, 1]`` or ``[1, C, 1, 1]`` (scalars among them)::

        x * k: (k s, k t)    x / k: (s / k, t / k)    x + k: (s, t + k)    x - k: (s, t - k)    k - x: (-s, k - t)

    starting from ``(1, 0)``. All arithmetic is float64, rounded once to float32.

    Float has no use for it. Between integer kernels a BatchNormalization is a float island with a Transpose on either
    side, while this Conv is an integer kernel into which the Relu behind it vanishes (pre-activation nets 2.6x of FP32
    for 1.6x to 1.8x).

    Not changed: training mode, ``spatial=0``, used statistics, parameters that are not constant, a rank other than 4, a
    type other than float32, a channel count that is not known or differs, chains of scalars only (the runtime has
    integer kernels for these), results that are not finite.
    """
    if node.op_type == "BatchNormalization":
        channels = editor.picture(operand(node, 0)).channels
        scale, shift = scale_of_norm(editor, node)
        refuse_if(channels not in (None, len(scale)), "its parameters are not one number a channel")
        chain = [node]
    else:
        scale, shift, chain = _of_chain(editor, node)
    if chain:
        _convert(editor, chain, scale, shift)


def _of_chain(editor: Editor, first: ir.Node) -> tuple[FloatArray, FloatArray, list[ir.Node]]:
    """Scale and shift of the longest chain of named nodes that starts here; an empty one of scalars only."""
    variable = [value for value in first.inputs if value is not None and editor.constant(value) is None]
    if len(first.inputs) != 2 or len(variable) != 1:
        return np.empty(0), np.empty(0), []
    value = variable[0]
    channels = known(editor.picture(value).channels, f"the channel count of '{value.name}' is not known")
    scale, shift = np.ones(channels), np.zeros(channels)
    chain: list[ir.Node] = []
    is_by_channel = False
    node = first
    while True:
        try:
            scale, shift, differs = _applied(editor, node, value, scale, shift)
        except NotCollapsibleError:
            if not chain:
                raise
            break
        chain.append(node)
        is_by_channel |= differs
        value = node.outputs[0]
        readers = editor.readers(value)
        if not editor.is_private(value) or not editor.may_change(readers[0]) or readers[0].op_type not in STEPS:
            break
        node = readers[0]
    return scale, shift, chain if is_by_channel else []


def _applied(
    editor: Editor, node: ir.Node, value: ir.Value, scale: FloatArray, shift: FloatArray
) -> tuple[FloatArray, FloatArray, bool]:
    """Scale and shift with one more node of a chain, and whether its constant may differ by channel."""
    other = known(other_operand(node, value), "none of its operands is constant")
    array = known(editor.array(other), "none of its operands is constant")
    several = f"its constant '{other.name}' of shape {array.shape} is not one number a channel"
    constant = known(by_channel(array, len(scale), 4), several)
    step = affine_step(node.op_type, scale, shift, constant, swapped=node.inputs[0] is not value)
    return *known(step, "it divides by its input"), array.size > 1


def _convert(editor: Editor, chain: list[ir.Node], scale: FloatArray, shift: FloatArray) -> None:
    with np.errstate(over="ignore"):
        weights, bias = scale.astype(np.float32), shift.astype(np.float32)
    refuse_if(not (np.isfinite(weights).all() and np.isfinite(bias).all()), "its scale and shift are not finite")
    first, last = chain[0], chain[-1]
    inputs = [
        next(value for value in first.inputs if editor.constant(value) is None),
        editor.add_constant(weights.reshape(-1, 1, 1, 1), f"{last.name}_weight"),
        editor.add_constant(bias, f"{last.name}_bias"),
    ]
    editor.become(last, "Conv", inputs, {"group": len(weights), "kernel_shape": (1, 1)}, inner=chain[:-1])


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
            bias = _bias_behind(editor, product, weights.dims[1])
        except NotCollapsibleError as reason:
            editor.refuse(product, reason)
            continue
        if bias is not None:
            layers.change(product, *bias)


def _bias_behind(editor: Editor, product: ir.Node, columns: int) -> tuple[ir.Node, ir.Value] | None:
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
    refuse_if(len(tensor.dims) > (editor.rank(product.inputs[0]) or 0), f"its bias '{constant.name}' adds dimensions")
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
    refuse_if(len(inputs) < 2, "it has one operand only")
    for position in range(len(inputs)):
        editor.require_float32(operand(node, position))
    total = inputs[0]
    for value in inputs[1:-1]:
        total = editor.insert_before(node, "Add", [total, value])
    editor.become(node, "Add", [total, inputs[-1]])
