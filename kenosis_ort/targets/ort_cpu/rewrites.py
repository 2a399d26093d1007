"""Rewrites for the tiles of ONNX Runtime's integer kernels on x86-64."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kenosis_ort.graph.constants import Is, what
from kenosis_ort.graph.view import further_outputs, ir, optional
from kenosis_ort.graph.walk import MAIN_DOMAINS
from kenosis_ort.rewrite.pools import Axis, window_attributes, window_axes
from kenosis_ort.rewrite.rule import PADDED, Editor, NotCollapsibleError, operand, rule

_LARGEST_WINDOW = 25


@rule(
    "Conv",
    did="Convs over few channels read a multiple of 4 of them",
    stays="Convs over few channels keep their odd channel count",
)
def pad_stem_channels(editor: Editor, conv: ir.Node) -> None:
    """Channels of a picture rounded up to a multiple of 4 in front of a stem Conv.

    A Conv does not see channels of zeros, and weights of zero do not see what they read. With ``C'`` the next multiple
    of 4, ``x' = Pad(x)`` having ``C' - C`` channels of zeros more, and ``w'`` any continuation of ``w``::

        sum over c < C' of w'[o, c, u, v] * x'[c, ...] = sum over c < C of w[o, c, u, v] * x[c, ...]

    Here ``w'`` continues ``w`` by zeros, which leaves the scales of the weights what they are.

    Float has no use for it. The runtime's int8 Conv gathers the window of every output, four channels at a time, and
    one by one where the count is no multiple of 4: a 3x3 Conv over three channels is 1.4 to 2.1 times as fast over
    four. Over large windows the multiplications that are added cost more than that saves. Where a stem is strided and
    the picture can be cut in blocks, `space_to_depth_stem` does better; what it leaves, this rule takes.

    Not changed: groups, windows of more than 25 elements or of one, weights that are not constant, a type other than
    float32. Convs over a multiple of 4 or over 8 channels and more are no stems.
    """
    if not is_over_few_channels(editor, conv):
        return
    weights = editor.array(conv.inputs[1])
    if weights is None:
        raise NotCollapsibleError("its weights are not constant")
    editor.picture(operand(conv, 0))
    window = int(np.prod(weights.shape[2:]))
    if not 1 < window <= _LARGEST_WINDOW:
        raise NotCollapsibleError(f"its window has {window} elements")
    extra = -weights.shape[1] % MULTIPLE_OF_STEM
    zeros = np.zeros((weights.shape[0], extra, *weights.shape[2:]), weights.dtype)
    _store(editor, conv, 1, np.concatenate((weights, zeros), axis=1), PADDED)
    pads = editor.add_constant(np.array([0, 0, 0, 0, 0, extra, 0, 0], np.int64), f"{conv.name}_pads")
    editor.read(conv, 0, editor.insert_before(conv, "Pad", [conv.inputs[0], pads]))
    editor.done += 1


MULTIPLE_OF_STEM = 4
"""The runtime's int8 Conv is slow over a number of channels that is no multiple of this."""

_STEM_CHANNELS = 8
_PICTURE_RANK = 4
_BLOCKS = (2, 4)
_LARGEST_GROWTH = 2


@rule(
    "Conv",
    did="strided Convs over few channels became SpaceToDepth and a Conv of stride 1",
    stays="strided Convs over few channels stay",
)
def space_to_depth_stem(editor: Editor, conv: ir.Node) -> None:
    """A strided stem Conv over few channels as SpaceToDepth and a Conv of stride 1.

    Let the Conv have stride ``b`` along height and width, kernel ``kh x kw``, ``p`` rows of zeros above the picture and
    ``e`` below (columns likewise), and let ``H`` and ``W`` be multiples of ``b``. With ``x = 0`` outside the picture::

        y[o, i, j] = sum over c, u, v of w[o, c, u, v] * x[c, b i + u - p, b j + v - q]

    ``SpaceToDepth(b)`` gives ``z[(a b + d) C + c, m, n] = x[c, b m + a, b n + d]``. The row ``b i + u - p`` is row
    ``m`` of phase ``a`` with::

        a = (u - p) mod b,      m = i + floor((u - p) / b)

    and, ``H`` being a multiple of ``b``, it lies outside ``x`` exactly where ``m`` lies outside ``z``. So ``y`` is a
    Conv of ``z`` with stride 1 in which tap ``u`` is tap ``t`` of the channels of phase ``a``, all others zero::

        P  = ceil(p / b)                               rows of zeros above
        t  = floor((u - p) / b) + P                    from 0 (u = 0) to K - 1 (u = kh - 1)
        K  = floor((kh - 1 - p) / b) + P + 1           its kernel height
        E  = floor((p + e - kh) / b) + K - P           rows of zeros below, from the count of rows of y:
             H / b + P + E - K + 1 = floor((H + p + e - kh) / b) + 1

    ``E`` is never negative: for ``e = 0`` it is ``floor(-(d + 1) / b) + floor(d / b) + 1 = 0`` with ``d = kh - 1 - p``,
    and it grows with ``e``. The result is exact but for the order of additions.

    In float this is about as fast. In int8 the runtime's Conv is slow over three channels (over any number that is no
    multiple of 4), and up to twice as fast over the ``3 b b`` of this one, although some of its weights are zero.

    Not changed: strides other than 2x2 and 4x4, dilations, groups, weights that are not constant or would more than
    double, a type other than float32, heights or widths that are unknown or no multiple of ``b``. Convs over a multiple
    of 4 or over 8 channels and more are no stems.
    """
    strides = conv.attributes.get_ints("strides", ())
    if max(strides, default=1) == 1 or not is_over_few_channels(editor, conv):
        return
    weights, height, width = _check(editor, conv)
    _apply(editor, conv, weights, height, width)


