"""Calibration without data: feeds made up from what the model's inputs are for.

Recurrent states and past keys and values are outputs of the model that its next step takes as inputs.
"""

import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto

from kenosis_ort.calibration.computed_feeds import StateLoop
from kenosis_ort.calibration.feeds import Array, Provenance, checked_feeds, input_specs
from kenosis_ort.calibration.part_session import SessionSettings
from kenosis_ort.calibration.readers import IndexedReader
from kenosis_ort.calibration.synthetic.kinds import (
    InputInfo,
    InputKind,
    Maker,
    Shapes,
    SyntheticSample,
    classify,
    find_shapes,
    shapes_of,
)
from kenosis_ort.calibration.synthetic.makers import Surroundings, make_makers
from kenosis_ort.calibration.synthetic.pixels import ImageMaker, Preprocessing, given_way, shows_writing
from kenosis_ort.checks import whole
from kenosis_ort.errors import CalibrationError, did_you_mean, last_gate
from kenosis_ort.graph.bodies import state_pairs
from kenosis_ort.graph.load import LoadedModel, load_model

_log = logging.getLogger(__name__)

Feed = dict[str, Array]
Numbers = float | Sequence[float]

_MOST_REAL = 256
SAMPLES_A_SEQUENCE = 16
STEPS_A_SAMPLE = 4  # states need time to fill, and one sample every few steps shows more of it


