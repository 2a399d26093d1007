"""Bounds: rows of them become one Clip, and hard activations Clips that vanish into the kernel before them."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kenosis_ort.graph.constants import HEAVY, Is, what
from kenosis_ort.graph.view import channel_axis, ir, optional
from kenosis_ort.graph.walk import MAIN_DOMAINS
from kenosis_ort.rewrite.rule import Editor, NotCollapsibleError, known, operand, other_operand, refuse_if, rule

_BOUNDS = ("Min", "Max", "Relu", "Clip")
_OPEN = (-math.inf, math.inf)


class _Bounds(NamedTuple):
    """``low <= high`` around a value."""

    value: ir.Value
    low: float
    high: float


@rule(
    *_BOUNDS,
    did="rows of Min, Max, Relu and Clip became one Clip or Relu each",
    stays="rows of Min and Max stay",
    backwards=True,
)
def collapse_clip(editor: Editor, last: ir.Node) -> None:
    """Bounds, written as Min, Max, Relu and Clip in a row, collapsed into one Clip or Relu.

    With ``Clip(x; l, h) = min(max(x, l), h)`` and ``l <= h``, all of them are Clips::

        Max(x, l) = Clip(x; l, inf)      Min(x, h) = Clip(x; -inf, h)      Relu(x) = Clip(x; 0, inf)
        Clip(Clip(x; a, b); l, h) = Clip(x; min(max(a, l), h), min(max(b, l), h))

    so that ``Min(Max(x, 0), 6)`` is ``Clip(x; 0, 6)`` and ``Max(x, 0)`` is ``Relu(x)``; the same to the bit. Some
    exporters write Relu6 so. Min and Max are float operators to the runtime; a Clip or Relu vanishes into the
    requantization of the Conv before it.

    Not collapsed: bounds that are computed or not one number, a lower bound above the upper one, a type other than
    float32, an inner value that another node, a body of control flow, the graph's outputs or the caller need. A Clip or
    Relu alone is left as it is.
    """
    bounds = _bounds(editor, last)
    if bounds is None:
        return
    inner: list[ir.Node] = []
    while (node := editor.producer(bounds.value, *_BOUNDS)) is not None and editor.is_private(bounds.value):
        before = _bounds(editor, node)
        if before is None:
            break
        low, high = (min(max(bound, bounds.low), bounds.high) for bound in before[1:])
        bounds = _Bounds(before.value, low, high)
        inner.append(node)
    if not inner and last.op_type in ("Relu", "Clip"):
        return
    editor.require_float32(bounds.value)
    editor.require_no_growth(bounds.value, [value for node in (*inner, last) for value in node.inputs])
    _write(editor, last, bounds, inner)


def _bounds(editor: Editor, node: ir.Node) -> _Bounds | None:
    """Value and bounds of a clipping node, None if its bounds are not constant numbers in order."""
    if node.op_type == "Relu":
        return _Bounds(operand(node, 0), 0.0, math.inf)
    if node.op_type == "Clip":
        given = [(optional(node, at), infinity) for at, infinity in enumerate(_OPEN, 1)]
        low, high = (infinity if value is None else editor.scalar(value) for value, infinity in given)
        if low is None or high is None or low > high:
            return None
        return _Bounds(operand(node, 0), low, high)
    for value in node.inputs:
        bound = editor.scalar(other_operand(node, value))
        if value is not None and bound is not None and editor.constant(value) is None:
            return _Bounds(value, bound, math.inf) if node.op_type == "Max" else _Bounds(value, -math.inf, bound)
    return None


def _write(editor: Editor, last: ir.Node, bounds: _Bounds, inner: Collection[ir.Node]) -> None:
    if bounds.low == 0.0 and math.isinf(bounds.high):
        editor.become(last, "Relu", [bounds.value], inner=inner)
        return
    stored = [
        None if math.isinf(bound) else editor.add_constant(np.array(bound, np.float32), f"{last.name}_{side}")
        for side, bound in (("min", bounds.low), ("max", bounds.high))
    ]
    editor.become(last, "Clip", [bounds.value, *(stored if stored[1] else stored[:1])], inner=inner)


@rule("HardSigmoid", did="HardSigmoid gates became Clips", stays="HardSigmoid gates stay float between integer kernels")
def hard_sigmoid_to_clip(editor: Editor, gate: ir.Node) -> None:
    """HardSigmoid behind a Conv or Gemm as Clip, its slope and shift moved into the weights.

    With ``y[c] = x * W[c] + d[c]`` and a slope ``a > 0``::

        HardSigmoid(y) = max(0, min(1, a * y + b)) = Clip(x * (a W) + (a d + b); 0, 1)

    In float it makes no difference. In integer HardSigmoid is a float island, while a Clip vanishes into the
    requantization of the layer; and the requantization then spends all its steps on the values between the bounds.
    Squeeze-and-excite gates end like that.

    Not changed: a value that anything else needs, weights that are not constant, ``alpha`` and ``beta`` of Gemm other
    than 1, a slope that is not positive, types other than float32.
    """
    value = operand(gate, 0)
    layer = editor.producer(value, "Conv", "Gemm")
    if layer is None or not editor.may_change(layer):
        return
    editor.require_float32(value)
    editor.require_private(value)
    slope, shift = gate.attributes.get_float("alpha", 0.2), gate.attributes.get_float("beta", 0.5)
    refuse_if(slope <= 0.0, "its slope is not positive")
    weights = editor.array(layer.inputs[1])
    given = optional(layer, 2)
    bias = editor.array(given) if given else np.zeros(1)
    if weights is None or bias is None or weights.dtype != np.float32:
        raise NotCollapsibleError(f"the weights of '{layer.name}' are not constant")
    if any(layer.attributes.get_float(name, 1.0) != 1.0 for name in ("alpha", "beta")):
        raise NotCollapsibleError(f"'{layer.name}' has factors of its own")
    channels = weights.shape[channel_axis(layer)]
    refuse_if(bias.size not in (1, channels), f"the bias of '{layer.name}' is not one number a channel")
    moved = np.broadcast_to(bias.astype(np.float64).reshape(-1) * slope + shift, channels)
    scaled = (weights.astype(np.float64) * slope).astype(np.float32)
    editor.store_array(layer, 1, scaled, f"{operand(layer, 1).name}_gate")
    editor.store_array(layer, 2, moved.astype(np.float32), f"{given.name if given else f'{layer.name}_bias'}_gate")
    low, high = (editor.add_constant(np.float32(number), f"{gate.name}_{number:g}") for number in (0, 1))
    editor.become(gate, "Clip", [value, low, high])


@rule(
    "HardSwish",
    "HardSigmoid",
    did="HardSwish activations became integer products, their factor moved into the weights behind them",
    stays="HardSwish activations stay float between integer kernels",
)
def hard_swish_to_product(editor: Editor, node: ir.Node) -> None:
    """HardSwish between integer kernels as a bounded sum and a product, its factor moved into the weights behind it.

    With a slope ``a > 0`` and ``c = Clip(x + b / a; 0, 1 / a)``::

        x * HardSigmoid(x; a, b) = x * max(0, min(1, a x + b)) = a * (x * c)

    and HardSwish is that with ``a = 1/6`` and ``b = 1/2``. Everything between here and the next layers with weights is
    homogeneous: for ``a > 0`` pools, Relu, shapes and a product with another value give ``a * f(x)`` for ``a * x``, and
    a Conv, Gemm or MatMul of ``a * x`` is one with weights ``a * W`` of ``x``. So the product ``x * c`` takes the place
    of HardSwish, and all layers that it reaches get ``a * W``.

    In float the operator is as good. In integer it is a float island of four passes over memory (DequantizeLinear,
    HardSigmoid, Mul, QuantizeLinear: 1.25 ns an element), while the sum takes up the Clip in its requantization, and
    sum and product are integer kernels (0.5 ns). MobileNetV3-Large spends a third of its time there.

    Not changed: a value that a sum, a norm, an output of the graph or anything else needs that is not homogeneous, a
    product with something that comes from the value itself, weights that are not constant or belong to a node that is
    not named, types other than float32.
    """
    inner: tuple[ir.Node, ...] = ()
    x, last, slope, shift = operand(node, 0), node, 1 / 6, 0.5
    if node.op_type == "HardSigmoid":
        gate = node.outputs[0]
        products = editor.readers_of(gate, "Mul")
        slope, shift = node.attributes.get_float("alpha", 0.2), node.attributes.get_float("beta", 0.5)
        is_gated = editor.is_private(gate) and bool(products) and other_operand(products[0], gate) is x
        if not is_gated or slope <= 0:
            return
        last, inner = products[0], (node,)
    editor.require_float32(x)
    for layer, weights in _layers_behind(editor, last):
        scaled = (weights.astype(np.float64) * slope).astype(np.float32)
        editor.store_array(layer, 1, scaled, f"{operand(layer, 1).name}_scaled")
    numbers = (("shift", shift / slope), ("low", 0.0), ("high", 1 / slope))
    moved_by, low, high = (editor.add_constant(np.float32(number), f"{last.name}_{what}") for what, number in numbers)
    moved = editor.insert_before(last, "Add", [x, moved_by])
    clipped = editor.insert_before(last, "Clip", [moved, low, high])
    editor.become(last, "Mul", [x, clipped], inner=inner)


def _layers_behind(editor: Editor, swish: ir.Node) -> list[tuple[ir.Node, npt.NDArray[np.generic]]]:
    """The layers whose weights can take a factor of the value, through homogeneous operators, and these weights."""
    layers: dict[str, ir.Node] = {}
    products: dict[str, ir.Node] = {}
    scaled: set[ir.Value] = set()
    stack = [swish.outputs[0]]
    while stack:
        value = stack.pop()
        if value in scaled:
            continue
        scaled.add(value)
        readers = editor.readers(value)
        refuse_if(editor.is_pinned(value) or not readers, f"'{value.name}' is needed as it is")
        for reader in readers:
            if reader.domain not in MAIN_DOMAINS or list(reader.inputs).count(value) != 1:
                raise NotCollapsibleError(f"'{reader.name}' ({reader.op_type}) does not keep a factor")
            if reader.op_type in HEAVY and reader.inputs[0] is value:
                layers[reader.name or ""] = reader
            elif reader.op_type == "Mul" or (Is.HOMOGENEOUS in what(reader) and reader.inputs[0] is value):
                products[reader.name or ""] = reader
                stack += [output for output in reader.outputs if output.name]
            else:
                raise NotCollapsibleError(f"'{reader.name}' ({reader.op_type}) does not keep a factor")
    for node in products.values():
        if sum(read in scaled for read in node.inputs) != 1:
            raise NotCollapsibleError(f"'{node.name}' multiplies it with what comes from it")
    found = []
    for layer in layers.values():
        variable = f"the weights of '{layer.name}' are not constant"
        weights = known(editor.array(layer.inputs[1]), variable)
        refuse_if(weights.dtype != np.float32, variable)
        refuse_if(not editor.may_change(layer), f"'{layer.name}' is not to change")
        refuse_if(any(read in scaled for read in layer.inputs[1:]), f"'{layer.name}' takes it for weights")
        found.append((layer, weights))
    return found
