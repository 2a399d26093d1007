"""Transposes among activations: what stands between two that cancel computes in the order of axes outside of them."""

import math
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kenosis_ort.graph.constants import Is, what
from kenosis_ort.graph.live import Attribute
from kenosis_ort.graph.view import further_outputs, ir, optional
from kenosis_ort.rewrite.rule import Editor, operand, rule

Order = tuple[int, ...]
Array = npt.NDArray[np.generic]

_OPSET = 13  # Softmax over one axis
_OVER_AN_AXIS = ("Concat", "Softmax", "LogSoftmax")
_READ_THE_FIRST_ALONE = ("Clip", "LogSoftmax", "Softmax")


class _Form(NamedTuple):
    """A node in another order of axes.

    Attributes:
        turned: Positions of the inputs that have the axes.
        attributes: Attributes that name axes, as they are then.
        constants: The same of constant inputs, by position.
    """

    turned: Sequence[int]
    attributes: dict[str, Attribute]
    constants: dict[int, Array]


class _Region(NamedTuple):
    """Nodes that are connected with each other, and the Transposes in front of them.

    Attributes:
        transposes: Those that the nodes read.
        nodes: The nodes, in order.
    """

    transposes: list[ir.Node]
    nodes: dict[ir.Node, _Form]


@rule(
    "Transpose",
    did="Transposes cancelled out: what stood between them computes in the other order of axes",
    least_opset=_OPSET,
    whole=True,
)
def cancel_transposes(editor: Editor) -> None:
    """Nodes between Transposes in the order of axes that stands outside of them.

    For a node ``f`` that treats all axes alike, or names those that it does not, with ``f'`` the same with its axes and
    constants in the other order, and an order ``P``::

        f(Transpose(x; P), Transpose(y; P), c)     = Transpose(f'(x, y, Transpose(c; P^-1)); P)
        Transpose(Transpose(x; P); P^-1)           = x

    Nodes that such a step leads to one another are changed as one, where fewer numbers are moved then: a Transpose goes
    with its last reader, one into the old order is put behind each value that something else needs in it.

    Exporters of TensorFlow, whose channels come last, put a Transpose on either side of each Conv and leave some there:
    around the hard swish of Keras. In an integer model each one is a step of its own over bytes, nothing is fused with
    the Conv, and its padding, means and biases are not recognized: MobileNetV3-Small at 128x128 0.83x of FP32, without
    them 1.8x (one AVX2 thread). ONNX Runtime moves Transposes as well, after the quantizer has placed Q and DQ.

    Not changed: nodes with several outputs, reductions that drop axes, axes or padding that are computed.
    """
    while any(_cancel(editor, order) for order in dict.fromkeys(filter(None, map(_order, editor.graph)))):
        pass  # a region that is turned may have met another one


def _cancel(editor: Editor, order: Order) -> bool:
    """Changes the regions behind Transposes of one order that it pays for; whether there was one."""
    paying = [region for region in _regions(editor, order) if _saved(editor, region, order) > 0]
    for region in paying:
        _turn(editor, region, order)
    return bool(paying)


def _order(node: ir.Node) -> Order | None:
    """The order of a Transpose; None of other nodes, and if it is not known."""
    if node.op_type != "Transpose" or node.domain:
        return None
    rank = 0 if node.inputs[0] is None or node.inputs[0].shape is None else len(node.inputs[0].shape)
    return tuple(node.attributes.get_ints("perm", tuple(reversed(range(rank))))) or None


def _back(order: Order) -> Order:
    return tuple(int(axis) for axis in np.argsort(order))


# -- what can be turned -------------------------------------------------------------------------------------------


def _regions(editor: Editor, order: Order) -> Iterator[_Region]:
    """The regions behind Transposes of an order."""
    nodes, regions = list(editor.graph), dict[ir.Value, _Region]()
    for node in nodes:
        if _order(node) == order and editor.may_change(node) and node.inputs[0] not in regions:
            regions[node.outputs[0]] = _Region([node], {})
            continue
        form = _form(editor, node, order, regions.keys())
        if form is None:
            continue
        met = [regions[value] for at in form.turned if (value := operand(node, at)) in regions]
        whole = met[0]
        for region in met[1:]:
            if region is not whole:
                whole.transposes.extend(region.transposes)
                whole.nodes.update(region.nodes)
                regions.update({value: whole for value, old in regions.items() if old is region})
        whole.nodes[node] = form
        regions[node.outputs[0]] = whole
    for region in {id(region): region for region in regions.values()}.values():
        yield _Region(region.transposes, {node: region.nodes[node] for node in nodes if node in region.nodes})


def _form(editor: Editor, node: ir.Node, order: Order, turned: Set[ir.Value]) -> _Form | None:
    """A node that reads a turned value in the order before it; None where it has none."""
    if turned.isdisjoint(node.inputs) or further_outputs(node) or not editor.may_change(node):
        return None
    form = _with_axes(editor, node, order)
    if form is None or turned.isdisjoint(operand(node, at) for at in form.turned):
        return None
    for at in form.turned:
        value = operand(node, at)
        array = editor.array(value)
        if array is None or array.ndim > len(order):
            if value not in turned and editor.rank(value) != len(order):
                return None
        elif array.size != 1:
            whole = array.reshape((1,) * (len(order) - array.ndim) + array.shape)  # it is broadcast over the axes
            form.constants[at] = whole.transpose(_back(order))
    return form


