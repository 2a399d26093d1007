"""Images: pictures brought to what a model takes, and the choice of what they show.

Pictures show photographs alone, or writing too, whichever the net answers to. A trained net is excited by what it was
trained on: its last layers vary more over such pictures, and so do its answers. Measured on trained nets, writing
excites the last third of the layers of a text detector and of a classifier of text lines 1.5 to 2 times as much as
photographs do, and their answers more than 2.5 times; those of nets for photographs 0.8 to 1.25 times. A text
recognizer is excited 1.1 times as much, but takes pictures of one line, which are wide and low.

Nets are trained on one of few ways to bring pixels to numbers, which differ in scale by up to 250 and in what black is.
The way comes from the caller, real samples, the graph, or what the first layer's statistics say. Where the graph itself
does not normalize, each way is tried on made-up photographs and judged by the first layer:

* Where a BatchNormalization follows, its stored mean and variance are compared with the measured ones.
* Where it was folded into the Conv, the folded bias ``beta - gamma * m / s`` is about as large as the deviation of the
  Conv's output, and the means of that output, which beta sets, are not many deviations from zero.
* A net that never had a BatchNormalization may have biases too small to tell: of Relu or the like it is homogeneous,
  so that any scale suits its layers. What remains is its answer: a classifier that sees inputs of a fraction of their
  right size finds all classes equally likely. The way is taken with which the whole net answers neither with all
  classes alike nor with certainty, and it is called a guess.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

from kenosis_ort.calibration.feeds import Array, Known, input_specs
from kenosis_ort.calibration.part_session import ObservedModel, SessionSettings, outputs_of, run
from kenosis_ort.calibration.synthetic.consumers import Consumers
from kenosis_ort.calibration.synthetic.drawing import Doubles, Draws, is_line, page, photograph
from kenosis_ort.calibration.synthetic.kinds import InputInfo, Maker, SyntheticSample
from kenosis_ort.calibration.synthetic.stem import ChannelMoments, Stem, StemPoint, distance
from kenosis_ort.errors import CalibrationError
from kenosis_ort.graph.constants import LAYERS

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preprocessing:
    """Preprocessing of pixels: mapped to a range, then the mean subtracted, then divided.

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
        black_and_white = np.array([[[0, 255]]] * max(len(self.mean), len(self.std)), np.uint8)
        values = self.apply(black_and_white)
        return float(values.min()), float(values.max())


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
        for value, array in arrays.items():
            seen[value].add(np.moveaxis(array, axes[value], 0) if value in axes and array.ndim > 1 else array[None])
    spreads = {value: moments.deviation for value, moments in seen.items()}
    return [float(np.median(spreads[v])) for v in layers], [float(spreads[v].max()) for v in outputs]


_MOST_LAYERS = 24
_LEAST_CLASSES = 10
_LEAST_SPREAD = 1e-6


def image_maker(
    proto: onnx.ModelProto,
    info: InputInfo,
    shape: tuple[int, ...],
    given: Preprocessing | None,
    real: Sequence[Mapping[str, Array]],
    settings: SessionSettings,
) -> ImageMaker:
    """A maker of photographs, with the preprocessing of the caller, of real samples, or the one that suits the model.

    Args:
        proto: The model.
        info: The input.
        shape: Its shape.
        given: What the caller says; None for nothing.
        real: Real samples.
        settings: How to run the model.
    """
    if given is not None:
        return ImageMaker(info, shape, [given], Known.GIVEN)
    if real:
        return ImageMaker(info, shape, [_of_real(real, info)], Known.REAL)
    plain = ImageMaker(info, shape, [Preprocessing()], Known.GUESS)
    pictures = cache(lambda index: plain.pictures(SyntheticSample(0, index)))

    def trial(way: Preprocessing, index: int) -> Array:
        return plain.brought(pictures(index), way).astype(info.dtype)

    return ImageMaker(info, shape, *_chosen(proto, info, trial, settings))


def _of_real(feeds: Sequence[Mapping[str, Array]], info: InputInfo) -> Preprocessing:
    """The preprocessing that brings black and white to the extremes of each channel of the real images."""
    axis = -1 if info.channels_last else -3
    pixels = [np.moveaxis(feed[info.name].astype(np.float64), axis, 0) for feed in feeds]
    low = np.min([p.reshape(p.shape[0], -1).min(axis=1) for p in pixels], axis=0)
    high = np.max([p.reshape(p.shape[0], -1).max(axis=1) for p in pixels], axis=0)
    width = np.maximum(high - low, _LEAST_SPREAD)
    mean, std = tuple(float(v) for v in -low / width), tuple(float(v) for v in 1 / width)
    return Preprocessing(0.0, 1.0, mean, std, name="as the real samples")


