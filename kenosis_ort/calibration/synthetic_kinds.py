"""What an input of a model is for, as far as its type, shape, name and consumers tell."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import onnx
from onnx import TensorProto, numpy_helper

_PASSING = frozenset({"Cast", "Reshape", "Squeeze", "Unsqueeze", "Identity", "Flatten", "Transpose", "Slice", "Clip"})
_EMBEDDINGS = {"EmbedLayerNormalization": {0: 2, 1: 4}}  # index of the indices: index of their table
_INTEGERS = frozenset({TensorProto.INT64, TensorProto.INT32})
_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE})
_BYTES = frozenset({TensorProto.UINT8})
_CHANNELS = (1, 3, 4)


class Kind(str, Enum):
    """The kinds of input that can be made up."""

    IMAGE = "image"
    SIGNAL = "signal"  # anything continuous: noise with a 1/f spectrum
    STATE = "state"  # recurrent state or cache: zero at the start
    TOKENS = "tokens"  # indices into a table
    POSITIONS = "positions"
    SEGMENTS = "segments"
    MASK = "mask"  # all ones
    LENGTH = "length"  # number of steps of the other inputs
    SCALE = "scale"  # ratio of the resized to the original image
    IMAGE_SIZE = "image size"  # height and width
    SAMPLE_RATE = "sample rate"


@dataclass(frozen=True)
class InputInfo:
    """One input of a model.

    Attributes:
        name: Its name.
        element_type: Number from ``onnx.TensorProto``.
        shape: Sizes; a name or None where it is not fixed.
        kind: What it is for, None if that cannot be told.
        rows: For tokens the number of rows of the table, None otherwise.
        channels_last: For images.
    """

    name: str
    element_type: int
    shape: tuple[int | str | None, ...]
    kind: Kind | None
    rows: int | None = None
    channels_last: bool = False


def _has_word(name: str, *words: str) -> bool:
    parts = re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    joined = "_" + "_".join(parts) + "_"
    return any(f"_{word}_" in joined for word in words)


class Inputs:
    """The inputs of a model, classified.

    Args:
        proto: The model.
    """

    def __init__(self, proto: onnx.ModelProto) -> None:
        graph = proto.graph
        self._constants = {t.name: t for t in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
                self._constants[node.output[0]] = node.attribute[0].t
        self._consumers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
        for node in graph.node:
            for index, name in enumerate(node.input):
                self._consumers.setdefault(name, []).append((node, index))
        self.infos = tuple(self._info(v) for v in graph.input if v.name not in self._constants)

    def _info(self, value: onnx.ValueInfoProto) -> InputInfo:
        tensor = value.type.tensor_type
        shape: tuple[int | str | None, ...] = tuple(
            d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in tensor.shape.dim
        )
        if not value.type.HasField("tensor_type") or not tensor.HasField("shape"):
            return InputInfo(value.name, tensor.elem_type, shape, None)
        last = len(shape) == 4 and shape[3] in _CHANNELS and shape[1] not in _CHANNELS
        rows = self._rows(value.name) if tensor.elem_type in _INTEGERS else None
        kind = self._kind(value.name, tensor.elem_type, shape, rows)
        return InputInfo(value.name, tensor.elem_type, shape, kind, rows, last)

    def _kind(self, name: str, element_type: int, shape: tuple[int | str | None, ...], rows: int | None) -> Kind | None:
        if _has_word(name, "mask", "attention_mask", "padding_mask", "input_mask"):
            return Kind.MASK
        if element_type in _FLOATS:
            return self._float_kind(name, shape)
        if element_type in _BYTES:
            return Kind.IMAGE if len(shape) == 4 and set(shape) & set(_CHANNELS) else None
        if element_type in _INTEGERS:
            return _integer_kind(name, shape, rows)
        return None

    def _float_kind(self, name: str, shape: tuple[int | str | None, ...]) -> Kind | None:
        if _has_word(name, "scale_factor", "scale_factors", "im_scale", "im_info_scale"):
            return Kind.SCALE
        if _has_word(name, "im_shape", "image_shape", "orig_size", "ori_shape", "img_shape", "image_size"):
            return Kind.IMAGE_SIZE
        if _has_word(name, "length", "lengths", "seq_len"):
            return Kind.LENGTH
        if len(shape) == 4 and (shape[1] in _CHANNELS or shape[3] in _CHANNELS):
            return Kind.SIGNAL if _is_narrow(shape) else Kind.IMAGE
        if len(shape) <= 3 and (name.lower() in ("h", "c", "h0", "c0") or _has_word(name, "state", "hidden", "cache")):
            return Kind.STATE
        if _has_word(name, "past", "past_key_values", "cache"):
            return Kind.STATE
        return Kind.SIGNAL if shape else None

    def _rows(self, name: str) -> int | None:
        """Returns the smallest number of rows among the tables that an input indexes."""
        found: list[int] = []
        for node, index in self._reached(name):
            table = None
            if node.op_type in ("Gather", "GatherElements") and index == 1:
                table = self._constants.get(node.input[0])
                axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
            elif node.op_type in _EMBEDDINGS and index in _EMBEDDINGS[node.op_type]:
                position = _EMBEDDINGS[node.op_type][index]
                table = self._constants.get(node.input[position]) if position < len(node.input) else None
                axis = 0
            if table is not None and table.dims:
                found.append(int(table.dims[axis]))
        return min(found, default=None)

    def _reached(self, name: str) -> Iterator[tuple[onnx.NodeProto, int]]:
        """Yields the consumers of a value, also behind nodes that pass its elements on."""
        queue, seen = [name], {name}
        while queue:
            for node, index in self._consumers.get(queue.pop(), ()):
                yield node, index
                if node.op_type in _PASSING and index == 0 and node.output[0] not in seen:
                    seen.add(node.output[0])
                    queue.append(node.output[0])

    def pixel_factor(self, name: str) -> float | None:
        """Returns the largest pixel value if the graph itself normalizes pixels of an input, None if it does not."""
        for node, index in self._reached(name):
            other = node.input[1 - index] if len(node.input) == 2 else ""
            if node.op_type not in ("Sub", "Div", "Mul", "Add") or other not in self._constants:
                continue
            largest = float(abs(numpy_helper.to_array(self._constants[other])).max(initial=0.0))
            if node.op_type == "Mul":
                return 255.0 if largest <= 1 / 40 else 1.0
            return 255.0 if largest > 10 else 1.0
        return None

    def shapes(self) -> Mapping[str, tuple[int | str | None, ...]]:
        """Returns the shapes by input name."""
        return {info.name: info.shape for info in self.infos}


def _is_narrow(shape: tuple[int | str | None, ...]) -> bool:
    """Whether a one-channel input is a spectrogram rather than an image: one side is of a few bins only."""
    sides = shape[2:4] if shape[1] == 1 else shape[1:3]
    fixed = [side for side in sides if isinstance(side, int)]
    return 1 in (shape[1], shape[3]) and len(fixed) == 2 and min(fixed) < 16 and fixed[0] != fixed[1]


def _integer_kind(name: str, shape: tuple[int | str | None, ...], rows: int | None) -> Kind | None:
    if _has_word(name, "position_ids", "positions", "position"):
        return Kind.POSITIONS
    if _has_word(name, "token_type_ids", "segment_ids", "token_type"):
        return Kind.SEGMENTS
    if _has_word(name, "sr", "sample_rate", "sampling_rate"):
        return Kind.SAMPLE_RATE
    if _has_word(name, "length", "lengths", "seq_len", "len"):
        return Kind.LENGTH
    if _has_word(name, "im_shape", "image_shape", "orig_size", "orig_target_sizes", "image_size"):
        return Kind.IMAGE_SIZE
    if rows is not None and shape:
        return Kind.TOKENS
    return None
