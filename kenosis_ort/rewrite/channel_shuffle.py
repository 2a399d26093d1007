"""Channel shuffles: found by what they do to a picture of numbered elements, folded into Convs or made one Gather.

A channel shuffle is written as Reshape, Transpose and Reshape, often with a Split, Slice or Gather behind it. Instead
of knowing the spellings, the operators are applied to a picture whose elements are all different, and the result is
compared with ``y[n, c] = x[n, chosen[c]]``. A height, a width or a batch that is not known counts as a small number,
each as another one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kenosis_ort.graph.constants import Is, what
from kenosis_ort.graph.view import further_outputs, ir, moved_by
from kenosis_ort.rewrite.rule import Editor, NotCollapsibleError, operand, refuse_if, rule

Indices = npt.NDArray[np.int64]

SHAPE_OPS = ("Reshape", "Transpose", "Gather", "Slice", "Split", "Squeeze", "Unsqueeze")

_RANK = 4
_LONGEST = 6
_MOST_ELEMENTS = 1 << 23
_STAND_INS = (2, 0, 3, 5)  # for unknown dimensions of [N, C, H, W]; channels have to be known


class Selection(NamedTuple):
    """``value`` is ``source`` with only the channels ``chosen``, in this order.

    Attributes:
        chosen: For each channel of the value, the channel of the source.
        path: The nodes in between, from the source to the value.
    """

    source: ir.Value
    value: ir.Value
    chosen: Indices
    channels: int
    path: tuple[ir.Node, ...]


def find_selection(editor: Editor, value: ir.Value) -> Selection | None:
    """Channels that a value of four dimensions selects from the farthest value that it can be traced to, if any."""
    path: list[ir.Node] = []
    found = None
    at = value
    while len(path) < _LONGEST and (node := editor.producer(at, *SHAPE_OPS)) is not None:
        path.insert(0, node)
        at = operand(node, 0)
        try:
            chosen = _chosen(editor, at, value, path)
        except NotCollapsibleError:
            continue
        if chosen is not None:
            found = Selection(at, value, chosen, editor.picture(at).channels or 0, tuple(path))
    return found


def _chosen(editor: Editor, source: ir.Value, value: ir.Value, path: Sequence[ir.Node]) -> Indices | None:
    editor.picture(source)
    dims = editor.dims(source)
    if dims is None or not dims[1]:
        return None
    shape = [stand_in if dim is None else dim for dim, stand_in in zip(dims, _STAND_INS, strict=True)]
    if np.prod(shape, dtype=np.float64) > _MOST_ELEMENTS:
        return None
    picture: Indices = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    moved = picture
    for node, after in zip(path, (*(operand(n, 0) for n in path[1:]), value), strict=True):
        results = moved_by(node, [moved, *(editor.array(given) for given in node.inputs[1:] if given is not None)])
        if results is None:
            return None
        moved = results[list(node.outputs).index(after)]
    if moved.ndim != _RANK or moved.shape[0] != shape[0] or moved.shape[2:] != tuple(shape[2:]):
        return None
    chosen: Indices = moved[0, :, 0, 0] // (shape[2] * shape[3])
    return chosen if np.array_equal(picture[:, chosen], moved) else None


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
    dense: list[ir.Node] = field(default_factory=list)
    depthwise: list[ir.Node] = field(default_factory=list)


@rule(
    "Conv",
    did="channel shuffles were folded into Convs or became a Gather",
    stays="channel shuffles are not folded",
    whole=True,
)
def fold_channel_shuffle(editor: Editor) -> None:
    """A channel shuffle folded into the weights of a Conv, or written as one Gather.

    Let ``y[n, c] = x[n, p[c]]`` with a permutation ``p`` (Reshape, Transpose and Reshape). With ``w`` the weights of a
    Conv that reads ``y``, or that makes ``x`` from ``z``::

        sum over c of w[o, c] * y[c] = sum over c of w'[o, c] * x[c]       with  w'[o, p[c]] = w[o, c]
        y[o] = x[p[o]] = (w * z)[p[o]] = w'[o] * z                         with  w'[o] = w[p[o]],  the bias likewise

    so the Conv does the shuffle for nothing. Operators that treat channels alike may lie in between, and depthwise
    Convs, whose channels are then put in the same order. A Conv of ``g`` groups becomes one without groups, its weights
    filled up with zeros: it multiplies ``g`` times as much. Where both sides have groups, the one with fewer input
    channels a group changes, over which the runtime's grouped int8 Conv is slowest. What cannot be folded, as with a
    Split behind it that takes half of the channels, becomes a Gather.

    The runtime's integer kernels have the channels last, a Transpose of five dimensions takes them to the front and is
    slow on bytes. ShuffleNet v1 ran at 0.69x of FP32 with it, at 1.21x with Gather, at 1.05x folded into the Conv
    before and at 1.43x into the one behind (an AVX512 thread with AMX). A Slice with steps in place of a Gather is
    slower. Float has no use for any of it.

    Not changed: shapes that are computed, types other than float32. Not folded: more than four groups, a Conv that is
    not named, an order of channels that something else needs.
    """
    for value in _ends(editor):
        selection = find_selection(editor, value)
        if selection is None or np.array_equal(selection.chosen, np.arange(selection.channels)):
            continue
        last = selection.path[-1]
        try:
            _fold(editor, selection)
        except NotCollapsibleError as reason:
            if len(selection.path) == 1 or not _is_behind_named(editor, selection.source):
                editor.refuse(last, reason)
                continue
            _gather(editor, selection)
        editor.drop_unread([selection.value], "")
        editor.done += 1


def _ends(editor: Editor) -> list[ir.Value]:
    """The values behind Transposes and Gathers that more than moving operators read, the last first."""
    found: dict[ir.Value, None] = {}
    stack = [node.outputs[0] for node in editor.find("Transpose", "Gather")]
    while stack:
        value = stack.pop()
        if value not in found:
            found[value] = None
            stack += [output for node in editor.readers_of(value, *SHAPE_OPS) for output in node.outputs]
    return [v for v in reversed(found) if len(editor.readers_of(v, *SHAPE_OPS)) < len({*editor.readers(v)})]


def _is_behind_named(editor: Editor, value: ir.Value) -> bool:
    """Whether one of the nearest Convs in front of a value is named."""
    stack: list[ir.Value | None] = [value]
    seen: set[ir.Value | None] = {None}
    while stack and len(seen) < _FARTHEST:
        at = stack.pop()
        node = None if at is None else at.producer()
        if at in seen or node is None:
            continue
        seen.add(at)
        if node.op_type == "Conv":
            return editor.may_change(node)
        stack += node.inputs
    return False


# -- where it can go ----------------------------------------------------------------------------------------------


def _fold(editor: Editor, selection: Selection) -> None:
    """Folds a shuffle into Convs; raises where there are none."""
    refuse_if(sorted(selection.chosen) != [*range(selection.channels)], "it leaves channels out")
    folds, reasons = list[_Fold](), list[str]()
    for look in (_behind, _before):
        try:
            fold = look(editor, selection)
        except NotCollapsibleError as reason:
            reasons.append(str(reason))
            continue
        folds.append(fold)
    refuse_if(not folds, "; ".join(reasons))
    fold = min(folds, key=lambda f: _cost(editor, f))
    for conv in fold.depthwise:
        order = np.argsort(selection.chosen) if fold.behind else selection.chosen
        _reorder(editor, conv, order)
    for conv in fold.dense:
        weights = _without_groups(editor, conv)
        if fold.behind:
            _store(editor, conv, 1, weights[:, np.argsort(selection.chosen)])
        else:
            _store(editor, conv, 1, weights)
            _reorder(editor, conv, selection.chosen)
    editor.redirect(selection.value, selection.source)


def _cost(editor: Editor, fold: _Fold) -> int:
    """The most input channels a group of a Conv that would lose its groups, 0 if none would."""
    grouped = [conv for conv in fold.dense if conv.attributes.get_int("group", 1) > 1]
    return max((_weights(editor, conv).shape[1] for conv in grouped), default=0)


def _behind(editor: Editor, selection: Selection) -> _Fold:
    """The Convs that read the channels; raises where something else needs their order."""
    fold = _Fold(behind=True)
    stack, seen = [selection.value], set[ir.Node]()
    while stack:
        value = stack.pop()
        refuse_if(editor.is_pinned(value), f"the order of channels of '{value.name}' is needed")
        for node in editor.readers(value):
            if node in seen:
                continue
            seen.add(node)
            if _is_conv(editor, node, value):
                if not _is_depthwise(editor, node):
                    _check_dense(node)
                    fold.dense.append(node)
                    continue
                fold.depthwise.append(node)
            elif not _treats_channels_alike(editor, node):
                raise NotCollapsibleError(f"'{node.name}' ({node.op_type}) needs the order of channels")
            stack.append(node.outputs[0])
    refuse_if(not fold.dense, "no Conv is behind it")
    return fold


def _before(editor: Editor, selection: Selection) -> _Fold:
    """The Conv that makes the channels; raises where something else needs their order."""
    fold = _Fold(behind=False)
    value = selection.source
    refuse_if(editor.is_pinned(selection.value), f"'{selection.value.name}' is needed under its name")
    while not fold.dense:
        refuse_if(not editor.is_private(value), f"the order of channels of '{value.name}' is needed elsewhere")
        node = value.producer()
        if node is None or not (_is_conv(editor, node, operand(node, 0)) or _treats_channels_alike(editor, node)):
            raise NotCollapsibleError(f"no Conv makes '{value.name}'")
        if node.op_type != "Conv":
            value = operand(node, 0)
        elif _is_depthwise(editor, node):
            fold.depthwise.append(node)
            value = operand(node, 0)
        else:
            _check_dense(node)
            fold.dense.append(node)
    return fold


def _is_conv(editor: Editor, node: ir.Node, value: ir.Value) -> bool:
    """Whether a node is a named Conv of constant weights with ``value`` as its data only."""
    if node.op_type != "Conv" or not editor.may_change(node) or node.inputs.count(value) != 1:
        return False
    given = [read for read in node.inputs[1:] if read is not None]
    return node.inputs[0] is value and all(editor.constant(read) is not None for read in given)


def _is_depthwise(editor: Editor, conv: ir.Node) -> bool:
    group = conv.attributes.get_int("group", 1)
    return group > 1 and _weights(editor, conv).shape[:2] == (group, 1)


def _check_dense(conv: ir.Node) -> None:
    group = conv.attributes.get_int("group", 1)
    refuse_if(group > _MOST_GROUPS, f"'{conv.name}' has {group} groups")


def _treats_channels_alike(editor: Editor, node: ir.Node) -> bool:
    constants = [editor.constant(read) for read in node.inputs[1:] if read is not None]
    if further_outputs(node) or any(tensor is None or any(d != 1 for d in tensor.dims) for tensor in constants):
        return False
    return bool(what(node) & (Is.ACTIVATION | Is.POOL))


# -- the edits ----------------------------------------------------------------------------------------------------


def _weights(editor: Editor, conv: ir.Node) -> npt.NDArray[np.generic]:
    """The weights of a Conv for which `_is_conv` holds."""
    weights = editor.array(operand(conv, 1))
    assert weights is not None
    return weights


def _without_groups(editor: Editor, conv: ir.Node) -> npt.NDArray[np.generic]:
    """Weights of a Conv for all input channels; its groups are removed."""
    weights = _weights(editor, conv)
    group = conv.attributes.get_int("group", 1)
    outputs, width = len(weights) // group, weights.shape[1]
    dense = np.zeros((len(weights), width * group, *weights.shape[2:]), weights.dtype)
    for at in range(group):
        rows = slice(at * outputs, (at + 1) * outputs)
        dense[rows, at * width : (at + 1) * width] = weights[rows]
    if "group" in conv.attributes:
        editor.set_attribute(conv, "group", 1)
    return dense


def _reorder(editor: Editor, conv: ir.Node, order: Indices) -> None:
    """Puts the output channels of a Conv in an order."""
    for position, value in enumerate(conv.inputs):
        array = editor.array(value) if position else None
        if array is not None:
            _store(editor, conv, position, array[order])


def _store(editor: Editor, conv: ir.Node, position: int, array: npt.NDArray[np.generic]) -> None:
    editor.store_array(conv, position, array, f"{operand(conv, position).name}_shuffled")


def _gather(editor: Editor, selection: Selection) -> None:
    """Writes a shuffle as one Gather in front of the first node that reads its result."""
    reading = {*editor.readers(selection.value)}
    reader = next(node for node in editor.nodes if node in reading)
    chosen = editor.add_constant(selection.chosen, f"{selection.path[-1].name}_channels")
    picked = editor.insert_before(reader, "Gather", [selection.source, chosen], axis=1)
    editor.redirect(selection.value, picked)
