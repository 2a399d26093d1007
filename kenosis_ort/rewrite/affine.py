"""Scales and shifts by channel folded into weights or a Conv of their own, linear layers as Gemm, and sums as Add."""

import numpy as np
import numpy.typing as npt

from kenosis_ort.graph.constants import LAYERS
from kenosis_ort.graph.view import further_outputs, ir, optional
from kenosis_ort.rewrite.rule import Editor, FloatArray, NotCollapsibleError, operand, other_operand, rule

Weights = npt.NDArray[np.generic]


def affine_step(
    op_type: str, scale: FloatArray, shift: FloatArray, constant: FloatArray, *, swapped: bool
) -> tuple[FloatArray, FloatArray] | None:
    """Scale and shift with one more Mul, Add, Sub or Div behind them.

    Args:
        op_type: The operator.
        scale: Factor so far, by channel.
        shift: Summand so far, by channel.
        constant: Its other operand, by channel. Overflow gives infinity, which is for the caller to refuse.
        swapped: Whether the constant is the first operand, and ``x * scale + shift`` the second.

    Returns:
        The new pair; None where the constant is divided by the value, which is not affine.
    """
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        if op_type == "Mul":
            return scale * constant, shift * constant
        if op_type == "Add":
            return scale, shift + constant
        if op_type == "Sub":
            return (-scale, constant - shift) if swapped else (scale, shift - constant)
        return None if swapped else (scale / constant, shift / constant)


@rule(
    "Conv",
    "Gemm",
    did="scales and shifts by channel were folded into the weights in front of them",
    stays="Conv or Gemm nodes have a scale or shift behind them that stays",
)
def fold_scale(editor: Editor, layer: ir.Node) -> None:
    """Scales and shifts by channel behind a Conv or Gemm, folded into its weights.

    With ``y[c] = x * W[c] + d[c]`` and constants ``k`` and ``t`` by channel (or one number for all)::

        y * k = x * (k W) + k d      y / k = x * (W / k) + d / k      y + t = x * W + (d + t)
        y - t = x * W + (d - t)      t - y = x * (-W) + (t - d)

    Rows of them are joined first. All arithmetic is float64, rounded once to float32. In a float model the runtime does
    the same; between Q and DQ it does not, and each of them would be a float operator, or a depthwise Conv.

    Not folded: weights or a bias that are not constant, ``alpha`` and ``beta`` of Gemm that are not 1, a type other
    than float32, an inner value that another node, a body of control flow, the graph's outputs or the caller need,
    results that are not finite.
    """
    weights = editor.array(layer.inputs[1])
    if weights is None or weights.ndim < 2:
        return
    axis = 1 if layer.op_type == "Gemm" and not layer.attributes.get_int("transB", 0) else 0
    channels = weights.shape[axis]
    spatial = 0 if layer.op_type == "Gemm" else weights.ndim - 2
    scale, shift = np.ones(channels), np.zeros(channels)
    value, steps = layer.outputs[0], []
    while editor.is_private(value) and (readers := editor.readers_of(value, *_STEPS)):
        array = editor.array(other_operand(readers[0], value))
        usable = array is not None and array.dtype == np.float32
        constant = _by_channel(array, channels, 2 + spatial) if usable else None
        swapped = readers[0].inputs[0] is not value
        op_type = readers[0].op_type
        applied = None if constant is None else affine_step(op_type, scale, shift, constant, swapped=swapped)
        if applied is None:
            break
        scale, shift = applied
        steps.append(readers[0])
        value = readers[0].outputs[0]
    if not steps:
        return
    if any(layer.attributes.get_float(name, 1.0) != 1.0 for name in ("alpha", "beta")):
        raise NotCollapsibleError("its alpha or beta is not 1")
    bias = _bias(editor, layer, channels)
    if weights.dtype != np.float32:
        raise NotCollapsibleError("its weights are not float32")
    factor = scale.reshape([channels if at == axis else 1 for at in range(weights.ndim)])
    with np.errstate(over="ignore", invalid="ignore"):
        new_weights = (weights.astype(np.float64) * factor).astype(np.float32)
        new_bias = (bias * scale + shift).astype(np.float32)
    if not (np.isfinite(new_weights).all() and np.isfinite(new_bias).all()):
        raise NotCollapsibleError("the folded weights would not be finite")
    base = operand(layer, 1).name
    editor.store_array(layer, 1, new_weights, f"{base}_scaled")
    editor.store_array(layer, 2, new_bias, f"{base}_bias")
    editor.drop(steps, layer.name)
    editor.take_over_output(layer, steps[-1].outputs[0])
    editor.done += len(steps)


