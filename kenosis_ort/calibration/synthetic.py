"""Calibration without data: feeds made up from what the model's inputs are for."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from kenosis_ort.calibration.leaves import dead_leaves, pink_noise
from kenosis_ort.calibration.reader_base import Array, IndexedReader
from kenosis_ort.calibration.session import ObservedModel, SessionSettings, run
from kenosis_ort.calibration.synthetic_kinds import InputInfo, Inputs, Kind
from kenosis_ort.errors import CalibrationError, did_you_mean
from kenosis_ort.graph.load import load_model

_log = logging.getLogger(__name__)

_NORMALIZED = (-2.1, 2.6)  # pixels after subtracting ImageNet's mean and dividing by its deviation
_IMAGE_SIDE = 224
_STEPS = 32
_AUDIO_STEPS = 16_000
_SAMPLE_RATE = 16_000
_ARRAY_BYTES = 2**31
_SIZES_TO_TRY = (64, 128, 256, 320, 416, 512, 640, 576, 16, 8, 1, 1600, 4000)

Generator = np.random.Generator


class SyntheticReader(IndexedReader):
    """Feeds made up without data: natural-looking images, tokens, masks, signals.

    The same model, seed and index give the same feed. Real data is better: see `assumptions`.

    Args:
        model: The model or its path.
        samples: Number of feeds, each with one sample where the batch size is not fixed.
        seed: Of the random numbers.
        input_ranges: Lowest and highest value by input name, for inputs of floats and tokens; an input named here
            never counts as unknown.
        input_shapes: Shape by input name, for inputs of dynamic shape.

    Raises:
        CalibrationError: What an input is for, or its shape, cannot be told; the message names the argument to give.
            Or a name is unknown.
        ModelLoadError: The model cannot be loaded.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | onnx.ModelProto,
        *,
        samples: int = 32,
        seed: int = 0,
        input_ranges: Mapping[str, tuple[float, float]] | None = None,
        input_shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        if samples < 1:
            raise CalibrationError(f"The number of synthetic samples, {samples}, is not positive.")
        proto = model if isinstance(model, onnx.ModelProto) else load_model(model).proto
        inputs = Inputs(proto)
        self._samples, self._seed = samples, seed
        self._ranges = {n: (float(a), float(b)) for n, (a, b) in (input_ranges or {}).items()}
        names = [info.name for info in inputs.infos]
        for name in (*self._ranges, *(input_shapes or {})):
            if name not in names:
                raise CalibrationError(
                    f"The model has no input '{name}'.{did_you_mean(name, names)}",
                    fix=f"Its inputs: {', '.join(names)}.",
                )
        self._infos = inputs.infos
        self._given = {name: tuple(int(d) for d in shape) for name, shape in (input_shapes or {}).items()}
        self._shapes = _resolve_shapes(inputs.infos, self._given)
        self._notes: list[str] = []
        self._sources: dict[str, str] = {}
        for info in self._infos:
            self._decide_range(info, inputs)
        self._settle_shapes(proto)
        for info in self._infos:
            self._note(info)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What was assumed about each input, one sentence each."""
        return tuple(self._notes)

    def _decide_range(self, info: InputInfo, inputs: Inputs) -> None:
        """Decides the range of an input, or refuses it."""
        if info.kind is None and (info.name not in self._ranges or _numpy_type(info) is None):
            raise CalibrationError(
                f"What the input '{info.name}' ({_describe(info)}) is for cannot be told, so no data can be made up.",
                where=f"input '{info.name}'",
                fix=f"Give SyntheticReader(input_ranges={{'{info.name}': (low, high)}}), or a reader of real data.",
            )
        if info.kind is Kind.IMAGE and info.name not in self._ranges:
            top = 255.0 if info.element_type == TensorProto.UINT8 else inputs.pixel_factor(info.name)
            self._ranges[info.name] = _NORMALIZED if top is None else (0.0, top)
            self._sources[info.name] = "a guess" if top is None else "from the graph's own normalization"

    def _note(self, info: InputInfo) -> None:
        known = f" in {self._ranges[info.name]}" if info.name in self._ranges else ""
        known += f", {self._sources[info.name]}" if info.name in self._sources else ""
        what = info.kind.value if info.kind is not None else "values"
        self._notes.append(f"input '{info.name}' of shape {self._shapes[info.name]} is taken for {what}{known}")
        _log.info("synthetic data: %s", self._notes[-1])

    def _settle_shapes(self, proto: onnx.ModelProto) -> None:
        """Where a size is dynamic, tries sizes until the model runs.

        Raises:
            CalibrationError: It runs with none of them.
        """
        free = [
            i for i in self._infos if i.name not in self._given and not all(isinstance(d, int) for d in i.shape[1:])
        ]
        if not free:
            return
        outputs = [value.name for value in proto.graph.output]
        with ObservedModel(proto, SessionSettings(optimize=False)) as model:
            session = model.session(outputs)
        first_error: CalibrationError | None = None
        for size in (None, *_SIZES_TO_TRY):
            self._shapes = _resolve_shapes(self._infos, self._given, size)
            try:
                run(session, outputs, dict(self.feed(0)), 0)
                return
            except CalibrationError as error:
                first_error = first_error or error
        raise CalibrationError(
            f"No size of the dynamic inputs was found with which the model runs ({first_error}).",
            where=", ".join(f"input '{info.name}' ({_describe(info)})" for info in free),
            fix="Give SyntheticReader(input_shapes={name: shape}), or a reader of real data.",
        ) from first_error

    def __len__(self) -> int:
        return self._samples

    def feed(self, index: int) -> dict[str, Array]:
        rng = np.random.default_rng((self._seed, index))
        return {info.name: self._make(info, rng) for info in self._infos}

    def _make(self, info: InputInfo, rng: Generator) -> Array:
        shape = self._shapes[info.name]
        dtype = _numpy_type(info)
        range_ = self._ranges.get(info.name)
        if info.kind is Kind.IMAGE:
            values = _images(rng, shape, info.channels_last, range_ or _NORMALIZED)
        elif np.issubdtype(dtype, np.floating) and (range_ is not None or info.kind in (None, Kind.SIGNAL)):
            values = _signal(rng, shape, range_)
        elif range_ is not None:
            values = rng.integers(int(range_[0]), int(range_[1]), shape, endpoint=True)
        else:
            values = self._special(info, shape, rng)
        if np.issubdtype(dtype, np.integer):
            values = np.rint(values)
        return np.array(np.broadcast_to(values, shape), dtype, order="C")

    def _special(self, info: InputInfo, shape: tuple[int, ...], rng: Generator) -> Array:
        """Returns the values of an input that its kind alone determines."""
        steps = shape[-1] if shape else 1
        if info.kind is Kind.TOKENS:
            return rng.integers(0, info.rows or 1, shape)
        if info.kind is Kind.POSITIONS:
            return np.arange(steps) % (info.rows or steps)
        if info.kind in (Kind.MASK, Kind.SCALE):
            return np.ones(shape)
        if info.kind is Kind.IMAGE_SIZE:
            return np.resize(self._image_size(), shape)
        if info.kind is Kind.LENGTH:
            return np.full(shape, self._sequence_length(info.name))
        if info.kind is Kind.SAMPLE_RATE:
            return np.full(shape, _SAMPLE_RATE)
        return np.zeros(shape)

    def _image_size(self) -> tuple[int, int]:
        for info in self._infos:
            if info.kind is Kind.IMAGE:
                shape = self._shapes[info.name]
                return (shape[1], shape[2]) if info.channels_last else (shape[2], shape[3])
        return (_IMAGE_SIDE, _IMAGE_SIDE)

    def _sequence_length(self, name: str) -> int:
        longest = [s[1] for n, s in self._shapes.items() if n != name and len(s) > 1]
        return longest[0] if longest else 1


def _numpy_type(info: InputInfo) -> np.dtype[Any] | None:
    if info.element_type in (TensorProto.UNDEFINED, TensorProto.STRING):
        return None
    return np.dtype(helper.tensor_dtype_to_np_dtype(info.element_type))


def _describe(info: InputInfo) -> str:
    sizes = ", ".join("?" if d is None else str(d) for d in info.shape)
    return f"{TensorProto.DataType.Name(info.element_type).lower()} of shape ({sizes})"


def _resolve_shapes(
    infos: Sequence[InputInfo], given: Mapping[str, tuple[int, ...]], size: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Returns a fixed shape of every input; sizes of one name are the same everywhere.

    Args:
        infos: The inputs.
        given: Shapes that the caller gave.
        size: For dynamic axes other than the batch, channels and states; None chooses by kind.

    Raises:
        CalibrationError: A given shape contradicts the model's, or a tensor would be absurdly large.
    """
    symbols: dict[str, int] = {}
    for info in infos:
        if info.name not in given:
            continue
        wanted = given[info.name]
        fits = len(wanted) == len(info.shape) and all(
            not isinstance(d, int) or d == w for d, w in zip(info.shape, wanted, strict=True)
        )
        if not fits:
            raise CalibrationError(
                f"The shape {wanted} does not fit the model's input ({_describe(info)}).",
                where=f"input '{info.name}'",
                fix="Correct input_shapes.",
            )
        symbols.update({d: w for d, w in zip(info.shape, wanted, strict=True) if isinstance(d, str)})
    out: dict[str, tuple[int, ...]] = {}
    for info in infos:
        if info.name in given:
            out[info.name] = given[info.name]
            continue
        sizes = []
        for axis, dim in enumerate(info.shape):
            chosen = dim if isinstance(dim, int) else _default_size(info, axis, size)
            sizes.append(symbols.setdefault(dim, chosen) if isinstance(dim, str) else chosen)
        out[info.name] = tuple(sizes)
        if np.prod(out[info.name], dtype=np.float64) * 4 > _ARRAY_BYTES:
            raise CalibrationError(
                f"The input's shape {out[info.name]} is too large to make up.",
                where=f"input '{info.name}'",
                fix="Give input_shapes, or a reader of real data.",
            )
    return out