def is_over_few_channels(editor: Editor, conv: ir.Node) -> bool:
    """Whether a Conv without groups reads so few channels, and such a number of them, that int8 is slow.

    One whose weights are not constant counts as such.
    """
    weights = editor.constant(conv.inputs[1])
    if conv.attributes.get_int("group", 1) != 1:
        return False
    if weights is None or len(weights.dims) != _PICTURE_RANK:
        return weights is None
    return bool(weights.dims[1] < _STEM_CHANNELS and weights.dims[1] % MULTIPLE_OF_STEM)


def _check(editor: Editor, conv: ir.Node) -> tuple[npt.NDArray[np.generic], Axis, Axis]:
    weights = editor.array(conv.inputs[1])
    if weights is None:
        raise NotCollapsibleError("its weights are not constant")
    picture = editor.picture(operand(conv, 0))
    height, width = window_axes(conv, weights.shape[2:], picture)
    block = height.stride
    if block != width.stride or block not in _BLOCKS:
        raise NotCollapsibleError(f"its stride is {height.stride} x {width.stride}")
    if any(axis.dilation != 1 and axis.kernel > 1 for axis in (height, width)):
        raise NotCollapsibleError("it is dilated")
    if picture.height is None or picture.width is None:
        raise NotCollapsibleError(f"height and width of '{operand(conv, 0).name}' are not known")
    if picture.height % block or picture.width % block:
        raise NotCollapsibleError(f"{picture.height} x {picture.width} is no multiple of its stride")
    new_size = _phases(height)[0].kernel * _phases(width)[0].kernel * block * block
    if new_size > _LARGEST_GROWTH * height.kernel * width.kernel:
        raise NotCollapsibleError("its weights would more than double")
    return weights, height, width


def _apply(editor: Editor, conv: ir.Node, weights: npt.NDArray[np.generic], height: Axis, width: Axis) -> None:
    block = height.stride
    outputs, channels = weights.shape[:2]
    new_height, rows, row_taps = _phases(height)
    new_width, columns, column_taps = _phases(width)
    spread = np.zeros((outputs, block, block, channels, new_height.kernel, new_width.kernel), weights.dtype)
    for u in range(height.kernel):
        for v in range(width.kernel):
            spread[:, rows[u], columns[v], :, row_taps[u], column_taps[v]] = weights[:, :, u, v]
    merged = spread.reshape(outputs, block * block * channels, new_height.kernel, new_width.kernel)
    _store(editor, conv, 1, merged, "_blocks")
    blocks = editor.insert_before(conv, "SpaceToDepth", [conv.inputs[0]], blocksize=block)
    editor.become(conv, "Conv", [blocks, *conv.inputs[1:]], window_attributes(new_height, new_width))


