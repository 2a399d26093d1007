"""Inputs of a model: what each is for, as far as its name, type, shape and consumers tell, and its shape.

Where sizes are dynamic, the model is run with usual ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper

from kenosis_ort.calibration.feeds import Array, Known, Shape, declared_shape, fits
from kenosis_ort.calibration.part_session import ObservedModel, SessionSettings, run
from kenosis_ort.calibration.synthetic.consumers import Consumers
from kenosis_ort.calibration.synthetic.drawing import Draws
from kenosis_ort.errors import CalibrationError
from kenosis_ort.graph.constants import HEAVY

_INTEGERS = frozenset({TensorProto.INT64, TensorProto.INT32})
_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16})
_COLOURS = (1, 3, 4)
_STATE_NAMES = ("h", "c", "h0", "c0", "hx", "cx", "hn", "cn")
_SOUNDS = ("audio", "wave", "waveform", "wav", "speech", "pcm", "samples", "input_values")
_LONG = 2000  # steps from which on an axis of a matrix is taken for time rather than features


class InputKind(str, Enum):
    """The kinds of input that can be made up."""

    IMAGE = "image"
    AUDIO = "audio"
    SERIES = "series"
    FEATURES = "features"
    TOKENS = "tokens"
    MASK = "mask"
    POSITIONS = "positions"
    SEGMENTS = "segments"
    STATE = "state"
    PAST = "past"
    LENGTH = "length"
    SCALE = "scale"
    IMAGE_SIZE = "image size"
    SAMPLE_RATE = "sample rate"
    BOOLEAN = "boolean"


@dataclass(frozen=True)
class InputInfo:
    """One input of a model.

    Attributes:
        name: Its name.
        element_type: Number from ``onnx.TensorProto``; 0 for what is no tensor.
        shape: Sizes; a name or None where it is not fixed.
        kind: What it is for, None if that cannot be told.
        rows: For tokens and positions the number of rows of the table they index, where it is known.
        channels_last: For images.
        additive: For masks: added to scores, so that 0 keeps and a large negative number hides.
        reason: Where the kind cannot be told, why.
    """

    name: str
    element_type: int
    shape: Shape
    kind: InputKind | None
    rows: int | None = None
    channels_last: bool = False
    additive: bool = False
    reason: str = ""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy type of its arrays."""
        return np.dtype(helper.tensor_dtype_to_np_dtype(self.element_type))

    def describe(self) -> str:
        """Type and shape as text."""
        sizes = ", ".join("?" if d is None else str(d) for d in self.shape)
        name = TensorProto.DataType.Name(self.element_type).lower() if self.element_type else "no tensor"
        return f"{name} of shape ({sizes})" if self.element_type else name

    def sides(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Height and width in pixels, of an image."""
        height, width = shape[-3:-1] if self.channels_last else shape[-2:]
        return height, width

    def taken_for(self, kind: InputKind) -> InputInfo:
        """The input as the caller says it is."""
        last = kind is InputKind.IMAGE and _is_channels_last(self.shape, None)
        return replace(self, kind=kind, channels_last=last, reason="")


@dataclass(frozen=True)
class SyntheticSample:
    """One feed to be made up: everything random in it depends on nothing else.

    Attributes:
        seed: Of the reader.
        index: Of the feed; for recurrent nets of the sequence.
        step: Of a sequence.
        steps: Number of steps of a sequence, 1 where nothing is recurrent.
    """

    seed: int
    index: int
    step: int = 0
    steps: int = 1

    def draws(self, *key: int | str) -> Draws:
        """Random numbers that depend on the sample's index and a key, not on its step."""
        return Draws(self.seed, self.index, *key)

    def sentence_lengths(self, count: int, most: int) -> list[int]:
        """The lengths of so many sentences, the same for tokens, masks and whatever else belongs to them.

        A quarter of the samples are of full length, so that every position is seen.
        """
        draws = Draws(self.seed, self.index, self.step, "lengths")
        if self.index % 4 == 0:
            return [most] * count
        return [draws.integer(max(most // 4, 1), most) for _ in range(count)]


@dataclass(eq=False)
class Maker:
    """Makes up the values of one input.

    Attributes:
        info: The input.
        shape: Its shape.
        values: Returns the values of a sample, which broadcast to the shape, of any type of numbers.
        says: What is made up, for people.
        known: How well the scale of the values is known.
        natural: Whether the values are like those in nature, or leave nothing open; not so for tokens and features.
    """

    info: InputInfo
    shape: tuple[int, ...]
    values: Callable[[SyntheticSample], Array]
    says: str
    known: Known = Known.GRAPH
    natural: bool = True

    def make(self, sample: SyntheticSample) -> Array:
        """The array of one sample, of the input's shape and type."""
        values = self.values(sample)
        dtype = self.info.dtype
        if np.issubdtype(dtype, np.integer) and not np.issubdtype(values.dtype, np.integer):
            limits = np.iinfo(dtype)
            values = np.clip(np.rint(values), limits.min, limits.max)
        return np.array(np.broadcast_to(values, self.shape), dtype, order="C")


def classify(proto: onnx.ModelProto) -> tuple[InputInfo, ...]:
    """The inputs that must be fed, with what each is for."""
    consumers = Consumers(proto)
    return tuple(_info(v, consumers) for v in proto.graph.input if v.name not in consumers.constants)


def _info(value: onnx.ValueInfoProto, consumers: Consumers) -> InputInfo:
    if not value.type.HasField("tensor_type"):
        kind = value.type.WhichOneof("value") or "no tensor"
        reason = f"it is of the type {kind.removesuffix('_type').replace('_', ' ')}"
        return InputInfo(value.name, 0, (), None, reason=reason)
    tensor = value.type.tensor_type
    info = InputInfo(value.name, tensor.elem_type, declared_shape(tensor), None)
    if tensor.elem_type == TensorProto.STRING:
        return replace(info, reason="it takes text")
    if not tensor.HasField("shape"):
        return replace(info, reason="the model does not say how many axes it has")
    domain = consumers.foreign_domain(value.name)
    if domain is not None:
        return replace(info, reason=f"it goes to an operator of the domain '{domain}'")
    return _sort(info, consumers)


def _sort(info: InputInfo, consumers: Consumers) -> InputInfo:
    name, element_type, shape = info.name, info.element_type, info.shape
    if _has_word(name, "mask", "attn_mask", "padding_mask"):
        return replace(info, kind=InputKind.MASK, additive=element_type in _FLOATS and consumers.is_added(name))
    if element_type == TensorProto.BOOL:
        return replace(info, kind=InputKind.BOOLEAN)
    kind = _named(name, element_type, shape)
    if kind is not None:
        return replace(info, kind=kind, rows=consumers.rows(name))
    if element_type in _INTEGERS | _FLOATS and shape:  # nets of Keras cast float tokens themselves
        rows = consumers.rows(name) if element_type in _INTEGERS else consumers.rows(name, frozenset())
        if rows is not None:
            return replace(info, kind=InputKind.TOKENS, rows=rows)
    if element_type in _INTEGERS:
        return replace(info, reason="an integer input that looks nothing up in a table of the model")
    channels = consumers.conv_channels(name)
    last = _is_channels_last(shape, channels)
    if _is_image(shape, channels, last):
        return replace(info, kind=InputKind.IMAGE, channels_last=last)
    if element_type in _FLOATS:
        return replace(info, kind=_float_kind(name, shape, consumers))
    if element_type == TensorProto.INT16 and len(shape) <= 3:
        return replace(info, kind=InputKind.AUDIO)
    return info


_NAMES: Final[tuple[tuple[InputKind, frozenset[int] | None, range, tuple[str, ...]], ...]] = (
    (InputKind.SCALE, _FLOATS, range(99), ("scale_factor", "scale_factors", "im_scale")),
    (InputKind.IMAGE_SIZE, None, range(99), ("im_shape", "image_shape", "img_shape", "ori_shape", "orig_size",
                                             "orig_target_sizes", "image_size", "target_sizes")),
    (InputKind.POSITIONS, _INTEGERS, range(99), ("position_ids", "positions", "position", "pos_ids", "cache_position")),
    (InputKind.SEGMENTS, _INTEGERS, range(99), ("token_type_ids", "segment_ids", "token_type", "segments")),
    (InputKind.SAMPLE_RATE, None, range(2), ("sr", "sample_rate", "sampling_rate")),
    (InputKind.LENGTH, None, range(3), ("length", "lengths", "seq_len", "seqlen", "len", "lens")),
    (InputKind.PAST, _FLOATS, range(3, 99), ("past", "past_key_values", "past_key", "past_value")),
    (InputKind.STATE, _FLOATS, range(99), ("state", "states", "hidden", "cache", "initial_h", "initial_c", "rnn")),
)  # fmt: skip
"""Kinds that a name tells beyond doubt: of which element types, None for any, how many axes, and the words."""


def _named(name: str, element_type: int, shape: Shape) -> InputKind | None:
    """The kind that the name tells beyond doubt for this type."""
    for kind, types, axes, words in _NAMES:
        if (types is None or element_type in types) and len(shape) in axes and _has_word(name, *words):
            return kind
    return InputKind.STATE if element_type in _FLOATS and name.lower() in _STATE_NAMES else None


def _float_kind(name: str, shape: Shape, consumers: Consumers) -> InputKind | None:
    if len(shape) < 4 and _has_word(name, *_SOUNDS):
        return InputKind.AUDIO
    if len(shape) == 2:
        is_long = not isinstance(shape[1], int) or shape[1] >= _LONG
        return InputKind.AUDIO if is_long and consumers.features(name) is None else InputKind.FEATURES
    if len(shape) == 3:
        is_wave = shape[1] == 1 and not (isinstance(shape[2], int) and shape[2] < _LONG)
        return InputKind.AUDIO if is_wave else InputKind.SERIES
    return InputKind.FEATURES if len(shape) == 4 else None


def _is_image(shape: Shape, channels: int | None, last: bool) -> bool:
    if len(shape) == 3:  # no batch axis
        colours, sides = (shape[2], shape[:2]) if last else (shape[0], shape[1:])
        return colours in (1, 3) and all(isinstance(s, int) and s >= 16 for s in sides)
    if len(shape) != 4:
        return False
    colours, sides = (shape[3], shape[1:3]) if last else (shape[1], shape[2:])
    if not isinstance(colours, int):
        colours = channels
    return colours in _COLOURS and not (colours == 1 and _is_narrow(sides))


def _is_channels_last(shape: Shape, channels: int | None) -> bool:
    if len(shape) == 3:
        return shape[2] in (1, 3) and shape[0] not in (1, 3)
    if len(shape) != 4 or shape[3] not in _COLOURS or shape[1] in _COLOURS:
        return False
    # A dynamic axis 1 may still be that of the colours.
    return channels is None or isinstance(shape[1], int) or shape[3] in (channels, 3)


def _is_narrow(sides: Shape) -> bool:
    """Whether a one-channel input is a spectrogram rather than an image: one side is of a few bins only."""
    fixed = [side for side in sides if isinstance(side, int)]
    return bool(fixed) and min(fixed) < 16 and (len(fixed) == 1 or fixed[0] != fixed[1])


def _has_word(name: str, *words: str) -> bool:
    parts = re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    joined = "_" + "_".join(parts) + "_"
    return any(f"_{word}_" in joined for word in words)


_SIZES = (64, 128, 256, 320, 416, 512, 640, 576, 16, 8, 1, 1600, 4000)
_AUDIO_SIZES = (512, 576, 1024, 1600, 4000, 480, 640, 320, 256, 160)
_IMAGE_SIDE = 224
_STEPS = 32
_AUDIO_STEPS = 16_000
_ARRAY_BYTES = 2**31

Hints = Mapping[tuple[str, int], int]
Shapes = dict[str, tuple[int, ...]]


def resolve_shapes(
    infos: Sequence[InputInfo], given: Mapping[str, tuple[int, ...]], hints: Hints, size: int | None = None
) -> Shapes:
    """A fixed shape of every input; sizes of one name are the same everywhere, ``a + b`` is their sum.

    Args:
        infos: The inputs.
        given: Shapes that the caller gave.
        hints: Sizes by input name and axis that the model's operators tell.
        size: For dynamic axes other than the batch, channels and states; None chooses by kind.

    Raises:
        CalibrationError: A given shape contradicts the model's, or a tensor would be absurdly large.
    """
    symbols: dict[str, int] = {}
    for info in infos:
        if info.name in given:
            if not fits(info.shape, given[info.name]):
                raise CalibrationError(
                    f"The shape {given[info.name]} does not fit the model's input ({info.describe()}).",
                    where=f"input '{info.name}'",
                    fix="Correct input_shapes.",
                )
            pairs = zip(info.shape, given[info.name], strict=True)
            symbols.update({d: w for d, w in pairs if isinstance(d, str)})
    # Sums such as "past_length + length" come after their terms.
    for info in infos:
        for axis, dim in enumerate(info.shape):
            if isinstance(dim, str) and "+" not in dim:
                symbols.setdefault(dim, _default_size(info, axis, size, hints))
    out: Shapes = {}
    for info in infos:
        sizes = [
            dim if isinstance(dim, int) else _symbol(dim or "", symbols) or _default_size(info, axis, size, hints)
            for axis, dim in enumerate(info.shape)
        ]
        out[info.name] = given.get(info.name, tuple(sizes))
        if np.prod(out[info.name], dtype=np.float64) * 4 > _ARRAY_BYTES:
            raise CalibrationError(
                f"The input's shape {out[info.name]} is too large to make up.",
                where=f"input '{info.name}'",
                fix="Give input_shapes, or a reader of real data.",
            )
    return out


def has_free_axes(info: InputInfo) -> bool:
    """Whether an axis other than the batch is dynamic."""
    return not all(isinstance(d, int) for d in info.shape[1:])


def _symbol(name: str, symbols: Mapping[str, int]) -> int:
    terms = [term.strip(" ()") for term in name.split("+")]
    sizes = [int(term) if term.isdigit() else symbols.get(term, 0) for term in terms]
    return symbols.get(name) or (sum(sizes) if all(sizes) else 0)


def _default_size(info: InputInfo, axis: int, size: int | None, hints: Hints) -> int:
    if axis == 0 or info.kind is InputKind.STATE:
        return 1
    if (info.name, axis) in hints or size is not None:
        return hints.get((info.name, axis), size or 0)
    if info.kind is InputKind.IMAGE:
        return _IMAGE_SIDE
    return _AUDIO_STEPS if info.kind is InputKind.AUDIO and axis == len(info.shape) - 1 else _STEPS


def _hints(consumers: Consumers, infos: Sequence[InputInfo]) -> Hints:
    """The channels of images, which a Conv tells, and the last axis of others where a matrix tells it."""
    found: dict[tuple[str, int], int] = {}
    for info in infos:
        last = len(info.shape) - 1
        if info.kind is InputKind.IMAGE:
            found[info.name, last if info.channels_last else last - 2] = consumers.conv_channels(info.name) or 3
        elif (features := consumers.features(info.name)) is not None:
            found[info.name, last] = features
    return found


_PEAKS = 24  # tensors looked at
_ODD = 4.0  # times the least peak


def find_shapes(
    proto: onnx.ModelProto,
    infos: Sequence[InputInfo],
    given: Mapping[str, tuple[int, ...]],
    feed: Callable[[Shapes], dict[str, Array]],
    settings: SessionSettings,
) -> Shapes:
    """Fixed shapes of all inputs with which the model runs.

    The usual sizes come first. Nets that take sound in blocks may run with blocks of a wrong length and then compute
    something else, with values hundreds of times too large: of the lengths that run, the longest is taken whose values
    are not much larger than those of any other.

    Args:
        proto: The model.
        infos: Its inputs.
        given: Shapes that are known.
        feed: Makes a feed of given shapes.
        settings: How to run the model.

    Raises:
        CalibrationError: It runs with no size, or a given shape contradicts the model's.
    """
    hints = _hints(Consumers(proto), infos)
    free = [i for i in infos if i.name not in given and has_free_axes(i)]
    if not free:
        return resolve_shapes(infos, given, hints)
    audio, blocks = (any(i.kind is InputKind.AUDIO for i in some) for some in (infos, free))
    outputs = [value.name for value in proto.graph.output]
    layers = [n.output[0] for n in proto.graph.node if n.op_type in HEAVY and n.output[0] not in outputs]
    watched = [*outputs, *(layers[:: max(1, -(-len(layers) // _PEAKS))] if blocks else ())]
    with ObservedModel(proto, settings) as model:
        session = model.session(watched)
    first_error: CalibrationError | None = None
    found: list[tuple[Shapes, int, float]] = []
    # The usual sizes first; for sound those of the blocks that nets take.
    for size in (None, *dict.fromkeys((*_AUDIO_SIZES, *_SIZES) if audio else _SIZES)):
        try:
            shapes = resolve_shapes(infos, given, hints, size)
            values = run(session, watched, feed(shapes), 0).values()
        except CalibrationError as error:
            first_error = first_error or error
            continue
        if size is None or not blocks:
            return shapes
        found.append((shapes, size, max((_peak(value) for value in values), default=0.0)))
    if found:
        least = min(peak for _, _, peak in found)
        return max((entry for entry in found if entry[2] <= _ODD * least), key=lambda entry: entry[1])[0]
    raise CalibrationError(
        f"No size of the dynamic inputs was found with which the model runs ({first_error}).",
        where=", ".join(f"input '{info.name}' ({info.describe()})" for info in free),
        fix="Give SyntheticReader(input_shapes={name: shape}), or a reader of real data.",
    ) from first_error


def shapes_of(feed: Mapping[str, Array], infos: Sequence[InputInfo]) -> Shapes:
    """The shapes of a real feed for the inputs of dynamic ones, with a batch of one."""
    batches = {info.shape[0] for info in infos if info.shape and isinstance(info.shape[0], str)}
    out: Shapes = {}
    for info in infos:
        if info.name in feed and has_free_axes(info):
            sizes = zip(info.shape, feed[info.name].shape, strict=True)
            out[info.name] = tuple(
                1 if dim in batches or (axis == 0 and dim is None) else size for axis, (dim, size) in enumerate(sizes)
            )
    return out


def _peak(value: Any) -> float:
    array = np.asarray(value)
    return float(np.abs(array).max(initial=0.0)) if array.dtype.kind == "f" else 0.0