def _default_size(info: InputInfo, axis: int, size: int | None) -> int:
    if axis == 0:
        return 1
    if info.kind is Kind.IMAGE:
        channel = 3 if info.channels_last else 1
        return 3 if axis == channel else size or _IMAGE_SIDE
    if info.kind is Kind.STATE:
        return 1
    if size is not None:
        return size
    if info.kind is Kind.SIGNAL and len(info.shape) <= 3 and axis == len(info.shape) - 1 and not _is_features(info):
        return _AUDIO_STEPS
    return _STEPS


def _is_features(info: InputInfo) -> bool:
    """Whether another axis is fixed, so that the dynamic one counts frames rather than samples of a waveform."""
    return any(isinstance(d, int) and d > 1 for d in info.shape)


def _images(rng: Generator, shape: tuple[int, ...], channels_last: bool, range_: tuple[float, float]) -> Array:
    channels, (height, width) = (shape[3], shape[1:3]) if channels_last else (shape[1], shape[2:4])
    batch = np.empty((shape[0], channels, height, width))
    for image in batch:
        colour = dead_leaves(rng, height, width)
        image[:] = colour.mean(axis=0) if channels == 1 else np.resize(colour, image.shape)
    batch = range_[0] + batch * (range_[1] - range_[0])
    return batch.transpose(0, 2, 3, 1) if channels_last else batch


def _signal(rng: Generator, shape: tuple[int, ...], range_: tuple[float, float] | None) -> Array:
    """Returns noise of unit variance with a 1/f spectrum along the last axes, or mapped to a range."""
    values = pink_noise(rng, shape, axes=min(len(shape) - 1, 2) if len(shape) > 1 else len(shape), power=0.5)
    if range_ is None:
        return values
    low, high = range_
    scaled = (low + high) / 2 + values * (high - low) / 6
    clipped: Array = np.clip(scaled, low, high)
    return clipped
