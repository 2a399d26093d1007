"""Channels of a depthwise Conv rounded up to a multiple of 16.

Let ``C`` channels be made by dense Convs, pass through depthwise Convs and operators that treat channels alike, and be
read by dense Convs only. To each value ``v`` among them channels are added that repeat its first one::

    v'[n, c] = v[n, c]  for c < C,      v'[n, c] = v[n, 0]  for C <= c < C'

- A dense Conv that makes them repeats row 0 of its weights, and its bias: output ``c >= C`` is output 0.
- A depthwise Conv, and a constant by channel, repeat their channel 0; an operator that treats channels alike computes
  the same from the same.
- A dense Conv that reads them gets columns of zeros: the sum of ``w'[o, c] v'[c]`` over ``c < C'`` is that of
  ``w[o, c] v[c]`` over ``c < C``.

So the result is exact, and the ranges of all values, and the scales of all weights by tensor, stay what they are (zeros
in place of the repetition would be as exact, but would leave channels of weights without a scale).

Float has no use for it. The runtime's int8 depthwise kernel is fast where ``C`` is a multiple of 16 only: inverted
bottlenecks of 24 to 328 channels are 1.4 to 1.9 times as fast when padded.

Not changed: channels that reach an output of the graph, a body of control flow, a value that the caller names, a node
that is not named or an operator that may mix or count channels; weights that are not constant; fewer channels than 16;
channels that would grow by more than a third.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper

from kenosis_ort.graph.constants import Is, what
from kenosis_ort.graph.opset import RewriteResult
from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.walk import MAIN_DOMAINS, attribute, attribute_int
from kenosis_ort.rewrite.matching import NotCollapsibleError
from kenosis_ort.rewrite.rule import PADDED, IntegerForm, has_candidate

_MULTIPLE = 16
_LARGEST_GROWTH = 4 / 3


@dataclass
class _Channels:
    """The values that carry the same channels, and the constants to change with them.

    Attributes:
        rows: Dense Convs that make the channels.
        columns: Dense Convs that read them.
        depthwise: Depthwise Convs in between.
        operands: Constants by channel, as (node, position, axis).
        reason: Why they cannot be padded, None if they can.
    """

    count: int
    values: set[str] = field(default_factory=set)
    rows: dict[str, onnx.NodeProto] = field(default_factory=dict)
    columns: dict[str, onnx.NodeProto] = field(default_factory=dict)
    depthwise: dict[str, onnx.NodeProto] = field(default_factory=dict)
    operands: list[tuple[onnx.NodeProto, int, int]] = field(default_factory=list)
    reason: str | None = None

    def refuse(self, reason: str) -> None:
        self.reason = self.reason or reason


def pad_depthwise(
    model: onnx.ModelProto, *, nodes: Collection[str], keep_values: Collection[str] = ()
) -> RewriteResult:
    """Pads the channels of the named depthwise Convs to a multiple of 16, in place.

    Every node whose weights change, the dense Convs on both sides among them, has to be named. Nodes keep their
    names; values and weights of another shape get `PADDED` behind theirs.

    Args:
        model: The model to change, its nodes named, its types and shapes inferred; the shapes of the values that
            get more channels are updated.
        nodes: Names of the nodes that may change.
        keep_values: Values that must keep existing with their meaning.
    """
    if not has_candidate(model, nodes, "Conv"):
        return RewriteResult()
    form = IntegerForm(model, nodes, keep_values)
    seen: dict[str, _Channels] = {}
    grown: dict[str, int] = {}
    for conv in form.candidates("Conv"):
        count = _depthwise_channels(form, conv)
        if count is None or count % _MULTIPLE == 0 or count < _MULTIPLE:
            continue
        found = seen.get(conv.input[0])
        if found is None:
            found = _collect(form, conv, count)
            seen.update(dict.fromkeys(found.values, found))
            if found.reason is None:
                _pad(form, found)
                form.done += len(found.depthwise)
                grown.update(dict.fromkeys(found.values, _padded(count)))
        if found.reason is not None:
            form.refuse(conv, found.reason)
    result = form.finish(
        "depthwise Convs got channels up to a multiple of 16", "depthwise Convs keep their odd channel count"
    )
    if grown:
        _rename(model, {value: form.index.fresh_name(f"{value}{PADDED}") for value in sorted(grown)}, grown)
    return result


def _rename(model: onnx.ModelProto, new: Mapping[str, str], grown: Mapping[str, int]) -> None:
    """Gives values their new names and channels; bodies of control flow read none of them."""
    for node in model.graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                if name in new:
                    names[index] = new[name]
    for value in model.graph.value_info:
        if value.name in new:
            value.type.tensor_type.shape.dim[1].dim_value = grown[value.name]
            value.name = new[value.name]


def _padded(count: int) -> int:
    return -(-count // _MULTIPLE) * _MULTIPLE


def _depthwise_channels(form: IntegerForm, conv: onnx.NodeProto) -> int | None:
    """The channel count of a depthwise Conv with as many outputs, None for another node."""
    if conv.op_type != "Conv" or conv.domain not in MAIN_DOMAINS:
        return None
    weights = form.index.constant(conv.input[1])
    group = attribute_int(conv, "group", 1)
    if weights is None or group == 1 or list(weights.dims[:2]) != [group, 1]:
        return None
    return group


# -- finding what belongs together --------------------------------------------------------------------------------


def _collect(form: IntegerForm, conv: onnx.NodeProto, count: int) -> _Channels:
    """All that carries the channels of a depthwise Conv; every value is visited, so each set only once."""
    found = _Channels(count)
    if _padded(count) > _LARGEST_GROWTH * count:
        found.refuse(f"{count} channels would become {_padded(count)}")
    visited: set[str] = set()
    stack = [conv.input[0]]
    while stack:
        value = stack.pop()
        if value in found.values:
            continue
        found.values.add(value)
        _check_value(form, found, value)
        producer = form.index.producers.get(value)
        for node in ([producer] if producer is not None else []) + form.index.readers.get(value, []):
            if node.op_type == "Conv" and node.domain in MAIN_DOMAINS:
                stack += _visit_conv(form, found, node, makes=node is producer)
            elif node.name not in visited:
                visited.add(node.name)
                stack += _visit(form, found, node)
    for node in (
        *found.rows.values(),
        *found.columns.values(),
        *found.depthwise.values(),
        *(o[0] for o in found.operands),
    ):
        if node.name not in form.named:
            found.refuse(f"'{node.name}' carries its channels and is not to change")
    return found


def _check_value(form: IntegerForm, found: _Channels, value: str) -> None:
    try:
        if form.picture(value).channels != found.count:
            raise NotCollapsibleError(f"'{value}' is not known to have {found.count} channels")
    except NotCollapsibleError as reason:
        found.refuse(str(reason))
    if form.index.producers.get(value) is None or form.index.is_pinned(value):
        found.refuse(f"its channels reach '{value}', which is needed as it is")


def _visit(form: IntegerForm, found: _Channels, node: onnx.NodeProto) -> list[str]:
    """Notes what has to change at a node that makes or reads some of the values; returns further such values."""
    if not _treats_channels_alike(form, node):
        found.refuse(f"'{node.name}' ({node.op_type}) may need its channels as they are")
        return []
    more = [node.output[0]]
    for position, name in enumerate(node.input):
        if not name:
            continue
        constant = form.index.constant(name)
        dims = form.dims(name) if constant is None else tuple(constant.dims)
        if dims is None:
            found.refuse(f"the rank of '{name}' is not known")
        elif len(dims) < 3 or dims[-3] == 1:
            continue  # one for all channels
        elif constant is None:
            more.append(name)
        elif dims[-3] == found.count:
            found.operands.append((node, position, len(dims) - 3))
        else:
            found.refuse(f"'{name}' is not one number a channel")
    return more


def _visit_conv(form: IntegerForm, found: _Channels, conv: onnx.NodeProto, *, makes: bool) -> list[str]:
    """As `_visit`, for a Conv that makes some of the values or (visited once more if both) reads them."""
    if any(name in found.values for name in conv.input[1:]):
        found.refuse(f"'{conv.name}' takes its channels for weights")
        return []
    weights = form.index.constant(conv.input[1])
    bias = conv.input[2] if len(conv.input) > 2 else ""
    if weights is None or len(weights.dims) != 4 or (bias and form.index.constant(bias) is None):
        found.refuse(f"the weights of '{conv.name}' are not constant")
        return []
    if _depthwise_channels(form, conv) == found.count:
        found.depthwise[conv.name] = conv
        return [conv.input[0], conv.output[0]]
    if attribute_int(conv, "group", 1) != 1:
        found.refuse(f"'{conv.name}' splits its channels into groups")
        return []
    (found.rows if makes else found.columns)[conv.name] = conv
    return []


def _treats_channels_alike(form: IntegerForm, node: onnx.NodeProto) -> bool:
    if any(node.output[1:]):
        return False
    if node.op_type == "ReduceMean" and node.domain in MAIN_DOMAINS:
        stored = attribute(node, "axes")
        given = form.array(node.input[1]) if len(node.input) > 1 else None
        axes = list(stored.ints) if stored is not None else [] if given is None else given.reshape(-1).tolist()
        return sorted(axis % 4 for axis in axes) == [2, 3] and attribute_int(node, "keepdims", 1) == 1
    return bool(what(node) & (Is.ELEMENTWISE | Is.POOL))


# -- changing it --------------------------------------------------------------------------------------------------


def _pad(form: IntegerForm, found: _Channels) -> None:
    extra = _padded(found.count) - found.count
    for conv in found.rows.values():
        _repeat(form, conv, 1, 0, extra)
        _repeat(form, conv, 2, 0, extra)
    for conv in found.depthwise.values():
        _repeat(form, conv, 1, 0, extra)
        _repeat(form, conv, 2, 0, extra)
        for group in conv.attribute:
            if group.name == "group":
                group.i = found.count + extra
    for conv in found.columns.values():
        weights = array_in(form.index.constants[conv.input[1]])
        zeros = np.zeros((weights.shape[0], extra, *weights.shape[2:]), weights.dtype)
        _store(form, conv, 1, np.concatenate((weights, zeros), axis=1))
    for node, position, axis in found.operands:
        _repeat(form, node, position, axis, extra)


def _repeat(form: IntegerForm, node: onnx.NodeProto, position: int, axis: int, extra: int) -> None:
    """Repeats the first channel of a node's constant input along an axis; an absent input stays absent."""
    if position >= len(node.input) or not node.input[position]:
        return
    array = array_in(form.index.constants[node.input[position]])
    first = np.repeat(array.take([0], axis=axis), extra, axis=axis)
    _store(form, node, position, np.concatenate((array, first), axis=axis))


def _store(form: IntegerForm, node: onnx.NodeProto, position: int, array: npt.NDArray[np.generic]) -> None:
    tensor = onnx.numpy_helper.from_array(np.ascontiguousarray(array))
    form.index.store_constant(node, position, tensor, f"{node.input[position]}{PADDED}")
