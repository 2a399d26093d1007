"""Sums of residuals, in the operator that is the fastest where they stand."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx

from kenosis_ort.graph.walk import attribute_float
from kenosis_ort.rewrite.norms import norm_around
from kenosis_ort.rewrite.rule import Editor, NotCollapsibleError, rule

_RANK = 3


@rule(
    "LayerNormalization",
    "Sqrt",
    did="residuals in front of a LayerNormalization are added by Sum, which the runtime does not join with it",
    stays="residuals in front of a LayerNormalization stay",
)
def residual_to_sum(editor: Editor, node: onnx.NodeProto) -> None:
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
    if residual is None or not _is_joined(editor, residual, readers):
        return
    if editor.element_type(value) != onnx.TensorProto.FLOAT:
        editor.refuse(residual, f"'{value}' is not known to be float32")
        return
    editor.become(residual, "Sum", list(residual.input))


def _normalized(editor: Editor, node: onnx.NodeProto) -> tuple[str, Collection[onnx.NodeProto]]:
    """The input of the norm that a node is, or is part of, with the nodes that read it there; "" for none.

    Before operator set 17 the norms are still arithmetic, of which the runtime makes the operator at load.
    """
    if node.op_type == "LayerNormalization":
        return node.input[0], (node,)
    norm = norm_around(editor, node)
    return (norm.x, norm.inner) if norm is not None and norm.centred else ("", ())


def _is_joined(editor: Editor, residual: onnx.NodeProto, readers: Collection[onnx.NodeProto]) -> bool:
    """Whether the runtime may join the Add with the only norm that reads it."""
    output = residual.output[0]
    members = {id(node) for node in readers}
    elsewhere = any(id(node) not in members for node in editor.readers[output])
    if elsewhere or output in editor.outputs or output in editor.captured:
        return False
    left, right = (_shape(editor, name) for name in residual.input)
    if left is None or right is None:
        return all(shape is None or len(shape) == _RANK for shape in (left, right))
    same = all(a == b or a is None or b is None for a, b in zip(left, right, strict=False))
    return len(left) == len(right) == _RANK and same


def _shape(editor: Editor, value: str) -> tuple[int | None, ...] | None:
    constant = editor.constant(value)
    return editor.dims(value) if constant is None else tuple(constant.dims)


_LAYER_NORM_OPSET, _RMS_NORM_OPSET = 17, 23
_LAYER_NORM, _RMS_NORM = "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"
_EPSILON = 1e-12  # the default of both operators


@rule(
    _LAYER_NORM,
    _RMS_NORM,
    did="joined residuals and norms (SkipLayerNormalization) became Sum and norm, which are faster",
    stays="joined residuals and norms (SkipLayerNormalization) stay",
)
def split_skip_norm(editor: Editor, joined: onnx.NodeProto) -> None:
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
    _check(editor, joined, editor.opset)
    _split(editor, joined, editor.opset)


def _check(editor: Editor, joined: onnx.NodeProto, opset: int) -> None:
    if joined.op_type == _LAYER_NORM and opset < _LAYER_NORM_OPSET:
        raise NotCollapsibleError(f"LayerNormalization needs operator set {_LAYER_NORM_OPSET}, the model has {opset}")
    for statistic in joined.output[1:3]:
        if statistic and (editor.readers.get(statistic) or editor.is_pinned(statistic)):
            raise NotCollapsibleError(f"its statistic '{statistic}' is needed")
    gamma = editor.constant(joined.input[2])  # of the type of all the rest
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
    """An optional input in a list, an empty one without it."""
    return [name for name in node.input[position : position + 1] if name]


_AXES_INPUT_OPSET = 18


def write_rms_quotient(editor: Editor, node: onnx.NodeProto, x: str, epsilon: float, opset: int) -> str:
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
        The quotient's name.
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
def sum_to_add(editor: Editor, node: onnx.NodeProto) -> None:
    """Sum as Add.

    ``Sum(a, b) = a + b`` is ``Add(a, b)``, and ``Sum(a, b, c, ...)`` is ``Add(Add(Add(a, b), c), ...)``: the runtime's
    Sum adds in this order too, with the same broadcasting, so the result is the same to the bit.

    Sum has no integer kernel, Add has one, into which the Relu behind a residual vanishes (a residual net 2.4x of FP32
    for 1.6x). A Sum between float nodes had better stay one: the runtime fuses an Add and the LayerNormalization behind
    it into a kernel that is slower than the two.

    Not changed: a Sum of one value, types other than float32.
    """
    inputs = list(node.input)
    if len(inputs) < 2:
        raise NotCollapsibleError("it has one operand only")
    for name in inputs:
        editor.require_float32(name)
    total = inputs[0]
    for name in inputs[1:-1]:
        total = editor.insert_before(node, "Add", [total, name])
    editor.become(node, "Add", [total, inputs[-1]])