def _bias(editor: Editor, layer: ir.Node, channels: int) -> FloatArray:
    """The bias of a layer as one number a channel, zeros without one."""
    bias = optional(layer, 2) if layer.op_type != "MatMul" else None
    if bias is None:
        return np.zeros(channels)
    found = _by_channel(editor.array(bias), channels, 2 if layer.op_type == "Gemm" else 1)
    if found is None:
        raise NotCollapsibleError(f"its bias '{bias.name}' is not one number a channel, or not constant")
    return found


def _by_channel(array: npt.NDArray[np.generic] | None, channels: int, rank: int) -> FloatArray | None:
    """A constant as one number a channel, axis 1 of ``rank`` or the only axis; None if it is not one."""
    if array is None or array.ndim > rank:
        return None
    shape, axis = (1,) * (rank - array.ndim) + array.shape, min(1, rank - 1)
    if any(dim != 1 for at, dim in enumerate(shape) if at != axis) or shape[axis] not in (1, channels):
        return None
    return np.broadcast_to(array.astype(np.float64).reshape(-1), (channels,))


_INFERENCE_BY_DEFAULT = 7
"""Before this operator set BatchNormalization is in training mode unless it says ``is_test``."""

_STEPS = ("Mul", "Div", "Add", "Sub")


@rule(
    "BatchNormalization",
    *_STEPS,
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
        scale, shift = _of_norm(editor, node)
        if channels not in (None, len(scale)):
            raise NotCollapsibleError("its parameters are not one number a channel")
        chain = [node]
    else:
        scale, shift, chain = _of_chain(editor, node)
    if chain:
        _convert(editor, chain, scale, shift)


def _of_norm(editor: Editor, norm: ir.Node) -> tuple[FloatArray, FloatArray]:
    """Scale and shift of a BatchNormalization in inference."""
    if editor.opset() < _INFERENCE_BY_DEFAULT or norm.attributes.get_int("training_mode", 0) != 0:
        raise NotCollapsibleError("it is in training mode")
    if not norm.attributes.get_int("spatial", 1):
        raise NotCollapsibleError("it normalizes each element (spatial=0)")
    if further_outputs(norm):
        raise NotCollapsibleError("its statistics are outputs")
    arrays = [array.astype(np.float64) for value in norm.inputs[1:5] if (array := editor.array(value)) is not None]
    if len(arrays) != 4:
        raise NotCollapsibleError("its parameters are not constant")
    gamma, beta, mean, variance = arrays
    if any(array.ndim != 1 or array.shape != gamma.shape for array in arrays):
        raise NotCollapsibleError("its parameters are not one number a channel")
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        scale = gamma / np.sqrt(variance + norm.attributes.get_float("epsilon", 1e-5))
        return scale, beta - scale * mean


def _of_chain(editor: Editor, first: ir.Node) -> tuple[FloatArray, FloatArray, list[ir.Node]]:
    """Scale and shift of the longest chain of named nodes that starts here; an empty one of scalars only."""
    variable = [value for value in first.inputs if value is not None and editor.constant(value) is None]
    if len(first.inputs) != 2 or len(variable) != 1:
        return np.empty(0), np.empty(0), []
    value = variable[0]
    channels = editor.picture(value).channels
    if channels is None:
        raise NotCollapsibleError(f"the channel count of '{value.name}' is not known")
    scale, shift = np.ones(channels), np.zeros(channels)
    chain: list[ir.Node] = []
    by_channel = False
    node = first
    while True:
        try:
            scale, shift, differs = _applied(editor, node, value, scale, shift)
        except NotCollapsibleError:
            if not chain:
                raise
            break
        chain.append(node)
        by_channel |= differs
        value = node.outputs[0]
        readers = editor.readers(value)
        if not editor.is_private(value) or not editor.may_change(readers[0]) or readers[0].op_type not in _STEPS:
            break
        node = readers[0]
    return scale, shift, chain if by_channel else []


def _applied(
    editor: Editor, node: ir.Node, value: ir.Value, scale: FloatArray, shift: FloatArray
) -> tuple[FloatArray, FloatArray, bool]:
    """Scale and shift with one more node of a chain, and whether its constant may differ by channel."""
    other = other_operand(node, value)
    array = editor.array(other)
    if other is None or array is None:
        raise NotCollapsibleError("none of its operands is constant")
    constant = _by_channel(array, len(scale), 4)
    if constant is None:
        raise NotCollapsibleError(f"its constant '{other.name}' of shape {array.shape} is not one number a channel")
    step = affine_step(node.op_type, scale, shift, constant, swapped=node.inputs[0] is not value)
    if step is None:
        raise NotCollapsibleError("it divides by its input")
    return *step, array.size > 1


def _convert(editor: Editor, chain: list[ir.Node], scale: FloatArray, shift: FloatArray) -> None:
    with np.errstate(over="ignore"):
        weights, bias = scale.astype(np.float32), shift.astype(np.float32)
    if not (np.isfinite(weights).all() and np.isfinite(bias).all()):
        raise NotCollapsibleError("its scale and shift are not finite")
    first, last = chain[0], chain[-1]
    inputs = [
        next(value for value in first.inputs if editor.constant(value) is None),
        editor.add_constant(weights.reshape(-1, 1, 1, 1), f"{last.name}_weight"),
        editor.add_constant(bias, f"{last.name}_bias"),
    ]
    editor.become(last, "Conv", inputs, {"group": len(weights), "kernel_shape": (1, 1)}, inner=chain[:-1])


_FOLDABLE = ("Add", *sorted(LAYERS))


@rule(
    "BatchNormalization",
    did="BatchNormalization nodes were folded into the weights in front of them",
    stays="BatchNormalization nodes stay: nothing in front of them can take them up",
    least_opset=_INFERENCE_BY_DEFAULT,
)
def fold_batch_norm(editor: Editor, norm: ir.Node) -> None:
    """BatchNormalization folded into the Conv, ConvTranspose, Gemm or MatMul in front of it.

    In inference, with scale ``g``, shift ``b``, mean ``m`` and variance ``v`` per channel ``c``::

        BN(y)[c] = g[c] * (y[c] - m[c]) / sqrt(v[c] + epsilon) + b[c]
                 = s[c] * y[c] + t[c]        with  s = g / sqrt(v + epsilon),  t = b - s * m

    The node in front is affine in its weights: ``y[c] = x * W[c] + d[c]``. Hence::

        BN(y)[c] = x * (s[c] * W[c]) + (s[c] * d[c] + t[c])

    that is, the same node with weights ``s * W`` and bias ``s * d + t``. The bias ``d`` may also be an ``Add`` of a
    constant between the two. Gemm computes ``alpha * A * B + beta * C``: its weights become ``s * B``, its bias
    ``beta * s * C + t`` and ``beta`` 1. A MatMul has no bias: without an ``Add`` the BatchNormalization turns into one.

    All arithmetic is float64 and rounded once, to the type of the weights. The channel of a BatchNormalization is
    axis 1, for MatMul and Gemm the last axis, so these must be of rank 2.

    Not folded: training mode, ``spatial=0``, parameters or weights that are not constant, an intermediate
    value that another node, a body of control flow, the graph's outputs or the caller need, results that overflow.
    """
    scale, shift = _of_norm(editor, norm)
    affine, add, weights = _in_front(editor, norm)
    weights, bias = _folded(editor, affine, add, weights, scale, shift)
    _put_in(editor, affine, add, norm, weights, bias)
    editor.done += 1


def _in_front(editor: Editor, norm: ir.Node) -> tuple[ir.Node, ir.Node | None, Weights]:
    """The layer in front of a BatchNormalization, the Add between them, if there is one, and the layer's weights.

    Every value between them is read by the next node only.
    """
    affine, add = _affine_before(editor, operand(norm, 0)), None
    if affine.op_type == "Add":
        add = affine
        variable = [value for value in add.inputs if value is not None and editor.constant(value) is None]
        if len(variable) != 1:
            raise NotCollapsibleError("the Add in front of it adds no constant")
        affine = _affine_before(editor, variable[0])
        if affine.op_type == "Add":
            raise NotCollapsibleError("it follows an Add")
    weights = editor.array(affine.inputs[1])
    if weights is None:
        raise NotCollapsibleError(f"the weights of '{affine.name}' are not constant")
    if affine.op_type == "MatMul":
        values = (affine.inputs[0], affine.outputs[0], norm.outputs[0])
        ranks = [rank for value in values if (rank := editor.rank(value)) is not None]
        if weights.ndim != 2 or ranks[:1] != [2]:
            raise NotCollapsibleError(f"'{affine.name}' is not known to give a matrix")
    return affine, add, weights


def _affine_before(editor: Editor, value: ir.Value) -> ir.Node:
    """The layer or Add that makes a value for one reader."""
    node = value.producer()
    if node is None:
        raise NotCollapsibleError("it follows no node")
    editor.require_private(value)
    found = editor.producer(value, *_FOLDABLE)
    if found is None:
        raise NotCollapsibleError(f"it follows a {node.op_type}")
    return found


def _folded(
    editor: Editor, affine: ir.Node, add: ir.Node | None, weights: Weights, scale: FloatArray, shift: FloatArray
) -> tuple[Weights, Weights]:
    """The new weights and the new bias, in the type of the old weights."""
    factor = _weight_factor(affine, weights.shape, scale)
    bias = _bias(editor, affine, len(scale)) * affine.attributes.get_float("beta", 1.0)
    if add is not None:
        constant = next(value for value in add.inputs if editor.constant(value) is not None)
        rank = weights.ndim if affine.op_type in ("Conv", "ConvTranspose") else 2
        addend = _by_channel(editor.array(constant), len(scale), rank)
        if addend is None:
            raise NotCollapsibleError(f"'{constant.name if constant else ''}' is not one number a channel")
        bias = bias + addend
    with np.errstate(over="ignore", invalid="ignore"):
        new_weights = (weights.astype(np.float64) * factor).astype(weights.dtype)
        new_bias = (bias * scale + shift).astype(weights.dtype)
    if not all(np.isfinite(array.astype(np.float64)).all() for array in (new_weights, new_bias)):
        raise NotCollapsibleError("the folded weights are not finite")
    return new_weights, new_bias


def _weight_factor(affine: ir.Node, shape: tuple[int, ...], scale: FloatArray) -> FloatArray:
    """``scale`` in a shape that multiplies weights of ``shape`` along their output channels."""
    channels = len(scale)
    if affine.op_type == "ConvTranspose":
        groups = affine.attributes.get_int("group", 1)
        if shape[1] * groups != channels or shape[0] % groups:
            raise NotCollapsibleError("the channel counts differ")
        per_input = np.repeat(scale.reshape(groups, shape[1]), shape[0] // groups, axis=0)
        return per_input.reshape(shape[0], shape[1], *([1] * (len(shape) - 2)))
    axis = 0 if affine.op_type == "Conv" or affine.attributes.get_int("transB", 0) != 0 else 1
    if shape[axis] != channels:
        raise NotCollapsibleError("the channel counts differ")
    return scale.reshape([channels if at == axis else 1 for at in range(len(shape))])


def _put_in(
    editor: Editor, affine: ir.Node, add: ir.Node | None, norm: ir.Node, weights: Weights, bias: Weights
) -> None:
    """Gives the layer its new weights; the last of the nodes that stay takes over the output."""
    base, output = operand(affine, 1).name, norm.outputs[0]
    editor.store_array(affine, 1, weights, f"{base}_folded")
    if affine.op_type == "MatMul" and add is None:
        editor.rewrite(norm, "Add", [norm.inputs[0]])
        editor.store_array(norm, 1, bias, f"{base}_bias")
        return
    editor.drop([norm], affine.name)
    if affine.op_type == "MatMul" and add is not None:
        at = next(at for at, value in enumerate(add.inputs) if editor.constant(value) is not None)
        editor.store_array(add, at, bias, f"{base}_bias")
        editor.take_over_output(add, output)
        return
    editor.store_array(affine, 2, bias, f"{base}_bias")
    if affine.op_type == "Gemm":
        editor.set_attribute(affine, "beta", None)
    if add is not None:
        editor.drop([add], affine.name)
    editor.take_over_output(affine, output)


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


def _scaled(array: Weights, factor: float) -> Weights:
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