# ---- the way of the pixels -------------------------------------------------------------------------------------------


_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

WAYS = (
    Preprocessing(name="0 to 1"),
    Preprocessing(-1.0, 1.0, name="-1 to 1"),
    Preprocessing(-0.5, 0.5, name="-0.5 to 0.5"),
    Preprocessing(mean=_MEAN, std=_STD, name="normalized with ImageNet's mean and deviation"),
    Preprocessing(0.0, 255.0, name="0 to 255"),
    Preprocessing(0.0, 255.0, tuple(m * 255 for m in _MEAN), name="0 to 255 minus the mean"),
)
"""How trained nets take pixels, most often."""
_USUAL = WAYS[3]

_TRIALS = 6
_FITS = 0.35  # misfit of a BatchNormalization, of which the right way has 0.02 to 0.2 and half the deviation 0.5
_CLEARLY = 1.6  # times the best misfit: what is better than that is used too
_PLAUSIBLE = 4.0  # cost of a folded bias from which on no way is
_ALIKE = 1.8  # difference of that cost below which ways cannot be told apart
_MOST_COST = 16.0
_TYPICAL_BIAS, _BIAS_SCATTER = 0.7, 0.9  # of a folded bias in deviations of the output: median, and scatter of its log
_TYPICAL_MEAN, _MEAN_SCATTER = 1.5, 0.5  # of the output's mean, the same
_BYTES_FROM = 10.0  # constants above are for pixels of 0 to 255
_TELLING_BIAS = 0.06  # median over all layers, in deviations of outputs: 0.4 to 1 where a normalization was folded
_CONFIDENCE = (0.15, 0.97)  # of a classifier in its likeliest class, on inputs of the right size
_OUTLOOK_TRIALS = 3
_METADATA = re.compile(r"(?:^|[._])(?:image_)?(mean|std|scale)(?:_values?)?$", re.IGNORECASE)

Choice = tuple[tuple[Preprocessing, ...], Known]
Trial = Callable[[Preprocessing, int], Array]
"""Makes an input's array from a preprocessing and an index."""


def _chosen(proto: onnx.ModelProto, info: InputInfo, trial: Trial, settings: SessionSettings) -> Choice:
    """Preprocessing of the pixels of an input, several where they cannot be told apart, and how well it is known."""
    if info.element_type in (TensorProto.UINT8, TensorProto.INT8):
        low = 0.0 if info.element_type == TensorProto.UINT8 else -128.0
        return ((Preprocessing(low, low + 255.0, name="as bytes"),), Known.GRAPH)
    found = _from_graph(Consumers(proto), info.name) or _from_metadata(proto)
    if found is not None:
        return ((found,), Known.GRAPH)
    try:
        stem = Stem(proto, info.name)
        if stem.point is None:
            return ((_USUAL,), Known.GUESS)
        choice = _selected(stem, stem.point, trial)
        if choice[1] is Known.CONVENTION and len(input_specs(proto)[0]) == 1:
            choice = _confirmed(proto, info.name, choice, trial, settings)
        return choice
    except CalibrationError as error:
        _log.info("no range of pixels is known: %s", error)
        return ((_USUAL,), Known.GUESS)


def _confirmed(proto: onnx.ModelProto, name: str, choice: Choice, trial: Trial, settings: SessionSettings) -> Choice:
    """The choice if the biases of the whole net bear it out, else what suits its answers best."""
    biases, output = _biases(proto), proto.graph.output[0].name
    ends_in_softmax = any(n.op_type == "Softmax" and output in n.output for n in proto.graph.node)
    with ObservedModel(proto, settings) as model:
        session = model.session([*biases, output])

    def ask(way: Preprocessing) -> tuple[float, float | None]:
        """The median bias of layers in deviations of their outputs; how sure a classifier is on average."""
        ratios, confidences = [], []
        for index in range(_OUTLOOK_TRIALS):
            found = run(session, [*biases, output], {name: trial(way, index)}, index)
            for value, bias in biases.items():
                axes = tuple(axis for axis in range(found[value].ndim) if axis != 1)
                spread = float(np.median(found[value].std(axis=axes, dtype=np.float64)))
                ratios.append(float(np.median(np.abs(bias)) / max(spread, 1e-30)))
            if found[output].ndim == 2 and found[output].shape[1] >= _LEAST_CLASSES:
                confidences.append(_confidence(found[output].astype(np.float64), plain=ends_in_softmax))
        return float(np.median(ratios or [0.0])), float(np.mean(confidences)) if confidences else None

    bias, confidence = ask(choice[0][0])
    if bias >= _TELLING_BIAS:
        return choice
    if confidence is None or _CONFIDENCE[0] <= confidence <= _CONFIDENCE[1]:
        return (choice[0], Known.GUESS)
    answers = [(way, ask(way)[1] or 0.0) for way in WAYS]
    ways = tuple(way for way, sure in answers if _CONFIDENCE[0] <= sure <= _CONFIDENCE[1])
    return (ways or choice[0], Known.GUESS)


