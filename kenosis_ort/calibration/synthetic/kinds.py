"""Kinds of inputs, and the states among them.

What an input of a model is for, as far as its name, type, shape and consumers tell.

Recurrent states and past keys and values: outputs of the model that its next step takes as inputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from kenosis_ort.calibration.part_session import ObservedModel, SessionSettings, run
from kenosis_ort.calibration.synthetic.stem import Consumers
from kenosis_ort.errors import CalibrationError
from kenosis_ort.graph.bodies import state_pairs

Array = npt.NDArray[Any]
Feed = dict[str, Array]

SAMPLES_A_SEQUENCE = 16
STEPS_A_SAMPLE = 4  # states need time to fill, and one sample every few steps shows more of it


def find_links(proto: onnx.ModelProto, infos: Sequence[InputInfo]) -> dict[str, str]:
    """Returns, by name of a state input, the output that takes its place in the next step.

    They belong together if their names say so, see `state_pairs`; without such names, if their types and shapes fit, in
    the order in which they stand.
    """
    states = {info.name: info for info in infos if info.kind in (InputKind.STATE, InputKind.PAST)}
    links = {name: output for output, name in state_pairs(proto).items() if name in states}
    for name, info in states.items():
        fitting = [v.name for v in proto.graph.output if v.name not in links.values() and _fits(info, v)]
        waiting = [other for other in states.values() if other.name not in links and _are_alike(other, info)]
        if name not in links and fitting and len(fitting) >= len(waiting):
            links[name] = fitting[0]
    return links


def _are_alike(one: InputInfo, other: InputInfo) -> bool:
    return len(one.shape) == len(other.shape) and one.element_type == other.element_type


def _fits(info: InputInfo, value: onnx.ValueInfoProto) -> bool:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type") or tensor.elem_type != info.element_type or not info.shape:
        return False
    if tensor.HasField("shape") and len(tensor.shape.dim) != len(info.shape):
        return False
    sizes = [d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim]
    return all(a == b for a, b in zip(info.shape, sizes, strict=False) if isinstance(a, int) and b is not None)


class Feedback:
    """Runs a model step by step so that its states are its own.

    Args:
        proto: The model.
        links: Output by name of the input that it replaces.
        settings: How to run it.
        warm: Whether a first, unseen step fills the states: for past keys and values, which are never empty.
    """

    def __init__(self, proto: onnx.ModelProto, links: dict[str, str], settings: SessionSettings, *, warm: bool) -> None:
        self._links = links
        self._outputs = tuple(dict.fromkeys(links.values()))
        self._warm = warm
        with ObservedModel(proto, settings) as model:
            self._session = model.session(self._outputs)
        self._at: tuple[int, int] | None = None
        self._states: Feed = {}

    def states(self, sequence: int, step: int, make: Callable[[int, int], Feed]) -> Feed:
        """The states in front of a step.

        Args:
            sequence: Index of the sequence.
            step: Index of the step.
            make: Makes the feed of a sequence and step, with initial states.

        Raises:
            CalibrationError: The model does not run.
        """
        if self._at is None or self._at[0] != sequence or self._at[1] > step:
            self._at, self._states = (sequence, 0), {}
            if self._warm:
                self._advance(make(sequence, 0))
        while self._at[1] < step:
            self._advance(make(sequence, self._at[1]))
            self._at = (sequence, self._at[1] + 1)
        return dict(self._states)

    def _advance(self, feed: Feed) -> None:
        feed = {**feed, **self._states}
        found = dict(
            zip(self._outputs, run(self._session, self._outputs, feed, self._at[0] if self._at else 0), strict=True)
        )
        states = {name: _cut(np.asarray(found[output]), feed[name].shape) for name, output in self._links.items()}
        if not all(np.isfinite(state).all() for state in states.values()):
            raise CalibrationError(
                "The model's states grow beyond all bounds on made-up data.",
                where=f"inputs {', '.join(self._links)}",
                fix="Give input_ranges for the states, or a reader of real data.",
            )
        self._states = states


def _cut(array: Array, shape: tuple[int, ...]) -> Array:
    """The last steps of an array that has grown along an axis."""
    if array.ndim != len(shape):
        return array.reshape(shape)
    return np.ascontiguousarray(
        array[tuple(slice(max(a - b, 0), None) for a, b in zip(array.shape, shape, strict=True))]
    )


Shape = tuple["int | str | None", ...]

_INTEGERS = frozenset({TensorProto.INT64, TensorProto.INT32})
_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16})
_COLOURS = (1, 3, 4)
_STATE_NAMES = ("h", "c", "h0", "c0", "hx", "cx", "hn", "cn")
_STATE_WORDS = ("state", "states", "hidden", "cache", "initial_h", "initial_c", "rnn")
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

    def taken_for(self, kind: InputKind) -> InputInfo:
        """The input as the caller says it is."""
        last = kind is InputKind.IMAGE and _is_channels_last(self.shape, None)
        return replace(self, kind=kind, channels_last=last, reason="")


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
    # Some exporters write -1 for a free dimension.
    shape: Shape = tuple(
        d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else (d.dim_param or None) for d in tensor.shape.dim
    )
    info = InputInfo(value.name, tensor.elem_type, shape, None)
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
    if element_type in _INTEGERS:
        rows = consumers.rows(name)
        if rows is not None and shape:
            return replace(info, kind=InputKind.TOKENS, rows=rows)
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


def _named(name: str, element_type: int, shape: Shape) -> InputKind | None:
    """The kind that the name tells beyond doubt for this type."""
    floating, integer = element_type in _FLOATS, element_type in _INTEGERS
    if _has_word(name, "scale_factor", "scale_factors", "im_scale"):
        return InputKind.SCALE if floating else None
    if _has_word(name, "im_shape", "image_shape", "img_shape", "ori_shape", "orig_size", "orig_target_sizes",
                 "image_size", "target_sizes"):  # fmt: skip
        return InputKind.IMAGE_SIZE
    if integer and _has_word(name, "position_ids", "positions", "position", "pos_ids", "cache_position"):
        return InputKind.POSITIONS
    if integer and _has_word(name, "token_type_ids", "segment_ids", "token_type", "segments"):
        return InputKind.SEGMENTS
    if _has_word(name, "sr", "sample_rate", "sampling_rate") and len(shape) <= 1:
        return InputKind.SAMPLE_RATE
    if _has_word(name, "length", "lengths", "seq_len", "seqlen", "len", "lens") and len(shape) <= 2:
        return InputKind.LENGTH
    if floating and _has_word(name, "past", "past_key_values", "past_key", "past_value") and len(shape) >= 3:
        return InputKind.PAST
    if floating and (name.lower() in _STATE_NAMES or _has_word(name, *_STATE_WORDS)):
        return InputKind.STATE
    return None


def _float_kind(name: str, shape: Shape, consumers: Consumers) -> InputKind | None:
    if (
        _has_word(name, "audio", "wave", "waveform", "wav", "speech", "pcm", "samples", "input_values")
        and len(shape) < 4
    ):
        return InputKind.AUDIO
    if len(shape) == 2:
        if isinstance(shape[1], int):
            return InputKind.AUDIO if shape[1] >= _LONG and consumers.features(name) is None else InputKind.FEATURES
        return InputKind.AUDIO if consumers.features(name) is None else InputKind.FEATURES
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
    if len(shape) != 4:
        return False
    if shape[3] in _COLOURS and shape[1] not in _COLOURS:
        # A dynamic axis 1 may still be that of the colours.
        return not (channels is not None and not isinstance(shape[1], int) and shape[3] not in (channels, 3))
    return False


def _is_narrow(sides: Shape) -> bool:
    """Whether a one-channel input is a spectrogram rather than an image: one side is of a few bins only."""
    fixed = [side for side in sides if isinstance(side, int)]
    return bool(fixed) and min(fixed) < 16 and (len(fixed) == 1 or fixed[0] != fixed[1])


def _has_word(name: str, *words: str) -> bool:
    parts = re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    joined = "_" + "_".join(parts) + "_"
    return any(f"_{word}_" in joined for word in words)
