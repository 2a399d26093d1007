"""Images: made-up photographs and writing, brought to what the model takes.

What made-up pictures show: photographs alone, or writing too, whichever the net answers to.

A trained net is excited by what it was trained on: its last layers vary more over such pictures, and so do its answers.
Measured on trained nets, writing excites the last third of the layers of a text detector and of a classifier of text
lines 1.5 to 2 times as much as photographs do, and their answers more than 2.5 times; those of nets for photographs 0.8
to 1.25 times. A text recognizer is excited 1.1 times as much, but takes pictures of one line, which are wide and low.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.calibration.provenance import Known
from kenosis_ort.calibration.session import ObservedModel, SessionSettings, run
from kenosis_ort.calibration.synthetic.draws import Draws
from kenosis_ort.calibration.synthetic.kinds import InputInfo
from kenosis_ort.calibration.synthetic.leaves import photograph
from kenosis_ort.calibration.synthetic.maker import Array, Maker, SyntheticSample
from kenosis_ort.calibration.synthetic.pages import is_line, page
from kenosis_ort.errors import CalibrationError
from kenosis_ort.graph.operators import LAYERS

Subject = Callable[[Draws, int, int], npt.NDArray[np.uint8]]
"""Makes a picture of red, green and blue of some height and width."""


@dataclass(frozen=True)
class Preprocessing:
    """How pixels become the values of an input: mapped to a range, then the mean subtracted, then divided.

    Attributes:
        low: What black becomes.
        high: What white becomes.
        mean: Subtracted then, one number or one a channel.
        std: Divided by at last, one number or one a channel.
        name: For people.
    """

    low: float = 0.0
    high: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    name: str = ""

    def apply(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
        """The values of pixels of shape (channels, height, width)."""
        scaled = self.low + pixels.astype(np.float64) * ((self.high - self.low) / 255.0)
        mean, std = (_per_channel(v, len(pixels)) for v in (self.mean, self.std))
        values: npt.NDArray[np.float64] = (scaled - mean) / std
        return values

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and largest value of any channel."""
        count = max(len(self.mean), len(self.std))
        mean, std = (np.resize(np.asarray(v, np.float64), count) for v in (self.mean, self.std))
        ends = [(end - m) / s for end in (self.low, self.high) for m, s in zip(mean, std, strict=True)]
        return float(min(ends)), float(max(ends))


def _per_channel(values: tuple[float, ...], channels: int) -> npt.NDArray[np.float64]:
    if len(values) in (1, channels):
        return np.asarray(values, np.float64)[:, None, None]
    return np.full((1, 1, 1), sum(values) / len(values))  # grey pictures of a net with colours' mean


