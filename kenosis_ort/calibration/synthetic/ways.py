"""The way that a model takes pixels, as the caller, real samples or the model say, or as it answers to trials.

Nets are trained on one of few ways to bring pixels to numbers, which differ in scale by up to 250 and in what black is.
The way comes from the caller, the graph, or what the first layer's statistics say. Where the graph itself does not
normalize, each way is tried on made-up photographs and judged by the first layer:

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
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

from kenosis_ort.calibration.feeds import Known, input_specs
from kenosis_ort.calibration.part_session import ObservedModel, SessionSettings, run
from kenosis_ort.calibration.synthetic.drawing import Doubles
from kenosis_ort.calibration.synthetic.kinds import Array, InputInfo, SyntheticSample
from kenosis_ort.calibration.synthetic.pixels import ImageMaker, Preprocessing
from kenosis_ort.calibration.synthetic.stem import Consumers, Stem, StemPoint, distance
from kenosis_ort.errors import CalibrationError

_log = logging.getLogger(__name__)

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
    ways, known = choose_ways(
        proto, info, lambda way, index: plain.brought(pictures(index), way).astype(info.dtype), settings
    )
    return ImageMaker(info, shape, ways, known)


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


def choose_ways(
    proto: onnx.ModelProto, info: InputInfo, trial: Callable[[Preprocessing, int], Array], settings: SessionSettings
) -> Choice:
    """Preprocessing of the pixels of an input, several where they cannot be told apart, and how well it is known.

    Args:
        proto: The model.
        info: The input.
        trial: Makes the input's array from a preprocessing and an index.
        settings: How to run the model.
    """
    if info.element_type in (TensorProto.UINT8, TensorProto.INT8):
        low = 0.0 if info.element_type == TensorProto.UINT8 else -128.0
        return ((Preprocessing(low, low + 255.0, name="as bytes"),), Known.GRAPH)
    inside = _from_graph(Consumers(proto), info.name)
    if inside is not None:
        return ((inside,), Known.GRAPH)
    stated = _from_metadata(proto)
    if stated is not None:
        return ((stated,), Known.GRAPH)
    try:
        stem = Stem(proto, info.name)
        if stem.point is None:
            return ((_USUAL,), Known.GUESS)
        choice = _selected(stem, stem.point, trial)
        if choice[1] is Known.CONVENTION and len(input_specs(proto)[0]) == 1:
            choice = _confirmed(Outlook(proto, info.name, settings), choice, trial)
        return choice
    except CalibrationError as error:
        _log.info("no range of pixels is known: %s", error)
        return ((_USUAL,), Known.GUESS)


def _confirmed(outlook: Outlook, choice: Choice, trial: Callable[[Preprocessing, int], Array]) -> Choice:
    """The choice if the biases of the whole net bear it out, else what suits its answers best."""

    def ask(way: Preprocessing) -> tuple[float, float | None]:
        return outlook.ask(trial(way, index) for index in range(_OUTLOOK_TRIALS))

    bias, confidence = ask(choice[0][0])
    if bias >= _TELLING_BIAS:
        return choice
    if confidence is None or _CONFIDENCE[0] <= confidence <= _CONFIDENCE[1]:
        return (choice[0], Known.GUESS)
    answers = [(way, ask(way)[1] or 0.0) for way in WAYS]
    ways = tuple(way for way, sure in answers if _CONFIDENCE[0] <= sure <= _CONFIDENCE[1])
    return (ways or choice[0], Known.GUESS)


def _selected(stem: Stem, point: StemPoint, trial: Callable[[Preprocessing, int], Array]) -> Choice:
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


class Outlook:
    """A whole model, ready to be asked.

    Args:
        proto: The model.
        name: Its only input.
        settings: How to run it.
    """

    def __init__(self, proto: onnx.ModelProto, name: str, settings: SessionSettings) -> None:
        self._name = name
        self._biases = _biases(proto)
        self._output = proto.graph.output[0].name
        self._ends_in_softmax = any(n.op_type == "Softmax" and self._output in n.output for n in proto.graph.node)
        with ObservedModel(proto, settings) as model:
            self._session = model.session([*self._biases, self._output])

    def ask(self, arrays: Iterable[npt.NDArray[np.generic]]) -> tuple[float, float | None]:
        """The size of the biases and the confidence of the answers.

        Args:
            arrays: Inputs.

        Returns:
            The median over the layers of the median bias in deviations of the layer's output; and the mean probability
            of the likeliest class, None where the output is not that of a classifier.
        """
        ratios: list[float] = []
        confidences: list[float] = []
        names = [*self._biases, self._output]
        for index, array in enumerate(arrays):
            *layers, answer = run(self._session, names, {self._name: array}, index)
            for bias, layer in zip(self._biases.values(), layers, strict=True):
                spread = layer.std(axis=tuple(a for a in range(layer.ndim) if a != 1), dtype=np.float64)
                ratios.append(float(np.median(np.abs(bias)) / max(float(np.median(spread)), 1e-30)))
            if answer.ndim == 2 and answer.shape[1] >= _LEAST_CLASSES:
                confidences.append(_confidence(answer.astype(np.float64), plain=self._ends_in_softmax))
        return float(np.median(ratios or [0.0])), float(np.mean(confidences)) if confidences else None


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