def _phases(axis: Axis) -> tuple[Axis, list[int], list[int]]:
    """The new window along one axis, and the phase and the new tap of each old tap."""
    block, kernel = axis.stride, axis.kernel
    begin = -(-axis.begin // block)
    extent = (kernel - 1 - axis.begin) // block + begin + 1
    end = (axis.begin + axis.end - kernel) // block + extent - begin
    offsets = [u - axis.begin for u in range(kernel)]
    new = Axis(kernel=extent, stride=1, dilation=1, begin=begin, end=end)
    return new, [o % block for o in offsets], [o // block + begin for o in offsets]


_MULTIPLE = 16
_LARGEST_PADDING = 4 / 3


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
    values: set[ir.Value] = field(default_factory=set)
    rows: dict[str, ir.Node] = field(default_factory=dict)
    columns: dict[str, ir.Node] = field(default_factory=dict)
    depthwise: dict[str, ir.Node] = field(default_factory=dict)
    operands: list[tuple[ir.Node, int, int]] = field(default_factory=list)
    reason: str | None = None

    def refuse(self, reason: str) -> None:
        self.reason = self.reason or reason


@rule(
    "Conv",
    did="depthwise Convs got channels up to a multiple of 16",
    stays="depthwise Convs keep their odd channel count",
    whole=True,
)
def pad_depthwise(editor: Editor) -> None:
    """Channels of a depthwise Conv rounded up to a multiple of 16.

    Let ``C`` channels be made by dense Convs, pass through depthwise Convs and operators that treat channels alike, and
    be read by dense Convs only. To each value ``v`` among them channels are added that repeat its first one::

        v'[n, c] = v[n, c]  for c < C,      v'[n, c] = v[n, 0]  for C <= c < C'

    - A dense Conv that makes them repeats row 0 of its weights, and its bias: output ``c >= C`` is output 0.
    - A depthwise Conv, and a constant by channel, repeat their channel 0; an operator that treats channels alike
      computes the same from the same.
    - A dense Conv that reads them gets columns of zeros: the sum of ``w'[o, c] v'[c]`` over ``c < C'`` is that of
      ``w[o, c] v[c]`` over ``c < C``.

    So the result is exact, and the ranges of all values, and the scales of all weights by tensor, stay what they are
    (zeros in place of the repetition would be as exact, but would leave channels of weights without a scale).

    Float has no use for it. The runtime's int8 depthwise kernel is fast where ``C`` is a multiple of 16 only: inverted
    bottlenecks of 24 to 328 channels are 1.4 to 1.9 times as fast when padded.

    Not changed: channels that reach an output of the graph, a body of control flow, a value that the caller names, a
    node that is not named or an operator that may mix or count channels; weights that are not constant; fewer channels
    than 16; channels that would grow by more than a third.
    """
    seen: dict[ir.Value, _Channels] = {}
    grown: dict[ir.Value, int] = {}
    for conv in filter(editor.may_change, editor.find("Conv")):
        count = _depthwise_channels(editor, conv)
        if count is None or count % _MULTIPLE == 0 or count < _MULTIPLE:
            continue
        found = seen.get(operand(conv, 0))
        if found is None:
            found = _collect(editor, conv, count)
            seen.update(dict.fromkeys(found.values, found))
            if found.reason is None:
                _pad(editor, found)
                editor.done += len(found.depthwise)
                grown.update(dict.fromkeys(found.values, _padded(count)))
        if found.reason is not None:
            editor.refuse(conv, found.reason)
    for value in sorted(grown, key=lambda each: each.name or ""):
        editor.rename_grown(value, f"{value.name}{PADDED}", axis=1, size=grown[value])


def _padded(count: int) -> int:
    return -(-count // _MULTIPLE) * _MULTIPLE


def _depthwise_channels(editor: Editor, conv: ir.Node) -> int | None:
    """The channel count of a depthwise Conv with as many outputs, None for another Conv."""
    weights = editor.constant(conv.inputs[1])
    group = conv.attributes.get_int("group", 1)
    if weights is None or group == 1 or list(weights.dims[:2]) != [group, 1]:
        return None
    return group


# -- finding what belongs together --------------------------------------------------------------------------------


def _collect(editor: Editor, conv: ir.Node, count: int) -> _Channels:
    """All that carries the channels of a depthwise Conv; every value is visited, so each set only once."""
    found = _Channels(count)
    if _padded(count) > _LARGEST_PADDING * count:
        found.refuse(f"{count} channels would become {_padded(count)}")
    visited: set[ir.Node] = set()
    stack = [operand(conv, 0)]
    while stack:
        value = stack.pop()
        if value in found.values:
            continue
        found.values.add(value)
        _check_value(editor, found, value)
        producer = value.producer()
        for node in ([producer] if producer is not None else []) + editor.readers(value):
            if node.op_type == "Conv" and node.domain in MAIN_DOMAINS:
                stack += _visit_conv(editor, found, node, makes=node is producer)
            elif node not in visited:
                visited.add(node)
                stack += _visit(editor, found, node)
    convs = (*found.rows.values(), *found.columns.values(), *found.depthwise.values())
    for node in (*convs, *(node for node, _, _ in found.operands)):
        if not editor.may_change(node):
            found.refuse(f"'{node.name}' carries its channels and is not to change")
    return found


def _check_value(editor: Editor, found: _Channels, value: ir.Value) -> None:
    try:
        if editor.picture(value).channels != found.count:
            raise NotCollapsibleError(f"'{value.name}' is not known to have {found.count} channels")
    except NotCollapsibleError as reason:
        found.refuse(str(reason))
    if value.producer() is None or editor.is_pinned(value):
        found.refuse(f"its channels reach '{value.name}', which is needed as it is")


def _visit(editor: Editor, found: _Channels, node: ir.Node) -> list[ir.Value]:
    """Notes what has to change at a node that makes or reads some of the values; returns further such values."""
    if not _treats_channels_alike(editor, node):
        found.refuse(f"'{node.name}' ({node.op_type}) may need its channels as they are")
        return []
    more = [node.outputs[0]]
    for position, value in enumerate(node.inputs):
        if value is None:
            continue
        constant = editor.constant(value)
        dims = editor.dims(value) if constant is None else tuple(constant.dims)
        if dims is None:
            found.refuse(f"the rank of '{value.name}' is not known")
        elif len(dims) < 3 or dims[-3] == 1:
            continue  # one for all channels
        elif constant is None:
            more.append(value)
        elif dims[-3] == found.count:
            found.operands.append((node, position, len(dims) - 3))
        else:
            found.refuse(f"'{value.name}' is not one number a channel")
    return more


def _visit_conv(editor: Editor, found: _Channels, conv: ir.Node, *, makes: bool) -> list[ir.Value]:
    """As `_visit`, for a Conv that makes some of the values or (visited once more if both) reads them."""
    if any(value in found.values for value in conv.inputs[1:]):
        found.refuse(f"'{conv.name}' takes its channels for weights")
        return []
    weights = editor.constant(conv.inputs[1])
    bias = optional(conv, 2)
    if weights is None or len(weights.dims) != 4 or (bias and editor.constant(bias) is None):
        found.refuse(f"the weights of '{conv.name}' are not constant")
        return []
    if _depthwise_channels(editor, conv) == found.count:
        found.depthwise[conv.name or ""] = conv
        return [operand(conv, 0), conv.outputs[0]]
    if conv.attributes.get_int("group", 1) != 1:
        found.refuse(f"'{conv.name}' splits its channels into groups")
        return []
    (found.rows if makes else found.columns)[conv.name or ""] = conv
    return []


def _treats_channels_alike(editor: Editor, node: ir.Node) -> bool:
    if further_outputs(node):
        return False
    if node.op_type == "ReduceMean" and node.domain in MAIN_DOMAINS:
        given = editor.array(optional(node, 1))
        axes = node.attributes.get_ints("axes", ()) if given is None else given.reshape(-1).tolist()
        return sorted(axis % 4 for axis in axes) == [2, 3] and node.attributes.get_int("keepdims", 1) == 1
    return bool(what(node) & (Is.ELEMENTWISE | Is.POOL))


# -- changing it --------------------------------------------------------------------------------------------------


def _pad(editor: Editor, found: _Channels) -> None:
    extra = _padded(found.count) - found.count
    for conv in (*found.rows.values(), *found.depthwise.values()):
        _repeat(editor, conv, 1, 0, extra)
        _repeat(editor, conv, 2, 0, extra)
    for conv in found.depthwise.values():
        editor.set_attribute(conv, "group", found.count + extra)
    for conv in found.columns.values():
        weights = editor.array(operand(conv, 1))
        assert weights is not None  # as `_visit_conv` found it
        zeros = np.zeros((weights.shape[0], extra, *weights.shape[2:]), weights.dtype)
        _store(editor, conv, 1, np.concatenate((weights, zeros), axis=1), PADDED)
    for node, position, axis in found.operands:
        _repeat(editor, node, position, axis, extra)


def _repeat(editor: Editor, node: ir.Node, position: int, axis: int, extra: int) -> None:
    """Repeats the first channel of a node's constant input along an axis; an absent input stays absent."""
    array = editor.array(optional(node, position))
    if array is None:
        return
    first = np.repeat(array.take([0], axis=axis), extra, axis=axis)
    _store(editor, node, position, np.concatenate((array, first), axis=axis), PADDED)


def _store(editor: Editor, node: ir.Node, position: int, array: npt.NDArray[np.generic], suffix: str) -> None:
    editor.store_array(node, position, array, f"{operand(node, position).name}{suffix}")


OWN_FORMS = (space_to_depth_stem, pad_stem_channels, pad_depthwise)
"""In the order they are applied, behind those for integer kernels of all targets."""