class ImageMaker(Maker):
    """Made-up photographs.

    Args:
        info: The input, with channels first or last, with or without batch axis.
        shape: Its shape.
        ways: Preprocessing of the pixels; several are used in turn.
        known: How well it is known.

    Attributes:
        writing: Half of the pictures show writing.
    """

    def __init__(self, info: InputInfo, shape: tuple[int, ...], *, ways: Sequence[Preprocessing], known: Known) -> None:
        super().__init__(info, shape)
        self.ways = tuple(ways)
        self.known = known
        self.writing = False

    @property
    def says(self) -> str:
        ranges = " and ".join(f"{way.name} ({way.ends[0]:.3g} to {way.ends[1]:.3g})" for way in self.ways)
        return f"images{', half of them of writing' if self.writing else ''}, pixels {ranges}"

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        height, width = self.shape[-3:-1] if self.info.channels_last else self.shape[-2:]
        return height, width

    def values(self, sample: SyntheticSample) -> Array:
        return self.brought(self.pictures(sample), self.ways[sample.index % len(self.ways)])

    def shown(self, sample: SyntheticSample, *, writing: bool) -> Array:
        """The array of a sample that shows photographs alone, or writing alone."""
        pictures = self._drawn(sample, page if writing else photograph)
        return self.brought(pictures, self.ways[sample.index % len(self.ways)]).astype(self.info.dtype)

    def pictures(self, sample: SyntheticSample) -> npt.NDArray[np.uint8]:
        """The pictures of a sample, of shape (count, channels, height, width)."""
        # Not in turns: whoever takes every second or fourth sample has to get some of both (the Thue-Morse sequence).
        odd = bin(sample.index // len(self.ways)).count("1") % 2
        return self._drawn(sample, *((page, photograph) if odd and self.writing else (photograph, page)))

    def _drawn(self, sample: SyntheticSample, *subjects: Subject) -> npt.NDArray[np.uint8]:
        """Pictures of the subjects in turn."""
        height, width = self.size
        channels = self.shape[-1 if self.info.channels_last else -3]
        count = math.prod(self.shape) // max(height * width * channels, 1)
        kinds = subjects if self.writing else subjects[:1]
        return np.stack([self._pixels(sample, number, channels, kinds[number % len(kinds)]) for number in range(count)])

    def brought(self, pictures: npt.NDArray[np.uint8], way: Preprocessing) -> Array:
        """Pictures as the model takes them, of the input's shape."""
        out = np.stack([way.apply(picture) for picture in pictures])
        return (out.transpose(0, 2, 3, 1) if self.info.channels_last else out).reshape(self.shape)

    def _pixels(self, sample: SyntheticSample, number: int, channels: int, subject: Subject) -> npt.NDArray[np.uint8]:
        colour = subject(sample.draws(self.info.name, sample.step, number), *self.size)
        if channels == 3:
            return colour
        if channels == 4:
            return np.concatenate([colour, np.full_like(colour[:1], 255)])
        grey = (colour * np.array([77, 150, 29], np.int32)[:, None, None]).sum(axis=0) >> 8
        return np.broadcast_to(grey.astype(np.uint8), (channels, *grey.shape))


_log = logging.getLogger(__name__)

_TRIALS: Final = 8
_EXCITED: Final = 1.4  # times the deviation over photographs, from which on writing is what a net is for
_EXCITED_BY_LINES: Final = 1.0
_ANSWERS: Final = 2.0  # the same of an output
_MOST_LAYERS: Final = 16
_NOTHING: Final = 1e-9


def shows_writing(proto: onnx.ModelProto, makers: Sequence[Maker], settings: SessionSettings) -> bool:
    """Whether half of a net's pictures had better show writing.

    Args:
        proto: The model.
        makers: Of its inputs; of any but a single picture nothing is found out.
        settings: How to run the model.
    """
    maker = makers[0] if makers else None
    if not isinstance(maker, ImageMaker) or len(makers) > 1:
        return False
    try:
        photographs, pages = (_excitement(proto, maker, settings, writing=shown) for shown in (False, True))
    except CalibrationError as error:
        _log.info("photographs alone: %s", error)
        return False
    layers, answers = (
        (np.asarray(b) + _NOTHING) / (np.asarray(a) + _NOTHING) for a, b in zip(photographs, pages, strict=True)
    )
    excited = float(np.exp(np.mean(np.log(layers)))) if layers.size else 1.0
    answered = float(answers.max(initial=0.0))
    _log.info("writing excites the last layers %.2f times as much as photographs, answers %.2f", excited, answered)
    return excited >= (_EXCITED_BY_LINES if is_line(*maker.size) else _EXCITED) or answered >= _ANSWERS


def _excitement(
    proto: onnx.ModelProto, maker: ImageMaker, settings: SessionSettings, *, writing: bool
) -> tuple[list[float], list[float]]:
    """The deviations of the last third of the layers, the median over their channels, and of the outputs."""
    nodes = [node for node in proto.graph.node if node.op_type in LAYERS]
    axes = {node.output[0]: -1 if node.op_type in ("Gemm", "MatMul") else 1 for node in nodes}
    layers = list(axes)[len(axes) * 2 // 3 :][-_MOST_LAYERS:]
    outputs = [v.name for v in proto.graph.output if v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT]
    names = list(dict.fromkeys([*layers, *outputs]))
    sums: dict[str, Any] = dict.fromkeys(names, 0.0)
    with ObservedModel(proto, SessionSettings(custom_op_libraries=settings.custom_op_libraries)) as model:
        session = model.session(names)
        for index in range(_TRIALS):
            feed = {maker.info.name: maker.shown(SyntheticSample(0, index), writing=writing)}
            for value, array in zip(names, run(session, names, feed, index), strict=True):
                rows = np.moveaxis(array, axes[value], 0) if value in axes and array.ndim > 1 else array[None]
                wide = rows.reshape(len(rows), -1).astype(np.float64)
                sums[value] = sums[value] + np.stack(
                    [np.full(len(wide), wide.shape[1]), wide.sum(1), (wide * wide).sum(1)]
                )
    spreads = {}
    for value, (count, total, squares) in sums.items():
        mean = total / count
        spreads[value] = np.sqrt(np.maximum(squares / count - mean * mean, 0.0))
    return [float(np.median(spreads[v])) for v in layers], [float(spreads[v].max()) for v in outputs]
