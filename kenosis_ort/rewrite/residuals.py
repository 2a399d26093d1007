"""Residuals in front of norms: joined with them or not, as is the fastest, and the arithmetic of an RMS norm."""

from collections.abc import Collection

import numpy as np
import onnx

from kenosis_ort.graph.view import ir
from kenosis_ort.rewrite.norms import LAYER_NORM_OPSET, RMS_NORM_OPSET, norm_around
from kenosis_ort.rewrite.rule import Editor, NotCollapsibleError, operand, rule

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
    stored = [(value, editor.constant(value)) for value in residual.inputs]
    left, right = (editor.dims(value) if tensor is None else tuple(tensor.dims) for value, tensor in stored)
    if left is None or right is None:
        return all(shape is None or len(shape) == _RANK for shape in (left, right))
    same = all(a == b or a is None or b is None for a, b in zip(left, right, strict=False))
    return len(left) == len(right) == _RANK and same


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
