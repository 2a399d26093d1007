"""Images: pictures brought to what a model takes, and the choice of what they show.

Pictures show photographs alone, or writing too, whichever the net answers to. A trained net is excited by what it was
trained on: its last layers vary more over such pictures, and so do its answers. Measured on trained nets, writing
excites the last third of the layers of a text detector and of a classifier of text lines 1.5 to 2 times as much as
photographs do, and their answers more than 2.5 times; those of nets for photographs 0.8 to 1.25 times. A text
recognizer is excited 1.1 times as much, but takes pictures of one line, which are wide and low.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx

from kenosis_ort.calibration.feeds import Known
from kenosis_ort.calibration.part_session import SessionSettings, outputs_of
from kenosis_ort.calibration.synthetic.drawing import Draws, is_line, page, photograph
from kenosis_ort.calibration.synthetic.kinds import Array, InputInfo, Maker, SyntheticSample
from kenosis_ort.calibration.synthetic.stem import ChannelMoments
from kenosis_ort.errors import CalibrationError
from kenosis_ort.graph.constants import LAYERS

_log = logging.getLogger(__name__)


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


Subject = Callable[[Draws, int, int], npt.NDArray[np.uint8]]
"""Makes a picture of red, green and blue of some height and width."""


class ImageMaker(Maker):
    """Made-up photographs, or photographs and writing, brought to what the model takes.

    Args:
        info: The input, with channels first or last, with or without batch axis.
        shape: Its shape.
        ways: Preprocessing of the pixels; several are used in turn.
        known: How well it is known.
        writing: Half of the pictures show writing.
    """

    def __init__(
        self,
        info: InputInfo,
        shape: tuple[int, ...],
        ways: Sequence[Preprocessing],
        known: Known,
        *,
        writing: bool = False,
    ) -> None:
        ranges = " and ".join(f"{way.name} ({way.ends[0]:.3g} to {way.ends[1]:.3g})" for way in ways)
        says = f"images{', half of them of writing' if writing else ''}, pixels {ranges}"
        super().__init__(info, shape, self._values, says, known=known)
        self.ways, self.writing = tuple(ways), writing

    def with_writing(self) -> ImageMaker:
        """The same, half of whose pictures show writing."""
        return ImageMaker(self.info, self.shape, self.ways, self.known, writing=True)

    def _values(self, sample: SyntheticSample) -> Array:
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
        height, width = self.info.sides(self.shape)
        channels = self.shape[-1 if self.info.channels_last else -3]
        count = math.prod(self.shape) // max(height * width * channels, 1)
        kinds = subjects if self.writing else subjects[:1]
        return np.stack([self._pixels(sample, number, channels, kinds[number % len(kinds)]) for number in range(count)])

    def brought(self, pictures: npt.NDArray[np.uint8], way: Preprocessing) -> Array:
        """Pictures as the model takes them, of the input's shape."""
        out = np.stack([way.apply(picture) for picture in pictures])
        return (out.transpose(0, 2, 3, 1) if self.info.channels_last else out).reshape(self.shape)

    def _pixels(self, sample: SyntheticSample, number: int, channels: int, subject: Subject) -> npt.NDArray[np.uint8]:
        colour = subject(sample.draws(self.info.name, sample.step, number), *self.info.sides(self.shape))
        if channels == 3:
            return colour
        if channels == 4:
            return np.concatenate([colour, np.full_like(colour[:1], 255)])
        grey = (colour * np.array([77, 150, 29], np.int32)[:, None, None]).sum(axis=0) >> 8
        return np.broadcast_to(grey.astype(np.uint8), (channels, *grey.shape))


# ---- photographs or writing ------------------------------------------------------------------------------------------


_WRITING_TRIALS: Final = 8
_EXCITED: Final = 1.4  # times the deviation over photographs, from which on writing is what a net is for
_EXCITED_BY_LINES: Final = 1.0
_ANSWERS: Final = 2.0  # the same of an output
_MOST_EXCITED: Final = 16
_NOTHING: Final = 1e-9


def shows_writing(proto: onnx.ModelProto, maker: ImageMaker, settings: SessionSettings) -> bool:
    """Whether half of a net's pictures had better show writing.

    Args:
        proto: The model.
        maker: Of its only input.
        settings: How to run the model.
    """
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
    enough = _EXCITED_BY_LINES if is_line(*maker.info.sides(maker.shape)) else _EXCITED
    return excited >= enough or answered >= _ANSWERS


def _excitement(
    proto: onnx.ModelProto, maker: ImageMaker, settings: SessionSettings, *, writing: bool
) -> tuple[list[float], list[float]]:
    """The deviations of the last third of the layers, the median over their channels, and of the outputs."""
    nodes = [node for node in proto.graph.node if node.op_type in LAYERS]
    axes = {node.output[0]: -1 if node.op_type in ("Gemm", "MatMul") else 1 for node in nodes}
    layers = list(axes)[len(axes) * 2 // 3 :][-_MOST_EXCITED:]
    outputs = [v.name for v in proto.graph.output if v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT]
    names = list(dict.fromkeys([*layers, *outputs]))
    seen = {name: ChannelMoments() for name in names}
    samples = (SyntheticSample(0, index) for index in range(_WRITING_TRIALS))
    feeds = ({maker.info.name: maker.shown(sample, writing=writing)} for sample in samples)
    for arrays in outputs_of(proto, names, feeds, settings.custom_op_libraries):
        for value, array in zip(names, arrays, strict=True):
            seen[value].add(np.moveaxis(array, axes[value], 0) if value in axes and array.ndim > 1 else array[None])
    spreads = {value: moments.deviation for value, moments in seen.items()}
    return [float(np.median(spreads[v])) for v in layers], [float(spreads[v].max()) for v in outputs]