class SyntheticReader(IndexedReader):
    """Feeds made up without data: natural-looking images, tokens, masks, sound, features, states.

    The same model, seed and index give the same feed, bit for bit on every platform; only states that the model itself
    computed differ by its rounding. What was assumed is in `assumptions`; how far the ranges can be trusted that rest
    on it, `kenosis_ort.calibration.trust` says.

    Args:
        model: The model or its path.
        samples: Number of feeds, each with one sample where the batch size is not fixed.
        seed: Of the random numbers.
        kinds: Kind by input name, one of the values of `InputKind`, where names, types and shapes do not tell.
        input_ranges: Lowest and highest value by input name; an input named here never counts as unknown.
        input_shapes: Shape by input name, for inputs of dynamic shape.
        input_range: What black and white pixels are, for the images that ``input_ranges`` does not name.
        mean: Then subtracted from the pixels, one number or one a channel, as in `ImageFolderReader`.
        std: Divided by at last, the same. With ``mean`` or ``std`` but no ``input_range``, pixels are taken for 0 to
            255 where a number in them is above 10, for 0 to 1 otherwise.
        real: A reader, or an iterable of feeds, of a handful of real samples: they come first, beyond ``samples``, and
            the scale of what is made up follows them where the caller does not say it.
        custom_op_libraries: Shared libraries with custom operators; the model runs where its states, the sizes of its
            inputs or their scale have to be found out.

    Attributes:
        seed: As given.

    Raises:
        CalibrationError: What an input is for, or its shape, cannot be told; the message names the argument to give.
            Or a name or kind is unknown, or a number out of range.
        ModelLoadError: The model cannot be loaded.
    """

    @last_gate
    def __init__(
        self,
        model: str | os.PathLike[str] | onnx.ModelProto | LoadedModel,
        samples: int = 32,
        *,
        seed: int = 0,
        kinds: Mapping[str, str] | None = None,
        input_ranges: Mapping[str, tuple[float, float]] | None = None,
        input_shapes: Mapping[str, Sequence[int]] | None = None,
        input_range: tuple[float, float] | None = None,
        mean: Numbers | None = None,
        std: Numbers | None = None,
        real: Any = None,
        custom_op_libraries: Sequence[str] = (),
    ) -> None:
        samples, seed = whole("samples", samples, least=1), whole("seed", seed)
        proto = load_model(model, ask_runtime=False).proto
        self._samples, self.seed = samples, seed
        settings = SessionSettings((), tuple(custom_op_libraries), threads=1, optimize=False)
        # What each input is for, and what the caller says of it.
        infos = classify(proto)
        _check_names([info.name for info in infos], kinds, input_ranges, input_shapes)
        self._infos = tuple(_of_kind(info, kinds) for info in infos)
        ranges = {name: _range(name, value) for name, value in (input_ranges or {}).items()}
        pixels = _pixels(input_range, mean, std)
        _check_known(self._infos, ranges, pixels)
        self._real = real_feeds(real, proto) if real is not None else []
        # Shapes, as far as the real samples and the caller tell them, and states that come back.
        given = shapes_of(self._real[0], self._infos) if self._real else {}
        given.update({name: tuple(int(d) for d in shape) for name, shape in (input_shapes or {}).items()})
        links = {name: out for name, out in find_links(proto, self._infos).items() if name not in ranges}
        self._at: tuple[int, int] | None = None  # sequence and step that the loop stands in front of

        def make(shapes: Shapes) -> dict[str, Maker]:
            return make_makers(Surroundings(proto, self._infos, shapes, ranges, pixels, links, self._real, settings))

        def first_feed(shapes: Shapes) -> Feed:
            return {name: maker.make(SyntheticSample(seed, 0)) for name, maker in make(shapes).items()}

        # The makers, for shapes with which the model runs.
        self._makers = make(find_shapes(proto, self._infos, given, first_feed, settings))
        for name, maker in self._makers.items():
            if isinstance(maker, ImageMaker) and len(self._makers) == 1 and shows_writing(proto, maker, settings):
                self._makers = {name: maker.with_writing()}
        self._loop = StateLoop(proto, links, settings) if links else None
        for text in self.assumptions:
            _log.info("synthetic data: %s", text)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Assumptions about the inputs, one sentence each."""
        return tuple(
            f"input '{m.info.name}' of shape {m.shape} is taken for {m.says}; the scale is {m.known.value}"
            for m in self._makers.values()
        )

    @property
    def provenance(self) -> Provenance:
        """Certainty of the assumptions."""
        return Provenance(
            known={name: maker.known for name, maker in self._makers.items()},
            natural=all(maker.natural for maker in self._makers.values()),
            real=len(self._real),
        )

    def __len__(self) -> int:
        return self._samples + len(self._real)

    def feed(self, index: int) -> dict[str, Array]:
        if index < len(self._real):
            return {name: np.array(value) for name, value in self._real[index].items()}
        index -= len(self._real)
        if self._loop is None:
            return self._make(SyntheticSample(self.seed, index))
        sequence, step = divmod(index, SAMPLES_A_SEQUENCE)
        step *= STEPS_A_SAMPLE
        return {**self._step(sequence, step), **self._states(self._loop, sequence, step)}

    def _states(self, loop: StateLoop, sequence: int, step: int) -> Feed:
        """The states in front of a step: those that the model computes over all steps of the sequence before."""
        if self._at is None or self._at[0] != sequence or self._at[1] > step:
            self._at, loop.states = (sequence, 0), {}
            if any(info.kind is InputKind.PAST for info in self._infos):  # past keys and values are never empty
                self._advance(loop, sequence, 0)
        for number in range(self._at[1], step):
            self._advance(loop, sequence, number)
            self._at = sequence, number + 1
        return dict(loop.states)

    def _advance(self, loop: StateLoop, sequence: int, step: int) -> None:
        feed = self._step(sequence, step)
        loop.advance({**feed, **loop.states}, sequence)
        loop.states = {name: _cut(np.asarray(state), feed[name].shape) for name, state in loop.states.items()}
        if not all(np.isfinite(state).all() for state in loop.states.values()):
            raise CalibrationError(
                "The model's states grow beyond all bounds on made-up data.",
                where=f"inputs {', '.join(loop.states)}",
                fix="Give input_ranges for the states, or a reader of real data.",
            )

    def _step(self, sequence: int, step: int) -> dict[str, Array]:
        return self._make(SyntheticSample(self.seed, sequence, step, SAMPLES_A_SEQUENCE * STEPS_A_SAMPLE))

    def _make(self, sample: SyntheticSample) -> dict[str, Array]:
        return {name: maker.make(sample) for name, maker in self._makers.items()}


def _check_names(names: Sequence[str], *given: Mapping[str, Any] | None) -> None:
    for name in (name for mapping in given for name in mapping or {}):
        if name not in names:
            raise CalibrationError(
                f"The model has no input '{name}'.{did_you_mean(name, names)}",
                fix=f"Its inputs: {', '.join(names)}.",
            )


def _of_kind(info: InputInfo, kinds: Mapping[str, str] | None) -> InputInfo:
    if kinds is None or info.name not in kinds or not info.element_type:
        return info
    wanted = str(getattr(kinds[info.name], "value", kinds[info.name])).replace("_", " ")
    known = [kind.value for kind in InputKind]
    if wanted not in known:
        raise CalibrationError(
            f"The kind '{wanted}' is not known.{did_you_mean(wanted, known)}",
            where=f"input '{info.name}'",
            fix=f"One of: {', '.join(known)}.",
        )
    return info.taken_for(InputKind(wanted))


def _pixels(range_: tuple[float, float] | None, mean: Numbers | None, std: Numbers | None) -> Preprocessing | None:
    """The preprocessing of images that the caller gave, None if nothing was said."""
    if range_ is None and mean is None and std is None:
        return None
    wanted = None if range_ is None else _range("input_range", range_)
    pixels = given_way(wanted, _channels("mean", mean), _channels("std", std))
    if 0.0 in pixels.std:
        raise CalibrationError("std must not be 0.", fix="Give the deviation that pixels are divided by.")
    return pixels


def _check_known(
    infos: Sequence[InputInfo], ranges: Mapping[str, tuple[float, float]], pixels: Preprocessing | None
) -> None:
    """Refuses inputs of no known kind, and preprocessing without an image."""
    for info in infos:
        no_numbers = info.element_type in (0, TensorProto.STRING)
        if info.kind is None and (no_numbers or info.name not in ranges):
            raise _unknown(info, possible=not no_numbers)
    if pixels is not None and not any(i.kind is InputKind.IMAGE for i in infos):
        raise CalibrationError(
            "input_range, mean and std are for images, and the model takes none.",
            fix="Give input_ranges={name: (low, high)} instead, or kinds={name: 'image'}.",
        )


def _range(name: str, value: tuple[float, float]) -> tuple[float, float]:
    try:
        low, high = (float(end) for end in value)
    except (TypeError, ValueError) as error:
        raise CalibrationError(
            f"The range {value!r} is no pair of numbers.", where=name, fix="Give (lowest, highest)."
        ) from error
    if not (np.isfinite(low) and np.isfinite(high) and low <= high):
        raise CalibrationError(
            f"The range ({low}, {high}) is not finite or upside down.", where=name, fix="Give (lowest, highest)."
        )
    return low, high


def _channels(name: str, value: float | Sequence[float] | None) -> tuple[float, ...] | None:
    if value is None:
        return None
    numbers = tuple(float(v) for v in np.asarray(value, np.float64).reshape(-1))
    if len(numbers) not in (1, 3, 4) or not np.isfinite(numbers).all():
        raise CalibrationError(f"{name}={value!r} must be one number, or one a channel.", fix=f"Correct {name}.")
    return numbers


def _unknown(info: InputInfo, *, possible: bool) -> CalibrationError:
    because = f": {info.reason}" if info.reason else ""
    fix = "Give a reader of real data, such as ArrayReader."
    if possible:
        kinds = ", ".join(kind.value for kind in InputKind)
        fix = (
            f"Give SyntheticReader(kinds={{'{info.name}': kind}}), the kind one of {kinds}; or "
            f"input_ranges={{'{info.name}': (low, high)}}; or a reader of real data."
        )
    return CalibrationError(
        f"What the input '{info.name}' ({info.describe()}) is for cannot be told{because}, so no data can be made up.",
        where=f"input '{info.name}'",
        fix=fix,
    )


def real_feeds(reader: Any, proto: onnx.ModelProto) -> list[dict[str, Array]]:
    """Copies of all feeds of a reader.

    Raises:
        CalibrationError: There are none, too many to keep, or they do not fit the model.
    """
    some = itertools.islice(checked_feeds(reader, input_specs(proto)), _MOST_REAL + 1)
    feeds = [{n: np.array(v.numpy() if isinstance(v, ort.OrtValue) else v) for n, v in feed.items()} for feed in some]
    if not feeds:
        raise CalibrationError("The reader of real samples yields none.", fix="Leave real= out, or rewind the reader.")
    if len(feeds) > _MOST_REAL:
        raise CalibrationError(
            f"There are more than {_MOST_REAL} real samples, which need no made-up ones beside them.",
            fix="Use the reader of real samples itself, without SyntheticReader.",
        )
    return feeds


# ---- states ----------------------------------------------------------------------------------------------------------


def find_links(proto: onnx.ModelProto, infos: Sequence[InputInfo]) -> dict[str, str]:
    """Returns, by name of a state input, the output that takes its place in the next step.

    They belong together if their names say so, see `state_pairs`; without such names, if their types and shapes fit, in
    the order in which they stand.
    """
    states = {info.name: info for info in infos if info.kind in (InputKind.STATE, InputKind.PAST)}
    links = {name: output for output, name in state_pairs(proto).items() if name in states}
    for name, info in states.items():
        fitting = [v.name for v in proto.graph.output if v.name not in links.values() and _fits(info, v)]
        kind = (len(info.shape), info.element_type)
        waiting = [o for o in states.values() if o.name not in links and (len(o.shape), o.element_type) == kind]
        if name not in links and fitting and len(fitting) >= len(waiting):
            links[name] = fitting[0]
    return links


def _fits(info: InputInfo, value: onnx.ValueInfoProto) -> bool:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type") or tensor.elem_type != info.element_type or not info.shape:
        return False
    if tensor.HasField("shape") and len(tensor.shape.dim) != len(info.shape):
        return False
    sizes = [d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim]
    return all(a == b for a, b in zip(info.shape, sizes, strict=False) if isinstance(a, int) and b is not None)


def _cut(array: Array, shape: tuple[int, ...]) -> Array:
    """The last steps of an array that has grown along an axis."""
    if array.ndim != len(shape):
        return array.reshape(shape)
    last = tuple(slice(max(a - b, 0), None) for a, b in zip(array.shape, shape, strict=True))
    return np.ascontiguousarray(array[last])


_PROBED_FEEDS: Final = 16


def probe_feeds(reader: SyntheticReader) -> list[Feed]:
    """The few samples that `net_evidence` needs."""
    return [reader.feed(index) for index in range(min(len(reader), _PROBED_FEEDS))]
