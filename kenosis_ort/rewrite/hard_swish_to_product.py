"""HardSwish between integer kernels as a bounded sum and a product, its factor moved into the weights behind it.

With a slope ``a > 0`` and ``c = Clip(x + b / a; 0, 1 / a)``::

    x * HardSigmoid(x; a, b) = x * max(0, min(1, a x + b)) = a * (x * c)

and HardSwish is that with ``a = 1/6`` and ``b = 1/2``. Everything between here and the next layers with weights is
homogeneous: for ``a > 0`` pools, Relu, shapes and a product with another value give ``a * f(x)`` for ``a * x``, and a
Conv, Gemm or MatMul of ``a * x`` is one with weights ``a * W`` of ``x``. So the product ``x * c`` takes the place of
HardSwish, and all layers that it reaches get ``a * W``.

In float the operator is as good. In integer it is a float island of four passes over memory (DequantizeLinear,
HardSigmoid, Mul, QuantizeLinear: 1.25 ns an element), while the sum takes up the Clip in its requantization, and sum
and product are integer kernels (0.5 ns). MobileNetV3-Large spends a third of its time there.

Not changed: a value that a sum, a norm, an output of the graph or anything else needs that is not homogeneous, a
product with something that comes from the value itself, weights that are not constant or belong to a node that is not
named, types other than float32.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx
import onnx.numpy_helper

from kenosis_ort.graph.attributes import attribute_float
from kenosis_ort.graph.operators import HEAVY, Is, what
from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.walk import MAIN_DOMAINS
from kenosis_ort.rewrite.integer_form import IntegerForm
from kenosis_ort.rewrite.matching import NotCollapsibleError
from kenosis_ort.rewrite.rule import integer_rule


@integer_rule(
    "HardSwish",
    "HardSigmoid",
    did="HardSwish activations became integer products, their factor moved into the weights behind them",
    stays="HardSwish activations stay float between integer kernels",
)
def hard_swish_to_product(form: IntegerForm, node: onnx.NodeProto) -> None:
    """Turns each named HardSwish, and product of a value and its named HardSigmoid, into Add, Clip and Mul, in place.

    The Mul keeps the name and the output of the node, whose value is larger by a factor; so are those behind it, up to
    the layers with weights.
    """
    swish = _swish(form, node)
    if swish is None:
        return
    form.require_float32(swish.x)
    layers = _layers_behind(form, swish.last)
    _apply(form, swish, layers)


class _Swish(NamedTuple):
    """``x * HardSigmoid(x; slope, shift)``, which ``last`` computes."""

    x: str
    slope: float
    shift: float
    inner: tuple[onnx.NodeProto, ...]
    last: onnx.NodeProto


def _swish(form: IntegerForm, node: onnx.NodeProto) -> _Swish | None:
    """Returns the activation that a node is, or is the gate of; None for another gate."""
    x = node.input[0]
    if node.op_type == "HardSwish":
        return _Swish(x, 1 / 6, 0.5, (), node)
    gate = node.output[0]
    products = form.readers(gate, "Mul")
    slope, shift = attribute_float(node, "alpha", 0.2), attribute_float(node, "beta", 0.5)
    if not form.index.is_private(gate) or not products or sorted(products[0].input) != sorted((gate, x)) or slope <= 0:
        return None
    return _Swish(x, slope, shift, (node,), products[0])


def _apply(form: IntegerForm, swish: _Swish, layers: list[onnx.NodeProto]) -> None:
    for layer in layers:
        weights = array_in(form.index.constants[layer.input[1]])
        scaled = onnx.numpy_helper.from_array((weights.astype(np.float64) * swish.slope).astype(np.float32))
        form.index.store_constant(layer, 1, scaled, f"{layer.input[1]}_scaled")
    last = swish.last
    numbers = (("shift", swish.shift / swish.slope), ("low", 0.0), ("high", 1 / swish.slope))
    shift, low, high = (form.add_constant(np.float32(number), f"{last.name}_{what}") for what, number in numbers)
    moved = form.insert_before(last, "Add", [swish.x, shift])
    clipped = form.insert_before(last, "Clip", [moved, low, high])
    form.become(last, "Mul", [swish.x, clipped], inner=swish.inner)


def _layers_behind(form: IntegerForm, swish: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Returns the layers whose weights can take a factor of the value, through homogeneous operators."""
    layers: dict[str, onnx.NodeProto] = {}
    products: dict[str, onnx.NodeProto] = {}
    scaled: set[str] = set()
    stack = [swish.output[0]]
    while stack:
        value = stack.pop()
        if value in scaled:
            continue
        scaled.add(value)
        readers = form.index.readers.get(value, [])
        if form.index.is_pinned(value) or not readers:
            raise NotCollapsibleError(f"'{value}' is needed as it is")
        for reader in readers:
            if reader.domain not in MAIN_DOMAINS or list(reader.input).count(value) != 1:
                raise NotCollapsibleError(f"'{reader.name}' ({reader.op_type}) does not keep a factor")
            if reader.op_type in HEAVY and reader.input[0] == value:
                layers[reader.name] = reader
            elif reader.op_type == "Mul" or (Is.HOMOGENEOUS in what(reader) and reader.input[0] == value):
                products[reader.name] = reader
                stack += [name for name in reader.output if name]
            else:
                raise NotCollapsibleError(f"'{reader.name}' ({reader.op_type}) does not keep a factor")
    for node in products.values():
        if sum(name in scaled for name in node.input) != 1:
            raise NotCollapsibleError(f"'{node.name}' multiplies it with what comes from it")
    for layer in layers.values():
        weights = form.index.constant(layer.input[1])
        if weights is None or weights.data_type != onnx.TensorProto.FLOAT:
            raise NotCollapsibleError(f"the weights of '{layer.name}' are not constant")
        if layer.name not in form.named:
            raise NotCollapsibleError(f"'{layer.name}' is not to change")
        if any(name in scaled for name in layer.input[1:]):
            raise NotCollapsibleError(f"'{layer.name}' takes it for weights")
    return list(layers.values())