def _selected(stem: Stem, point: StemPoint, trial: Trial) -> Choice:
    costs: list[float] = []
    for way in WAYS:
        seen = stem.moments(trial(way, index) for index in range(_TRIALS))
        cost = _bias_cost(point, seen) if point.stored is None else distance(seen, point.stored)
        costs.append(np.inf if np.isnan(cost) else cost)  # of weights that hold NaN, or overflow
    best = min(costs)
    if point.stored is None:
        limit, known = best + _ALIKE, Known.CONVENTION if best <= _PLAUSIBLE else Known.GUESS
    else:
        limit, known = _CLEARLY * best, Known.STATISTICS if best <= _FITS else Known.GUESS
    return tuple(w for w, c in zip(WAYS, costs, strict=True) if c <= limit), known


def _bias_cost(point: StemPoint, seen: tuple[Doubles, Doubles]) -> float:
    spread = np.maximum(seen[1], 1e-12)
    bias = float(np.median(point.bias) / np.median(spread))
    mean = float(np.median(np.abs(seen[0]) / spread))
    size = (np.log(max(bias, 1e-9) / _TYPICAL_BIAS) / _BIAS_SCATTER) ** 2
    offset = (max(np.log(max(mean, 1e-9) / _TYPICAL_MEAN), 0.0) / _MEAN_SCATTER) ** 2
    return float(min(size, _MOST_COST) + min(offset, _MOST_COST))


def _from_graph(consumers: Consumers, name: str) -> Preprocessing | None:
    """The range of pixels that the graph's leading arithmetic is made for, None if there is none."""
    for operator, index, constant in consumers.normalization(name):
        largest = float(np.abs(constant).max())
        if operator == "Div" and index == 1:
            return None
        if largest not in (0.0, 1.0):
            of_bytes = 1 / 400 < largest < 1 / 40 if operator == "Mul" else largest > _BYTES_FROM
            return WAYS[4] if of_bytes else WAYS[0]
    return None


def _from_metadata(proto: onnx.ModelProto) -> Preprocessing | None:
    """The mean, deviation and scale that the model's metadata names, None if it names none."""
    found: dict[str, tuple[float, ...]] = {}
    for entry in proto.metadata_props:
        match = _METADATA.search(entry.key)
        numbers = re.findall(r"[-+]?\d*\.?\d+(?:[eE][-+]?\d+)?", entry.value) if match else []
        if match and len(numbers) in (1, 3):
            found[match.group(1).lower()] = tuple(float(n) for n in numbers)
    if "mean" not in found and "std" not in found:
        return None
    mean, std = found.get("mean", (0.0,)), found.get("std", (1.0,))
    scale = found.get("scale", (0.0,))[0]
    return given_way(None, mean, std) if not scale else Preprocessing(0.0, 255.0 * scale, mean, std, "as stated")


def given_way(
    range_: tuple[float, float] | None, mean: tuple[float, ...] | None, std: tuple[float, ...] | None
) -> Preprocessing:
    """The preprocessing that a caller describes.

    Args:
        range_: What black and white are before mean and deviation; None for 0 to 255 where mean or deviation are of
            that size, 0 to 1 otherwise.
        mean: Subtracted.
        std: Divided by.
    """
    mean, std = mean or (0.0,), std or (1.0,)
    if range_ is None:
        large = max(abs(v) for v in (*mean, *std)) > _BYTES_FROM
        range_ = (0.0, 255.0 if large else 1.0)
    return Preprocessing(*range_, mean, std, "as given")


def _biases(proto: onnx.ModelProto) -> Mapping[str, Doubles]:
    """Biases of Convs by their output's name, of some spread over the net."""
    consumers = Consumers(proto)
    found: dict[str, Doubles] = {}
    for node in proto.graph.node:
        bias = consumers.array(node.input[2]) if node.op_type == "Conv" and len(node.input) > 2 else None
        if bias is not None:
            found[node.output[0]] = bias
    names = list(found)[:: max(1, -(-len(found) // _MOST_LAYERS))]
    return {name: found[name] for name in names}


def _confidence(answer: Doubles, *, plain: bool) -> float:
    if not plain:
        answer = np.exp(answer - answer.max(axis=1, keepdims=True))
        answer = answer / answer.sum(axis=1, keepdims=True)
    return float(answer.max(axis=1).mean())