def _with_axes(editor: Editor, node: ir.Node, order: Order) -> _Form | None:
    """A node with its axes named in the order before; None where it has other ones."""
    kind, keepdims = what(node), node.attributes.get_int("keepdims", 1)
    form = _Form(range(len(node.inputs)), {}, {})
    if node.op_type == "Pad":
        amounts, given = editor.array(operand(node, 1)), optional(node, 3)
        if amounts is None:
            return None
        if given is None:
            return _Form([0], {}, {1: amounts.reshape(2, -1)[:, _back(order)].reshape(-1)})
        axes = editor.array(given)
        return None if axes is None else _Form([0], {}, {3: np.array(order, axes.dtype)[axes]})
    if Is.REDUCTION in kind and keepdims:
        given = optional(node, 1)
        if given is None:
            named = [order[axis] for axis in node.attributes.get_ints("axes", ())]
            return _Form([0], {"axes": sorted(named)} if named else {}, {})
        axes = editor.array(given)
        return None if axes is None else _Form([0], {}, {1: np.sort(np.array(order, axes.dtype)[axes])})
    if node.op_type in _OVER_AN_AXIS:
        axis = node.attributes.get("axis")
        form.attributes["axis"] = order[-1 if axis is None else axis.as_int()]
    elif not kind & (Is.ACTIVATION | Is.ELEMENTWISE) or node.op_type == "Dropout":
        return None
    return form._replace(turned=[0]) if node.op_type in _READ_THE_FIRST_ALONE else form


# -- what it pays -------------------------------------------------------------------------------------------------


def _saved(editor: Editor, region: _Region, order: Order) -> int:
    """Numbers that are moved less."""
    values = [node.outputs[0] for node in (*region.transposes, *region.nodes)]
    saved, foreign = 0, dict[ir.Value, None]()
    for value in values:
        outside = [reader for reader in editor.readers(value) if reader not in region.nodes]
        cancelled = [reader for reader in outside if _is_inverse(editor, reader, order)]
        saved += len(cancelled) * _size(editor, value)
        needed = editor.is_pinned(value) or len(cancelled) < len(outside)
        if value.producer() in region.nodes:
            saved -= needed * _size(editor, value)
        elif not needed and editor.readers(value):
            saved += _size(editor, value)
    for node, form in region.nodes.items():
        foreign |= dict.fromkeys(operand(node, at) for at in form.turned if editor.constant(operand(node, at)) is None)
    return saved - sum(_size(editor, value) for value in foreign if value not in values)


def _size(editor: Editor, value: ir.Value) -> int:
    """The numbers in a value, dimensions that are not known left out."""
    return math.prod(size for size in editor.dims(value) or () if size is not None)


def _is_inverse(editor: Editor, node: ir.Node, order: Order) -> bool:
    """Whether a node is a Transpose that undoes another one, and may go."""
    return _order(node) == _back(order) and editor.may_change(node) and not editor.is_pinned(node.outputs[0])


# -- the edits ----------------------------------------------------------------------------------------------------


def _turn(editor: Editor, region: _Region, order: Order) -> None:
    """Puts a region into the order before its Transposes."""
    before, foreign = {node.outputs[0]: operand(node, 0) for node in region.transposes}, dict[ir.Value, ir.Value]()
    for node, form in region.nodes.items():
        for at in form.turned:
            value = operand(node, at)
            if editor.constant(value) is not None:
                continue
            if value not in before and value not in foreign:
                foreign[value] = editor.insert_before(node, "Transpose", [value], perm=_back(order))
                _describe(foreign[value], value, order)
            editor.read(node, at, before[value] if value in before else foreign[value])
        for at, array in form.constants.items():
            editor.store_array(node, at, array, f"{operand(node, at).name}_transposed")
        for name, given in form.attributes.items():
            editor.set_attribute(node, name, given)
        value = node.outputs[0]
        taken = editor.hand_over(value, f"{value.name}_transposed")
        _describe(value, taken, order)
        before[taken] = value
    for old, value in before.items():
        for reader in editor.readers(old):
            if _is_inverse(editor, reader, order):
                editor.redirect(reader.outputs[0], value)
                editor.drop([reader])
                editor.done += 1
        maker = value.producer()
        if maker in region.nodes and (editor.readers(old) or editor.is_pinned(old)):
            editor.append_behind(maker, "Transpose", [value], output=old, nearest=True, perm=order)
    unread = [t for t in region.transposes if not editor.readers(t.outputs[0]) and not editor.is_pinned(t.outputs[0])]
    editor.drop(unread)
    editor.done += len(unread)


def _describe(value: ir.Value, turned: ir.Value, order: Order) -> None:
    """Gives a value the type of the value that it is transposed into, and its shape in the order before."""
    value.type = turned.type
    value.shape = None if turned.shape is None else ir.Shape([turned.shape[axis] for axis in _back(order)])
