"""A channel shuffle folded into the weights of a Conv, or written as one Gather.

Let ``y[n, c] = x[n, p[c]]`` with a permutation ``p`` (Reshape, Transpose and Reshape). With ``w`` the weights of a Conv
that reads ``y``, or that makes ``x`` from ``z``::

    sum over c of w[o, c] * y[c] = sum over c of w'[o, c] * x[c]       with  w'[o, p[c]] = w[o, c]
    y[o] = x[p[o]] = (w * z)[p[o]] = w'[o] * z                         with  w'[o] = w[p[o]],  the bias likewise

so the Conv does the shuffle for nothing. Operators that treat channels alike may lie in between, and depthwise Convs,
whose channels are then put in the same order. A Conv of ``g`` groups becomes one without groups, its weights filled up
with zeros: it multiplies ``g`` times as much. Where both sides have groups, the one with fewer input channels a group
changes, over which the runtime's grouped int8 Conv is slowest. What cannot be folded, as with a Split behind it that
takes half of the channels, becomes a Gather.

The runtime's integer kernels have the channels last, a Transpose of five dimensions takes them to the front and is slow
on bytes. ShuffleNet v1 ran at 0.69x of FP32 with it, at 1.21x with Gather, at 1.05x folded into the Conv before and at
1.43x into the one behind (an AVX512 thread with AMX). A Slice with steps in place of a Gather is slower. Float has no
use for any of it.

Not changed: shapes that are computed, types other than float32. Not folded: more than four groups, a Conv that is not
named, an order of channels that something else needs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper

from kenosis_ort.graph.constants import Is, what
from kenosis_ort.graph.opset import RewriteResult
from kenosis_ort.graph.outside import array_in
from kenosis_ort.graph.walk import attribute_int
from kenosis_ort.rewrite.matching import NotCollapsibleError
from kenosis_ort.rewrite.rule import SHAPE_OPS, Indices, IntegerForm, Selection, find_selection, has_candidate

_MOST_GROUPS = 4
_FARTHEST = 24  # values to look at for the Conv in front of a shuffle


@dataclass
class _Fold:
    """Target of a folded shuffle.

    Attributes:
        dense: The Convs that it goes into.
        depthwise: The depthwise Convs that it passes on the way there.
        behind: Whether they lie behind the shuffle.
    """

    behind: bool
    dense: list[onnx.NodeProto] = field(default_factory=list)
    depthwise: list[onnx.NodeProto] = field(default_factory=list)


def fold_channel_shuffle(
    model: onnx.ModelProto, *, nodes: Collection[str], keep_values: Collection[str] = ()
) -> RewriteResult:
    """Folds channel shuffles into named Convs, in place; other shuffles behind named Convs become a Gather.

    Args:
        model: The model to change, its nodes named, its types and shapes inferred.
        nodes: Names of the Convs that may change.
        keep_values: Values that must keep existing with their meaning.
    """
    if not has_candidate(model, nodes, "Conv"):
        return RewriteResult()
    form = IntegerForm(model, nodes, keep_values)
    for value in _ends(form):
        selection = find_selection(form, value)
        if selection is None or np.array_equal(selection.chosen, np.arange(selection.channels)):
            continue
        last = selection.path[-1]
        try:
            _fold(form, selection)
        except NotCollapsibleError as reason:
            if len(selection.path) == 1 or not _is_behind_named(form, selection.source):
                form.refuse(last, reason)
                continue
            _gather(form, selection)
        _prune(form, selection)
        form.done += 1
    return form.finish("channel shuffles were folded into Convs or became a Gather", "channel shuffles are not folded")


def _ends(form: IntegerForm) -> list[str]:
    """The values behind Transposes and Gathers that more than moving operators read, the last first."""
    found: dict[str, None] = {}
    stack = [node.output[0] for node in form.nodes("Transpose", "Gather")]
    while stack:
        value = stack.pop()
        if value not in found:
            found[value] = None
            stack += [name for node in form.readers(value, *SHAPE_OPS) for name in node.output]
    return [value for value in list(found)[::-1] if len(form.readers(value, *SHAPE_OPS)) < _reader_count(form, value)]


def _is_behind_named(form: IntegerForm, value: str) -> bool:
    """Whether one of the nearest Convs in front of a value is named."""
    stack, seen = [value], {""}
    while stack and len(seen) < _FARTHEST:
        at = stack.pop()
        node = form.index.producers.get(at)
        if at in seen or node is None:
            continue
        seen.add(at)
        if node.op_type == "Conv":
            return node.name in form.named
        stack += node.input
    return False


def _reader_count(form: IntegerForm, value: str) -> int:
    return len({id(node) for node in form.index.readers.get(value, ())})


# -- where it can go ----------------------------------------------------------------------------------------------


def _fold(form: IntegerForm, selection: Selection) -> None:
    """Folds a shuffle into Convs; raises where there are none."""
    if not selection.is_permutation:
        raise NotCollapsibleError("it leaves channels out")
    found = [_attempt(look, form, selection) for look in (_behind, _before)]
    folds = [fold for fold in found if isinstance(fold, _Fold)]
    if not folds:
        raise NotCollapsibleError("; ".join(str(reason) for reason in found))
    fold = min(folds, key=lambda f: _cost(form, f))
    for conv in fold.depthwise:
        order = np.argsort(selection.chosen) if fold.behind else selection.chosen
        _reorder(form, conv, order)
    for conv in fold.dense:
        weights = _without_groups(form, conv)
        if fold.behind:
            _store(form, conv, 1, weights[:, np.argsort(selection.chosen)])
        else:
            _store(form, conv, 1, weights)
            _reorder(form, conv, selection.chosen)
    form.index.redirect(selection.value, selection.source)


def _attempt(
    look: Callable[[IntegerForm, Selection], _Fold], form: IntegerForm, selection: Selection
) -> _Fold | NotCollapsibleError:
    try:
        return look(form, selection)
    except NotCollapsibleError as reason:
        return reason


def _cost(form: IntegerForm, fold: _Fold) -> int:
    """The most input channels a group of a Conv that would lose its groups, 0 if none would."""
    grouped = [conv for conv in fold.dense if attribute_int(conv, "group", 1) > 1]
    return max((form.index.constants[conv.input[1]].dims[1] for conv in grouped), default=0)


def _behind(form: IntegerForm, selection: Selection) -> _Fold:
    """The Convs that read the channels; raises where something else needs their order."""
    fold = _Fold(behind=True)
    stack, seen = [selection.value], set()
    while stack:
        value = stack.pop()
        if form.index.is_pinned(value):
            raise NotCollapsibleError(f"the order of channels of '{value}' is needed")
        for node in form.index.readers.get(value, ()):
            if id(node) in seen:
                continue
            seen.add(id(node))
            if _is_conv(form, node, value):
                if not _is_depthwise(form, node):
                    _check_dense(node)
                    fold.dense.append(node)
                    continue
                fold.depthwise.append(node)
            elif not _treats_channels_alike(form, node):
                raise NotCollapsibleError(f"'{node.name}' ({node.op_type}) needs the order of channels")
            stack.append(node.output[0])
    if not fold.dense:
        raise NotCollapsibleError("no Conv is behind it")
    return fold


def _before(form: IntegerForm, selection: Selection) -> _Fold:
    """The Conv that makes the channels; raises where something else needs their order."""
    fold = _Fold(behind=False)
    value = selection.source
    if form.index.is_pinned(selection.value):
        raise NotCollapsibleError(f"'{selection.value}' is needed under its name")
    while not fold.dense:
        if not form.index.is_private(value):
            raise NotCollapsibleError(f"the order of channels of '{value}' is needed elsewhere")
        node = form.index.producers.get(value)
        if node is None or not (_is_conv(form, node, node.input[0]) or _treats_channels_alike(form, node)):
            raise NotCollapsibleError(f"no Conv makes '{value}'")
        if node.op_type != "Conv":
            value = node.input[0]
        elif _is_depthwise(form, node):
            fold.depthwise.append(node)
            value = node.input[0]
        else:
            _check_dense(node)
            fold.dense.append(node)
    return fold


def _is_conv(form: IntegerForm, node: onnx.NodeProto, value: str) -> bool:
    """Whether a node is a named Conv of constant weights with ``value`` as its data only."""
    if node.op_type != "Conv" or node.name not in form.named or list(node.input).count(value) != 1:
        return False
    return node.input[0] == value and all(form.index.constant(name) is not None for name in node.input[1:] if name)


def _is_depthwise(form: IntegerForm, conv: onnx.NodeProto) -> bool:
    group = attribute_int(conv, "group", 1)
    return group > 1 and list(form.index.constants[conv.input[1]].dims[:2]) == [group, 1]


def _check_dense(conv: onnx.NodeProto) -> None:
    group = attribute_int(conv, "group", 1)
    if group > _MOST_GROUPS:
        raise NotCollapsibleError(f"'{conv.name}' has {group} groups")


def _treats_channels_alike(form: IntegerForm, node: onnx.NodeProto) -> bool:
    constants = [form.index.constant(name) for name in node.input[1:] if name]
    if any(node.output[1:]) or any(tensor is None or any(d != 1 for d in tensor.dims) for tensor in constants):
        return False
    return bool(what(node) & (Is.ACTIVATION | Is.POOL))


# -- the edits ----------------------------------------------------------------------------------------------------


def _without_groups(form: IntegerForm, conv: onnx.NodeProto) -> npt.NDArray[np.generic]:
    """Weights of a Conv for all input channels; its groups are removed."""
    weights = array_in(form.index.constants[conv.input[1]])
    group = attribute_int(conv, "group", 1)
    outputs, width = len(weights) // group, weights.shape[1]
    dense = np.zeros((len(weights), width * group, *weights.shape[2:]), weights.dtype)
    for at in range(group):
        rows = slice(at * outputs, (at + 1) * outputs)
        dense[rows, at * width : (at + 1) * width] = weights[rows]
    for stored in conv.attribute:
        if stored.name == "group":
            stored.i = 1
    return dense


def _reorder(form: IntegerForm, conv: onnx.NodeProto, order: Indices) -> None:
    """Puts the output channels of a Conv in an order."""
    for position, name in enumerate(conv.input):
        if position and name:
            _store(form, conv, position, array_in(form.index.constants[name])[order])


def _store(form: IntegerForm, conv: onnx.NodeProto, position: int, array: npt.NDArray[np.generic]) -> None:
    tensor = onnx.numpy_helper.from_array(np.ascontiguousarray(array))
    form.index.store_constant(conv, position, tensor, f"{conv.input[position]}_shuffled")


def _gather(form: IntegerForm, selection: Selection) -> None:
    """Writes a shuffle as one Gather in front of the first node that reads its result."""
    reading = {id(node) for node in form.index.readers[selection.value]}
    reader = next(node for node in form.index.nodes if id(node) in reading)
    chosen = form.add_constant(selection.chosen, f"{selection.path[-1].name}_channels")
    picked = form.insert_before(reader, "Gather", [selection.source, chosen], axis=1)
    form.index.redirect(selection.value, picked)


def _prune(form: IntegerForm, selection: Selection) -> None:
    """Removes the shape operators whose results are no longer read."""
    for node in reversed(selection.path):
        if form.is_gone(node) or any(form.index.readers.get(v) or form.index.is_pinned(v) for v in node.output if v):
            break
        form.index.remove(node)
        form.merged[node.name] = ""
